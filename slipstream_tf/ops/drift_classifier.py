"""Classification of examples by drift, on the device of their keys.

This is the classification of `ops.classifier` without sampling and counts, for CPU and GPU, in
graph and eager mode.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import require_choice, require_integer, require_number
from slipstream_tf.ops import _loader, features

MODES = ("none", "drift", "random")
# Table index of padding and of keys of ignored tables.
_NO_TABLE = -1


class Classified(NamedTuple):
    """Classification of the examples of a batch.

    Attributes:
        skippable: bool [batch].
        score: float32 [batch], skip scores.
        weight: float32 [batch]. 0 drops an example. Otherwise it is the number of examples that the
            example represents: 1, or 1 / keep_rate for a skippable example that subsampling keeps.
    """

    skippable: tf.Tensor
    score: tf.Tensor
    weight: tf.Tensor


def drift_tensors(tables: Any, keys: Any, drift: Any) -> dict[str, tf.Tensor]:
    """Returns the drift arguments of an op as tensors.

    Args:
        tables: Table index of each key, int32 [n].
        keys: Keys, int64 [n].
        drift: Drift of each key, float32 [n].
    """
    return {
        "tables": tf.convert_to_tensor(tables, tf.int32),
        "keys": tf.convert_to_tensor(keys, tf.int64),
        "drift": tf.convert_to_tensor(drift, tf.float32),
    }


class DriftClassifier:
    """Finds skippable examples by drift or at random, without sample or counts.

    The results are bitwise equal to the results of an `InputClassifier` with the same drifts,
    settings, seed and observed batches. `InputClassifier.copy_on` creates an instance that receives
    its drifts and settings.

    The C++ resource is released with the last object or `tf.function` that uses it. Replacing
    drifts or settings causes no retracing, and a step does not synchronize with the device.
    """

    def __init__(
        self,
        tables: Sequence[str],
        alpha: float = 1.0,
        seed: int = 0,
        ignored_tables: Sequence[str] = (),
        device: str | None = None,
    ):
        """Creates a classifier that tracks no key and skips no example.

        Args:
            tables: Names of the tables. `set_drift` refers to them by index.
            alpha: Fraction of an example's lookups that must be saturated, in (0, 1].
            seed: Seed of subsampling and of random skipping.
            ignored_tables: Names of tables. Their features are ignored.
            device: Device of the keys. None means the default placement of TensorFlow.

        Raises:
            ValueError: An argument is out of range.
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
        """Replaces the drifts of all tracked keys.

        Args:
            tables: int32 [n], the table index of each key.
            keys: int64 [n], unique per table.
            drift: float32 [n], at least 0. Keys with a drift that is not finite are not tracked.

        Raises:
            tf.errors.InvalidArgumentError: As for `InputClassifier.set_drift`.
        """
        with tf.device("CPU:0"):
            drifts = drift_tensors(tables, keys, drift)
        _loader.library().slipstream_drift_classifier_set_drift(handle=self._handle, **drifts)

    def configure(
        self,
        mode: str,
        threshold: float = 0.0,
        random_fraction: float = 0.0,
        keep_rate: float = 0.0,
        shadow: bool = False,
    ) -> None:
        """Sets the rule for skippable examples from the next batch on.

        The arguments are described in `InputClassifier.configure`, but the mode "predicted_loss" is
        not supported.

        Raises:
            ValueError: The mode is unknown or "predicted_loss".
            tf.errors.InvalidArgumentError: A number is out of range.
        """
        require_choice("mode", mode, MODES, "DriftClassifier.configure")
        with tf.device("CPU:0"):
            numbers = {
                "threshold": tf.constant(threshold, tf.float32),
                "random_fraction": tf.constant(random_fraction, tf.float64),
                "keep_rate": tf.constant(keep_rate, tf.float64),
            }
        _loader.library().slipstream_drift_classifier_configure(
            handle=self._handle, mode=mode, is_shadow=shadow, **numbers
        )

    def classify(self, inputs: Any, specs: Sequence[features.FeatureSpec]) -> Classified:
        """Returns which examples of a batch can be skipped.

        Args:
            inputs: Keys of the batch in any format that `features.pack` accepts.
            specs: The features, in order.

        Returns:
            (skippable, score, weight), each [batch].

        Raises:
            ValueError: A feature is missing, or its table is not a table of the classifier.
            tf.errors.InvalidArgumentError: Features differ in batch size, or row splits are invalid
                (checked on CPU only).
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
    """Returns the keys, table indices and row splits of all lookups.

    Returns:
        keys int64 [n] and table indices int32 [n], ordered by example, and the row splits of the
        examples.
    """
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
    """Concatenates the features if all of them are matrices."""
    keys = tf.concat([keys for keys, _, _ in parts], 1)
    of_tables = tf.concat([of_tables for _, of_tables, _ in parts], 1)
    return tf.reshape(keys, [-1]), tf.reshape(of_tables, [-1]), _even_splits(keys)


def _even_splits(matrix: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(matrix, tf.int64)
    # Shapes are in host memory, therefore computing on the CPU avoids a synchronization.
    with tf.device("CPU:0"):
        return tf.range(shape[0] + 1) * shape[1]


def _interleaved(parts: list[Any]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Concatenates features that are matrices or ragged lists.

    Every key is placed after the keys of earlier features of the same example. The order of keys
    within an example has no effect.
    """
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
