"""A Keras optimizer that applies the gradients of rows together with all others.

In: any Keras optimizer; the gradients of weights and, of layers with apply="step", of tables. Out:
weights and rows updated by one step. What Keras does to gradients first (unscaling, accumulation,
clipping) it does to those of rows, too: a table counts as one variable.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils.comm import Names
from slipstream_tf._utils.errors import invalid
from slipstream_tf.keras.row_gradients import Anchor, StoreGradients, anchor_of, by_store

_PLACE = "StepOptimizer"
_OF_CHECKS = Names("loss_scale")


class StepOptimizer:
    """Makes an optimizer that applies the rows' gradients of layers with apply="step".

        embeddings = slip.keras.EmbeddingCollection(..., apply="step")
        optimizer = keras.optimizers.Adam(1e-3, global_clipnorm=1.0)
        model.compile(slip.keras.StepOptimizer(optimizer), ...)

    What comes out is of a subclass of the optimizer's class, with the same settings and without
    state; a file of Keras has it, too. Rows are updated by the rule of their tables, at its rate.

    - `clipnorm`, `global_clipnorm` and `clipvalue` act on the merged gradient of each key. The norm
      of a table is that of all its rows in the batch; the global norm is over weights and tables.
    - `gradient_accumulation_steps` keeps the rows' gradients, too, and applies their mean; ranks
      exchange it then, once. What is kept is in no file: a model that is saved between two updates
      has lost it when loaded.
    - `StepOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))` unscales rows, and leaves out
      a step whose gradients are not finite. Without one such a step is an error, and changes
      neither weights nor rows.
    - Weight decay and moving averages (`use_ema`) would miss the rows, and are refused. Weights
      without the tables may decay: `exclude_from_weight_decay(var_names=["_anchor"])`.

    It takes a Keras optimizer without state, its name or its configuration; a
    `distributed.DistributedOptimizer` or a `keras.optimizers.LossScaleOptimizer`, too. In a
    `MultiOptimizer` wrap the one of the tables' anchors.
    """

    def __new__(cls, optimizer: Any) -> Any:
        """Returns the optimizer.

        Args:
            optimizer: that is to apply the rows' gradients, too; see the class.

        Raises:
            ValueError: it is something else, was used before, or has a setting that would miss
                rows.
        """
        return _wrapped(optimizer)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Builds what was saved."""
        return _wrapped(keras.saving.deserialize_keras_object(config["optimizer"]))


# Files of Keras name the class of what it makes, which is called so, too.
keras.saving.get_custom_objects()[StepOptimizer.__name__] = StepOptimizer


@keras.saving.register_keras_serializable(package="slipstream_tf")
class StepLossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """A `LossScaleOptimizer` around a `StepOptimizer`; that makes it."""

    def check_finite(self, grads: Sequence[Any]) -> Any:
        """Whether all gradients are finite, those of rows and of all ranks included."""
        is_finite = super().check_finite(
            [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads]
        )
        anchors = filter(None, map(anchor_of, self._trainable_variables))
        comm = next((anchor.store.comm for anchor in anchors), None)
        if comm is None or comm.size == 1:
            return is_finite
        lost = tf.cast(~tf.convert_to_tensor(is_finite), tf.float32)
        return comm.sum(lost, "control", _OF_CHECKS.of("finite")) < 0.5


def applies_rows(optimizer: Any) -> bool:
    """Whether an optimizer is one that `StepOptimizer` made."""
    if isinstance(optimizer, StepLossScaleOptimizer):
        return applies_rows(optimizer.inner_optimizer)
    return isinstance(optimizer, _AppliesRows)


# Any, because attributes come from the Keras class that it is mixed into.
_Mixin: Any = object


