"""The input classifier, which finds skippable examples of a batch.

The classifier is a C++ resource. It receives drifts and a threshold once per window, and the keys
of each batch in every step. It returns a bool, a skip score and a weight per example. It also
collects a uniform sample of the examples and loss statistics for the end of the window.

Source: Slipstream, arXiv 2404.04270, sampling and input classifier blocks.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import invalid, require_choice, require_integer, require_number
from slipstream_tf._utils.memory import require_room
from slipstream_tf.ops import _loader, features
from slipstream_tf.ops.drift_classifier import Classified, DriftClassifier, drift_tensors
from slipstream_tf.ops.loss_statistics import LossStatistics
from slipstream_tf.ops.table import to_arrays, to_tensors

PILOTS = ("none", "label", "linear", "fm", "model")
PILOT = {"base": np.float64, "buckets": np.int64, "numbers": np.float32}
"""Arrays of `InputClassifier.export_pilot`."""


class KeptInputs(NamedTuple):
    """Examples of a batch that are kept by their predicted losses.

    Attributes:
        rows: int64 [kept], ascending positions in the batch.
        correction: float32 [kept], importance weights, 1 / keep probability.
        offset: float32 [kept], log(keep probability with label 1 / keep probability with label 0).
            The log-odds of a label are larger by this value among the kept examples than among all
            examples.
        skippable: bool [kept], whether the keep probability was below 1.
    """

    rows: tf.Tensor
    correction: tf.Tensor
    offset: tf.Tensor
    skippable: tf.Tensor


MODES = ("none", "drift", "predicted_loss", "random")
# Arrays of `InputClassifier.export_window`.
WINDOW = {
    "sums": np.float64,
    "histogram": np.float64,
    "numbers": np.int64,
    "tables": np.int32,
    "keys": np.int64,
    "ends": np.int64,
    "losses": np.float32,
}


@dataclasses.dataclass(frozen=True)
class ClassifierCounts:
    """Counts of the observed examples of one window.

    If only a part of the examples was classified (`stride` of `InputClassifier.observe`,
    `window_batches` of `classify`), all counts except `examples_seen` are estimates.

    Attributes:
        examples_seen: Number of classified examples.
        examples_skipped: Number of dropped examples.
        hot_examples: Number of examples with a finite skip score.
        examples_skippable: Number of examples that could be dropped.
        examples_kept: Number of skippable examples that subsampling kept.
    """

    examples_seen: int
    examples_skipped: int
    hot_examples: int
    examples_skippable: int = 0
    examples_kept: int = 0


class InputClassifier:
    """Finds skippable examples by drift or predicted loss.

    The skip score of an example with m lookups is its ceil(alpha * m)-th smallest drift, where
    untracked keys count as +inf. The score of an example without lookups is +inf. With predicted
    losses (`subsample`) the score is |label - prediction| of a pilot, a small model that is trained
    in the same call.

    The class is thread-safe. The C++ resource is released with the last object, `tf.function` or
    dataset that uses it.
    """

    def __init__(
        self,
        tables: Sequence[str],
        alpha: float = 1.0,
        reservoir_size: int = 8192,
        seed: int = 0,
        ignored_tables: Sequence[str] = (),
        pilot: str = "none",
        pilot_factors: int = 8,
        pilot_memory_bytes: int = 0,
    ):
        """Creates a classifier that tracks no key and skips no example.

        Args:
            tables: Names of the tables. `set_drift` refers to them by index.
            alpha: Fraction of an example's lookups that must be saturated, in (0, 1].
            reservoir_size: Maximum number of examples in the sample of a window.
            seed: Seed of the sample, of subsampling and of random skipping.
            ignored_tables: Names of tables. Their features are ignored.
            pilot: Model that predicts losses. "none"; "label": the base rate; "linear": logistic
                regression with one number per key; "fm": a factorization machine; "model": the
                trained model.
            pilot_factors: Number of values per factor vector of "fm", 1 to 8.
            pilot_memory_bytes: Memory for the parameters of "linear" and "fm", at least 1,024. Keys
                share buckets of 16 bytes ("linear"), 32 bytes ("fm" with up to 4 factors) or 64
                bytes ("fm").

        Raises:
            ValueError: An argument is out of range.
        """
        place, memory = "InputClassifier", ("pilot_memory_bytes", pilot_memory_bytes)
        self._tables = features.table_names(tables, place)
        require_number("alpha", alpha, 0.0, 1.0, place, open_minimum=True)
        require_integer("reservoir_size", reservoir_size, 1, 1 << 24, place)
        require_integer("seed", seed, 0, (1 << 63) - 1, place)
        require_choice("pilot", pilot, PILOTS, place)
        require_integer("pilot_factors", pilot_factors, 1, 8, place)
        require_integer(*memory, 1024 if pilot in ("linear", "fm") else 0, None, place)
        require_room(*memory, pilot_memory_bytes, "pilot memory", place)
        self._ignored_tables = frozenset(ignored_tables)
        self._alpha, self._seed, self._pilot = alpha, seed, pilot
        self._copies: list[DriftClassifier] = []
        with tf.init_scope(), tf.device("CPU:0"):
            self._handle = _loader.library().slipstream_classifier(
                alpha=tf.constant(alpha, tf.float64),
                num_tables=len(self._tables),
                reservoir_size=reservoir_size,
                seed=seed,
                pilot=pilot,
                pilot_factors=pilot_factors,
                pilot_memory_bytes=pilot_memory_bytes,
            )

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables. The position of a table is its index."""
        return self._tables

    def classify(
        self,
        inputs: Any,
        specs: Sequence[features.FeatureSpec],
        observe: bool = True,
        window_batches: int = 0,
    ) -> Classified:
        """Returns which examples of a batch can be skipped.

        Args:
            inputs: Keys of the batch in any format that `features.pack` accepts.
            specs: The features, in order.
            observe: Whether the examples enter the sample and the counts of the window.
            window_batches: Number of batches per window, or 0 to classify all batches. If examples
                are observed but none can be skipped (in shadow mode or with mode "none"), only
                random batches are classified to save time: enough for four times the sample size,
                and at least one batch in 16. The counts are extrapolated to the other batches, for
                which all examples are returned as not skippable with score +inf.

        Returns:
            (skippable, score, weight), each [batch]. A weight of 0 drops the example.

        Raises:
            ValueError: A feature is missing, or its table is not a table of the classifier.
            tf.errors.InvalidArgumentError: The inputs are inconsistent, for example row splits
                decrease or features differ in batch size.
        """
        require_integer("window_batches", window_batches, 0, None, "InputClassifier.classify")
        packed = features.pack(inputs, specs)
        return self._classify(packed, observe=observe, window_batches=window_batches)

    def observe(self, packed: features.PackedFeatures, stride: int = 1) -> Classified:
        """Classifies and observes one random example in `stride`.

        The numbers of the examples since the start of training are divided into blocks of `stride`
        numbers. One random example of each block is classified. The choice depends only on the
        seed and the numbers. Every example has the same chance, 1 / stride. The counts of the
        window are extrapolated to the other examples.

        Args:
            packed: Keys of the batch, from `features.pack`.
            stride: Number of examples per classified example, at most 2^20.

        Returns:
            The classification, as of `classify`. Examples that were not chosen are not skippable
            and have the score +inf.
        """
        return self._classify(packed, stride=stride)

    def _classify(self, packed: features.PackedFeatures, **attributes: Any) -> Classified:
        with tf.device("CPU:0"):
            result = _loader.library().slipstream_classify_inputs(
                handle=self._handle, **attributes, **self._arguments(packed)
            )
        return Classified(result.skippable, result.score, result.weight)

    def subsample(
        self, inputs: Any, specs: Sequence[features.FeatureSpec], labels: Any, weights: Any = None
    ) -> KeptInputs:
        """Returns the examples to keep by predicted loss, and trains the pilot.

        Args:
            inputs: Keys of the batch in any format that `features.pack` accepts.
            specs: The features, in order.
            labels: float32 [batch], 0 to 1.
            weights: float32 [batch], sample weights, at least 0. None means 1.

        Raises:
            ValueError: As for `classify`.
            tf.errors.InvalidArgumentError: As for `classify`, or a label or weight is out of range.
                The classifier is unchanged then.
        """
        keys = self._arguments(features.pack(inputs, specs))
        return self._subsample(keys, labels, weights)

    def subsample_by(self, labels: Any, predictions: Any, weights: Any = None) -> KeptInputs:
        """Returns the examples to keep by the predictions of the trained model.

        Args:
            labels: float32 [batch], 0 to 1.
            predictions: float32 [batch], probabilities that the model predicts.
            weights: float32 [batch], sample weights, at least 0. None means 1.

        Raises:
            tf.errors.InvalidArgumentError: A value is out of range. The classifier is unchanged
                then.
        """
        # The op requires a feature, therefore a dummy feature without a table is passed.
        ids = {"": tf.zeros_like(labels, tf.int64)}
        packed = features.pack(ids, [features.FeatureSpec("", "")])
        keys = {"feature_table": [len(self._tables)], **packed.arguments()}
        return self._subsample(keys, labels, weights, predictions)

    def _arguments(self, packed: features.PackedFeatures) -> dict[str, Any]:
        """Returns the op arguments for the keys of a batch."""
        names = self._tables, self._ignored_tables
        tables = features.table_indices(packed.specs, *names, len(self._tables))
        return {"feature_table": tables, **packed.arguments()}

    def _subsample(
        self, keys: dict[str, Any], labels: Any, weights: Any, predictions: Any = None
    ) -> KeptInputs:
        given = {"labels": labels, "sample_weights": weights, "predictions": predictions}
        values = {
            name: tf.zeros([0]) if value is None else tf.cast(value, tf.float32)
            for name, value in given.items()
        }
        with tf.device("CPU:0"):
            op = _loader.library().slipstream_subsample_inputs
            result = op(handle=self._handle, **values, **keys)
        return KeptInputs(result.rows, result.correction, result.offset, result.skippable)

    def set_drift(self, tables: Any, keys: Any, drift: Any) -> None:
        """Replaces the drifts of all tracked keys.

        Args:
            tables: int32 [n], the table index of each key.
            keys: int64 [n], unique per table.
            drift: float32 [n], at least 0. Keys with a drift that is not finite are not tracked.

        Raises:
            tf.errors.InvalidArgumentError: A table is out of range, a drift is negative, a key
                occurs twice, or the lengths differ. The drifts are unchanged then.
        """
        drifts = drift_tensors(tables, keys, drift)
        _loader.library().slipstream_classifier_set_drift(handle=self._handle, **drifts)
        for copy in self._copies:
            copy.set_drift(tables, keys, drift)

    def copy_on(self, device: str) -> DriftClassifier:
        """Returns a classifier on a device that follows this classifier's settings.

        The copy receives the drifts and settings of later calls of `set_drift` and `configure`.
        Before them, it skips no example. Examples that the copy classifies do not enter the sample
        and the counts.

        Args:
            device: Device of the keys, for example "GPU:0".

        Raises:
            ValueError: This classifier predicts losses, which a copy does not support.
        """
        if self._pilot != "none":
            allowed = "'none', because a pilot cannot be copied to a device"
            raise invalid("pilot", self._pilot, "InputClassifier.copy_on", allowed)
        copy = DriftClassifier(
            self._tables, self._alpha, self._seed, sorted(self._ignored_tables), device
        )
        self._copies.append(copy)
        return copy

    def configure(
        self,
        mode: str,
        threshold: float = 0.0,
        random_fraction: float = 0.0,
        keep_rate: float = 0.0,
        shadow: bool = False,
    ) -> None:
        """Sets the rule for skippable examples from the next batch on.

        Args:
            mode: "none"; "drift" or "predicted_loss": examples with a score below the threshold are
                skippable; "random": each example is skippable with probability `random_fraction`,
                determined by the seed and the number of the example.
            threshold: At least 0; may be infinite.
            random_fraction: Probability of a skippable example, 0 to 1.
            keep_rate: With "drift", the fraction of the skippable examples that is kept with weight
                1 / keep_rate, in [0, 1). With "predicted_loss", the minimum keep probability, in
                (0, 1): a skippable example is kept with probability max(score / threshold,
                keep_rate). Not used with "random".
            shadow: Whether to keep every example with weight 1, for a dry run.

        Raises:
            ValueError: An argument is out of range.
        """
        place = "InputClassifier.configure"
        require_choice("mode", mode, MODES, place)
        if not threshold >= 0.0:
            raise invalid("threshold", threshold, place, "a number >= 0")
        require_number("random_fraction", random_fraction, 0.0, 1.0, place)
        require_number("keep_rate", keep_rate, 0.0, 1.0, place)
        if keep_rate == 1.0:
            raise invalid("keep_rate", keep_rate, place, "a number >= 0 and < 1")
        _loader.library().slipstream_classifier_configure(
            handle=self._handle,
            threshold=tf.constant(threshold, tf.float32),
            random_fraction=tf.constant(random_fraction, tf.float64),
            keep_rate=tf.constant(keep_rate, tf.float64),
            mode=mode,
            is_shadow=shadow,
        )
        for copy in self._copies:
            copy.configure(mode, threshold, random_fraction, keep_rate, shadow)

    def record_losses(self, losses: Any, labels: Any, skippable: Any, weights: Any = None) -> Any:
        """Adds the losses of a training batch to the statistics.

        Args:
            losses: float32 [batch], binary cross-entropy of each example before the update.
            labels: float32 [batch]. Labels of at least 0.5 count as positive.
            skippable: bool [batch], or None if no example is skippable.
            weights: float32 [batch], how many examples each example represents. None means 1.

        Returns:
            The operation in a graph, None in eager mode.

        Raises:
            tf.errors.InvalidArgumentError: The lengths differ.
        """
        losses = tf.convert_to_tensor(losses, tf.float32)
        if skippable is None:
            skippable = tf.zeros_like(losses, tf.bool)
        with tf.device("CPU:0"):
            return _loader.library().slipstream_record_losses(
                handle=self._handle,
                losses=losses,
                labels=tf.cast(labels, tf.float32),
                skippable=skippable,
                weights=tf.zeros([0]) if weights is None else tf.cast(weights, tf.float32),
            )

    def take_loss_statistics(self) -> LossStatistics:
        """Returns the statistics of the losses recorded since the last call."""
        result = _loader.library().slipstream_classifier_take_loss_statistics(handle=self._handle)
        return LossStatistics.from_sums(result.sums.numpy(), result.histogram.numpy())

    def reservoir_losses(self) -> np.ndarray:
        """Returns the predicted-loss scores of the window's sample, float32 [n].

        Examples without such a score are omitted.
        """
        return _loader.library().slipstream_classifier_reservoir_losses(handle=self._handle).numpy()

    def export_pilot(self) -> dict[str, np.ndarray]:
        """Returns the state of the pilot.

        Returns:
            base float64 [2], the base rate of the label and the number of steps in this mean;
            buckets int64 [n], the indices of the trained buckets, ascending; and numbers float32
            [n, width], the factors, weight and accumulators of each bucket.
        """
        result = _loader.library().slipstream_classifier_export_pilot(handle=self._handle)
        return to_arrays(result, PILOT)

    def import_pilot(self, contents: Mapping[str, Any]) -> None:
        """Replaces the state of the pilot by a result of `export_pilot`.

        Args:
            contents: The arrays of a pilot with the same settings.

        Raises:
            tf.errors.InvalidArgumentError: The arrays do not fit the pilot, which is unchanged
                then.
        """
        tensors = to_tensors(contents, PILOT, "import_pilot")
        _loader.library().slipstream_classifier_import_pilot(handle=self._handle, **tensors)

    def export_window(self) -> dict[str, np.ndarray]:
        """Returns the state of the window: sample, counts and random generators.

        Drifts and settings are not included.

        Returns:
            Arrays by name, as documented for the op SlipstreamClassifierExportWindow.
        """
        result = _loader.library().slipstream_classifier_export_window(handle=self._handle)
        return to_arrays(result, WINDOW)

    def import_window(self, contents: Mapping[str, Any]) -> None:
        """Replaces the state of the window by a result of `export_window`.

        Args:
            contents: The arrays.

        Raises:
            ValueError: An array is missing or unknown.
            tf.errors.InvalidArgumentError: The arrays do not fit each other, the number of tables
                or the size of the sample. The classifier is unchanged then.
        """
        tensors = to_tensors(contents, WINDOW, "import_window")
        _loader.library().slipstream_classifier_import_window(handle=self._handle, **tensors)

    def reservoir_scores(self, tables: Any, keys: Any, drift: Any) -> np.ndarray:
        """Returns the scores of the window's sample for given drifts.

        The drifts of `set_drift` are not used and stay unchanged.

        Args:
            tables: Table indices, as for `set_drift`.
            keys: Keys, as for `set_drift`. Keys that no sampled example contains have no effect.
            drift: Drifts, as for `set_drift`.

        Returns:
            float32 [n], one score per example of the sample.

        Raises:
            tf.errors.InvalidArgumentError: As for `set_drift`.
        """
        op = _loader.library().slipstream_classifier_reservoir_scores
        return op(handle=self._handle, **drift_tensors(tables, keys, drift)).numpy()

    def counts(self) -> ClassifierCounts:
        """Returns the counts of the current window without ending it."""
        numbers = self.export_window()["numbers"][: len(dataclasses.fields(ClassifierCounts))]
        return ClassifierCounts(*map(int, numbers))

    def end_window(self) -> ClassifierCounts:
        """Returns the window's counts and starts a window with an empty sample."""
        counts = _loader.library().slipstream_classifier_end_window(handle=self._handle)
        return ClassifierCounts(*(int(count) for count in counts.numpy()))
