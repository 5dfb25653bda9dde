"""Work ahead of training: the next batch on another thread, and its rows from the disk.

In: a data set; the end of the present window, or a store whose tables spill. Out: the same elements
in the same order. No batch of the next window is begun before the present window ends.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.errors import require_integer
from slipstream_tf.ops import _loader
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.sampling.classifier import as_it_is, default_keys
from slipstream_tf.sampling.notes import without_wrapping
from slipstream_tf.tables.base import EmbeddingStore


class LookAhead:
    """How far data sets work ahead of training: by one batch, but not into the next window.

    Making a batch may change what training looks at: counts of inputs, or where a reader is. So
    call `settle` before such things are read, saved or restored. Thread-safe. The C++ resource
    lives as long as this object or a data set that uses it.
    """

    def __init__(self) -> None:
        """Starts without windows."""
        with tf.init_scope(), tf.device("CPU:0"):
            self._handle = _loader.library().slipstream_look_ahead()

    def begin_window(self, batches: int, pulled: int = 0) -> None:
        """Says that a window begins, or goes on.

        Args:
            batches: of the window, at least 0; 0: it never ends.
            pulled: those of them that were pulled before, at least 0.

        Raises:
            ValueError: a number is out of its range.
        """
        require_integer("batches", batches, 0, None, "LookAhead.begin_window")
        require_integer("pulled", pulled, 0, None, "LookAhead.begin_window")
        with tf.device("CPU:0"):
            _loader.library().slipstream_look_ahead_begin_window(
                handle=self._handle,
                batches=tf.constant(batches, tf.int64),
                pulled=tf.constant(pulled, tf.int64),
            )

    def settle(self) -> None:
        """Waits until no batch is being made; the next one is begun when a batch is pulled.

        A batch that is made for a reader that is gone is not waited for.

        Raises:
            tf.errors.CancelledError: the step was cancelled while a batch was being made.
        """
        with tf.device("CPU:0"):
            _loader.library().slipstream_look_ahead_settle(handle=self._handle)

    def read(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the same elements, the next of which is made while one is used.

        An iterator's checkpoint has the one that was made.

        Args:
            dataset: what it does to make an element is done on another thread, in order.
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
        # What the elements are made by, and of, must live as long.
        ahead._slipstream_made_of = (dataset, self)
        options = tf.data.Options()
        # A prefetch that TensorFlow adds would make more, and into the next window.
        options.experimental_optimization.inject_prefetch = False
        return ahead.with_options(options)


def _flat_spec(spec: Any) -> tuple[tf.DType, tf.TensorShape]:
    """The type and the shape in which a data set has a component."""
    if isinstance(spec, tf.TensorSpec):
        return spec.dtype, spec.shape
    return tf.variant, tf.TensorShape(None)


def announce_rows(
    dataset: tf.data.Dataset,
    store: EmbeddingStore,
    specs: Sequence[FeatureSpec],
    get_keys: Callable[..., Any] | None = None,
) -> tf.data.Dataset:
    """Returns the same batches, which are announced to a store as they are made.

    What follows must ask for them ahead of their use: a `.prefetch(1)` or `Slipstream.read_ahead`.

    Args:
        dataset: elements are batches.
        store: whose tables spill; of another, the data set comes back as it is.
        specs: the features whose keys are meant.
        get_keys: as of `Slipstream.apply`.
    """
    if not store.spills:
        return dataset
    keys_of = get_keys or functools.partial(default_keys, specs)
    is_tuple = isinstance(dataset.element_spec, tuple)

    def announce(*components: Any) -> Any:
        keys = keys_of(without_wrapping(components[0]), *components[1:])
        store.announce_rows(pack(keys, specs))
        return components if is_tuple else components[0]

    return dataset.map(as_it_is(announce, get_keys))
