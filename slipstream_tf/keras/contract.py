"""Checks that a Keras model trains rows like its weights.

The checks raise an error if a Keras setting would not apply to the rows. They run while a step is
traced, so that `fit` needs no callback.
"""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid, require_choice
from slipstream_tf.keras.combined_optimizer import (
    applies_rows,
    make_apply_rows,
    refuse_missing_rows,
)
from slipstream_tf.keras.row_gradients import MODES, require_one_update
from slipstream_tf.policies import DeferGradients

# Settings of Keras optimizers that need all gradients at once or delay their application.
_NEED_STEP = (
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "gradient_accumulation_steps",
    "loss_scale_factor",
)
_IN_STEP = (
    "leave `apply` unset and compile a slip.keras.Model after its layers exist, with a new "
    "optimizer; or pass apply='step' to the layer and compile with "
    "slip.keras.CombinedOptimizer(optimizer)"
)
_NO_SCALING = (
    "an optimizer without loss scaling, because rows would receive scaled gradients. To use loss "
    f"scaling, {_IN_STEP}"
)


def require_apply(apply: str | None, store: Any, layer: str) -> str:
    """Checks the argument `apply` of a layer and returns its initial mode.

    Args:
        apply: `"backward"`, `"step"`, or None, which starts as `"backward"`.
        store: The store of the layer.
        layer: Name of the layer, for the error.

    Raises:
        ValueError: The mode is unknown, or the store does not support it.
    """
    require_choice("apply", apply, (*MODES, None), f"layer {layer!r}")
    if apply == "step" and not store.collects_gradients:
        place = f"layer {layer!r} with a {type(store).__name__}"
        raise invalid("apply", apply, place, "'backward', because 'step' requires native tables")
    return apply or "backward"


def reaching_rows(model: Any, optimizer: Any) -> Any:
    """Converts an optimizer so that its settings also apply to rows.

    Only layers with `apply=None` are affected. If their optimizer has a setting such as
    `global_clipnorm` and is not built yet, it is converted in place to a `CombinedOptimizer`. The
    layers then use `"step"` with a `CombinedOptimizer` and `"backward"` with any other optimizer.
    All layers are connected with their optimizer, unless the model overrides `train_step`, where
    another optimizer may apply their gradients.

    Args:
        model: A Keras model that is being compiled.
        optimizer: Optimizer in a format that `compile` accepts.

    Returns:
        The optimizer to compile with: an object, or the argument if no layer has `apply=None`.
    """
    layers = [part for part in _compat.layers_in(model) if hasattr(part, "follow_optimizer")]
    if not layers:
        return optimizer
    found = keras.optimizers.get(optimizer)
    for layer in layers:
        if not layer.follows_optimizer:
            continue
        own = _compat.optimizer_of(found, layer.anchors[0])
        needs_step = isinstance(own, keras.optimizers.LossScaleOptimizer) or any(
            getattr(own, setting, None) for setting in _NEED_STEP
        )
        if needs_step and not getattr(own, "built", False) and layer.store.collects_gradients:
            make_apply_rows(own)
        _require_one_kind(model, layer, own)
        layer.follow_optimizer(applies_rows(own))
    if not _compat.trains_itself(model):
        for layer in layers:
            layer.connect(_compat.optimizer_of(found, layer.anchors[0]))
    return found


def _require_one_kind(model: Any, layer: Any, optimizer: Any) -> None:
    """Raises ValueError if another model with the layer needs the other mode of the layer."""
    other = layer.connected_optimizer
    if other is None or applies_rows(other) == applies_rows(optimizer):
        return
    for part in _compat.layers_in(model):
        own = _compat.optimizer_of(getattr(part, "optimizer", None), layer.anchors[0])
        if own is other:
            return  # The model is compiled again, or contains the other model.
    gc.collect()  # The other model may be deleted, but not freed.
    if layer.connected_optimizer is None:
        return
    place = f"model {model.name!r}, which shares layer {layer.name!r} with another compiled model"
    kind = "with" if applies_rows(other) else "without"
    allowed = (
        f"an optimizer {kind} settings that need all gradients at once, as in the other model "
        f"({', '.join(_NEED_STEP[:4])}), because a layer applies gradients in one way. Compile "
        "both models with the same settings"
    )
    raise invalid("optimizer", type(optimizer).__name__, place, allowed)


