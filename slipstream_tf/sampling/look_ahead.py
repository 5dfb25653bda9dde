"""Prepares the next batch on another thread, with rows from disk.

Elements and their order do not change. A batch of the next window is not started before the current
window ends, because its classification depends on the new threshold.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.errors import require_integer
from slipstream_tf.ops import _loader
from slipstream_tf.ops.features import FeatureSpec, given_specs, pack
from slipstream_tf.sampling.classifier import default_keys, without_autograph
from slipstream_tf.sampling.notes import without_wrapping
from slipstream_tf.tables.base import EmbeddingStore


class LookAhead:
    """Prepares one batch ahead of training, but none of the next window.

    Preparing a batch can change state that training reads, such as example counts or the position
    of a reader. Call `wait_until_idle` before you read, save or restore such state.

    Thread-safe. The C++ resource is freed with this object and the last dataset that uses it.
    """

    def __init__(self) -> None:
        """Creates the resource without a window."""
        with tf.init_scope(), tf.device("CPU:0"):
            self._handle = _loader.library().slipstream_look_ahead()

    def begin_window(self, batches: int, pulled: int = 0) -> None:
        """Begins a window or continues one.

        Args:
            batches: Number of batches in the window, at least 0. 0 means that it never ends.
            pulled: Number of these batches that were requested before, at least 0.

        Raises:
            ValueError: If an argument is negative.
        """
        require_integer("batches", batches, 0, None, "LookAhead.begin_window")
        require_integer("pulled", pulled, 0, None, "LookAhead.begin_window")
        with tf.device("CPU:0"):
            _loader.library().slipstream_look_ahead_begin_window(
                handle=self._handle,
                batches=tf.constant(batches, tf.int64),
                pulled=tf.constant(pulled, tf.int64),
            )

    def wait_until_idle(self) -> None:
        """Waits until no batch is in preparation.

        The next preparation starts when a batch is requested. This call does not wait for the batch
        of an iterator that was deleted.

        Raises:
            tf.errors.CancelledError: If the step was cancelled during the wait.
        """
        with tf.device("CPU:0"):
            _loader.library().slipstream_look_ahead_wait_until_idle(handle=self._handle)

    def read(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset that prepares the next element in advance.

        A checkpoint of the iterator contains the prepared element.

        Args:
            dataset: Dataset to read. Its work runs on another thread, in order.

        Returns:
            The same elements, in the same order.
        """
        specs = [_flat_spec(spec) for spec in tf.nest.flatten(dataset.element_spec)]
        with tf.device("CPU:0"):
            variant = _loader.library().slipstream_ahead_dataset(
                input_dataset=tf.data.experimental.to_variant(dataset),
                handle=self._handle,
                output_types=[dtype for dtype, _ in specs],
                output_shapes=[shape for _, shape in specs],
            )
        ahead = tf.data.experimental.from_variant(variant, dataset.element_spec)
        # The returned dataset must keep its source and the resource alive.
        ahead._slipstream_made_of = (dataset, self)
        options = tf.data.Options()
        # An automatic prefetch would prepare more batches, also of the next window.
        options.experimental_optimization.inject_prefetch = False
        return ahead.with_options(options)


def _flat_spec(spec: Any) -> tuple[tf.DType, tf.TensorShape]:
    """Returns dtype and shape of a component in its variant representation."""
    if isinstance(spec, tf.TensorSpec):
        return spec.dtype, spec.shape
    return tf.variant, tf.TensorShape(None)


def prefetch_rows(
    dataset: tf.data.Dataset,
    store: EmbeddingStore,
    specs: Sequence[FeatureSpec],
    get_keys: Callable[..., Any] | None = None,
) -> tf.data.Dataset:
    """Requests the rows of each batch from a store in advance.

    The store can then load their rows from disk in advance.

    Apply `.prefetch(1)` or `Slipstream.read_ahead` to the result. Without it, rows are requested
    too late.

    Args:
        dataset: Dataset of batches.
        store: Store of the rows. If its tables do not spill to disk, `dataset` is returned.
        specs: Features with the keys of the rows. A batch may contain only some of them.
        get_keys: Function that returns the keys of a batch, as in `Slipstream.apply`. None reads
            them from the features.

    Returns:
        The same batches.
    """
    if not store.spills:
        return dataset
    keys_of = get_keys or functools.partial(default_keys, specs, requires_all=False)
    is_tuple = isinstance(dataset.element_spec, tuple)

    def request_rows(*components: Any) -> Any:
        keys = keys_of(without_wrapping(components[0]), *components[1:])
        is_mapping = isinstance(keys, Mapping)
        given = given_specs(keys, specs, "the keys of a batch") if is_mapping else specs
        store.prefetch_rows(pack(keys, given))
        return components if is_tuple else components[0]

    return dataset.map(without_autograph(request_rows, get_keys))
