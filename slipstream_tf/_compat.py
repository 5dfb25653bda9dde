"""All code that depends on the version of TensorFlow, Keras or Horovod."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

MINIMUM_KERAS = (3, 0)
# The first and the last tested minor release of TensorFlow.
TESTED_TENSORFLOW = ((2, 16), (2, 21))


def version_numbers(version: str) -> tuple[int, int]:
    """Returns (major, minor) of a version such as "3.15.1" or "2.21.0-rc1"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def is_tested_tensorflow(version: str) -> bool:
    """Returns whether slipstream_tf is tested with this TensorFlow version."""
    first, last = TESTED_TENSORFLOW
    return first <= version_numbers(version) <= last


def require_keras() -> Any:
    """Imports Keras 3 with the TensorFlow backend.

    TensorFlow 2.16 and later install Keras 3 as the package `keras`. `TF_USE_LEGACY_KERAS` only
    changes `tf.keras`, so that the layers here always build on `keras`.

    Returns:
        The module `keras`.

    Raises:
        ImportError: `keras` is older than 3, or uses another backend.
    """
    keras = importlib.import_module("keras")
    if version_numbers(keras.__version__) < MINIMUM_KERAS:
        raise ImportError(
            f"slipstream_tf.keras requires Keras 3, but keras {keras.__version__} is installed. "
            "Run: pip install --upgrade 'keras>=3' (with TensorFlow 2.16 or later)."
        )
    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            "slipstream_tf.keras requires the TensorFlow backend of Keras, but the backend is "
            f"{keras.backend.backend()!r}. Set KERAS_BACKEND=tensorflow before importing keras."
        )
    return keras


def arrays_to_tensors(value: Any) -> Any:
    """Converts the NumPy arrays in a nested dictionary to tensors.

    Early releases of Keras 3 (3.3, with TensorFlow 2.16) convert arrays of any dtype to float32
    when they call a layer. Keys above 2**24 would then lose bits.

    Args:
        value: An array, any other object (returned unchanged), or a dictionary of such values.
    """
    import tensorflow as tf

    if isinstance(value, Mapping):
        return {name: arrays_to_tensors(part) for name, part in value.items()}
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) else value


def tensorflow_variable(value: Any) -> Any:
    """Returns the `tf.Variable` behind a Keras variable, or None.

    A `tf.Variable` is returned unchanged. Keras 3 wraps a `tf.Variable` in a class with a property
    `value`, while `tf.Variable.value` is a method. The check works without importing Keras.
    """
    import tensorflow as tf

    if isinstance(value, tf.Variable):
        return value
    wrapped = getattr(value, "value", None)
    return wrapped if isinstance(wrapped, tf.Variable) else None


def value_without_autocast(variable: Any) -> Any:
    """Returns the value of a Keras variable in the dtype of the variable.

    `variable.value` has the compute dtype inside of a model with mixed precision.
    """
    import tensorflow as tf

    return tf.convert_to_tensor(variable._value)


def is_schedule(value: Any) -> bool:
    """Returns whether a value is a Keras `LearningRateSchedule`.

    The function does not import Keras, because without a loaded Keras no value is a schedule.
    """
    keras = sys.modules.get("keras")
    if keras is None or not hasattr(keras, "optimizers"):
        return False
    return isinstance(value, keras.optimizers.schedules.LearningRateSchedule)


