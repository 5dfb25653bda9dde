"""Every branch on the version of TensorFlow, Keras or Horovod lives here and nowhere else."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

MINIMUM_KERAS = (3, 0)
# First and last minor release of TensorFlow that slipstream_tf is tested with.
TESTED_TENSORFLOW = ((2, 16), (2, 21))


def version_numbers(version: str) -> tuple[int, int]:
    """Returns (major, minor) of a version string such as "3.15.1" or "2.21.0-rc1"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def is_tested_tensorflow(version: str) -> bool:
    """Whether slipstream_tf is tested with this version of TensorFlow."""
    first, last = TESTED_TENSORFLOW
    return first <= version_numbers(version) <= last


def require_keras() -> Any:
    """Imports Keras 3 on its TensorFlow backend.

    TensorFlow 2.16 and later bring Keras 3 as the package `keras`; `TF_USE_LEGACY_KERAS` changes
    `tf.keras` only, so the layers here are always built on `keras` itself.

    Returns:
        The module `keras`.

    Raises:
        ImportError: `keras` is older than 3, or runs on another backend.
    """
    keras = importlib.import_module("keras")
    if version_numbers(keras.__version__) < MINIMUM_KERAS:
        raise ImportError(
            f"slipstream_tf.keras needs Keras 3, found keras {keras.__version__}. "
            "Run: pip install --upgrade 'keras>=3' (with TensorFlow 2.16 or later)."
        )
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            "slipstream_tf.keras needs Keras's TensorFlow backend, found "
            f"{keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before importing keras."
        )
    return keras


def arrays_to_tensors(value: Any) -> Any:
    """Makes tensors of the NumPy arrays in an input, which may be a nested dictionary.

    Early releases of Keras 3 (3.3, with TensorFlow 2.16) turn arrays of any dtype into float32 when
    they call a layer, in which keys above 2**24 are no longer told apart. Tensors stay as they are.
    """
    import tensorflow as tf

    if isinstance(value, Mapping):
        return {name: arrays_to_tensors(part) for name, part in value.items()}
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value


def tensorflow_variable(value: Any) -> Any:
    """Returns the tf.Variable of a Keras 3 variable, a tf.Variable itself, or None.

    Keras 3 wraps a tf.Variable in a class of its own, whose `value` is a property; that of a
    tf.Variable is a method. Keras need not be imported to tell them apart.
    """
    import tensorflow as tf

    if isinstance(value, tf.Variable):
        return value
    wrapped = getattr(value, "value", None)
    return wrapped if isinstance(wrapped, tf.Variable) else None


def is_schedule(value: Any) -> bool:
    """Whether a value is a `LearningRateSchedule` of Keras 3, which need not be imported yet."""
    keras = sys.modules.get("keras")
    if keras is None or not hasattr(keras, "optimizers"):
        return False
    return isinstance(value, keras.optimizers.schedules.LearningRateSchedule)


def keras_object(value: Any, module: str, base: str) -> tuple[str, dict[str, Any]] | None:
    """Returns class name and configuration of an object of a Keras class; None of anything else.

    Args:
        value: an object.
        module: of Keras, e.g. "optimizers".
        base: the class in it, e.g. "Optimizer".
    """
    keras = sys.modules.get("keras")
    if keras is None or not hasattr(keras, module):
        return None
    if not isinstance(value, getattr(getattr(keras, module), base)):
        return None
    return type(value).__name__, value.get_config()


def dense_rate(optimizer: Any) -> Any:
    """Returns the learning rate of a Keras optimizer: a schedule, variable or function, or None."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return getattr(optimizer, "_learning_rate", None)


def layers_in(model: Any) -> list[Any]:
    """Returns a Keras model or layer and all layers in it, however deep.

    Keras 3 has no public way to all of them: `layers` is of models and one level deep, and
    `tf.train.TrackableView` does not see those in lists.

    Raises:
        TypeError: it is neither.
    """
    flatten = getattr(model, "_flatten_layers", None)
    if flatten is None:
        raise TypeError(f"{model!r} is no Keras model or layer.")
    return list(flatten(include_self=True, recursive=True))


def functional_class() -> Any:
    """Returns the class of `keras.Model(inputs, outputs)`, which Keras 3 has no public name for."""
    return importlib.import_module("keras.src.models.functional").Functional


def weighs_classes(function: Any) -> bool:
    """Whether a function is that by which Keras 3 maps a data set to `fit`'s `class_weight`."""
    return getattr(function, "__name__", "") == "class_weights_map_fn"


