"""The front object: tracks a model's embedding tables, and skips what need not be trained."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.agreement import most_known, require_same
from slipstream_tf._utils.comm import Communicator, SingleProcess
from slipstream_tf._utils.errors import invalid
from slipstream_tf.checkpoint.store_state import tree_from_bytes, tree_to_bytes
from slipstream_tf.config import DryRun, HotSet, Saturation, Window
from slipstream_tf.data.spec import SKIPPABLE
from slipstream_tf.distributed.batches import even_ends
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
from slipstream_tf.sampling.foreseen import leave_out, thin
from slipstream_tf.sampling.look_ahead import LookAhead, announce_rows
from slipstream_tf.sampling.notes import note_share
from slipstream_tf.sampling.passes import Applied, StepPlan, present_window
from slipstream_tf.tables.sok.store import SokStore
from slipstream_tf.tables.variable import VariableStore
from slipstream_tf.telemetry.dry_run import estimate_dry_run
from slipstream_tf.telemetry.exchange_estimate import estimate_exchange
from slipstream_tf.telemetry.ledger import Ledger
from slipstream_tf.telemetry.run_report import RunReport


class Slipstream(tf.train.experimental.PythonState):
    """Finds the keys whose rows have settled while a model trains, and saves by its policies.

    Method: Slipstream, arXiv 2404.04270, and this project's policies. Connect
    - the steps, through `callback` (in `fit`) or `step` (in a loop of your own). Without steps no
      window ever ends and nothing is skipped; a warning says so;
    - the training data through `apply`, where examples are skipped;
    - the examples' losses, where `max_auc_loss` or an estimate of cost needs them: `callback` does
      so for models with `LossFeedback`, for example the models of `slipstream_tf.models`; in
      your own loop call `record_losses`.

    A `tf.train.Checkpoint(model=model, slipstream=slipstream)` holds what it knows beside tables,
    and goes on from there; deferred gradients are applied when it is saved. Where they
    shall stay, and for several ranks, use `distributed.JobCheckpoints(..., engine=slipstream)`.

    Args:
        embeddings: the layer whose keys are tracked, or several whose tables and features differ in
            name; or, for a model with embeddings of its own, a `tables.VariableStore` or
            `tables.SokStore`, with `features`.
        policies: what is saved: `SkipExamples`, `DeferGradients`, `MaskGradients` of
            `slipstream_tf`, each once; one or a sequence. Without any the engine only watches, and
            tells which keys have settled.
        window: length of a window, warm-up and sample; default `Window()`.
        hot_set: the keys that are watched; default `HotSet()`.
        max_auc_loss: maximum AUC that saving may cost, by an estimate; None: no bound. A policy's
            share then only bounds from above. The estimate held on shuffled data
            (benchmarks/results/withholding.md) and failed on a changing stream, where 0.0020 were
            lost instead of 0.0005 (benchmarks/results/stream.md).
        dry_run: True or a `DryRun`: do everything but the saving, and tell in `report` what it
            would have saved.
        saturation: when a key counts as saturated; default `Saturation()`.
        features: with a store: the features, in order, as `EmbeddingCollection` takes them; default
            one per table, named like it.
        comm: with a `VariableStore`: the ranks whose replicas of the variables it watches, from
            `distributed.init()`; their gradients must be averaged by `DistributedGradientTape` or
            `DistributedOptimizer`. None: this process alone. A layer and a `SokStore` have their
            own.

    Attributes:
        settings: all of them.
        specs: the features, in order.
        store: the store whose tables are tracked.
        comm: the ranks that the store's tables are shared with.
        tracker: the window loop, with the classifier and the reports.
        plan: how many steps training takes.
        steps: that were counted.
        layers: whose tables are tracked; empty for a store of one's own.
        batch_sizes: of what `apply` returned last, and was given; None: not known.
        are_losses_told: whether a step has told its inputs' losses.
        is_validating: whether a `fit` with the callback is evaluating now.
        most_batches: of a pass over what `apply` returned last; None: not known.

    Raises:
        ValueError: an argument is something else, or a setting does not fit the tables.
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
        # What `serialize` gave, to be restored again where the tables are replaced after it. None:
        # they were not restored, or training has gone on.
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
                link_of(self.comm)  # Its report may be one rank's.
        self.tracker = SaturationTracker(self.store, settings, self.specs, self.comm)
        self._reading, self._look_ahead = LookAhead(), LookAhead()
        self._begin_window()
        self.steps = 0
        self.are_losses_told = False
        self.plan = StepPlan(self.tracker, self.comm, self._begin_window)
        self.is_validating = False
        misuse.take_over(self, self.store)
        self.batch_sizes: tuple[int | None, int | None] = (None, None)
        self.most_batches: int | None = None

    @property
    def ledger(self) -> Ledger:
        """What was saved in the windows that have ended; print it, or use `to_dict`."""
        return Ledger(self.tracker.reports, self.settings)

    def report(self) -> RunReport:
        """Returns what was saved, or a dry run would have; where it is nothing, why.

        Print it, or use its `to_dict`.
        """
        reports, estimate = self.tracker.reports, None
        if self.settings.dry_run:
            loss, ranks = self.tracker.auc_loss_of_deferring, self.comm.size
            # Of rows that we send, and in a dtype.
            link = None if self.store.wire is None else self.comm.link
            exchange = estimate_exchange(reports, link, ranks, self.store.is_spread)
            estimate = estimate_dry_run(self.settings, reports, loss, exchange)
        present = present_window(self.tracker)
        warmup = self.tracker.warmup_steps
        return RunReport(self.settings, self.ledger, warmup, self.steps, estimate, present)

    def apply(
        self,
        dataset: tf.data.Dataset,
        batch_size: int | None = None,
        get_keys: Callable[..., Any] | None = None,
        drop_remainder: bool = False,
        ahead: bool = True,
        class_weight: Mapping[int, float] | None = None,
    ) -> tf.data.Dataset:
        """Leaves out skippable examples and refills the batches. For training data only.

        The next batch is read, classified and refilled on another thread while one trains, but not
        before the window ends that comes before it: what is skipped stays the same. Put it last: a
        `.prefetch(n)` after it makes every new threshold n batches late. Evaluate on data that did
        not go through it.

        A pass that skips ends before the number of batches that `cardinality` says: that is the
        most there may be, by which Keras lets each epoch go on to its end. Where the data do not
        know their length, Keras holds later epochs to the first one's batches; the callback warns
        if that leaves something out.

        With several ranks a collective. `dataset` has this rank's examples; where they end before
        those of others, batches of no examples follow (`distributed.even_ends`).

        Args:
            dataset: elements are batches, e.g. `(features, label)`.
            batch_size: examples of an output batch; default: that of `dataset`, where its
                element_spec, `.batch(n)`, `.rebatch(n)` or a reader tells it. No batch is read to
                find out.
            get_keys: called like a function for `dataset.map`, returns the keys in a format that
                the embedding layer takes. Default: what the features have under the names of the
                layer's; or `features["keys"]`; see `sampling.classifier.skip_inputs`.
            drop_remainder: whether a last batch that is not full is left out.
            ahead: whether to work a batch ahead. Not for a `dataset` that predicts, or tells where
                training is, as it is read. An iteration that ends early has then read a batch that
                is not trained, and classified it.
            class_weight: weight by class, as `fit` takes it, where the model's `fit` cannot: Keras
                takes no `class_weight` beside sample weights (`keep`), and fetches batches ahead
                of the windows. `slip.keras.Model.fit` hands its own on to here.

        In a dry run that needs no losses, a window of many batches is counted by a share of them,
        one in 16 at least, chosen at random.

        With `ForeseenLoss` elements must have labels. They become (features, label, sample_weight),
        or get "log_odds_offset" among their features. Read in batches larger than `batch_size`.

        Where losses are needed, the features get "skippable"; where examples are thinned, elements
        become (features, label, sample_weight).

        Returns:
            The dataset.

        Raises:
            ValueError: as `slipstream_tf.sampling.classifier.skip_inputs`.
        """
        source = sized(dataset, batch_size, is_refilled=self.settings.skips_examples)
        weighed = source.dataset
        if class_weight is not None:
            weighed = weigh_classes(weighed, class_weight)
        # Into the next window, too: only what follows depends on it.
        read = self._reading.read(weighed) if ahead else weighed
        kept = self.leave_out(read, source.size, get_keys, drop_remainder)
        self.plan.batches = source.batches
        self.batch_sizes = source.size or source.given, source.given
        # Ranks that have fewer batches get empty ones.
        self.most_batches = most_known(self.comm, source.most, "slipstream.batches")
        again = functools.partial(self.apply, dataset, batch_size, get_keys, drop_remainder, ahead)
        # Features that have notes are for models that take them off.
        even = even_ends(kept, self.comm, note_share if self.settings.needs_losses else None)
        for layer in self.layers:
            even = announce_rows(even, layer.store, layer.specs, get_keys)
        return Applied(
            self.read_ahead(even) if ahead else even,
            self.most_batches,
            functools.partial(misuse.require_no_validation, self),
            (lambda weights: again(class_weight=weights)) if class_weight is None else None,
        )

    def leave_out(
        self,
        dataset: tf.data.Dataset,
        batch_size: int | None = None,
        get_keys: Callable[..., Any] | None = None,
        drop_remainder: bool = False,
    ) -> tf.data.Dataset:
        """The first part of `apply`, for those who put something between: see there.

        With several ranks, `distributed.even_ends` must follow, and `read_ahead` may.
        """
        self.plan.batches = sized(dataset, batch_size).batches
        kept = leave_out(self, dataset, batch_size, get_keys, drop_remainder)
        if not self.settings.policies:
            return kept
        batches = 2 * self.tracker.window_steps
        return call_at(kept, batches, functools.partial(misuse.warn_without_steps, self, batches))

    def thin(self, batch: Any, predictions: tf.Tensor) -> Any:
        """Returns the part of a batch to train, in a loop of your own with `pilot="model"`.

        Args:
            batch: `(features, label)` or `(features, label, sample_weight)`; the part has the
                sample weights or offsets that correct it.
            predictions: float [batch] or [batch, 1], the model's probabilities.
        """
        return thin(self, batch, predictions)

    def read_ahead(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The second part of `apply`: has each batch made while the one before trains."""
        return self._look_ahead.read(dataset)

    def settle(self) -> None:
        """Waits until no batch is being made ahead of training, nor read for the one after.

        Call it before reading or saving what `dataset` changes as it is read, e.g. counts of its
        own. `state`, `end_window` and a checkpoint of the iterator do so themselves.
        """
        self._look_ahead.settle()
        self._reading.settle()

    def observe(self, inputs: Any) -> Classified:
        """Shows a training batch to the engine, in a loop whose data does not go through `apply`.

        The threshold is found on these examples; a `tables.SokStore` counts their keys.

        Args:
            inputs: the keys, as `EmbeddingCollection` takes them.

        Returns:
            What the engine says of each example; nothing is skipped.

        Raises:
            ValueError: a policy skips examples, which is what `apply` does.
        """
        if self.settings.skips_examples or self.settings.examples.pilot_settings:
            allowed = "others; or let the data go through Slipstream.apply, which skips examples"
            raise invalid("policies", self.settings.policies, "Slipstream.observe", allowed)
        if isinstance(self.store, SokStore):
            self.store.count_accesses(pack(inputs, self.specs))
        return self.tracker.classifier.classify(inputs, self.specs)

    def classifier_on(self, device: str) -> DriftClassifier:
        """Returns a classifier that says in steps on a device which inputs' keys are saturated.

        The engine gives it drifts and settings when a window ends; before, it skips nothing. With
        settings that do not skip examples, `skippable` is what it finds, and all weights are 1.
        What a step leaves out by it is not in the ledger.

        Args:
            device: where the keys are, e.g. "GPU:0".

        Raises:
            ValueError: a policy goes by losses, which are foreseen on the host.
        """
        if self.settings.examples.pilot_settings:
            allowed = "RowDrift: losses are foreseen on the host"
            raise invalid("by", self.settings.policies, "Slipstream.classifier_on", allowed)
        return self.tracker.classifier.copy_on(device)

    def record_losses(
        self, features: Any, losses: Any, labels: Any, skippable: Any = None, weights: Any = None
    ) -> Any:
        """Takes in the losses of a training step's inputs.

            slipstream.record_losses(features, losses, labels)

        Args:
            features: as `apply` gave them, which have "skippable"; or None.
            losses: float32 [batch], each example's own before the update.
            labels: float32 [batch], 0 and 1; the losses are binary cross-entropy.
            skippable: bool [batch], where the features do not tell it; None: no example was.
            weights: float32 [batch], the sample weights that `apply` gave; None: 1.

        Returns:
            The operation in a graph, None in eager mode.
        """
        if isinstance(features, Mapping):
            skippable = features.get(SKIPPABLE, skippable)
        self.are_losses_told = True
        return self.tracker.classifier.record_losses(losses, labels, skippable, weights)

    @property
    def policies(self) -> Mapping[str, UpdatePolicy]:
        """What becomes of the gradients of the tracked tables in the present window."""
        return self.tracker.policies

    def state(self) -> dict[str, Any]:
        """Returns all that the engine knows on this rank, for `distributed.JobCheckpoints`.

        Returns:
            Nested dictionaries of JSON-serialisable values and arrays: states of keys, T,
            snapshots, the present window, reports. Rows, counts and deferred gradients are the
            store's.
        """
        # A batch that is being made is counted, and in the iterator's checkpoint.
        self.settle()
        return {
            "steps": self.steps,
            "planned_steps": self.plan.steps,
            "tracker": self.tracker.state(),
        }

    def check(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError if `restore` cannot take states; nothing is changed."""
        self.tracker.check([state["tracker"] for state in states])

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Goes on from what `state` gave; with several ranks a collective.

        Args:
            states: of every rank that saved them, rank 0 first; there may be another number of
                ranks now. The store must have its rows and counts back already.

        Raises:
            ValueError: the tables or the drift metric differ; nothing is changed.
        """
        self.settle()
        self.tracker.restore([state["tracker"] for state in states])
        self._begin_window()
        self.steps, self._restored = states[0]["steps"], None
        self.plan.restore(states[0]["planned_steps"])

    def serialize(self) -> bytes:
        """Returns `state` as the bytes of an .npz file, for `tf.train.Checkpoint`."""
        return tree_to_bytes(self.state())

    def deserialize(self, string_value: bytes) -> None:
        """Goes on from what `serialize` returned; for one process."""
        if self.comm.size > 1:
            raise ValueError(
                "A tf.train.Checkpoint has what one rank's Slipstream knows. Restore it with "
                f"distributed.JobCheckpoints(..., engine=slipstream): there are {self.comm.size} "
                "ranks."
            )
        self.restore([tree_from_bytes(string_value, "Slipstream")])
        self._restored = string_value

    def _restore_again(self) -> None:
        """Tells tables that TensorFlow has replaced after the engine which rows have flags."""
        if self._restored is not None:
            self.deserialize(self._restored)

    def back_up(self, is_backed_up: bool) -> None:
        """Says whether weight files have the engine's state, too, and loading them restores it.

        For `keras.callbacks.BackupAndRestore`; `callback` does so where it is beside one.
        """
        # The last: when its weights are loaded, the tables of the others are there.
        for layer in self.layers[-1:]:
            layer.include_engine(self if is_backed_up and self.comm.size == 1 else None)

    def restore_backup(self, content: bytes) -> None:
        """Goes on from what `serialize` returned, in a `fit` that has told of its epochs."""
        self.deserialize(content)
        self.plan.restore(self.plan.steps, is_in_fit=True)

    @property
    def callback(self) -> SaturationCallback:
        """A new Keras callback that counts the steps of `fit`; one in a `fit`.

        `callback(log_dir)` is one that writes for TensorBoard, too: see `SaturationCallback`.
        """
        return SaturationCallback(self)

    def set_model(self, _: Any) -> None:
        """Raises TypeError: among Keras's callbacks belongs `callback`."""
        raise TypeError("A Slipstream is no callback. Write callbacks=[slipstream.callback].")

    def step(self, steps: int = 1) -> WindowReport | None:
        """Counts trained steps of a loop of your own; ends the window if it is full.

        Args:
            steps: steps trained since the last call.

        Returns:
            The window's report if one ended, else None.
        """
        self._go_on(steps)
        if steps >= self.tracker.steps_left:
            self._look_ahead.settle()
        if (report := self.tracker.step(steps)) is not None:
            self._begin_window()
            misuse.warn_at_window_end(self, report)
        return report

    def end_window(self) -> WindowReport:
        """Ends the present window now, however many steps it had; returns its report."""
        self._go_on(1)
        self._look_ahead.settle()
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
