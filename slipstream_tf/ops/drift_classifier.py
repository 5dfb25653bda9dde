"""Classification of inputs by drift on the device that their keys are on.

In: drifts of the tracked keys and a threshold, once a window; keys of a batch, every step. Out: a
bool, a skip score and a weight per input, as `ops.classifier` gives them. CPU and GPU; graph or
eager.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import require_choice, require_integer, require_number
from slipstream_tf.ops import _loader, features

MODES = ("none", "drift", "random")
# Of a key that is no lookup.
_NO_TABLE = -1


class Classified(NamedTuple):
    """What is to become of the inputs of a batch.

    Attributes:
        skippable: bool [batch].
        score: float32 [batch], skip scores.
        weight: float32 [batch]: 0 leaves an input out; else the inputs that it stands for: 1, or
            1 / keep_rate for a skippable one that thinning keeps.
    """

    skippable: tf.Tensor
    score: tf.Tensor
    weight: tf.Tensor


def drift_tensors(tables: Any, keys: Any, drift: Any) -> dict[str, tf.Tensor]:
    """Returns arguments of the ops that take drifts: int32, int64 and float32 [n]."""
    return {
        "tables": tf.convert_to_tensor(tables, tf.int32),
        "keys": tf.convert_to_tensor(keys, tf.int64),
        "drift": tf.convert_to_tensor(drift, tf.float32),
    }


class DriftClassifier:
    """Says which inputs can be skipped by drift or at random; it keeps no sample and no counts.

    Results are those of an `InputClassifier` with the same drifts, settings and seed that observes
    the same batches, bit for bit. `InputClassifier.copy_on` makes one that follows it. The C++
    resource lives as long as this object or a `tf.function` that uses it. Replacing drifts or
    settings retraces nothing, and a step waits for nothing.
    """

    def __init__(
        self,
        tables: Sequence[str],
        alpha: float = 1.0,
        seed: int = 0,
        ignored_tables: Sequence[str] = (),
        device: str | None = None,
    ):
        """Creates a classifier that tracks no key and skips nothing.

        Args:
            tables: names of the tables, in the order of the indices that `set_drift` takes.
            alpha: share of an input's lookups that must be saturated: above 0, at most 1.
            seed: seeds thinning and random skipping.
            ignored_tables: names of tables whose features are passed over.
            device: where the keys are. None: where TensorFlow would place an op.

        Raises:
            ValueError: an argument is out of its range.
        """
        place = "DriftClassifier"
        self._tables = features.table_names(tables, place)
        require_number("alpha", alpha, 0.0, 1.0, place, open_minimum=True)
        require_integer("seed", seed, 0, (1 << 63) - 1, place)
        self._ignored_tables = frozenset(ignored_tables)
        self._device = device
        with tf.init_scope():
            with tf.device("CPU:0"):
                alpha = tf.constant(alpha, tf.float64)
            with tf.device(device):
                self._handle = _loader.library().slipstream_drift_classifier(
                    alpha=alpha, num_tables=len(self._tables), seed=seed
                )

    def set_drift(self, tables: Any, keys: Any, drift: Any) -> None:
        """Replaces the drifts of all tracked keys; see `InputClassifier.set_drift`."""
        with tf.device("CPU:0"):
            drifts = drift_tensors(tables, keys, drift)
        _loader.library().slipstream_drift_classifier_set_drift(handle=self._handle, **drifts)

    def configure(
        self,
        mode: str,
        threshold: float = 0.0,
        random_share: float = 0.0,
        keep_rate: float = 0.0,
        shadow: bool = False,
    ) -> None:
        """Sets what is skippable from the next batch on; see `InputClassifier.configure`.

        Raises:
            ValueError: the mode is unknown; "foreseen_loss" needs an `InputClassifier`.
            tf.errors.InvalidArgumentError: a number is out of its range.
        """
        require_choice("mode", mode, MODES, "DriftClassifier.configure")
        with tf.device("CPU:0"):
            numbers = {
                "threshold": tf.constant(threshold, tf.float32),
                "random_share": tf.constant(random_share, tf.float64),
                "keep_rate": tf.constant(keep_rate, tf.float64),
            }
        _loader.library().slipstream_drift_classifier_configure(
            handle=self._handle, mode=mode, is_shadow=shadow, **numbers
        )

    def classify(self, inputs: Any, specs: Sequence[features.FeatureSpec]) -> Classified:
        """Tells which inputs of a batch can be skipped.

        Args:
            inputs: keys of the batch in any format that `features.pack` takes.
            specs: the features, in order.

        Returns:
            (skippable, score, weight), each [batch].

        Raises:
            ValueError: a feature is missing, or is of a table that the classifier does not have.
            tf.errors.InvalidArgumentError: features differ in batch size; or row splits are not
                sound (on a CPU).
        """
        tables = features.table_indices(specs, self._tables, self._ignored_tables, _NO_TABLE)
        with tf.device(self._device):
            keys, of_tables, row_splits = _lookups(features.pack(inputs, specs), tables)
            result = _loader.library().slipstream_classify_by_drift(
                handle=self._handle, keys=keys, tables=of_tables, row_splits=row_splits
            )
        return Classified(result.skippable, result.score, result.weight)


def _lookups(
    packed: features.PackedFeatures, tables: Sequence[int]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns keys int64 [n] and their tables int32 [n], input by input, and row splits."""
    parts = []
    for feature, table in enumerate(tables):
        keys, row_splits, _ = packed.of(feature)
        of_tables = tf.fill(tf.shape(keys), tf.constant(table, tf.int64))
        if (is_key := packed.is_key(feature)) is not None:
            of_tables = tf.where(is_key, of_tables, np.int64(_NO_TABLE))
        if keys.shape.rank == 1 and row_splits is None:
            keys, of_tables = keys[:, None], of_tables[:, None]
        parts.append((keys, of_tables, row_splits))
    if all(row_splits is None for _, _, row_splits in parts):
        keys, of_tables, row_splits = _side_by_side(parts)
    else:
        keys, of_tables, row_splits = _interleaved(parts)
    return keys, tf.cast(of_tables, tf.int32), row_splits