def connect(layers: Any, optimizer: Any) -> None:
    """Connects embedding layers with the optimizer that will apply their gradients.

    `slip.keras.Model` and models that `fit` trains do this themselves. In a custom training loop or
    `train_step`, the layers learn of the optimizer when it applies gradients for the first time.
    Call this function before training if the learning rate of the tables must follow the optimizer
    from the first step, or must follow changes by callbacks without a delay of one step.

    Example:

    >>> layer = slip.keras.Embedding(100, 4)
    >>> slip.keras.connect(layer, keras.optimizers.Adam(1e-3))

    Args:
        layers: A layer or model, or a sequence of layers and models. Embedding layers at any depth
            are connected.
        optimizer: The Keras optimizer of the layers.

    Raises:
        ValueError: There is no embedding layer, or a setting of the optimizer does not apply to
            rows.
    """
    roots = list(layers) if isinstance(layers, (list, tuple)) else [layers]
    parts = [part for root in roots for part in _compat.layers_in(root)]
    found = [part for part in parts if hasattr(part, "follow_optimizer")]
    if not found:
        raise invalid("layers", layers, "connect", "at least one slip.keras layer")
    for layer in found:
        own = _compat.optimizer_of(keras.optimizers.get(optimizer), layer.anchors[0])
        require_fitting_optimizer(layer, own)
        layer.store.follow(own)
        layer.connect(own)


class CheckApply(keras.constraints.Constraint):
    """Constraint of an anchor, which checks the optimizer that applies its gradient.

    Keras has no other hook that connects a layer with its optimizer in a custom training step.
    """

    def __init__(self, layer: Any):
        """Checks for a layer.

        Args:
            layer: An `EmbeddingCollection`.
        """
        self._layer = weakref.ref(layer)

    def __call__(self, anchor: Any) -> Any:
        """Returns the value of an anchor.

        Args:
            anchor: The variable.

        Raises:
            ValueError: A setting of the optimizer does not apply to rows.
        """
        layer, optimizer = self._layer(), self.check()
        if layer is None:
            return tf.convert_to_tensor(anchor)
        checks = require_one_update(layer.store, layer.name) if layer.apply == "backward" else []
        if optimizer is not None:
            layer.store.rates.follow_applied(optimizer)
        with tf.control_dependencies([check for check in checks if check is not None]):
            return tf.identity(tf.convert_to_tensor(anchor))

    def check(self) -> Any:
        """Checks the optimizer that is running in this thread and returns it, if there is one.

        Raises:
            ValueError: A setting of the optimizer does not apply to rows.
        """
        layer: Any = self._layer()
        if layer is None or not layer.anchors:
            return None
        optimizer = _compat.optimizer_of(_compat.applying_optimizer(), layer.anchors[0])
        if optimizer is not None:
            require_fitting_optimizer(layer, optimizer)
        return optimizer


def require_fitting_optimizer(layer: Any, optimizer: Any) -> None:
    """Raises ValueError if an optimizer would miss rows.

    Args:
        layer: An `EmbeddingCollection`.
        optimizer: The Keras optimizer of its anchors.
    """
    anchors, apply = layer.anchors, layer.apply
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    name, place = type(optimizer).__name__, f"a model with tables of layer {layer.name!r}"
    if apply == "step":
        if applies_rows(optimizer):
            return
        how = "keras.optimizers.LossScaleOptimizer(optimizer)" if is_scaled else "optimizer"
        allowed = f"slip.keras.CombinedOptimizer({how}), because the layer has apply='step'"
        raise invalid("optimizer", name, place, allowed)
    if applies_rows(optimizer):
        place = f"layer {layer.name!r} with a CombinedOptimizer"
        raise invalid("apply", apply, place, "'step'. Pass apply='step' to the layer")
    if is_scaled:
        raise invalid("optimizer", name, place, _NO_SCALING)
    for setting in _NEED_STEP:
        value = getattr(optimizer, setting, None)
        if value:
            allowed = f"None. To apply the setting to rows as well, {_IN_STEP}"
            raise invalid(setting, value, place, allowed)
    refuse_missing_rows(optimizer, anchors[0], layer.name)


