"""The window loop: hot set, snapshot, drift, threshold, states. Publishes to classifier and store.

In: a store's access counts and rows, and the losses of trained inputs. Out: what the classifier
skips, what the store masks or holds back, and a `WindowReport` per window.
Method: Slipstream, arXiv 2404.04270, snapshot and sampling blocks; states, guard, budget and
deferring are this project's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from slipstream_tf.config import SaturationConfig
from slipstream_tf.errors import invalid, require_integer
from slipstream_tf.ops.classifier import InputClassifier
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.saturation import hot_set
from slipstream_tf.saturation.policies import UpdatePolicies, freeze_drift
from slipstream_tf.saturation.ranks import Communicator, Ranks
from slipstream_tf.saturation.report import (
    TableWindow,
    WindowReport,
    drift_histogram,
    drift_quantiles,
)
from slipstream_tf.saturation.states import KeyStates, next_states
from slipstream_tf.saturation.steering import Steerer, Steering, WindowWork
from slipstream_tf.saturation.threshold import (
    LARGEST_THRESHOLD,
    ThresholdResult,
    find_threshold,
    fixed_threshold,
)
from slipstream_tf.saturation.tracked_table import Measured, TrackedTable

if TYPE_CHECKING:
    from slipstream_tf.stores.base import TrackedStore


class SaturationTracker:
    """Finds saturated keys window by window, and says what is skipped, masked or held back.

    A window is `config.snapshot_interval` trained steps. All state changes at window ends, so that
    classification between them is constant. The first window has no snapshot: nothing is skipped
    before the end of the second (except with skip="random", and what deferring by movement holds).

    Nothing is skipped, masked or deferred before the end of the warm-up. As long as its length is
    not known (`config.warmup` is a share, and neither `config.planned_steps` nor `plan` says of
    how many steps), it goes on.

    With skip="random", the i-th window that begins at or after the end of the warm-up (i from 0)
    skips the share `config.random_shares[i]`, whatever the keys; the last share repeats. Without a
    warm-up that starts with the first step. `report.random_shares` gives the shares of a run.
    """

    def __init__(
        self,
        store: TrackedStore,
        config: SaturationConfig,
        specs: Sequence[FeatureSpec],
        comm: Communicator | None = None,
    ):
        """Starts the first window.

        Args:
            store: holds the tables; its access counts are decayed at window ends.
            config: settings.
            specs: features of an input; the tables they use are tracked, other tables are not.
            comm: the ranks that train together: all end their windows after the same steps, see
                the same T and states, and report what they did in all. None: this process alone.

        Raises:
            ValueError: there is no feature, a feature's table is not in the store, a setting names
                a table that no feature uses, or a budget is too small for one row.
        """
        if not specs:
            raise invalid("specs", specs, "SaturationTracker", "one feature or more")
        known = [table.name for table in store.tables]
        for spec in specs:
            if spec.table not in known:
                allowed = "a table of the store: " + ", ".join(known)
                raise invalid("table", spec.table, f"feature {spec.name!r}", allowed)
        used = {spec.table for spec in specs}
        for setting in ("exempt_tables", "table_hot_budget_bytes"):
            for name in getattr(config, setting):
                if name not in used:
                    allowed = "tables that a feature uses: " + ", ".join(sorted(used))
                    raise invalid(setting, name, "SaturationConfig", allowed)
        self._store = store
        self._config = config
        self._ranks = Ranks(comm)
        if config.simulated_ranks > 1 and self._ranks.size > 1:
            where = f"SaturationConfig on {self._ranks.size} ranks"
            raise invalid("simulated_ranks", config.simulated_ranks, where, "1: they are real")
        tracked = [t for t in store.tables if t.name in used and t.name not in config.exempt_tables]
        if not tracked:
            allowed = "fewer than all tables: one must be left to track"
            raise invalid("exempt_tables", config.exempt_tables, "SaturationConfig", allowed)
        needed = min(hot_set.snapshot_bytes(table.dim) for table in tracked)
        if config.hot_budget_bytes < needed:
            allowed = f"at least {needed}: the snapshot of one row takes that many bytes"
            raise invalid("hot_budget_bytes", config.hot_budget_bytes, "SaturationConfig", allowed)
        self._tables = [TrackedTable(store, table, config.metric, self._ranks) for table in tracked]
        rate = getattr(store, "learning_rate", None)
        rate = None if rate is None else float(rate)
        self._policies = UpdatePolicies(config, tracked, rate)
        self._freeze_drift = freeze_drift(config, rate)
        self._classifier = InputClassifier(
            [table.name for table in self._tables],
            config.alpha,
            config.reservoir_size,
            config.seed,
            loss_memory_bytes=config.loss_memory_bytes if self._remembers_losses else 0,
            max_skips=config.max_skips,
            weigh_visits=config.weigh_visits,
            ignored_tables=config.exempt_tables,
        )
        # A store with copies of other ranks' rows, if they are to be used.
        self._freezer: Any = None
        if config.may_freeze and self._ranks.size > 1 and hasattr(store, "freeze"):
            self._freezer = store
        self._accesses: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self._steerer = Steerer(config)
        self._planned_steps: int | None = None
        self._step = 0
        self._steps_in_window = 0
        self._inputs_seen = 0
        self._windows_after_warmup = 0
        self._window_is_warming_up = True
        self._reports: list[WindowReport] = []
        self._try_policies()
        self._begin_window(0, 0.0, None)

    def _try_policies(self) -> None:
        """Shows the store what it will be asked for after the warm-up, so that it refuses now."""
        sizes = self._sizes()
        for table in self._tables:
            self._store.set_update_policy(table.name, self._policies.of(table.name, sizes, True))
            table.require_metric()

    @property
    def _remembers_losses(self) -> bool:
        return self._config.score == "remembered_loss"

    @property
    def _counts_all_keys(self) -> bool:
        """Whether every hot key counts as saturated, however far it moves."""
        by_share = self._config.threshold is None and self._config.max_threshold is None
        return by_share and self._remembers_losses and self._config.saturated_share == 1.0

    @property
    def classifier(self) -> InputClassifier:
        """Tells which inputs to skip; pass it to `inputs.classifier.skip_inputs`."""
        return self._classifier

    @property
    def reports(self) -> tuple[WindowReport, ...]:
        """Reports of the windows that have ended, in order."""
        return tuple(self._reports)

    @property
    def warmup_steps(self) -> int | None:
        """Steps before which nothing is skipped; None as long as that is not known."""
        return self._config.resolve_warmup(self._planned_steps)

    @property
    def is_warming_up(self) -> bool:
        """Whether the warm-up goes on; as long as its length is not known, it does."""
        warmup = self.warmup_steps
        return warmup is None or self._step < warmup

    @property
    def policies(self) -> UpdatePolicies:
        """What the settings mean for the tables' gradients."""
        return self._policies

    @property
    def states(self) -> dict[str, KeyStates]:
        """States of the hot keys in the present window, by table."""
        return {table.name: table.states for table in self._tables}

    def plan(self, steps: int) -> None:
        """Says how many steps training would take without skipping; takes effect at a window's end.

        Args:
            steps: in all, from the start; `config.planned_steps` goes first.
        """
        require_integer("steps", steps, 0, None, "SaturationTracker.plan")
        self._planned_steps = steps

    def step(self, steps: int = 1) -> WindowReport | None:
        """Counts trained steps, and ends the window if it is full.

        Args:
            steps: steps trained since the last call (Keras: `steps_per_execution`).

        Returns:
            The window's report, or None if the window goes on.
        """
        require_integer("steps", steps, 0, None, "SaturationTracker.step")
        self._step += steps
        self._steps_in_window += steps
        if self._steps_in_window < self._config.snapshot_interval:
            return None
        return self.end_window()

    def end_window(self) -> WindowReport:
        """Ends the window now, however many steps it had, and starts the next one.

        Returns:
            The report, which is also the last of `reports`.
        """
        start = time.perf_counter()
        hot_keys = [table.states.keys.size for table in self._tables]
        snapshot_bytes = sum(table.snapshot_bytes for table in self._tables)
        release = self._config.release
        measured = [table.measure(self._is_withholding, release) for table in self._tables]
        self._log_anomalies(measured)
        self._publish([m.keys for m in measured], [m.judged for m in measured])
        ranks = self._ranks
        scores = self._classifier.reservoir_scores()
        if self._config.threshold is None and self._config.judges_keys:
            scores = ranks.concatenate(scores, "scores")
        losses = ranks.total_losses(self._classifier.take_loss_statistics())
        remembered = None
        if self._remembers_losses:
            remembered = ranks.concatenate(self._classifier.reservoir_losses(), "remembered")
        (counts,) = ranks.total_counts([self._classifier.end_window()], "inputs")
        rows = ranks.total_counts([table.take_counts() for table in self._tables], "rows")
        self._inputs_seen += counts.inputs_seen

        steering = self._steerer.next(
            WindowWork(
                inputs_seen=counts.inputs_seen,
                inputs_skipped=counts.inputs_skipped,
                hot_inputs=counts.hot_inputs,
                rows_offered=sum(r.offered for r in rows),
                rows_masked=sum(r.masked for r in rows),
                losses=losses,
            ),
            self._planned_inputs(counts.inputs_skipped),
        )
        found = self._find_threshold(scores, steering)
        loss_threshold = None
        if remembered is not None:
            by_loss = find_threshold(remembered, steering.share)
            loss_threshold = by_loss.scaled(steering.scale).threshold
        overlap = self._renew_hot_set(measured, found.threshold)
        is_warming_up = self._window_is_warming_up
        next_window = len(self._reports) + 1
        is_skipping = self._begin_window(next_window, found.threshold, loss_threshold)
        ranks.require_agreement(
            next_window, found.threshold, (table.saturated_keys for table in self._tables)
        )

        if not self._reports and self.warmup_steps is None and self._config.skip != "none":
            logging.warning(
                "The warm-up is a share of the planned steps, whose number is not known: nothing "
                "is skipped. Give planned_steps or warmup_steps to SaturationConfig, or data whose "
                "length is known (tf.data.experimental.assert_cardinality)."
            )
        self._warn_without_inputs(sum(r.offered for r in rows))
        drift = np.concatenate([m.drift for m in measured])
        state_counts = [table.states.counts() for table in self._tables]
        self._reports.append(
            WindowReport(
                window=len(self._reports),
                step=self._step,
                is_warming_up=is_warming_up,
                hot_keys=sum(hot_keys),
                snapshot_bytes=snapshot_bytes,
                evicted=sum(m.evicted for m in measured),
                anomalies=int((~np.isfinite(drift)).sum()),
                drift_quantiles=drift_quantiles(drift),
                drift_histogram=drift_histogram(drift),
                threshold=found.threshold,
                is_threshold_capped=found.is_capped,
                is_skipping=is_skipping,
                saturated_keys=sum(c["saturated"] + c["probing"] for c in state_counts),
                inputs_seen=counts.inputs_seen,
                inputs_skipped=counts.inputs_skipped,
                inputs_skippable=counts.inputs_skippable,
                inputs_kept=counts.inputs_kept,
                hot_inputs=counts.hot_inputs,
                next_hot_keys=sum(table.states.keys.size for table in self._tables),
                hot_set_overlap=overlap,
                loss_threshold=loss_threshold,
                target_share=steering.share,
                log_loss=losses.mean_loss,
                auc=losses.auc,
                guard=steering.guard,
                budget=steering.budget,
                predicted_cost=steering.predicted_cost,
                skippable_value=steering.value,
                tables=tuple(
                    TableWindow(table.name, table.dim, keys, states, counts)
                    for table, keys, states, counts in zip(
                        self._tables, hot_keys, state_counts, rows, strict=True
                    )
                ),
                frozen_keys=self._frozen_keys(),
                traffic=ranks.take_traffic(),
                seconds=time.perf_counter() - start,
            )
        )
        return self._reports[-1]

    def _begin_window(self, window: int, threshold: float, loss_threshold: float | None) -> bool:
        """Publishes what holds in the window that begins; returns whether it may skip inputs."""
        self._steps_in_window = 0
        self._window_is_warming_up = self.is_warming_up
        is_active = not self._window_is_warming_up
        sizes = self._sizes()
        for table in self._tables:
            table.mark(self._config.withholds_saturated and is_active)
            policy = self._policies.of(table.name, sizes, is_active)
            self._store.set_update_policy(table.name, policy)
        if self._freezer is not None:
            self._freezer.freeze(self._keys_to_freeze() if is_active else {})
        self._publish(
            [table.states.keys for table in self._tables],
            [table.published_drift(threshold) for table in self._tables],
        )
        if self._remembers_losses:
            # Where all hot keys count as saturated, they did at any visit, in another run's
            # windows, too.
            saturated = [table.saturated_since(self._counts_all_keys) for table in self._tables]
            self._classifier.set_saturated(
                _table_indices([keys for keys, _ in saturated]),
                np.concatenate([keys for keys, _ in saturated]),
                np.concatenate([since for _, since in saturated]),
            )
        return self._configure_classifier(window, threshold, loss_threshold)

    def _keys_to_freeze(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Keys to freeze and their access counts over all ranks, the most accessed first."""
        found = {}
        for table in self._tables:
            keys, counts = self._accesses.get(table.name, (np.empty(0, np.int64), np.empty(0)))
            is_frozen = np.isin(keys, table.keys_to_freeze(self._freeze_drift))
            found[table.name] = (keys[is_frozen], counts[is_frozen])
        return found

    def _frozen_keys(self) -> int:
        if self._freezer is None:
            return 0
        return sum(self._freezer.frozen_keys(table.name) for table in self._tables)

    def _sizes(self) -> dict[str, int]:
        """Rows of each table over all ranks; of sharded tables by this rank's even part."""
        parts = self._ranks.size if hasattr(self._store, "owners") else 1
        return {table.name: parts * self._store.size(table.name) for table in self._tables}

    def _configure_classifier(
        self, window: int, threshold: float, loss_threshold: float | None
    ) -> bool:
        config = self._config
        if self._window_is_warming_up or config.skip in ("none", "defer"):
            # Losses are remembered all the same, as from this window.
            self._classifier.configure("none", window=window)
            return False
        if config.skip == "random":
            shares = config.random_shares
            share = shares[min(self._windows_after_warmup, len(shares) - 1)]
            self._windows_after_warmup += 1
            self._classifier.configure(
                "random", random_share=share, shadow=config.shadow, window=window
            )
            return share > 0.0 and not config.shadow
        mode = "drift"
        if loss_threshold is not None:
            mode, threshold = "remembered_loss", loss_threshold
        # A mask leaves inputs alone; those that it could skip are marked for the guard.
        shadow = config.shadow or not config.skips_inputs
        self._classifier.configure(
            mode, threshold=threshold, keep_rate=config.keep_rate, shadow=shadow, window=window
        )
        return threshold > 0.0 and not shadow

    def _warn_without_inputs(self, rows_offered: int) -> None:
        """Warns once if gradients came, but no input was seen by which T could be found."""
        finds_threshold = self._config.judges_keys and self._config.threshold is None
        is_idle = rows_offered > 0 and self._inputs_seen == 0
        if finds_threshold and is_idle and self._config.skip != "none" and not self._reports:
            logging.warning(
                "Gradients came in, but no input went through Slipstream.apply: the threshold is "
                "found on inputs, so it stays 0 and no key is saturated. Put slipstream.apply(...) "
                "last in the training data's pipeline, or set `threshold`."
            )

    @property
    def _is_withholding(self) -> bool:
        """Whether gradients of saturated keys did not reach their rows in this window."""
        withholds = self._config.withholds_saturated and not self._config.shadow
        return withholds and not self._window_is_warming_up

    def _planned_inputs(self, just_skipped: int) -> int | None:
        """Inputs that training is offered in all, by the inputs that the steps so far took.

        Args:
            just_skipped: in the window that ends, which has no report yet.
        """
        steps = self._config.planned_steps
        steps = self._planned_steps if steps is None else steps
        if steps is None or not self._step:
            return None
        skipped = just_skipped + sum(report.inputs_skipped for report in self._reports)
        return round(steps * (self._inputs_seen - skipped) / self._step)

    def _find_threshold(self, scores: np.ndarray, steering: Steering) -> ThresholdResult:
        """T of the keys, by share or as set, times what the guard leaves of it."""
        config = self._config
        if not config.judges_keys:
            return fixed_threshold(scores, self._freeze_drift if self._freezer else 0.0)
        if config.threshold is not None:
            found = fixed_threshold(scores, config.threshold)
        elif self._counts_all_keys and np.isfinite(scores).any():
            # All keys, not those below the largest score of a sample: over the windows of an epoch
            # one key of many would drift further now and then, and the memory never hold.
            found = fixed_threshold(scores, LARGEST_THRESHOLD)
        else:
            share = config.saturated_share if self._remembers_losses else steering.share
            found = find_threshold(scores, share, config.max_threshold)
        return found if steering.scale == 1.0 else found.scaled(steering.scale)

    def _publish(self, keys: list[np.ndarray], drifts: list[np.ndarray]) -> None:
        """Gives the classifier the drifts of all tables."""
        self._classifier.set_drift(
            _table_indices(keys), np.concatenate(keys), np.concatenate(drifts)
        )

    def _renew_hot_set(self, measured: list[Measured], threshold: float) -> float:
        """Chooses the next hot set and its states; returns its overlap with the old one."""
        judges_keys = self._config.judges_keys or self._freezer is not None
        budget = self._config.hot_budget_bytes if judges_keys else 0
        if not budget:
            self._store.decay_counts(self._config.count_decay)
            return 0.0
        # Where keys are judged for freezing alone, the others need not be followed.
        least = 0.0 if self._config.judges_keys else self._freezer.least_accesses
        candidates = []
        for table in self._tables:
            own = min(budget, self._config.table_hot_budget_bytes.get(table.name, budget))
            most = hot_set.most_candidates(table.dim, own)
            keys, counts = self._store.hot_keys(table.name, most)
            keys, counts = self._ranks.merge_accesses(
                np.asarray(keys), np.asarray(counts), f"hot_keys.{table.name}", least
            )
            candidates.append(hot_set.Candidates(keys, counts, table.dim))
            self._accesses[table.name] = (keys, counts)
        chosen = hot_set.choose_hot_keys(candidates, budget)
        # After the choice: a factor of 0 would leave nothing to choose by.
        self._store.decay_counts(self._config.count_decay)

        common = total = 0
        for table, keys, found in zip(self._tables, chosen, measured, strict=True):
            states = next_states(
                table.states,
                keys,
                found.keys,
                found.drift,
                threshold,
                len(self._reports),
                release=self._config.release,
                revisit_every=self._config.probing_interval,
                protect_windows=self._config.protect_windows,
                are_masked=self._is_withholding,
            )
            table.renew(states)
            common += int((table.states.windows_watched > 0).sum())
            total += table.states.keys.size
        return common / total if total else 0.0

    def _log_anomalies(self, measured: list[Measured]) -> None:
        for table, found in zip(self._tables, measured, strict=True):
            is_anomaly = ~np.isfinite(found.drift)
            if is_anomaly.any():
                logging.warning(
                    "Window %d, step %d: %d hot keys of table %r have a drift that is not finite "
                    "and count as varying. First: key %d.",
                    len(self._reports),
                    self._step,
                    int(is_anomaly.sum()),
                    table.name,
                    int(found.keys[is_anomaly][0]),
                )


def _table_indices(keys: list[np.ndarray]) -> np.ndarray:
    """The index of each key's table, int32, for keys listed table by table."""
    return np.repeat(np.arange(len(keys), dtype=np.int32), [k.size for k in keys])