def keras_object(value: Any, module: str, base: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the class name and configuration of a Keras object.

    If the value is no instance of the base class, the result is None.

    Args:
        value: Any object.
        module: Name of the Keras module, for example `"optimizers"`.
        base: Name of the base class in that module, for example `"Optimizer"`.
    """
    keras = sys.modules.get("keras")
    if keras is None or not hasattr(keras, module):
        return None
    if not isinstance(value, getattr(getattr(keras, module), base)):
        return None
    return type(value).__name__, value.get_config()


def dense_rate(optimizer: Any) -> Any:
    """Returns the learning rate of a Keras optimizer, or None.

    The result is a schedule, a variable or a function. An optimizer with an `inner_optimizer` has
    the learning rate of the inner optimizer.
    """
    return getattr(innermost_optimizer(optimizer), "_learning_rate", None)


def schedule_step(optimizer: Any) -> Any:
    """Returns the step at which a Keras optimizer evaluates its learning-rate schedule.

    With `gradient_accumulation_steps` it counts all steps, whereas `iterations` counts updates.
    """
    return getattr(optimizer, "_iterations", optimizer.iterations)


def innermost_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer inside of a `keras.optimizers.LossScaleOptimizer`."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def layers_in(model: Any) -> list[Any]:
    """Returns a model or layer and all nested layers.

    Keras 3 has no public API for this: `layers` exists for models and is one level deep, and
    `tf.train.TrackableView` misses layers in lists.

    Raises:
        TypeError: The argument is neither a model nor a layer.
    """
    flatten = getattr(model, "_flatten_layers", None)
    if flatten is None:
        raise TypeError(
            f"Invalid `model`: {type(model).__name__} object. Expected a Keras model or layer."
        )
    return list(flatten(include_self=True, recursive=True))


def functional_class() -> Any:
    """Returns the class of `keras.Model(inputs, outputs)`, which is not public."""
    return importlib.import_module("keras.src.models.functional").Functional


def weighs_classes(function: Any) -> bool:
    """Returns whether Keras maps a dataset with this function to apply `class_weight`."""
    return getattr(function, "__name__", "") == "class_weights_map_fn"


# Dataset transformations that preserve the size of batches, and transformations that may change
# it, by the class names inside TensorFlow.
_KEEP_BATCHES = {
    *("Prefetch", "Shuffle", "Take", "Skip", "Repeat", "Cache", "Options", "Shard"),
    *("AssertCardinality", "Filter", "TakeWhile", "IgnoreErrors"),
}
_MAP_BATCHES = {"Map", "ParallelMap", "Scan"}


def record_batch_size(dataset: Any, size: int) -> Any:
    """Attaches a batch size to a dataset.

    `recorded_batch_size` returns it for this dataset and for datasets that are made from it.

    Args:
        dataset: A `tf.data.Dataset`.
        size: Number of examples per batch.

    Returns:
        The same dataset object.
    """
    dataset._recorded_batch_size = size
    return dataset


def _where_batches_are_made(dataset: Any, passing: set[str]) -> Any:
    """Finds the dataset that creates the batches of a dataset.

    The search follows the inputs of `dataset` through the transformations in `passing`. It ends at
    a dataset with an attached batch size, or at any other transformation.
    """
    while not hasattr(dataset, "_recorded_batch_size"):
        inputs = dataset._inputs() if _kind_of(dataset) in passing else []
        if len(inputs) != 1:
            break
        (dataset,) = inputs
    return dataset


def _kind_of(dataset: Any) -> str:
    return type(dataset).__name__.strip("_").removesuffix("Dataset").removesuffix("V2")


def recorded_batch_size(dataset: Any) -> int | None:
    """Returns the batch size of a dataset, or None if unknown.

    No element is read. The size is the argument of `.batch(n)` or `.rebatch(n)`, or the size that
    `record_batch_size` attached. TensorFlow has no public API for it, and the static shape is
    unknown without `drop_remainder`. Transformations between that call and `dataset` are ignored if
    they keep batches as they are (`_KEEP_BATCHES`) or map them. After any other transformation the
    size is unknown.

    Note: `.map` and `.scan` can change the number of examples. Check the size of the actual
    batches.

    Args:
        dataset: A `tf.data.Dataset`.
    """
    import tensorflow as tf

    made = _where_batches_are_made(dataset, _KEEP_BATCHES | _MAP_BATCHES)
    if hasattr(made, "_recorded_batch_size"):
        return int(made._recorded_batch_size)
    names = {"Batch": "_batch_size", "ParallelBatch": "_batch_size", "PaddedBatch": "_batch_size"}
    name = {**names, "Rebatch": "_batch_sizes"}.get(_kind_of(made), "")
    size = tf.get_static_value(getattr(made, name, None))
    return None if size is None or size.ndim else int(size)


def is_sized_by_reader(dataset: Any) -> bool:
    """Returns whether all batches have the size that `record_batch_size` attached.

    This holds if no `.map`, `.scan` or unknown transformation follows. The size of such batches
    need not be checked.
    """
    return hasattr(_where_batches_are_made(dataset, _KEEP_BATCHES), "_recorded_batch_size")


def track_variable(layer: Any, variable: Any) -> None:
    """Adds a variable to the weights of a Keras layer.

    Setting an attribute would also add the variable to TensorFlow checkpoints, which must not
    contain it.
    """
    layer._track_variable(variable)


def track_with(variable: Any, name: str, child: Any) -> None:
    """Adds an object to every TensorFlow checkpoint that contains a Keras variable.

    Keras leaves layers in lists, tuples and dictionaries out of TensorFlow checkpoints. Their
    trainable variables are in the checkpoint because the optimizer has them.

    Args:
        variable: A Keras variable.
        name: The name of the object next to the variable.
        child: A TensorFlow trackable.
    """
    variable._track_trackable(child, name)


def exchange_weights(layer: Any, old: Sequence[Any], make: Callable[[], None]) -> None:
    """Replaces weights of a built layer, as Keras does for LoRA.

    Args:
        layer: A Keras layer.
        old: The variables to remove.
        make: Function without arguments that adds the new weights to the layer.
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
    """Returns whether Keras is writing or reading a legacy `.h5` model file.

    Layers and weights receive no argument that tells it. Therefore the call stack is searched.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").endswith(".legacy_h5_format"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def outermost_layer(layer: Any) -> Any:
    """Returns the outermost layer of the call in which `layer` is called.

    In `fit` it is the model. Keras layers have no pointer to their model, but Keras stores the
    entry layer of a call to propagate arguments such as `training`.
    """
    context = getattr(layer, "_get_call_context", None)
    return layer if context is None else context().entry_layer


def trains_itself(model: Any) -> bool:
    """Returns whether a model overrides `train_step`, where it may use multiple optimizers."""
    step = getattr(type(model), "train_step", None)
    return step is not None and not step.__module__.startswith(("keras.", "slipstream_tf."))


def applying_optimizer() -> Any:
    """Returns the Keras optimizer that is applying gradients in this thread, or None.

    Inside of another optimizer, such as `LossScaleOptimizer`, it is the outer one. Keras calls the
    constraints of variables in `apply`, but does not pass the optimizer to them. Therefore the
    function searches the callers.
    """
    import keras

    found, frame = None, sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.optimizers.Optimizer):
            found = caller
        frame = frame.f_back  # type: ignore[assignment]
    return found


def optimizer_of(optimizer: Any, variable: Any) -> Any:
    """Returns the optimizer for a variable.

    For a `keras.optimizers.MultiOptimizer` it is the inner optimizer of the variable, if that can
    be determined. Any other optimizer is returned unchanged.
    """
    choose = getattr(optimizer, "_optimizer_map", None)
    if not callable(choose):
        return optimizer
    if not hasattr(choose, "values") and not isinstance(choose, _Choice):
        # The function may create an optimizer in each call. Keras must use the same one.
        choose = optimizer._optimizer_map = _Choice(choose)
    return choose(variable)


class _Choice:
    """Calls a function once per variable."""

    def __init__(self, function: Callable[[Any], Any]):
        self._function = function
        self._chosen: dict[int, tuple[Any, Any]] = {}

    def __call__(self, variable: Any) -> Any:
        if id(variable) not in self._chosen:
            import tensorflow as tf

            with tf.init_scope():  # The optimizer must exist outside of a traced step.
                self._chosen[id(variable)] = variable, self._function(variable)
        return self._chosen[id(variable)][1]


def decays(optimizer: Any, variable: Any) -> bool:
    """Returns whether the weight decay of a Keras optimizer includes a variable."""
    return bool(optimizer._use_weight_decay(variable))


def copy_exclusions(old: Any, new: Any) -> None:
    """Copies the weight decay exclusions of one Keras optimizer to another.

    The configuration of an optimizer does not contain these exclusions.

    Args:
        old: The optimizer to read.
        new: The optimizer to change.
    """
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def is_recording() -> bool:
    """Returns whether a `tf.GradientTape` is recording; TensorFlow has no public API."""
    record = importlib.import_module("tensorflow.python.eager.record")
    return bool(record.could_possibly_record())


def traced_function() -> Any:
    """Returns the graph of the innermost `tf.function` that this thread traces.

    Loops and branches have separate graphs, which belong to the function.
    """
    import tensorflow as tf

    graph = tf.compat.v1.get_default_graph()
    while type(graph).__name__ != "FuncGraph" and getattr(graph, "outer_graph", None) is not None:
        graph = graph.outer_graph
    return graph


def is_saving_model() -> bool:
    """Returns whether this thread writes a SavedModel and traces functions for it."""
    context = importlib.import_module("tensorflow.python.saved_model.save_context")
    return bool(context.in_save_context())


def eager_mode() -> Any:
    """Returns a context in which operations run at once, also while a graph is being built."""
    context = importlib.import_module("tensorflow.python.eager.context")
    return context.eager_mode()


def num_tapes(tensor: Any) -> int:
    """Returns how many of the recording tapes have recorded a tensor: 0, 1, or 2 for more.

    A persistent tape counts as 2.
    """
    util = importlib.import_module("tensorflow.python.ops.gradients_util")
    return int(util.PossibleTapeGradientTypes([tensor]))


def needs_gradient(op: Any, index: int) -> bool:
    """Returns whether the result of a gradient function for an input of its op is used.

    A tape skips inputs that it has not recorded.

    Args:
        op: The first argument of the gradient function.
        index: Index of the input.
    """
    return index not in (getattr(op, "skip_input_indices", None) or ())


def is_recording_stopped() -> bool:
    """Returns whether recording is stopped, as in `tf.recompute_grad`."""
    tapes = importlib.import_module("tensorflow.python.pywrap_tfe")
    return bool(tapes.TFE_Py_TapeSetIsStopped())


def graph_outside_of_control_flow() -> Any:
    """Returns the graph that contains the loops and branches that are being traced.

    None in eager code.
    """
    import tensorflow as tf

    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    return graph


def call_with_gradient(
    function: Callable[[Any], Any], value: Any, gradient: Callable[[Any], Any]
) -> Any:
    """Calls a function for which a `tf.GradientTape` uses the given gradient.

    `tf.custom_gradient` registers its closure for the lifetime of the process if it is traced, so
    that the graph is never freed. Here only the tape keeps the closure. If no tape records the
    graph (the caller of the `tf.function` has the tape, or calls `tf.gradients`), TensorFlow
    derives the gradient from the operations of `function`.

    Args:
        function: Function of one tensor that returns one tensor.
        value: The tensor.
        gradient: Maps the gradient of the result to the gradient of `value`.

    Returns:
        `function(value)`.
    """
    record = importlib.import_module("tensorflow.python.eager.record")
    with record.stop_recording():
        result = function(value)
    record.record_operation(
        function.__name__, [result], [value], lambda of_result: [gradient(of_result)]
    )
    return result


def is_model_input(tensor: Any) -> bool:
    """Returns whether a `keras.KerasTensor` is an input of a Keras model."""
    keras = importlib.import_module("keras")
    history = getattr(tensor, "_keras_history", None)
    return history is not None and isinstance(history.operation, keras.layers.InputLayer)


# Prefix of the names of the graphs in which Keras calls layers to infer shapes.
_SCRATCH_GRAPH = "scratch_graph"
# Name of the function that Keras traces for the default signature of a SavedModel.
_DEFAULT_SIGNATURE = "serving_default"


def infers_shapes() -> bool:
    """Returns whether Keras calls layers only to infer the shapes of their outputs.

    Keras then calls them in a graph that never runs. The result is False inside of a `tf.function`
    in this graph, because TensorFlow reuses its trace for actual inputs.
    """
    import tensorflow as tf

    if tf.executing_eagerly():
        return False
    return _name_of(tf.compat.v1.get_default_graph()).startswith(_SCRATCH_GRAPH)


def declares_inputs() -> bool:
    """Returns whether Keras may have chosen the dtype of the inputs of the current graph.

    If Keras knows only the shape of an input, it uses float32: to infer shapes, and for the default
    signature of a SavedModel of a subclassed model.
    """
    import tensorflow as tf

    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        name = _name_of(graph)
        if name == _DEFAULT_SIGNATURE or name.startswith(_SCRATCH_GRAPH):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def _name_of(graph: Any) -> str:
    """Returns the name of a graph, empty if it is not the graph of a function."""
    return getattr(graph, "name", "")
