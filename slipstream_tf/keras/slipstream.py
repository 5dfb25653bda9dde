"""The engine, which tracks tables and applies policies to their training."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.agreement import max_known, require_same
from slipstream_tf._utils.comm import Communicator, SingleProcess
from slipstream_tf._utils.errors import invalid
from slipstream_tf.checkpoint.store_state import tree_from_bytes, tree_to_bytes
from slipstream_tf.config import DryRun, HotSet, Saturation, Window
from slipstream_tf.data.spec import SKIPPABLE
from slipstream_tf.distributed.batches import pad_to_equal_steps
from slipstream_tf.distributed.exchange import link_of
from slipstream_tf.engine.report import WindowReport
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.engine.tracker import SaturationTracker
from slipstream_tf.keras import misuse
from slipstream_tf.keras.callbacks import SaturationCallback
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.keras.tracked import tracked
from slipstream_tf.ops.drift_classifier import Classified, DriftClassifier
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.policies.base import Policy
from slipstream_tf.sampling.batches import call_at, sized
from slipstream_tf.sampling.classifier import weigh_classes
from slipstream_tf.sampling.look_ahead import LookAhead, prefetch_rows
from slipstream_tf.sampling.notes import note_fraction
from slipstream_tf.sampling.passes import Applied, StepPlan, current_window
from slipstream_tf.sampling.subsampling import drop_examples, subsample
from slipstream_tf.tables.sok.store import SokStore
from slipstream_tf.tables.variable import VariableStore
from slipstream_tf.telemetry.dry_run import estimate_dry_run
from slipstream_tf.telemetry.exchange_estimate import estimate_exchange
from slipstream_tf.telemetry.savings_report import SavingsReport

# Number of examples that `observe` classifies per batch: at most twice this number.
_OBSERVED_EXAMPLES = 2048


class Slipstream(tf.train.experimental.PythonState):
    """Finds saturated keys during training and applies policies that save work.

    The engine divides training into windows of a few hundred steps. At the end of a window it
    measures the drift of the most accessed keys: the distance of a key's row from its copy at the
    window's start. A key is saturated if its drift is below a threshold T. The method is described
    in Slipstream, arXiv 2404.04270. This project adds further policies. Connect three parts of the
    training:

    - The steps, with `callback` in `fit` or `step` in a custom loop. Without steps no window ends
      and no policy takes effect. A warning reports that.
    - The training data, with `apply`, if examples are skipped.
    - The loss of each example, with `max_auc_loss` or `DryRun(estimates_cost=True)`. `callback`
      records it for models with `LossFeedback`, for example the models of `slipstream_tf.models`.
      In a custom loop call `record_losses`.

    `tf.train.Checkpoint(model=model, slipstream=slipstream)` saves and restores the state of the
    engine in addition to the tables. Saving applies the deferred gradients. To keep them deferred,
    or with multiple ranks, use `distributed.CheckpointManager(..., engine=slipstream)`.

    Example:

    >>> layer = slip.keras.EmbeddingCollection([slip.Table("user", 4), slip.Table("item", 4)])
    >>> model = slip.models.DLRM(layer, dense_features=0, top=[8, 1])
    >>> model.compile("adam", "binary_crossentropy")
    >>> keys = np.arange(64).reshape(32, 2) % 10
    >>> data = tf.data.Dataset.from_tensor_slices(({"keys": keys}, keys[:, 0] % 2)).batch(8)
    >>> slipstream = slip.Slipstream(layer, slip.DeferGradients())
    >>> history = model.fit(slipstream.apply(data), callbacks=[slipstream.callback()], verbose=0)
    >>> slipstream.steps
    4

    Args:
        embeddings: The layer to track, or a sequence of layers whose tables and features have
            different names. For a model with custom embeddings, a `tables.VariableStore` or
            `tables.SokStore`, together with `features`.
        policies: One policy or a sequence of different policies: `SkipExamples`, `DeferGradients`,
            `MaskGradients`. Without policies the engine only reports which keys are saturated.
        window: Length of a window, warm-up and sample. Defaults to `Window()`.
        hot_set: The keys to track. Defaults to `HotSet()`.
        max_auc_loss: Upper bound of the estimated AUC loss, compared with training without
            policies, or None for no bound. With a bound, the `fraction` of a policy is an upper
            limit.
            Note: the estimate held on shuffled data (benchmarks/results/mask_and_defer.md) and
            failed on a changing stream, where training lost 0.0020 AUC with a bound of 0.0005
            (benchmarks/results/stream.md).
        dry_run: True or a `DryRun` makes the engine decide without saving anything. `report` then
            returns the estimated savings.
        saturation: Criterion for saturated keys. Defaults to `Saturation()`.
        features: With a store: the features, in order, in a format that `EmbeddingCollection`
            accepts. Defaults to one feature per table, with the name of the table.
        comm: With a `VariableStore`: the ranks that hold replicas of its variables, from
            `distributed.init()`. Their gradients must be averaged by `DistributedGradientTape` or
            `DistributedOptimizer`. None uses this process only. A layer and a `SokStore` provide
            their ranks.

    Attributes:
        settings: All settings, an `engine.settings.EngineSettings`.
        specs: The `FeatureSpec`s of the tracked features, in order.
        store: The store of the tracked tables.
        comm: The `Communicator` of the ranks that share the tables.
        tracker: The `engine.tracker.SaturationTracker`, which runs the window loop and has the
            classifier and the reports.
        plan: The `sampling.passes.StepPlan`. `plan.steps` is the number of steps that training
            would take without skipping.
        steps: Number of steps that the callback or `step` has counted.
        layers: The tracked layers; empty for a store.
        batch_sizes: Examples per batch of the result and of the argument of the last `apply`, as
            (result, argument). Each is None if unknown.
        are_losses_recorded: Whether `record_losses` has been called.
        is_validating: Whether a `fit` with the callback is evaluating.
        max_batches: Maximum number of batches in a pass over the result of the last `apply`, or
            None if unknown.

    Raises:
        ValueError: An argument is invalid, or a setting does not match the tables.
    """

    def __init__(
        self,
        embeddings: EmbeddingCollection | Sequence[EmbeddingCollection] | VariableStore | SokStore,
        policies: Policy | Sequence[Policy] = (),
        window: Window | None = None,
        hot_set: HotSet | None = None,
        max_auc_loss: float | None = None,
        dry_run: bool | DryRun = False,
        saturation: Saturation | None = None,
        features: Mapping[str, str] | Sequence[FeatureSpec] | None = None,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__()
        # The restored bytes of `serialize`, which are restored again if TensorFlow restores the
        # tables later. None if no state was restored or training has continued.
        self._restored: bytes | None = None
        self.layers, self.store, self.specs = tracked(embeddings, features, comm)
        for layer in self.layers:
            layer.when_restored(self._restore_again)
        settings = EngineSettings(policies, window, hot_set, saturation, max_auc_loss, dry_run)
        self.settings = settings
        self.comm: Communicator = comm or self.store.comm or SingleProcess()
        if self.comm.size > 1:
            own = {**settings.get_config(), "features": [repr(spec) for spec in self.specs]}
            require_same(self.comm, own, "slipstream.settings", "Slipstream")
            if settings.dry_run:
                link_of(self.comm)  # Measures now, because `report` may run on one rank only.
        self.tracker = SaturationTracker(self.store, settings, self.specs, self.comm)
        self._reading, self._look_ahead = LookAhead(), LookAhead()
        self._begin_window()
        self.steps = 0
        self.are_losses_recorded = False
        self.plan = StepPlan(self.tracker, self.comm, self._begin_window)
        self.is_validating = False
        misuse.claim_store(self, self.store)
        self.batch_sizes: tuple[int | None, int | None] = (None, None)
        self.max_batches: int | None = None

    def __repr__(self) -> str:
        return f"<Slipstream with policies {list(self.settings.policies)} for {self.store!r}>"

    def report(self) -> SavingsReport:
        """Returns the savings, or in a dry run the estimated savings.

        If nothing was saved, the report gives the reason. Print it, or call `table` for a line per
        window or `to_dict`.
        """
        reports, estimate = self.tracker.reports, None
        if self.settings.dry_run:
            loss, ranks = self.tracker.auc_loss_of_deferring, self.comm.size
            # Only for rows that this package sends, with a known wire dtype.
            link = None if self.store.wire is None else self.comm.link
            exchange = estimate_exchange(reports, link, ranks, self.store.is_spread)
            estimate = estimate_dry_run(self.settings, reports, loss, exchange)
        window, warmup = current_window(self.tracker), self.tracker.warmup_steps
        return SavingsReport(reports, self.settings, warmup, self.steps, estimate, window)

    def apply(
        self,
        dataset: tf.data.Dataset,
        batch_size: int | None = None,
        get_keys: Callable[..., Any] | None = None,
        drop_remainder: bool = False,
        ahead: bool = True,
        class_weight: Mapping[int, float] | None = None,
    ) -> tf.data.Dataset:
        """Drops skippable examples from training data and refills the batches.

        Refilling regroups the kept examples, in order, into batches of `batch_size`. While one
        batch trains, another thread prepares the next batch. Only the first batch of a window waits
        until the previous window has ended, because its examples are classified with the new
        threshold. Therefore the decisions are the same as without the thread. Put `apply` last,
        because a later `.prefetch(n)` delays every new threshold by n batches.

        Use `apply` for training data only, not for evaluation.

        A pass that skips examples ends before the number of batches that `cardinality` reports,
        which is the maximum, so that Keras does not cut an epoch short. If the length of the data
        is unknown, Keras limits later epochs to the number of batches of the first epoch. The
        callback warns if this drops data.

        The elements of the result have the structure of `dataset`, with these exceptions:

        - With `PredictedLoss(correction="weight")`, `SkipExamples(keep_rate=)` or `class_weight`,
          they are `(features, label, sample_weight)`.
        - With `PredictedLoss(correction="offset")`, the features include "log_odds_offset", float32
          [batch].
        - With `max_auc_loss`, unless it only sets the distance of `Movement`, or with
          `DryRun(estimates_cost=True)`, the features include "skippable", bool [batch], and with
          multiple ranks "fraction_of_step", float32 [batch].

        With `PredictedLoss(pilot="model")` the training step drops examples. `apply` then drops
        only a last batch that is not full, with `drop_remainder`, and adds only "fraction_of_step"
        and the weights of `class_weight`.

        `PredictedLoss` requires labels. Read the data in batches larger than `batch_size` then,
        because only a part of each batch is kept.

        A dry run (`Slipstream(dry_run=...)`) drops nothing. Without `max_auc_loss`,
        `DryRun(estimates_cost=True)` and `PredictedLoss`, it saves time: it classifies only a
        random subset of the batches of a long window, at least 1 in 16.

        With multiple ranks, all ranks must call it. `dataset` contains the examples of this rank.
        If a rank has fewer examples, empty batches follow (`distributed.pad_to_equal_steps`).

        Example:

        >>> layer = slip.keras.EmbeddingCollection([slip.Table("item", 4)])
        >>> slipstream = slip.Slipstream(layer, slip.SkipExamples(slip.RowDrift(), fraction=0.5))
        >>> data = tf.data.Dataset.from_tensor_slices(({"item": [3, 5, 8, 1]}, [0, 1, 0, 0]))
        >>> [len(label) for _, label in slipstream.apply(data.batch(2))]  # Window 0 drops none.
        [2, 2]

        Args:
            dataset: Dataset of batches, for example `(features, label)`.
            batch_size: Number of examples per output batch. Defaults to the batch size of
                `dataset`, if its element_spec, `.batch(n)`, `.rebatch(n)` or a reader specifies it.
                No batch is read to determine it.
            get_keys: Function with the arguments of a function for `dataset.map`, which returns the
                keys in a format that the embedding layer accepts. Defaults to the features with the
                names of the layer features, or `features["keys"]`; see
                `sampling.classifier.skip_inputs`.
            drop_remainder: Whether to drop a last batch that is not full.
            ahead: Whether to prepare one batch ahead. Pass False if reading `dataset` computes
                predictions or reports the position in training. If an iteration ends early, one
                batch has been classified but not trained, and another batch may have been read.
            class_weight: Dictionary from class to weight, as in `fit`. For a plain `keras.Model`,
                pass it here instead of to `fit`: Keras does not combine it with sample weights, and
                it would prefetch batches, which are then classified with an old threshold.
                `slip.keras.Model.fit` forwards its `class_weight` to this argument.

        Returns:
            The dataset.

        Raises:
            ValueError: The batch size is neither given nor known, or the elements cannot hold the
                weights or features that are added. `sampling.classifier.skip_inputs` lists the
                details.
        """
        source = sized(dataset, batch_size, is_refilled=self.settings.skips_examples)
        weighed = source.dataset
        if class_weight is not None:
            weighed = weigh_classes(weighed, class_weight)
        # Reading may cross the end of a window, because only classification depends on the window.
        read = self._reading.read(weighed) if ahead else weighed
        kept = self.drop_examples(read, source.size, get_keys, drop_remainder)
        self.plan.batches = source.batches
        self.batch_sizes = source.size or source.given, source.given
        # Ranks with fewer batches receive empty batches.
        self.max_batches = max_known(self.comm, source.maximum, "slipstream.batches")
        again = functools.partial(self.apply, dataset, batch_size, get_keys, drop_remainder, ahead)
        # Only models that record losses remove the notes from the features.
        even = pad_to_equal_steps(
            kept, self.comm, note_fraction if self.settings.needs_losses else None
        )
        for layer in self.layers:
            even = prefetch_rows(even, layer.store, layer.specs, get_keys)
        return Applied(
            self.read_ahead(even) if ahead else even,
            self.max_batches,
            functools.partial(misuse.require_no_validation, self),
            (lambda weights: again(class_weight=weights)) if class_weight is None else None,
        )

    def drop_examples(
        self,
        dataset: tf.data.Dataset,
        batch_size: int | None = None,
        get_keys: Callable[..., Any] | None = None,
        drop_remainder: bool = False,
    ) -> tf.data.Dataset:
        """Drops skippable examples and refills the batches: the first part of `apply`.

        Use it instead of `apply` to insert transformations between the parts. With multiple ranks,
        `distributed.pad_to_equal_steps` must follow, so that all ranks have the same number of
        batches. `read_ahead` may follow.

        Args:
            dataset: As in `apply`.
            batch_size: As in `apply`.
            get_keys: As in `apply`.
            drop_remainder: As in `apply`.

        Returns:
            The dataset, with elements as in `apply`.
        """
        self.plan.batches = sized(dataset, batch_size).batches
        kept = drop_examples(self, dataset, batch_size, get_keys, drop_remainder)
        if not self.settings.policies:
            return kept
        batches = 2 * self.tracker.window_steps
        return call_at(kept, batches, functools.partial(misuse.warn_without_steps, self, batches))

    def subsample(self, batch: Any, predictions: tf.Tensor) -> Any:
        """Drops examples of a batch by the loss that the model predicts.

        Call it in a custom loop with `PredictedLoss(pilot="model")`, and train on the result.

        Args:
            batch: `(features, label)` or `(features, label, sample_weight)`.
            predictions: Predicted probabilities of the model, float [batch] or [batch, 1].

        Returns:
            The kept examples as `(features, label, sample_weight)`. With `correction="offset"` the
            features include "log_odds_offset", which the loss must add to the predicted log odds.
        """
        return subsample(self, batch, predictions)

    def read_ahead(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset that prepares each batch while the previous batch trains.

        It is the last part of `apply`. A batch of the next window is not prepared before the
        current window ends.

        Args:
            dataset: Result of `drop_examples`, possibly transformed.
        """
        return self._look_ahead.read(dataset)

    def wait_until_idle(self) -> None:
        """Waits until no batch is being read or prepared ahead of training.

        Call it before you read or save state that changes when `dataset` is read, for example
        counters. `state` and `restore` call it.
        """
        self._look_ahead.wait_until_idle()
        self._reading.wait_until_idle()

    def observe(self, inputs: Any) -> Classified:
        """Classifies a training batch and counts its examples for the window.

        Call it once per step in a custom loop if the data does not pass through `apply`. The engine
        derives the threshold T from these examples. A `tables.SokStore` also counts accesses of
        all keys of the batch.

        Batches of 4,096 or more examples are sampled for T: one random example in
        `stride = batch // 2048` is classified and represents the others. The choice depends only on
        `Window.seed` and the number of the example since the start of training, so that a resumed
        training makes the same choice. A batch is not sampled if its size is unknown when a graph
        is traced, if losses are recorded (`max_auc_loss`, `DryRun(estimates_cost=True)`), or if
        `Window.sample` requires all its examples.

        Args:
            inputs: Keys in a format that `EmbeddingCollection` accepts.

        Returns:
            The classification of each example: `skippable`, bool [batch], `score` and `weight`,
            float32 [batch]. No example is dropped. Examples that a sample excludes are not
            skippable and have the score +inf.

        Raises:
            ValueError: A policy skips examples or predicts losses, which requires `apply`.
        """
        if self.settings.skips_examples or self.settings.examples.pilot_settings:
            allowed = (
                "policies that neither skip examples nor predict losses. Use Slipstream.apply for "
                "the given policies"
            )
            raise invalid("policies", self.settings.policies, "Slipstream.observe", allowed)
        packed = pack(inputs, self.specs)
        if isinstance(self.store, SokStore):
            self.store.count_accesses(packed)
        return self.tracker.classifier.observe(packed, self._stride(packed.batch_size))

    def _stride(self, batch_size: int | None) -> int:
        """Returns the number of examples per example that `observe` classifies.

        Args:
            batch_size: Number of examples in the batch, or None if unknown.
        """
        if batch_size is None or self.settings.needs_losses:
            return 1
        enough = self.tracker.window_steps * batch_size // self.settings.window.sample
        return max(1, min(batch_size // _OBSERVED_EXAMPLES, enough))

    def classifier_on(self, device: str) -> DriftClassifier:
        """Returns a classifier of examples that runs on a device.

        Call its `classify` on batches whose keys are on the device. The engine sets the drifts and
        the threshold of this classifier at the end of each window. Before the first window ends, no
        example is skippable. If the policies do not skip examples, `skippable` is still computed
        and all weights are 1. The report does not include examples that you drop with it.

        Args:
            device: Device of the keys, for example "GPU:0".

        Raises:
            ValueError: A policy depends on predicted losses, which are computed on the host.
        """
        if self.settings.examples.pilot_settings:
            allowed = "the score RowDrift, because losses are predicted on the host"
            raise invalid("score", self.settings.policies, "Slipstream.classifier_on", allowed)
        return self.tracker.classifier.copy_on(device)

    def record_losses(
        self, features: Any, losses: Any, labels: Any, skippable: Any = None, weights: Any = None
    ) -> Any:
        """Records the losses of the examples of a training step.

        Call it in each step of a custom loop if `max_auc_loss` is set, unless it only sets the
        distance of `Movement`, or if the dry run has `estimates_cost=True`.

        Example:

        >>> layer = slip.keras.EmbeddingCollection([slip.Table("item", 4)])
        >>> dry_run = slip.DryRun(estimates_cost=True)
        >>> slipstream = slip.Slipstream(layer, slip.DeferGradients(), dry_run=dry_run)
        >>> labels, probabilities = np.float32([0, 1]), np.float32([0.2, 0.6])
        >>> losses = -np.log(np.where(labels == 1, probabilities, 1 - probabilities))
        >>> slipstream.record_losses(None, losses, labels)

        Args:
            features: The features that `apply` returned, which contain "skippable", or None.
            losses: Loss of each example before the update, float32 [batch].
            labels: Labels 0 and 1, float32 [batch]. The losses are binary cross-entropy.
            skippable: Bool [batch], if the features do not contain it. None means that no example
                was skippable.
            weights: Sample weights that `apply` returned, float32 [batch]. None means 1.

        Returns:
            The operation in a graph, None in eager mode.
        """
        if isinstance(features, Mapping):
            skippable = features.get(SKIPPABLE, skippable)
        self.are_losses_recorded = True
        return self.tracker.classifier.record_losses(losses, labels, skippable, weights)

    @property
    def update_policies(self) -> Mapping[str, UpdatePolicy]:
        """The current `UpdatePolicy` of each tracked table, by table name."""
        return self.tracker.update_policies

    def state(self) -> dict[str, Any]:
        """Returns the state of the engine on this rank, for `distributed.CheckpointManager`.

        Returns:
            Nested dictionaries of JSON-serializable values and arrays: key states, threshold T,
            snapshots, current window and reports. The store saves rows, counts and deferred
            gradients.
        """
        # A batch in preparation changes counters and the checkpoint of the iterator.
        self.wait_until_idle()
        return {
            "steps": self.steps,
            "planned_steps": self.plan.steps,
            "tracker": self.tracker.state(),
        }

    def check(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError if `restore` would reject the states."""
        self.tracker.check([state["tracker"] for state in states])

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores the engine from the result of `state`.

        With multiple ranks, all ranks must call it.

        Args:
            states: The states of all ranks that saved them, rank 0 first. The current number of
                ranks may be different. The rows and counts of the store must be restored before.

        Raises:
            ValueError: The tables or the drift metric differ. The engine is unchanged.
        """
        self.wait_until_idle()
        self.tracker.restore([state["tracker"] for state in states])
        self._begin_window()
        self.steps, self._restored = states[0]["steps"], None
        self.plan.restore(states[0]["planned_steps"])

    def serialize(self) -> bytes:
        """Returns `state` as the bytes of an .npz file, for `tf.train.Checkpoint`."""
        return tree_to_bytes(self.state())

    def deserialize(self, string_value: bytes) -> None:
        """Restores the engine from the result of `serialize`, in a single process.

        Args:
            string_value: The bytes that `serialize` returned.

        Raises:
            ValueError: There are multiple ranks, or the saved tables or metric differ.
        """
        if self.comm.size > 1:
            raise ValueError(
                "A tf.train.Checkpoint contains the engine state of one rank, but training has "
                f"{self.comm.size} ranks. Save and restore with "
                "distributed.CheckpointManager(..., engine=slipstream)."
            )
        self.restore([tree_from_bytes(string_value, "Slipstream")])
        self._restored = string_value

    def _restore_again(self) -> None:
        """Restores the row flags if TensorFlow restored the tables after the engine."""
        if self._restored is not None:
            self.deserialize(self._restored)

    def back_up(self, is_backed_up: bool) -> None:
        """Sets whether weight files include the state of the engine.

        Loading such a file restores the engine. `callback` enables it for a
        `keras.callbacks.BackupAndRestore` in the same `fit`. With multiple ranks, or for a store
        without a layer, the state is never included.

        Args:
            is_backed_up: Whether the state is included.
        """
        # The last layer, because the tables of the other layers are loaded before its weights.
        for layer in self.layers[-1:]:
            layer.include_engine(self if is_backed_up and self.comm.size == 1 else None)

    def restore_backup(self, content: bytes) -> None:
        """Restores the engine within a `fit` that has already planned its epochs.

        Args:
            content: The bytes that `serialize` returned.
        """
        self.deserialize(content)
        self.plan.restore(self.plan.steps, is_in_fit=True)

    @property
    def callback(self) -> SaturationCallback:
        """A new Keras callback that counts the steps of one `fit`.

        `callback(log_dir)` also writes TensorBoard events, see `SaturationCallback`.
        """
        return SaturationCallback(self)

    def set_model(self, _: Any) -> None:
        """Raises TypeError, because Keras needs `slipstream.callback()` instead."""
        raise TypeError(
            "A Slipstream is not a Keras callback. Pass callbacks=[slipstream.callback()]."
        )

    def step(self, steps: int = 1) -> WindowReport | None:
        """Counts training steps, and ends the window when it is full.

        Call it after each step of a custom loop. In `fit`, `callback` calls it.

        Args:
            steps: Number of steps since the last call.

        Returns:
            The report of the window that ended, or None.
        """
        self._go_on(steps)
        if steps >= self.tracker.steps_left:
            self._look_ahead.wait_until_idle()
        if (report := self.tracker.step(steps)) is not None:
            self._begin_window()
            misuse.warn_at_window_end(self, report)
        return report

    def end_window(self) -> WindowReport:
        """Ends the current window immediately and returns its report."""
        self._go_on(0)
        self._look_ahead.wait_until_idle()
        report = self.tracker.end_window()
        self._begin_window()
        return report

    def _go_on(self, steps: int) -> None:
        misuse.require_owner(self, self.store)
        self.steps += steps
        self._restored = None

    def _begin_window(self) -> None:
        length = self.tracker.window_steps
        self._look_ahead.begin_window(length, length - self.tracker.steps_left)