def _side_by_side(parts: list[Any]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Of matrices."""
    keys = tf.concat([keys for keys, _, _ in parts], 1)
    of_tables = tf.concat([of_tables for _, of_tables, _ in parts], 1)
    return tf.reshape(keys, [-1]), tf.reshape(of_tables, [-1]), _even_splits(keys)


def _even_splits(matrix: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(matrix, tf.int64)
    # Shapes are on the host, whatever the device: counting there waits for nothing.
    with tf.device("CPU:0"):
        return tf.range(shape[0] + 1) * shape[1]


def _interleaved(parts: list[Any]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Of matrices and ragged lists: every key is put where its input begins, behind what comes
    before it there. Within an input the order does not matter."""
    flat = [
        (
            tf.reshape(keys, [-1]),
            tf.reshape(of_tables, [-1]),
            _even_splits(keys) if splits is None else splits,
        )
        for keys, of_tables, splits in parts
    ]
    row_splits = tf.add_n([splits for _, _, splits in flat])
    begins = row_splits[:-1]
    places = []
    for keys, _, splits in flat:
        numbers = tf.range(tf.size(keys, tf.int64))
        owners = tf.searchsorted(splits, numbers, side="right", out_type=tf.int64) - 1
        places.append(numbers + tf.gather(begins - splits[:-1], owners))
        begins += splits[1:] - splits[:-1]
    at = tf.concat(places, 0)[:, None]
    shape = tf.shape(at, tf.int64)
    with tf.device("CPU:0"):
        shape = shape[:1]
    keys = tf.scatter_nd(at, tf.concat([keys for keys, _, _ in flat], 0), shape)
    of_tables = tf.scatter_nd(at, tf.concat([tables for _, tables, _ in flat], 0), shape)
    return keys, of_tables, row_splits


tf.no_gradient("SlipstreamClassifyByDrift")