def refuse_scaled_gradients(optimizer: Any, policies: Sequence[Any]) -> None:
    """Rejects loss scaling if tables or policies would receive scaled gradients.

    Args:
        optimizer: Optimizer of the model in the `fit` of an engine.
        policies: Policies of the engine.

    Raises:
        ValueError: Rows would be updated or deferred by scaled gradients.
    """
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    name, place = type(optimizer).__name__, "fit with Slipstream"
    if is_scaled and not applies_rows(optimizer):
        raise invalid("optimizer", name, place, _NO_SCALING)
    is_scaled = is_scaled or bool(getattr(optimizer, "loss_scale_factor", None))
    if is_scaled and any(isinstance(policy, DeferGradients) for policy in policies):
        allowed = (
            "no DeferGradients, because scaled gradients do not determine how far rows move. "
            "Remove DeferGradients or loss scaling"
        )
        raise invalid("policies", list(policies), f"{place} and loss scaling", allowed)


def require_training_argument(layer: Any, training: bool | None) -> None:
    """Detects a layer that does not train although a tape is recording.

    The usual cause is a model without the argument `training` in its `call`, because `fit` passes
    `training` only to models with this argument. If the layer received False inside a model, the
    function only logs a warning, because False may be intended. Without a recording tape it does
    nothing.

    Args:
        layer: A trainable layer that is called without `training=True`.
        training: The argument that the layer received, None or False.

    Raises:
        ValueError: A tape is recording, and `training` is None.
    """
    if not _compat.is_recording():
        return
    outermost = _compat.outermost_layer(layer)
    model = "" if outermost is layer else f" in {type(outermost).__name__} {outermost.name!r}"
    if training is None:
        allowed = (
            "True or False under a gradient tape, because rows train only with training=True. Add "
            "the argument `training` to `call` of the keras.Model, so that `fit` can pass it. In a "
            "custom training step, call the model with training=True"
        )
        raise invalid("training", None, f"layer {layer.name!r}{model}", allowed)
    if outermost is not layer:
        logging.warning(
            "Layer %r%s is called with training=False under a gradient tape. Its rows are not "
            "trained. Call the model with training=True in a custom training step, or set "
            "layer.trainable = False if the rows should not be trained.",
            *(layer.name, model),
        )


def require_own_store(store: Any, tables: Sequence[Any], comm: Any, prefetch: bool) -> None:
    """Rejects a store object that contradicts the other arguments of a layer.

    Args:
        store: The argument `store` of the layer.
        tables: The tables of the layer.
        comm: The argument `comm`, which must be None.
        prefetch: The argument `prefetch`.

    Raises:
        ValueError: The tables, `comm` or `prefetch` do not match.
    """
    if comm is not None:
        allowed = "None. The layer uses the communicator of the store"
        raise invalid("comm", comm, "EmbeddingCollection with a store object", allowed)
    if prefetch and not store.prefetches:
        allowed = "a distributed.ShardedStore that was created with prefetch=True"
        raise invalid("store", store, "EmbeddingCollection with prefetch=True", allowed)
    if tuple(store.tables) != tuple(tables):
        names = [table.name for table in store.tables]
        allowed = f"a store of the tables {[table.name for table in tables]} of the layer"
        raise invalid("store", names, "EmbeddingCollection", f"{allowed}. Pass tables=store.tables")


def refuse_loss_scaling(policy: Any, layer: str) -> None:
    """Raises ValueError if a dtype policy computes in float16.

    The function checks the policies of the layer and of Keras. Such a policy requires loss scaling,
    which would also scale the gradients of rows.

    Args:
        policy: The dtype policy of the layer.
        layer: Name of the layer, for the error.
    """
    for name, dtype in ((p.name, p.compute_dtype) for p in (policy, keras.config.dtype_policy())):
        if dtype == "float16":
            allowed = (
                "'float32' or 'mixed_bfloat16', because the loss scaling of float16 would also "
                "scale the gradients of rows. For float16, pass apply='step' and compile with "
                "slip.keras.CombinedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
            raise invalid("dtype policy", name, f"layer {layer!r}", allowed)


def refuse_replicas(layer: str) -> None:
    """Raises ValueError in a `tf.distribute` strategy with multiple replicas."""
    strategy = tf.distribute.get_strategy()
    if (replicas := strategy.num_replicas_in_sync) > 1:
        place = f"layer {layer!r} with {replicas} replicas"
        allowed = "a strategy with one replica. Start one process per replica with Horovod instead"
        raise invalid("strategy", type(strategy).__name__, place, allowed)
