"""Where keys are in a list, and in which state: a map that is replaced once a window.

In: a `KeyMap` and keys. Out: indices, positions of hits and misses; or states. CPU and GPU; graph
or eager.
"""

from typing import Any, NamedTuple

import tensorflow as tf

from slipstream_tf.ops import _loader


class Probed(NamedTuple):
    """What `KeyMap.probe` returns.

    Attributes:
        indices: int64 [n], the index of each key in the map, or -1.
        hits: int64 [h], positions of the keys that are in the map, ascending.
        misses: int64 [n - h], positions of the others, ascending.
    """

    indices: tf.Tensor
    hits: tf.Tensor
    misses: tf.Tensor


class KeyMap:
    """A map of int64 keys that steps read at run time: replacing it retraces nothing.

    The C++ resource lives as long as this object or a `tf.function` that uses it. Probes have no
    gradient.

    Attributes:
        handle: scalar resource handle, for the ops.
    """

    def __init__(self, device: str | None = None):
        """Makes an empty map.

        Args:
            device: where keys will be looked up, e.g. a variable's `device`. None: where
                TensorFlow would place an op.
        """
        with tf.init_scope(), tf.device(device):
            self.handle = _loader.library().slipstream_key_map()

    def assign(self, keys: Any, states: Any = None) -> tf.Operation | None:
        """Replaces the content.

        Args:
            keys: int64 [n]; any value is a legal key, and of one given twice the first counts. Key
                i gets index i.
            states: uint8 [n]; None: all are 0.

        Raises:
            ValueError: the keys are not integers or the states no bytes, or no vectors.
            tf.errors.InvalidArgumentError: there are not as many states as keys.
            tf.errors.ResourceExhaustedError: there is no memory for the map.
        """
        with tf.device("CPU:0"):
            keys = tf.convert_to_tensor(keys, tf.int64)
            states = tf.convert_to_tensor([] if states is None else states, tf.uint8)
        return _loader.library().slipstream_key_map_assign(
            handle=self.handle, keys=keys, states=states
        )

    def probe(self, keys: tf.Tensor) -> Probed:
        """Looks keys up, and parts those that are in the map from the others.

        Args:
            keys: int64 [n].
        """
        return Probed(*_loader.library().slipstream_probe_keys(handle=self.handle, keys=keys))

    def states(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns uint8 [n], the states of keys int64 [n]; 0 for one that is not in the map."""
        return _loader.library().slipstream_look_up_states(handle=self.handle, keys=keys)


tf.no_gradient("SlipstreamProbeKeys")
tf.no_gradient("SlipstreamLookUpStates")
