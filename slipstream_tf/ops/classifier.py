"""The input classifier: a C++ resource that tells which inputs of a batch can be skipped.

In: drifts of the tracked keys and a threshold, once a window; keys of a batch, and the losses of
the inputs that were trained, every step. Out: a bool, a skip score and a weight per input; at a
window's end the scores of a uniform sample and statistics of the losses.
Method: Slipstream, arXiv 2404.04270, sampling and input classifier blocks.
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
    """Inputs of a batch that are kept by their foreseen losses.

    Attributes:
        rows: int64 [kept], of the batch, ascending.
        correction: float32 [kept], inputs that each stands for: 1 / its probability to be kept.
        offset: float32 [kept], log of (its probability to be kept with label 1 / with label 0):
            what the log-odds of what is kept are above those of all.
        skippable: bool [kept], whether it could have been left out.
    """

    rows: tf.Tensor
    correction: tf.Tensor
    offset: tf.Tensor
    skippable: tf.Tensor


MODES = ("none", "drift", "foreseen_loss", "random")
# Arrays of `export_window`.
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
    """Counts of one window's observed inputs.

    Where only a share of the batches was classified (`window_batches` of
    `InputClassifier.classify`), all but `examples_seen` are estimates.

    Attributes:
        examples_seen: inputs classified.
        examples_skipped: inputs left out.
        hot_examples: inputs with a finite skip score.
        examples_skippable: inputs that could be left out.
        examples_kept: skippable inputs that thinning kept.
    """

    examples_seen: int
    examples_skipped: int
    hot_examples: int
    examples_skippable: int = 0
    examples_kept: int = 0


class InputClassifier:
    """Holds the drifts of the tracked keys, a threshold, and a sample of the window's inputs.

    The skip score of an input with m lookups is its ceil(alpha * m)-th smallest drift, where
    untracked keys count as +inf; it is +inf for an input without lookups. By foreseen loss
    (`foresee`) it is |label - prediction|, of a pilot that is trained along. Thread-safe. The C++
    resource lives as long as this object or a `tf.function` or dataset that uses it.
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
        """Creates a classifier that tracks no key and skips nothing.

        Args:
            tables: names of the tables, in the order of the indices that `set_drift` takes.
            alpha: share of an input's lookups that must be saturated: above 0, at most 1.
            reservoir_size: most inputs in the window's sample.
            seed: seeds the sample, thinning and random skipping.
            ignored_tables: names of tables whose features are passed over.
            pilot: what foresees losses: "none"; "label": the base rate; "linear": a logistic
                regression, one number per key; "fm": a factorisation machine; "model": the model
                that is trained.
            pilot_factors: of "fm": numbers of a key's factor, 1 to 8.
            pilot_memory_bytes: of "linear" and "fm": for what is learnt of the keys, which share
                buckets of 16 bytes ("linear"), 32 or, with more than 4 factors, 64; 1,024 or more.

        Raises:
            ValueError: an argument is out of its range.
        """
        place, memory = "InputClassifier", ("pilot_memory_bytes", pilot_memory_bytes)
        self._tables = features.table_names(tables, place)
        require_number("alpha", alpha, 0.0, 1.0, place, open_minimum=True)
        require_integer("reservoir_size", reservoir_size, 1, 1 << 24, place)
        require_integer("seed", seed, 0, (1 << 63) - 1, place)
        require_choice("pilot", pilot, PILOTS, place)
        require_integer("pilot_factors", pilot_factors, 1, 8, place)
        require_integer(*memory, 1024 if pilot in ("linear", "fm") else 0, None, place)
        require_room(*memory, pilot_memory_bytes, "what the pilot learns", place)
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
        """Names of the tables; a table's position is its index."""
        return self._tables

    def classify(
        self,
        inputs: Any,
        specs: Sequence[features.FeatureSpec],
        observe: bool = True,
        window_batches: int = 0,
    ) -> Classified:
        """Tells which inputs of a batch can be skipped.

        Args:
            inputs: keys of the batch in any format that `features.pack` takes.
            specs: the features, in order.
            observe: whether the inputs enter the window's sample and counts.
            window_batches: batches of a window, or 0. Where inputs are observed and nothing may be
                left out (in shadow mode, or mode "none"), as many batches of a window are
                classified as give four inputs for each of the sample, one in 16 at least, chosen
                at random by the seed. They count for the others, whose inputs are not skippable
                and score +inf.

        Returns:
            (skippable, score, weight), each [batch].

        Raises:
            ValueError: a feature is missing, or is of a table that the classifier does not have.
            tf.errors.InvalidArgumentError: row splits decrease, features differ in batch size, ...
        """
        require_integer("window_batches", window_batches, 0, None, "InputClassifier.classify")
        arguments = {"window_batches": window_batches, **self._keys(inputs, specs)}
        with tf.device("CPU:0"):
            op = _loader.library().slipstream_classify_inputs
            result = op(handle=self._handle, observe=observe, **arguments)
        return Classified(result.skippable, result.score, result.weight)

    def foresee(
        self, inputs: Any, specs: Sequence[features.FeatureSpec], labels: Any, weights: Any = None
    ) -> KeptInputs:
        """Tells which inputs of a batch are kept by their foreseen losses; the pilot learns them.

        Args:
            inputs: keys of the batch in any format that `features.pack` takes.
            specs: the features, in order.
            labels: float32 [batch], 0 to 1.
            weights: float32 [batch], the inputs' sample weights, at least 0; None: 1.

        Raises:
            ValueError: as `classify`.
            tf.errors.InvalidArgumentError: as `classify`; or a label or weight is out of its
                range. Nothing is changed.
        """
        return self._foresee(self._keys(inputs, specs), labels, weights)

    def foresee_by(self, labels: Any, predictions: Any, weights: Any = None) -> KeptInputs:
        """The same where the model is the pilot.

        Args:
            labels: float32 [batch], 0 to 1.
            predictions: float32 [batch], the model's probabilities.
            weights: float32 [batch], the inputs' sample weights, at least 0; None: 1.

        Raises:
            tf.errors.InvalidArgumentError: a value is out of its range. Nothing is changed.
        """
        # The op wants a feature; this one is of no table.
        ids = {"": tf.zeros_like(labels, tf.int64)}
        packed = features.pack(ids, [features.FeatureSpec("", "")])
        keys = {"feature_table": [len(self._tables)], **packed.arguments()}
        return self._foresee(keys, labels, weights, predictions)

    def _keys(self, inputs: Any, specs: Sequence[features.FeatureSpec]) -> dict[str, Any]:
        """The arguments of an op that are of a batch's keys."""
        packed, ignored = features.pack(inputs, specs), len(self._tables)
        tables = features.table_indices(specs, self._tables, self._ignored_tables, ignored)
        return {"feature_table": tables, **packed.arguments()}

    def _foresee(
        self, keys: dict[str, Any], labels: Any, weights: Any, predictions: Any = None
    ) -> KeptInputs:
        given = {"labels": labels, "sample_weights": weights, "predictions": predictions}
        values = {
            name: tf.zeros([0]) if value is None else tf.cast(value, tf.float32)
            for name, value in given.items()
        }
        with tf.device("CPU:0"):
            op = _loader.library().slipstream_foresee_inputs
            result = op(handle=self._handle, **values, **keys)
        return KeptInputs(result.rows, result.correction, result.offset, result.skippable)

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
        drifts = drift_tensors(tables, keys, drift)
        _loader.library().slipstream_classifier_set_drift(handle=self._handle, **drifts)
        for copy in self._copies:
            copy.set_drift(tables, keys, drift)

    def copy_on(self, device: str) -> DriftClassifier:
        """Returns a classifier on a device that gets the drifts and settings of this one.

        It has them from the next `set_drift` and `configure` on, and skips nothing before. What it
        classifies is not observed.

        Args:
            device: where the keys of inputs are, e.g. "GPU:0".

        Raises:
            ValueError: this classifier foresees losses, which a copy does not.
        """
        if self._pilot != "none":
            raise invalid("pilot", self._pilot, "InputClassifier.copy_on", "'none': none is copied")
        copy = DriftClassifier(
            self._tables, self._alpha, self._seed, sorted(self._ignored_tables), device
        )
        self._copies.append(copy)
        return copy

    def configure(
        self,
        mode: str,
        threshold: float = 0.0,
        random_share: float = 0.0,
        keep_rate: float = 0.0,
        shadow: bool = False,
    ) -> None:
        """Sets what is skippable from the next batch on.

        Args:
            mode: "none"; "drift" or "foreseen_loss": inputs whose score is below the threshold;
                "random": each input with probability `random_share`, determined by the seed and the
                input's number.
            threshold: at least 0; may be infinite.
            random_share: 0 to 1.
            keep_rate: share of the skippable inputs that is kept with a weight of 1 / keep_rate, 0
                to below 1; not with "random". With "foreseen_loss" above 0: the least probability
                to be kept of an input, which is else score / threshold.
            shadow: keep every input, with a weight of 1.

        Raises:
            ValueError: an argument is out of its range.
        """
        place = "InputClassifier.configure"
        require_choice("mode", mode, MODES, place)
        if not threshold >= 0.0:
            raise invalid("threshold", threshold, place, "a number >= 0")
        require_number("random_share", random_share, 0.0, 1.0, place)
        require_number("keep_rate", keep_rate, 0.0, 1.0, place)
        if keep_rate == 1.0:
            raise invalid("keep_rate", keep_rate, place, "a number below 1")
        _loader.library().slipstream_classifier_configure(
            handle=self._handle,
            threshold=tf.constant(threshold, tf.float32),
            random_share=tf.constant(random_share, tf.float64),
            keep_rate=tf.constant(keep_rate, tf.float64),
            mode=mode,
            is_shadow=shadow,
        )
        for copy in self._copies:
            copy.configure(mode, threshold, random_share, keep_rate, shadow)

    def record_losses(self, losses: Any, labels: Any, skippable: Any, weights: Any = None) -> Any:
        """Adds the losses of a batch that is trained to the statistics.

        Args:
            losses: float32 [batch], each input's before the update.
            labels: float32 [batch]; 0.5 or more is positive, and the losses are binary
                cross-entropy.
            skippable: bool [batch], or None: no input was.
            weights: float32 [batch], the inputs that each stands for; None: 1.

        Returns:
            The operation in a graph, None in eager mode.

        Raises:
            tf.errors.InvalidArgumentError: the lengths differ.
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
        """Returns the scores by foreseen loss of the window's sample, float32 [inputs with one]."""
        return _loader.library().slipstream_classifier_reservoir_losses(handle=self._handle).numpy()

    def export_pilot(self) -> dict[str, np.ndarray]:
        """Returns what the pilot has learnt: base float64 [2], buckets int64 [n], numbers float32
        [n, width]."""
        result = _loader.library().slipstream_classifier_export_pilot(handle=self._handle)
        return to_arrays(result, PILOT)

    def import_pilot(self, contents: Mapping[str, Any]) -> None:
        """Replaces what the pilot has learnt by what `export_pilot` gave, of the same settings.

        Raises:
            tf.errors.InvalidArgumentError: the arrays do not fit the pilot. All is as it was.
        """
        tensors = to_tensors(contents, PILOT, "a pilot's state")
        _loader.library().slipstream_classifier_import_pilot(handle=self._handle, **tensors)

    def export_window(self) -> dict[str, np.ndarray]:
        """Returns what has come in since the window began, and where random choices are.

        Drifts and settings are not in it.

        Returns:
            Arrays as the op SlipstreamClassifierExportWindow names and describes them.
        """
        result = _loader.library().slipstream_classifier_export_window(handle=self._handle)
        return to_arrays(result, WINDOW)

    def import_window(self, contents: Mapping[str, Any]) -> None:
        """Replaces what `export_window` gives.

        Raises:
            ValueError: an array is missing or unknown.
            tf.errors.InvalidArgumentError: the arrays do not fit each other, the number of tables
                or the size of the reservoir. All is then as it was.
        """
        tensors = to_tensors(contents, WINDOW, "`contents` for import_window")
        _loader.library().slipstream_classifier_import_window(handle=self._handle, **tensors)

    def reservoir_scores(self, tables: Any, keys: Any, drift: Any) -> np.ndarray:
        """Returns what scores the window's sampled inputs would have.

        Args:
            tables: as for `set_drift`, whose drifts do not count, and stay.
            keys: likewise; those that no sampled input has make no difference.
            drift: likewise.

        Returns:
            float32 [sample].

        Raises:
            tf.errors.InvalidArgumentError: as `set_drift`.
        """
        op = _loader.library().slipstream_classifier_reservoir_scores
        return op(handle=self._handle, **drift_tensors(tables, keys, drift)).numpy()

    def counts(self) -> ClassifierCounts:
        """Returns the counts of the present window, which goes on."""
        numbers = self.export_window()["numbers"][: len(dataclasses.fields(ClassifierCounts))]
        return ClassifierCounts(*map(int, numbers))

    def end_window(self) -> ClassifierCounts:
        """Returns the window's counts and starts the next window with an empty sample."""
        counts = _loader.library().slipstream_classifier_end_window(handle=self._handle)
        return ClassifierCounts(*(int(count) for count in counts.numpy()))
