"""The input classifier: a C++ resource that tells which inputs of a batch can be skipped.

In: drifts of the tracked keys and a threshold, once a window; keys of a batch, every step.
Out: a bool and a skip score per input; at a window's end the scores of a uniform sample.
Method: Slipstream, arXiv 2404.04270, sampling and input classifier blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.errors import invalid, require_choice, require_integer, require_number
from slipstream_tf.ops import _loader, features

MODES = ("none", "drift", "random")


@dataclasses.dataclass(frozen=True)
class ClassifierCounts:
    """Counts of one window's observed inputs.

    Attributes:
        inputs_seen: inputs classified.
        inputs_skipped: inputs found skippable.
        hot_inputs: inputs with a finite skip score.
    """

    inputs_seen: int
    inputs_skipped: int
    hot_inputs: int


class InputClassifier:
    """Holds the drifts of the tracked keys, a threshold, and a sample of the window's inputs.

    The skip score of an input with m lookups is its ceil(alpha * m)-th smallest drift, where
    untracked keys count as +inf; it is +inf for an input without lookups. Thread-safe. The C++
    resource lives as long as this object or a `tf.function` or dataset that uses it.
    """

    def __init__(
        self,
        tables: Sequence[str],
        alpha: float = 1.0,
        reservoir_size: int = 8192,
        seed: int = 0,
    ):
        """Creates a classifier that tracks no key and skips nothing.

        Args:
            tables: names of the tables, in the order of the indices that `set_drift` takes.
            alpha: share of an input's lookups that must be saturated: above 0, at most 1.
            reservoir_size: most inputs in the window's sample.
            seed: seeds the sample and random skipping.

        Raises:
            ValueError: an argument is out of its range.
        """
        tables = tuple(tables)
        if not tables or len(set(tables)) != len(tables):
            raise invalid("tables", tables, "InputClassifier", "one or more names, each once")
        require_number("alpha", alpha, 0.0, 1.0, "InputClassifier", open_minimum=True)
        require_integer("reservoir_size", reservoir_size, 1, 1 << 24, "InputClassifier")
        require_integer("seed", seed, 0, (1 << 63) - 1, "InputClassifier")
        self._tables = tables
        with tf.init_scope(), tf.device("CPU:0"):
            self._handle = _loader.library().slipstream_classifier(
                alpha=tf.constant(alpha, tf.float64),
                num_tables=len(tables),
                reservoir_size=reservoir_size,
                seed=seed,
            )

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables; a table's position is its index."""
        return self._tables

    def classify(
        self, inputs: Any, specs: Sequence[features.FeatureSpec], observe: bool = True
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Tells which inputs of a batch can be skipped.

        Args:
            inputs: keys of the batch in any format that `features.pack` takes.
            specs: the features, in order.
            observe: whether the inputs enter the window's sample and counts.

        Returns:
            skippable: bool [batch], and score: float32 [batch], in the drift's unit.

        Raises:
            ValueError: a feature is missing, or is of a table that the classifier does not have.
            tf.errors.InvalidArgumentError: row splits decrease, features differ in batch size, ...
        """
        packed = features.pack(inputs, specs)
        with tf.device("CPU:0"):
            result = _loader.library().slipstream_classify_inputs(
                handle=self._handle,
                keys=packed.keys,
                row_splits=packed.row_splits,
                weights=packed.weights,
                feature_table=self._table_indices(specs),
                padding_key=features.PADDING_KEY,
                observe=observe,
                **packed.attrs,
            )
        return result.skippable, result.score

    def set_drift(self, tables: Any, keys: Any, drift: Any) -> None:
        """Replaces the drifts of all tracked keys.

        Args:
            tables: int32 [n], the index of each key's table.
            keys: int64 [n]; no key of a table may occur twice.
            drift: float32 [n], at least 0. Keys whose drift is not finite are not tracked.

        Raises:
            tf.errors.InvalidArgumentError: a table is out of range, a drift is negative, a key is
                given twice, or the lengths differ. The drifts are then as they were.
        """
        _loader.library().slipstream_classifier_set_drift(
            handle=self._handle,
            tables=tf.convert_to_tensor(tables, tf.int32),
            keys=tf.convert_to_tensor(keys, tf.int64),
            drift=tf.convert_to_tensor(drift, tf.float32),
        )

    def configure(self, mode: str, threshold: float = 0.0, random_share: float = 0.0) -> None:
        """Sets what is skippable from the next batch on.

        Args:
            mode: "none"; "drift": inputs whose score is below the threshold; "random": each input
                with probability `random_share`, determined by the seed and the input's number.
            threshold: at least 0; may be infinite.
            random_share: 0 to 1.

        Raises:
            ValueError: an argument is out of its range.
        """
        require_choice("mode", mode, MODES, "InputClassifier.configure")
        if not threshold >= 0.0:
            raise invalid("threshold", threshold, "InputClassifier.configure", "a number >= 0")
        require_number("random_share", random_share, 0.0, 1.0, "InputClassifier.configure")
        _loader.library().slipstream_classifier_configure(
            handle=self._handle,
            threshold=tf.constant(threshold, tf.float32),
            random_share=tf.constant(random_share, tf.float64),
            mode=mode,
        )

    def reservoir_scores(self) -> np.ndarray:
        """Skip scores of the window's sampled inputs under the current drifts: float32 [sample]."""
        scores = _loader.library().slipstream_classifier_reservoir_scores(handle=self._handle)
        return scores.numpy()

    def end_window(self) -> ClassifierCounts:
        """Returns the window's counts and starts the next window with an empty sample."""
        counts = _loader.library().slipstream_classifier_end_window(handle=self._handle)
        return ClassifierCounts(*(int(count) for count in counts.numpy()))

    def _table_indices(self, specs: Sequence[features.FeatureSpec]) -> list[int]:
        for spec in specs:
            if spec.table not in self._tables:
                raise invalid(
                    "table",
                    spec.table,
                    f"feature {spec.name!r}",
                    "a table of the classifier: " + ", ".join(self._tables),
                )
        return [self._tables.index(spec.table) for spec in specs]