# Transformations that leave the batches of the data set that they are made of as large as they are,
# by the names of TensorFlow's own classes, and those that may not.
_KEEP_BATCHES = {
    *("Prefetch", "Shuffle", "Take", "Skip", "Repeat", "Cache", "Options", "Shard"),
    *("AssertCardinality", "Filter", "TakeWhile", "IgnoreErrors"),
}
_MAP_BATCHES = {"Map", "ParallelMap", "Scan"}


def tell_batch_size(dataset: Any, size: int) -> Any:
    """Returns a data set of which `told_batch_size` finds that its batches have `size` inputs."""
    dataset._told_batch_size = size
    return dataset


def _where_batches_are_made(dataset: Any, passing: set[str]) -> Any:
    """Returns the data set that the batches come from through some transformations."""
    while not hasattr(dataset, "_told_batch_size"):
        inputs = dataset._inputs() if _kind_of(dataset) in passing else []
        if len(inputs) != 1:
            break
        (dataset,) = inputs
    return dataset


def _kind_of(dataset: Any) -> str:
    return type(dataset).__name__.strip("_").removesuffix("Dataset").removesuffix("V2")


def told_batch_size(dataset: Any) -> int | None:
    """Returns the batch size that was given to `.batch(n)`, `.rebatch(n)` or a reader, or None.

    TensorFlow has no public way to ask: its shape is not known without `drop_remainder`. No element
    is made. What follows may be what keeps batches as large as they are, and `.map` or `.scan`,
    which may not: check the batches that come.

    Args:
        dataset: a `tf.data.Dataset`.
    """
    import tensorflow as tf

    made = _where_batches_are_made(dataset, _KEEP_BATCHES | _MAP_BATCHES)
    if hasattr(made, "_told_batch_size"):
        return int(made._told_batch_size)
    names = {"Batch": "_batch_size", "ParallelBatch": "_batch_size", "PaddedBatch": "_batch_size"}
    name = {**names, "Rebatch": "_batch_sizes"}.get(_kind_of(made), "")
    size = tf.get_static_value(getattr(made, name, None))
    return None if size is None or size.ndim else int(size)


def is_sized_by_reader(dataset: Any) -> bool:
    """Whether batches are as a reader made them, so that their size need not be checked."""
    return hasattr(_where_batches_are_made(dataset, _KEEP_BATCHES), "_told_batch_size")


def track_variable(layer: Any, variable: Any) -> None:
    """Makes a variable one of a Keras layer's weights, but no part of TensorFlow's checkpoints.

    An attribute would be both.
    """
    layer._track_variable(variable)


def exchange_weights(layer: Any, old: Sequence[Any], make: Callable[[], None]) -> None:
    """Takes weights from a built Keras layer, and gives it others; as Keras does for LoRA.

    Args:
        layer: of Keras.
        old: weights of it.
        make: adds the new ones.
    """
    for variable in old:
        layer._untrack_variable(variable)
    was_locked = layer._tracker.locked
    layer._tracker.unlock()
    try:
        make()
    finally:
        if was_locked:
            layer._tracker.lock()


def is_in_legacy_file() -> bool:
    """Whether Keras writes or reads a model's `.h5` file of the old format just now."""
    try:
        state = importlib.import_module("keras.src.backend.common.global_state")
    except ImportError:
        return False
    return bool(state.get_global_attribute("use_legacy_config", False))


def outermost_layer(layer: Any) -> Any:
    """Returns the layer whose call the call of another, which runs now, is part of.

    In Keras's `fit` it is the model. Keras gives a layer no pointer to its model, but keeps this
    one for the arguments that it passes down.
    """
    context = getattr(layer, "_get_call_context", None)
    return layer if context is None else context().entry_layer


def optimizer_of(optimizer: Any, variable: Any) -> Any:
    """Returns the optimizer in a `keras.optimizers.MultiOptimizer` that has a variable.

    Others are returned as they are; so is a MultiOptimizer of which that is not known.
    """
    choose = getattr(optimizer, "_optimizer_map", None)
    return choose(variable) if callable(choose) else optimizer


def decays(optimizer: Any, variable: Any) -> bool:
    """Whether a Keras optimizer's weight decay, if it has any, acts on a variable."""
    return bool(optimizer._use_weight_decay(variable))


def copy_exclusions(old: Any, new: Any) -> None:
    """Gives a Keras optimizer what another excludes from weight decay; no configuration has it."""
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def is_recording() -> bool:
    """Whether a `tf.GradientTape` records just now; TensorFlow has no public way to ask."""
    record = importlib.import_module("tensorflow.python.eager.record")
    return bool(record.could_possibly_record())


def is_saving_model() -> bool:
    """Whether TensorFlow writes a SavedModel just now, for which it traces functions anew."""
    context = importlib.import_module("tensorflow.python.saved_model.save_context")
    return bool(context.in_save_context())
