"""A Keras optimizer that applies gradients of rows and weights together.

Unscaling, accumulation and clipping apply to the gradients of rows, too. A table counts as one
variable.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils.comm import CollectiveNames
from slipstream_tf._utils.errors import invalid
from slipstream_tf.keras.row_gradients import (
    Anchor,
    StoreGradients,
    add_by_table,
    anchor_of,
    by_store,
)

_PLACE = "CombinedOptimizer"
_CHECK_NAMES = CollectiveNames("loss_scale")


class CombinedOptimizer:
    """Creates an optimizer that applies gradients of layers with `apply="step"`.

    `CombinedOptimizer(optimizer)` returns an instance of a subclass of the optimizer's class, with
    the same settings and without state. It can be saved in Keras files. The optimizer updates the
    Keras weights. The sparse optimizer of each table updates its rows, with the learning rate of
    the table. The settings of the optimizer have these effects on rows:

    - `clipnorm`, `global_clipnorm` and `clipvalue` apply to the sum of the gradients of each key,
      averaged over the ranks. The norm of a table includes all its rows in the batch. The global
      norm includes weights and tables.
    - `gradient_accumulation_steps` accumulates the gradients of rows, too, and applies their mean.
      Ranks exchange gradients only when the mean is applied. Note: accumulated gradients are not
      saved. A model that is saved between two updates loses them.
    - `CombinedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))` unscales the gradients of
      rows and skips a step with non-finite gradients. Without loss scaling such a step raises an
      error and changes neither weights nor rows.
    - Weight decay and moving averages (`use_ema`) do not apply to rows and raise an error. To decay
      only the weights, call `optimizer.exclude_from_weight_decay(var_names=["_anchor"])` before.

    In a `MultiOptimizer`, wrap the optimizer to which the anchors of the tables are mapped.

    Example:

    >>> layer = slip.keras.EmbeddingCollection([slip.Table("item", 4)], apply="step")
    >>> optimizer = slip.keras.CombinedOptimizer(keras.optimizers.Adam(1e-3, global_clipnorm=1.0))
    >>> optimizer.global_clipnorm
    1.0
    """

    def __new__(cls, optimizer: Any) -> Any:
        """Returns the optimizer.

        Args:
            optimizer: A Keras optimizer without state, its name or its configuration. A
                `distributed.DistributedOptimizer` and a `keras.optimizers.LossScaleOptimizer` are
                accepted, too.

        Raises:
            ValueError: The argument is not an optimizer, has been used before, or has a setting
                that does not apply to rows.
        """
        return _wrapped(optimizer)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Creates the optimizer from the result of its `get_config`."""
        return _wrapped(keras.saving.deserialize_keras_object(config["optimizer"]))


# The created subclasses have this name, therefore Keras files refer to it.
keras.saving.get_custom_objects()[CombinedOptimizer.__name__] = CombinedOptimizer