class _AppliesRows(_Mixin):
    """The part of a `StepOptimizer` that is not Keras's; before the optimizer's own class."""

    _collected: "list[tuple[Anchor, tf.IndexedSlices]] | None" = None

    def build(self, variables: Sequence[Any]) -> None:
        """Makes the optimizer's state; refuses layers and settings with which rows would be missed.

        Raises:
            ValueError: see `StepOptimizer`.
        """
        for variable in variables:
            anchor = anchor_of(variable)
            if anchor is not None:
                if anchor.table is None:
                    place = f"StepOptimizer and layer {anchor.layer!r}"
                    allowed = "EmbeddingCollection(..., apply='step')"
                    raise invalid("apply", "backward", place, allowed)
                refuse_missing_rows(self, variable, anchor.layer)
        super().build(variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Applies the gradients of weights, `tf.Tensor`s, and of tables, `tf.IndexedSlices`."""
        given = self._trainable_variables if trainable_variables is None else trainable_variables
        variables, dense = list(given), list(grads)
        collected = []
        for index, (gradient, variable) in enumerate(zip(dense, variables, strict=True)):
            anchor = anchor_of(variable)
            if anchor is None or gradient is None:
                continue
            _require_slices(gradient, anchor)
            factor = self.loss_scale_factor
            values = gradient.values if factor is None else gradient.values / factor
            collected.append((anchor, tf.IndexedSlices(values, gradient.indices)))
            # To Keras, an anchor is a weight that is 0 and stays 0. Its gradient is its own value:
            # a constant is folded away together with the rows' update (see `training_lookup`).
            dense[index] = tf.convert_to_tensor(variable.value)
        if collected and self.gradient_accumulation_steps:
            collected = self._kept_with(collected)
        # Past Keras, which would track what it is given.
        object.__setattr__(self, "_collected", collected)
        try:
            super().apply(dense, None if trainable_variables is None else variables)
        finally:
            object.__setattr__(self, "_collected", None)

    def _clip_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Clips as Keras does, with the rows among the gradients; then applies the rows.

        On several ranks a collective: what each has of the rows is exchanged first.

        It is the last that Keras does to gradients, in a step that updates.
        """
        steps = self.gradient_accumulation_steps
        by_norm = self.clipnorm or self.global_clipnorm
        parts = by_store(self._collected or [])
        for part in parts:
            if steps:
                part.replace([values / steps for values in part.values()])
            part.share()
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
        # Weights are updated only if the rows were: a value that is not finite changes neither.
        with tf.control_dependencies(updates):
            return [None if g is None else tf.identity(g) for g in dense]

    def _kept_with(
        self, collected: list[tuple[Anchor, tf.IndexedSlices]]
    ) -> list[tuple[Anchor, tf.IndexedSlices]]:
        """Adds this step's gradients to those of the steps since the last update."""
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
        """Returns the optimizer's class and configuration, for `StepOptimizer.from_config`."""
        base: Any = type(self).__bases__[1]
        plain = base.from_config(super().get_config())
        return {"optimizer": keras.saving.serialize_keras_object(plain)}


class _Buffer:
    """Gradients of a table that wait for an update: variables whose length changes."""

    def __init__(self, dim: int):
        """Holds none, of `dim` values each."""
        with tf.init_scope(), tf.device("CPU:0"):
            self._keys = tf.Variable(tf.zeros([0], tf.int64), shape=[None], trainable=False)
            self._rows = tf.Variable(tf.zeros([0, dim]), shape=[None, dim], trainable=False)
            # A variable that a graph assigns a value of known size to is taken to have that size
            # wherever the graph reads it, even before. So nobody is to know this.
            self._none = tf.Variable(0, dtype=tf.int64, trainable=False)

    def add(self, part: tf.IndexedSlices) -> tf.IndexedSlices:
        """Returns what there is with this behind it."""
        keys = self._keys.assign(tf.concat([self._keys, part.indices], 0), read_value=False)
        rows = self._rows.assign(tf.concat([self._rows, part.values], 0), read_value=False)
        with tf.control_dependencies([op for op in (keys, rows) if op is not None]):
            return tf.IndexedSlices(self._rows.read_value(), self._keys.read_value())

    def clear(self) -> None:
        """Holds none again."""
        none = self._none.read_value()
        self._keys.assign(self._keys[:none])
        self._rows.assign(self._rows[:none])


def _wrapped(given: Any) -> Any:
    try:
        found = keras.optimizers.get(given)
    except (ValueError, TypeError):
        found = None
    if found is None or not hasattr(found, "apply"):
        raise invalid("optimizer", given, _PLACE, "a Keras optimizer or its name, e.g. 'adam'")
    if applies_rows(found):
        return found
    if hasattr(found, "optimizers"):
        allowed = "the optimizer in it to which the tables' anchors are mapped"
        raise invalid("optimizer", type(found).__name__, _PLACE, allowed)
    if getattr(found, "built", False):
        raise invalid("optimizer", "one that was used", _PLACE, "one without state")
    if isinstance(found, keras.optimizers.LossScaleOptimizer):
        return StepLossScaleOptimizer(
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
    """Makes an optimizer of Keras, not yet built, one as `StepOptimizer` makes, in place.

    So who holds it goes on to see its rate, its iterations and its moments.

    Args:
        optimizer: a Keras optimizer, or a `keras.optimizers.LossScaleOptimizer` around one.
    """
    if applies_rows(optimizer):
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        make_apply_rows(optimizer.inner_optimizer)
        optimizer.__class__ = StepLossScaleOptimizer
        return
    optimizer.__class__ = _class_of(type(optimizer))


def refuse_missing_rows(optimizer: Any, variable: Any, layer: str) -> None:
    """Refuses what a Keras optimizer does to weights and can in no way do to rows.

    Args:
        optimizer: a Keras optimizer.
        variable: an anchor.
        layer: name of its layer, for errors.

    Raises:
        ValueError: the optimizer has such a setting.
    """
    place = f"a model with tables of layer {layer!r}"
    if optimizer.use_ema:
        allowed = "False: rows have no moving average, and would not fit the weights' one"
        raise invalid("use_ema", True, place, allowed)
    if optimizer.weight_decay and _compat.decays(optimizer, variable):
        allowed = (
            "None, or of weights alone: optimizer.exclude_from_weight_decay(var_names=['_anchor']) "
            "before compile (rows do not decay; files of Keras do not keep what is excluded)"
        )
        raise invalid("weight_decay", optimizer.weight_decay, place, allowed)


def _require_slices(gradient: Any, anchor: Anchor) -> None:
    if not isinstance(gradient, tf.IndexedSlices):
        place = f"the gradient of tables of layer {anchor.layer!r} in StepOptimizer"
        allowed = "tf.IndexedSlices, as the backward pass of a layer with apply='step' gives them"
        raise invalid("grads", type(gradient).__name__, place, allowed)


def _clip_norms(
    optimizer: Any, grads: Sequence[Any], parts: Sequence[StoreGradients], one_by_one: bool
) -> tuple[list[Any], list[Any]]:
    """Gives Keras norms in place of tables, and multiplies rows as it did their norm.

    Args:
        optimizer: whose clipping is Keras's.
        grads: of weights.
        parts: of rows, merged.
        one_by_one: whether each norm counts by itself, or all together.

    Returns:
        The weights' gradients, clipped, and the updates of the rows.
    """
    norms = [part.norms() for part in parts]
    told = [tf.unstack(of_tables) if one_by_one else [of_tables] for of_tables in norms]
    clipped = optimizer._clip_gradients([*grads, *itertools.chain(*told)])
    rest, updates = iter(clipped[len(grads) :]), []
    for part, before, own in zip(parts, norms, told, strict=True):
        after = list(itertools.islice(rest, len(own)))
        updates.append(part.apply((tf.stack(after) if one_by_one else after[0]) / before))
    return clipped[: len(grads)], updates


def _clip_values(
    optimizer: Any, grads: Sequence[Any], parts: Sequence[StoreGradients]
) -> tuple[list[Any], list[Any]]:
    """The same with the values of rows, which come back as they are where nothing is clipped."""
    told = [part.values() for part in parts]
    clipped = optimizer._clip_gradients([*grads, *itertools.chain(*told)])
    rest, updates = iter(clipped[len(grads) :]), []
    for part, own in zip(parts, told, strict=True):
        part.replace(list(itertools.islice(rest, len(own))))
        updates.append(part.apply())
    return clipped[: len(grads)], updates
