"""The window loop: measures drift and configures the classifier and the store.

In each window the tracker reads the access counts and rows of a store and the losses of trained
examples. At the end of the window it decides which examples the classifier skips and which
gradients the store masks or defers, and returns a `WindowReport`.

Source: Slipstream, arXiv 2404.04270, snapshot and sampling blocks. Probing, `max_auc_loss` and
deferring are additions of this project.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from slipstream_tf._utils.errors import require_integer
from slipstream_tf.engine import window_end
from slipstream_tf.engine.hot_set import Candidates, max_candidates
from slipstream_tf.engine.ranks import Communicator, Ranks, part_of, require_restorable
from slipstream_tf.engine.report import ReportLog, TableWindow, WindowReport
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.engine.states import KeyState, KeyStates, effective_drifts
from slipstream_tf.engine.steering import Steerer
from slipstream_tf.engine.tracked_table import (
    FEW_KEYS,
    TrackedTable,
    for_each,
    joined,
    tables_at_once,
    tables_to_track,
)
from slipstream_tf.engine.window_end import sampled_drifts
from slipstream_tf.ops.classifier import InputClassifier
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.policies.base import Tables, WindowStart
from slipstream_tf.tables.base import TrackedStore

_Result = TypeVar("_Result")
# State of the window loop, without the parts that save their state separately.
_LOOP = (
    *("planned_steps", "step", "steps_in_window", "examples_seen", "windows_after_warmup"),
    *("window_is_warming_up", "threshold"),
)


class SaturationTracker:
    """Finds saturated keys in each window and applies the policies.

    All state changes at the end of a window, so that decisions are constant between window ends.
    The first window has no snapshot, therefore no key is saturated before the end of the second
    window.

    No example or gradient is saved before the end of the warm-up. The warm-up continues while its
    length is unknown: this is the case if `Window.warmup` is a fraction and the number of steps is
    set neither by `Window.planned_steps` nor by `plan`.

    Attributes:
        classifier: The input classifier. Pass it to `sampling.classifier.skip_inputs`.
    """

    def __init__(
        self,
        store: TrackedStore,
        settings: EngineSettings,
        specs: Sequence[FeatureSpec],
        comm: Communicator | None = None,
    ):
        """Starts the first window.

        Args:
            store: The store that contains the tables. Its access counts are decayed at window ends.
            settings: Settings of the engine.
            specs: Features of an example. Only the tables that they use are tracked.
            comm: Communicator of the ranks that train together, or None for a single process. All
                ranks end their windows after the same steps, compute the same T and states, and
                report totals.

        Raises:
            ValueError: There is no feature, the table of a feature is not in the store, a setting
                names a table that no feature uses, or a budget is too small for one row.
        """
        self._store = store
        self._settings = settings
        self._ranks = Ranks(comm)
        tracked = tables_to_track(store.tables, settings, specs)
        metric = settings.saturated.metric
        self._tables = [TrackedTable(store, table, metric, self._ranks) for table in tracked]
        self._tracked = tracked
        self._rates = {table.name: store.learning_rate_of(table.name) for table in tracked}
        for policy in settings.policies:
            policy.require_fit(self._acted_on())
        self.classifier = InputClassifier(
            [table.name for table in self._tables],
            settings.examples.alpha,
            settings.window.sample,
            settings.window.seed,
            **settings.examples.pilot_settings,
            ignored_tables=settings.hot_set.exclude,
        )
        self._tables_at_once = tables_at_once(store, self._ranks.size)
        self._steerer = Steerer(settings)
        self._planned_steps: int | None = None
        self._step = 0
        self._steps_in_window = 0
        self._examples_seen = 0
        self._windows_after_warmup = 0
        self._window_is_warming_up = True
        self._threshold = 0.0
        self._policy_states = {
            type(policy).__name__: policy.initial_state() for policy in settings.policies
        }
        self._reports = ReportLog()
        # Sends the store the policies after the warm-up now, so that an unsupported policy raises
        # here.
        for table, policy in zip(self._tables, self._gradient_policies(True), strict=True):
            store.set_update_policy(table.name, policy)
        self._begin_window(0.0)

    def _acted_on(self) -> Tables:
        """Returns the current description of the tables for policies."""
        parts = self._ranks.size if self._store.is_spread else 1
        rows = {table.name: parts * self._store.size(table.name) for table in self._tracked}
        are_native = self._store.updates_rows and not self._store.is_in_sok
        bound = self._settings.max_auc_loss_each
        return Tables(self._tracked, self._rates, rows, are_native, bound)

    def _gradient_policies(self, is_active: bool) -> list[UpdatePolicy]:
        """Returns the update policy of each table in a window.

        Args:
            is_active: Whether the window is after the warm-up.
        """
        settings, acted_on = self._settings, self._acted_on()
        policies = []
        for table in self._tracked:
            policy = settings.gradients.update_policy_of(table, acted_on) if is_active else None
            is_shadow = policy is not None and settings.dry_run
            policies.append(dataclasses.replace(policy or UpdatePolicy(), is_shadow=is_shadow))
        return policies

    @property
    def auc_loss_of_deferring(self) -> tuple[float, float] | None:
        """Estimated (minimum, maximum) AUC loss of deferring; None if unknown."""
        return self._settings.gradients.auc_loss(self._acted_on())

    @property
    def window_steps(self) -> int:
        """Number of steps per window."""
        return self._settings.window.length(self._planned_steps)

    @property
    def reports(self) -> tuple[WindowReport, ...]:
        """Reports of the windows that have ended, in order."""
        return tuple(self._reports)

    @property
    def warmup_steps(self) -> int | None:
        """Number of steps in the warm-up, or None if unknown."""
        return self._settings.window.warmup_steps(self._planned_steps)

    @property
    def is_warming_up(self) -> bool:
        """Whether the warm-up continues; always True while its length is unknown."""
        warmup = self.warmup_steps
        return warmup is None or self._step < warmup

    @property
    def steps_left(self) -> int:
        """Number of steps until the current window ends, at least 1."""
        return max(1, self.window_steps - self._steps_in_window)

    @property
    def update_policies(self) -> dict[str, UpdatePolicy]:
        """Update policies of the tracked tables in the current window."""
        return {table.name: table.policy for table in self._tables}

    @property
    def states(self) -> dict[str, KeyStates]:
        """States of the hot keys in the current window, by table."""
        return {table.name: table.states for table in self._tables}

    @property
    def goes_by_plan(self) -> bool:
        """Whether the warm-up length depends on the steps passed to `plan`."""
        return self._settings.window.warmup_steps(None) is None

    def plan(self, steps: int) -> None:
        """Sets the planned number of steps of training without skipping.

        The length of windows follows immediately. Skipping follows at the end of the current
        window. `Window.planned_steps` has priority.

        Args:
            steps: Total number of steps from the start of training.
        """
        require_integer("steps", steps, 0, None, "SaturationTracker.plan")
        self._planned_steps = steps

    def step(self, steps: int = 1) -> WindowReport | None:
        """Counts trained steps and ends the window if it is full.

        Args:
            steps: Number of steps since the last call (in Keras: `steps_per_execution`).

        Returns:
            The report of the window, or None if the window continues.
        """
        require_integer("steps", steps, 0, None, "SaturationTracker.step")
        self._step += steps
        self._steps_in_window += steps
        if self._steps_in_window < self.window_steps:
            return None
        return self.end_window()

    def state(self) -> dict[str, Any]:
        """Returns the state of the engine on this rank, at any time.

        Rows, slots, access counts and deferred gradients belong to the store and are not included.

        Returns:
            Nested dictionaries of JSON-serializable values and arrays. `restore` takes the results
            of all ranks.
        """
        return {
            "metric": self._settings.saturated.metric,
            "loop": {name: getattr(self, f"_{name}") for name in _LOOP},
            "reports": self._reports.state(),
            "steering": self._steerer.state(),
            "policies": self._policy_states,
            "tables": {table.name: table.state() for table in self._tables},
            "window": self.classifier.export_window(),
            "pilot": self.classifier.export_pilot(),
            "pilot_settings": self._settings.examples.pilot_settings,
            "merged_pilots": self._ranks.merged_pilots,
            "traffic": self._ranks.traffic_so_far(),
        }

    def check(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError if `restore` would reject the states; changes nothing."""
        dims = {table.name: table.dim for table in self._tables}
        require_restorable(states, dims, self._settings.saturated.metric)

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restores the states that `state` returned; a collective with multiple ranks.

        Call it after the rows and counts of the store are restored and before its deferred
        gradients are. If the number of ranks is unchanged, each rank gets its own state. Otherwise
        the states are distributed over the ranks, but the samples of examples start empty.

        Args:
            states: States of all ranks, in rank order.

        Raises:
            ValueError: The tables or the metric differ. The engine is unchanged then.
        """
        self.check(states)
        state = part_of(states, self._ranks.rank, self._ranks.size)
        for name in _LOOP:
            setattr(self, f"_{name}", state["loop"][name])
        # A policy without a saved state, or with other fields, keeps its initial values.
        saved = state["policies"]
        for name, own in self._policy_states.items():
            before = saved.get(name, {})
            self._policy_states[name] = {key: before.get(key, own[key]) for key in own}
        self._reports = ReportLog.from_state(state["reports"])
        self._steerer.restore(state["steering"])
        for table, policy in zip(self._tables, self._gradient_policies(True), strict=True):
            table.restore(state["tables"][table.name], policy)
        without_flags = {name: table["unmarked"] for name, table in state["tables"].items()}
        self._apply_window(without_flags)
        # Parameters of a pilot with other settings belong to other buckets.
        pilot = self._settings.examples.pilot_settings
        if pilot and state["pilot_settings"] == pilot:
            self.classifier.import_pilot(state["pilot"])
            self._ranks.merged_pilots = dict(state["merged_pilots"])
        self.classifier.import_window(state["window"])
        self._ranks.restore_traffic(state["traffic"])

    def _hot_key_count(self) -> int:
        return sum(table.states.keys.size for table in self._tables)

    @property
    def _threads(self) -> int:
        return 1 if self._hot_key_count() < FEW_KEYS else self._tables_at_once

    def _for_each_table(
        self, work: Callable[..., _Result], *others: Iterable[Any]
    ) -> list[_Result]:
        """Calls `work` for each table; returns the results in table order."""
        return for_each(work, self._threads, self._tables, *others)

    def end_window(self) -> WindowReport:
        """Ends the window now, whatever its length, and starts the next window.

        Returns:
            The report, which is also the last entry of `reports`.
        """
        start = time.perf_counter()
        snapshot_bytes = sum(table.snapshot_bytes for table in self._tables)
        findings = self._collect()
        self._examples_seen += findings.inputs.examples_seen
        planned_inputs = self._planned_inputs(findings.inputs.examples_skipped)
        steering = self._steerer.next(findings, planned_inputs)
        decision = window_end.decide(self._settings, findings, steering, self._threads)

        was_warming_up = self._window_is_warming_up
        overlap = self._renew_hot_set(decision.states)
        self._policy_states = {name: dict(own) for name, own in decision.policies.items()}
        is_skipping = self._begin_window(decision.found.threshold)
        saturated, threshold = [t.saturated_keys for t in self._tables], decision.found.threshold
        self._ranks.require_agreement(findings.window + 1, threshold, saturated)
        if not self._reports:
            window_end.warn_of_first_window(
                self._settings, self.warmup_steps, findings.rows_offered, self._examples_seen
            )
        each = zip(self._tables, findings.states, findings.rows, strict=True)
        tables = [
            TableWindow(table.name, table.dim, before.keys.size, table.states.counts(), rows)
            for table, before, rows in each
        ]
        report = window_end.describe(
            self._settings,
            findings,
            steering,
            decision,
            step=self._step,
            is_warming_up=was_warming_up,
            snapshot_bytes=snapshot_bytes,
            is_skipping=is_skipping,
            saturated_keys=sum(t.states["saturated"] + t.states["probing"] for t in tables),
            next_hot_keys=self._hot_key_count(),
            hot_set_overlap=overlap,
            tables=tuple(tables),
            traffic=self._ranks.take_traffic(),
            seconds=time.perf_counter() - start,
        )
        self._reports.append(report)
        return report

    def _collect(self) -> window_end.Findings:
        """Gathers the findings of the window from store, classifier and ranks."""
        settings, ranks = self._settings, self._ranks
        # Whether gradients of saturated keys were masked or deferred in this window.
        filters = settings.gradients.filters_saturated and not settings.dry_run
        filters = filters and not self._window_is_warming_up
        measured = self._for_each_table(lambda table: table.measure(filters))
        names = [table.name for table in self._tables]
        window_end.log_anomalies(len(self._reports), self._step, names, measured)
        scores = np.zeros(0, np.float32)
        if settings.goes_by_keys:
            sample = sampled_drifts(
                self.classifier.export_window(),
                [found.keys for found in measured],
                [found.deciding for found in measured],
            )
            scores = self.classifier.reservoir_scores(*sample)
            if settings.saturated.threshold is None:
                scores = ranks.concatenate(scores, "scores")
        losses = ranks.total_losses(self.classifier.take_loss_statistics())
        predicted_losses = None
        if settings.examples.pilot_settings:
            predicted_losses = ranks.concatenate(
                self.classifier.reservoir_losses(), "predicted_losses"
            )
        if settings.examples.pilot_settings and ranks.size > 1:
            self.classifier.import_pilot(ranks.merge_pilots(self.classifier.export_pilot()))
        (inputs,) = ranks.total_counts([self.classifier.end_window()], "inputs")
        return window_end.Findings(
            window=len(self._reports),
            states=[table.states for table in self._tables],
            measured=measured,
            scores=scores,
            predicted_losses=predicted_losses,
            policies=self._policy_states,
            losses=losses,
            inputs=inputs,
            rows=ranks.total_counts([table.take_counts() for table in self._tables], "rows"),
            candidates=self._candidates(),
        )

    def _begin_window(self, threshold: float) -> bool:
        """Starts a window and returns whether it may skip examples.

        Args:
            threshold: T of the window.
        """
        self._steps_in_window = 0
        self._window_is_warming_up = self.is_warming_up
        self._threshold = threshold
        is_active = not self._window_is_warming_up
        self._windows_after_warmup += is_active
        for table, policy in zip(self._tables, self._gradient_policies(is_active), strict=True):
            table.policy = policy
        return self._apply_window({})

    def _apply_window(self, without_flags: Mapping[str, np.ndarray]) -> bool:
        """Configures store and classifier; returns whether examples may be skipped.

        Args:
            without_flags: Maps a table to keys that were created again during the window, so that
                they have no flags.
        """
        is_active = not self._window_is_warming_up
        filters = self._settings.gradients.filters_saturated and is_active

        def configure_store(table: TrackedTable) -> None:
            table.set_flags(filters, without_flags.get(table.name))
            table.set_policy()

        self._for_each_table(configure_store)
        keys = [table.states.keys for table in self._tables]
        drifts = [effective_drifts(table.states, self._threshold) for table in self._tables]
        self.classifier.set_drift(*joined(keys, drifts))
        start = WindowStart(self._threshold, self._windows_after_warmup if is_active else 0)
        arguments, may_skip = self._settings.classifier_settings(self._policy_states, start)
        self.classifier.configure(**arguments)
        return may_skip

    def _planned_inputs(self, just_skipped: int) -> int | None:
        """Estimates how many examples training is offered in total.

        The estimate uses the number of trained examples per step so far.

        Args:
            just_skipped: Number of examples skipped in the window that ends, which has no report
                yet.

        Returns:
            The number, or None if the number of steps is unknown.
        """
        steps = self._settings.window.planned_steps
        steps = self._planned_steps if steps is None else steps
        if steps is None or not self._step:
            return None
        skipped = just_skipped + self._reports.examples_skipped
        return round(steps * (self._examples_seen - skipped) / self._step)

    def _candidates(self) -> list[Candidates] | None:
        """Returns the next hot set's candidates, or None if none is needed."""
        if not self._settings.goes_by_keys:
            return None
        candidates = []
        for table, own in zip(self._tables, self._for_each_table(self._hot_keys), strict=True):
            found = self._ranks.merge_accesses(*own, f"hot_keys.{table.name}")
            candidates.append(Candidates(*found, table.dim))
        return candidates

    def _renew_hot_set(self, states: Sequence[KeyStates] | None) -> float:
        """Starts the next hot set; returns the fraction of already hot keys."""
        # Decay follows the choice of hot keys, because a factor of 0 removes all counts.
        self._store.decay_counts(self._settings.hot_set.count_decay)
        if states is None:
            return 0.0

        def renew(table: TrackedTable, states: KeyStates) -> int:
            table.renew(states)
            return int(np.count_nonzero(table.states.states != KeyState.WARMING))

        common = sum(self._for_each_table(renew, states))
        total = self._hot_key_count()
        return common / total if total else 0.0

    def _hot_keys(self, table: TrackedTable) -> tuple[np.ndarray, np.ndarray]:
        """Returns this rank's most accessed keys of a table and their counts."""
        hot_set = self._settings.hot_set
        memory = self._settings.snapshot_bytes
        own = min(memory, hot_set.table_bytes.get(table.name, memory))
        # The key states need ascending keys. Sorting by count is not needed.
        order = {"by_key": True} if self._store.lists_hot_keys_by_key else {}
        maximum = min(max_candidates(table.dim, own), table.max_watched)
        keys, counts = self._store.hot_keys(table.name, maximum, **order)
        return np.asarray(keys), np.asarray(counts)