@keras.saving.register_keras_serializable(package="slipstream_tf")
class CombinedLossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """A `LossScaleOptimizer` around an optimizer that `CombinedOptimizer` created."""

    def check_finite(self, grads: Sequence[Any]) -> Any:
        """Returns whether all gradients are finite on all ranks.

        A collective with multiple ranks, so that all ranks skip the same steps.

        Args:
            grads: Gradients as in `apply`.

        Returns:
            A bool scalar.
        """
        is_finite = super().check_finite(
            [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
        )
        anchors = filter(None, map(anchor_of, self._trainable_variables))
        comm = next((anchor.store.comm for anchor in anchors), None)
        if comm is None or comm.size == 1:
            return is_finite
        lost = tf.cast(~tf.convert_to_tensor(is_finite), tf.float32)
        return comm.sum(lost, "control", _CHECK_NAMES.of("finite")) < 0.5


def applies_rows(optimizer: Any) -> bool:
    """Returns whether an optimizer is a `CombinedOptimizer`, also inside loss scaling."""
    if isinstance(optimizer, CombinedLossScaleOptimizer):
        return applies_rows(optimizer.inner_optimizer)
    return isinstance(optimizer, _AppliesRows)


# Any, because the Keras class next to the mixin defines the attributes.
_Mixin: Any = object


class _AppliesRows(_Mixin):
    """Mixin of `CombinedOptimizer` that precedes the class of the Keras optimizer."""

    _collected: "list[tuple[Anchor, tf.IndexedSlices]] | None" = None

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the state of the optimizer and checks the layers and settings.

        Raises:
            ValueError: A setting does not apply to rows, or a layer has `apply="backward"`.
        """
        for variable in variables:
            anchor = anchor_of(variable)
            if anchor is not None:
                _require_step(anchor)
                refuse_missing_rows(self, variable, anchor.layer)
        super().build(variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Applies the gradients of weights and tables.

        Args:
            grads: Gradients in the order of the variables: a `tf.Tensor` for each weight, and
                `tf.IndexedSlices` for each anchor of a table. None means no gradient.
            trainable_variables: The variables. None uses the variables of `build`.
        """
        given = self._trainable_variables if trainable_variables is None else trainable_variables
        variables, dense = list(given), list(grads)
        collected = []
        for index, (gradient, variable) in enumerate(zip(dense, variables, strict=True)):
            anchor = anchor_of(variable)
            if anchor is None or gradient is None:
                continue
            _require_step(anchor)
            _require_slices(gradient, anchor)
            factor = self.loss_scale_factor
            values = gradient.values if factor is None else gradient.values / factor
            collected.append((anchor, tf.IndexedSlices(values, gradient.indices)))
            # For Keras, an anchor is a weight that remains 0. Its gradient is its value instead of
            # a constant 0, because a constant would be folded together with the update of the rows
            # (see `training_lookup`).
            dense[index] = tf.convert_to_tensor(variable.value)
        # If layers share a store, only the anchors of the first layer receive gradients.
        stores = {id(anchor.store) for anchor, _ in collected}
        for index, (gradient, variable) in enumerate(zip(dense, variables, strict=True)):
            anchor = anchor_of(variable)
            if gradient is None and anchor is not None and id(anchor.store) in stores:
                dense[index] = tf.convert_to_tensor(variable.value)
        collected = add_by_table(collected)
        if collected and self.gradient_accumulation_steps:
            collected = self._kept_with(collected)
        # Bypasses attribute tracking by Keras.
        object.__setattr__(self, "_collected", collected)
        try:
            super().apply(dense, None if trainable_variables is None else variables)
        finally:
            object.__setattr__(self, "_collected", None)

    def _clip_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Clips all gradients, then applies the gradients of rows.

        Keras calls this method last before it updates the weights. With multiple ranks it is a
        collective, because ranks first exchange the gradients of rows.
        """
        steps = self.gradient_accumulation_steps
        by_norm = self.clipnorm or self.global_clipnorm
        parts = by_store(self._collected or [])
        for part in parts:
            part.follow(self)
            if steps:
                part.replace([values / steps for values in part.values()])
            part.exchange()
        if steps or by_norm or self.clipvalue:
            for part in parts:
                part.merge()
        if by_norm:
            dense, updates = _clip_norms(super(), grads, parts, one_by_one=bool(self.clipnorm))
        else:
            dense, updates = _clip_values(super(), grads, parts)
        updates = [update for update in updates if update is not None]
        if steps:
            self._forget(updates)
        # Weights are updated after the rows, so that a non-finite value changes neither.
        with tf.control_dependencies(updates):
            return [None if g is None else tf.identity(g) for g in dense]

    def _kept_with(
        self, collected: list[tuple[Anchor, tf.IndexedSlices]]
    ) -> list[tuple[Anchor, tf.IndexedSlices]]:
        """Returns the gradients of this step together with the accumulated gradients."""
        kept: Any = getattr(self, "_kept", None)
        if kept is None:
            kept = {}
            object.__setattr__(self, "_kept", kept)
        together = []
        for anchor, part in collected:
            key = id(anchor.store), anchor.table
            if key not in kept:
                kept[key] = _Buffer(int(part.values.shape[-1]))
            together.append((anchor, kept[key].add(part)))
        return together

    def _forget(self, updates: list[Any]) -> None:
        with tf.control_dependencies(updates):
            for buffer in getattr(self, "_kept", {}).values():
                buffer.clear()

    def get_config(self) -> dict[str, Any]:
        """Returns the class and configuration, for `CombinedOptimizer.from_config`."""
        base: Any = type(self).__bases__[1]
        plain = base.from_config(super().get_config())
        return {"optimizer": keras.saving.serialize_keras_object(plain)}


class _Buffer:
    """Accumulated gradients of a table, for any number of rows."""

    def __init__(self, dim: int):
        """Creates an empty buffer for gradients of `dim` values."""
        with tf.init_scope(), tf.device("CPU:0"):
            self._keys = tf.Variable(tf.zeros([0], tf.int64), shape=[None], trainable=False)
            self._rows = tf.Variable(tf.zeros([0, dim]), shape=[None, dim], trainable=False)
            # If a graph assigns a value of static size to a variable, TensorFlow assumes that size
            # for all reads in the graph, including earlier reads. Therefore `clear` reads its size,
            # 0, from a variable.
            self._none = tf.Variable(0, dtype=tf.int64, trainable=False)

    def add(self, part: tf.IndexedSlices) -> tf.IndexedSlices:
        """Appends gradients and returns all gradients of the buffer.

        A key may occur more than once.
        """
        keys = self._keys.assign(tf.concat([self._keys, part.indices], 0), read_value=False)
        rows = self._rows.assign(tf.concat([self._rows, part.values], 0), read_value=False)
        with tf.control_dependencies([op for op in (keys, rows) if op is not None]):
            return tf.IndexedSlices(self._rows.read_value(), self._keys.read_value())

    def clear(self) -> None:
        """Removes all gradients."""
        none = self._none.read_value()
        self._keys.assign(self._keys[:none])
        self._rows.assign(self._rows[:none])


def _wrapped(given: Any) -> Any:
    try:
        found = keras.optimizers.get(given)
    except (ValueError, TypeError):
        found = None
    if found is None or not hasattr(found, "apply"):
        raise invalid(
            "optimizer", given, _PLACE, "a Keras optimizer or its name, for example 'adam'"
        )
    if applies_rows(found):
        return found
    if hasattr(found, "optimizers"):
        allowed = (
            "a single optimizer. In a MultiOptimizer, wrap the optimizer of the '_anchor' weights"
        )
        raise invalid("optimizer", type(found).__name__, _PLACE, allowed)
    if getattr(found, "built", False):
        allowed = "an optimizer that has not been built. Pass a new optimizer"
        raise invalid("optimizer", f"built {type(found).__name__}", _PLACE, allowed)
    if isinstance(found, keras.optimizers.LossScaleOptimizer):
        return CombinedLossScaleOptimizer(
            _wrapped(found.inner_optimizer),
            initial_scale=found.initial_scale,
            dynamic_growth_steps=found.dynamic_growth_steps,
            name=found.name,
        )
    optimizer = _class_of(type(found)).from_config(found.get_config())
    _compat.copy_exclusions(found, optimizer)
    return optimizer


def _class_of(base: type) -> Any:
    return type(_PLACE, (_AppliesRows, base), {"__module__": __name__})


def make_apply_rows(optimizer: Any) -> None:
    """Converts an unbuilt Keras optimizer in place, as `CombinedOptimizer` does.

    The conversion is in place so that existing references to the optimizer remain valid and read
    its learning rate, iterations and moments.

    Args:
        optimizer: A Keras optimizer, or a `keras.optimizers.LossScaleOptimizer` around a Keras
            optimizer.
    """
    if applies_rows(optimizer):
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        make_apply_rows(optimizer.inner_optimizer)
        optimizer.__class__ = CombinedLossScaleOptimizer
        return
    optimizer.__class__ = _class_of(type(optimizer))


def refuse_missing_rows(optimizer: Any, variable: Any, layer: str) -> None:
    """Raises an error if an optimizer setting cannot apply to rows.

    Args:
        optimizer: A Keras optimizer.
        variable: An anchor.
        layer: Name of the layer of the anchor, for errors.

    Raises:
        ValueError: The optimizer has such a setting.
    """
    place = f"a model with tables of layer {layer!r}"
    if optimizer.use_ema:
        allowed = "False, because rows have no moving average that matches the averaged weights"
        raise invalid("use_ema", True, place, allowed)
    if optimizer.weight_decay and _compat.decays(optimizer, variable):
        allowed = (
            "None, or a weight decay without the tables, because rows do not decay. Call "
            "optimizer.exclude_from_weight_decay(var_names=['_anchor']) before compile, also for a "
            "loaded model, because Keras files do not store the exclusion"
        )
        raise invalid("weight_decay", optimizer.weight_decay, place, allowed)


def _require_step(anchor: Anchor) -> None:
    if anchor.table is None:
        place = f"layer {anchor.layer!r} with a CombinedOptimizer"
        raise invalid("apply", "backward", place, "'step'. Pass apply='step' to the layer")


def _require_slices(gradient: Any, anchor: Anchor) -> None:
    if not isinstance(gradient, tf.IndexedSlices):
        place = f"the gradient of tables of layer {anchor.layer!r} in CombinedOptimizer"
        allowed = "tf.IndexedSlices. Pass the gradients of tables as tape.gradient returns them"
        raise invalid("grads", type(gradient).__name__, place, allowed)


def _clip_norms(
    optimizer: Any, grads: Sequence[Any], parts: Sequence[StoreGradients], one_by_one: bool
) -> tuple[list[Any], list[Any]]:
    """Clips gradients by norm.

    Keras receives the norm of each table in place of its gradients and clips it. The gradients of
    the rows are then scaled by the clipped norm divided by the norm.

    Args:
        optimizer: The object whose `_clip_gradients` is the method of Keras.
        grads: Gradients of weights.
        parts: Merged gradients of rows.
        one_by_one: Whether each norm is clipped separately instead of one global norm.

    Returns:
        The clipped gradients of weights, and the updates of the rows.
    """
    norms = [part.norms() for part in parts]
    split_norms = [tf.unstack(of_tables) if one_by_one else [of_tables] for of_tables in norms]
    clipped = optimizer._clip_gradients([*grads, *itertools.chain(*split_norms)])
    rest, updates = iter(clipped[len(grads) :]), []
    for part, before, own in zip(parts, norms, split_norms, strict=True):
        after = list(itertools.islice(rest, len(own)))
        updates.append(part.apply((tf.stack(after) if one_by_one else after[0]) / before))
    return clipped[: len(grads)], updates


def _clip_values(
    optimizer: Any, grads: Sequence[Any], parts: Sequence[StoreGradients]
) -> tuple[list[Any], list[Any]]:
    """Clips gradients by value, including the gradients of rows.

    Without a clipping setting, Keras returns the gradients unchanged. The arguments and results are
    the same as in `_clip_norms`, without `one_by_one`.
    """
    values = [part.values() for part in parts]
    clipped = optimizer._clip_gradients([*grads, *itertools.chain(*values)])
    rest, updates = iter(clipped[len(grads) :]), []
    for part, own in zip(parts, values, strict=True):
        part.replace(list(itertools.islice(rest, len(own))))
        updates.append(part.apply())
    return clipped[: len(grads)], updates
