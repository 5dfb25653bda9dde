"""The window loop: hot set, snapshot, drift, threshold. Publishes to the input classifier.

In: a store's access counts and rows. Out: the classifier's drifts and mode, and a `WindowReport`
per window. Method: Slipstream, arXiv 2404.04270, snapshot and sampling blocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from absl import logging

from slipstream_tf.config import SaturationConfig
from slipstream_tf.errors import invalid, require_integer
from slipstream_tf.ops.classifier import InputClassifier
from slipstream_tf.ops.drift import row_drift
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.saturation import hot_set
from slipstream_tf.saturation.report import WindowReport, drift_quantiles
from slipstream_tf.saturation.threshold import find_threshold

if TYPE_CHECKING:
    from slipstream_tf.stores.base import EmbeddingStore


class SaturationTracker:
    """Finds saturated keys window by window and tells the classifier what to skip.

    A window is `config.snapshot_interval` trained steps. All state changes at window ends, so that
    classification between them is constant. The first window has no snapshot: nothing is skipped
    before the end of the second (except with skip="random").

    With skip="random", the i-th window that begins at or after the end of the warm-up (i from 0)
    skips the share `config.random_shares[i]`, whatever the keys; the last share repeats. Without a
    warm-up that starts with the first step. `report.random_shares` gives the shares of a run.
    """

    def __init__(
        self, store: EmbeddingStore, config: SaturationConfig, specs: Sequence[FeatureSpec]
    ):
        """Starts the first window.

        Args:
            store: holds the tables; its access counts are decayed at window ends.
            config: settings.
            specs: features of an input; the tables they use are tracked, other tables are not.

        Raises:
            ValueError: there is no feature, or a feature's table is not in the store.
        """
        if not specs:
            raise invalid("specs", specs, "SaturationTracker", "one feature or more")
        known = [table.name for table in store.tables]
        for spec in specs:
            if spec.table not in known:
                allowed = "a table of the store: " + ", ".join(known)
                raise invalid("table", spec.table, f"feature {spec.name!r}", allowed)
        used = {spec.table for spec in specs}
        self._store = store
        self._config = config
        tracked = [table for table in store.tables if table.name in used]
        self._tables = tuple(table.name for table in tracked)
        self._dims = [table.dim for table in tracked]
        self._classifier = InputClassifier(
            self._tables, config.alpha, config.reservoir_size, config.seed
        )
        self._step = 0
        self._steps_in_window = 0
        self._windows_after_warmup = 0
        self._window_is_warming_up = False
        self._reports: list[WindowReport] = []
        # Per table: the hot keys, ascending, and their rows at the window's start.
        self._hot_keys = [np.empty(0, np.int64) for _ in self._tables]
        self._snapshots = [np.empty((0, dim), np.float32) for dim in self._dims]
        self._begin_window(threshold=0.0)

    @property
    def classifier(self) -> InputClassifier:
        """Tells which inputs to skip; pass it to `inputs.classifier.skip_inputs`."""
        return self._classifier

    @property
    def reports(self) -> tuple[WindowReport, ...]:
        """Reports of the windows that have ended, in order."""
        return tuple(self._reports)

    @property
    def is_warming_up(self) -> bool:
        """Whether the warm-up goes on; as long as its length is not known, it does."""
        warmup = self._config.resolve_warmup(None)
        return warmup is None or self._step < warmup

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
        tracked = sum(keys.size for keys in self._hot_keys)
        snapshot_bytes = sum(snapshot.nbytes for snapshot in self._snapshots)
        tables, keys, drift = self._measure_drift()
        is_anomaly = ~np.isfinite(drift)
        if is_anomaly.any():
            self._log_anomalies(tables[is_anomaly], keys[is_anomaly])
        self._classifier.set_drift(tables, keys, drift)
        found = find_threshold(
            self._classifier.reservoir_scores(),
            self._config.target_skip,
            self._config.max_threshold,
        )
        counts = self._classifier.end_window()
        overlap = self._renew_hot_set()
        window_was_warming_up = self._window_is_warming_up
        is_skipping = self._begin_window(found.threshold)
        report = WindowReport(
            window=len(self._reports),
            step=self._step,
            is_warming_up=window_was_warming_up,
            hot_keys=tracked,
            snapshot_bytes=snapshot_bytes,
            evicted=tracked - keys.size,
            anomalies=int(is_anomaly.sum()),
            drift_quantiles=drift_quantiles(drift),
            threshold=found.threshold,
            is_threshold_capped=found.is_capped,
            is_skipping=is_skipping,
            # A comparison with NaN is false.
            saturated_keys=int((drift < np.float32(found.threshold)).sum()),
            inputs_seen=counts.inputs_seen,
            inputs_skipped=counts.inputs_skipped,
            hot_inputs=counts.hot_inputs,
            next_hot_keys=sum(keys.size for keys in self._hot_keys),
            hot_set_overlap=overlap,
            seconds=time.perf_counter() - start,
        )
        self._reports.append(report)
        return report

    def _begin_window(self, threshold: float) -> bool:
        """Publishes the mode of the window that begins; returns whether it may skip inputs."""
        self._steps_in_window = 0
        self._window_is_warming_up = self.is_warming_up
        if self.is_warming_up or self._config.skip == "none":
            self._classifier.configure("none")
            return False
        if self._config.skip == "random":
            shares = self._config.random_shares
            share = shares[min(self._windows_after_warmup, len(shares) - 1)]
            self._windows_after_warmup += 1
            self._classifier.configure("random", random_share=share)
            return share > 0.0
        self._classifier.configure("drift", threshold=threshold)
        return threshold > 0.0

    def _measure_drift(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Drift of the hot keys that the store still holds: table indices, keys, drift, all [n]."""
        tables, keys, drifts = [], [], []
        for index, name in enumerate(self._tables):
            rows, found = _gather(self._store, name, self._hot_keys[index])
            with tf.device("CPU:0"):
                drift = row_drift(
                    tf.constant(rows[found], tf.float32),
                    tf.constant(self._snapshots[index][found], tf.float32),
                    self._config.metric,
                ).numpy()
            tables.append(np.full(drift.size, index, np.int32))
            keys.append(self._hot_keys[index][found])
            drifts.append(drift)
        return np.concatenate(tables), np.concatenate(keys), np.concatenate(drifts)

    def _renew_hot_set(self) -> float:
        """Chooses the next hot set and copies its rows; returns its overlap with the old one."""
        budget = self._config.hot_budget_bytes
        candidates = []
        for name, dim in zip(self._tables, self._dims, strict=True):
            most = min(self._store.size(name), hot_set.most_candidates(dim, budget))
            keys, counts = self._store.hot_keys(name, most)
            candidates.append(hot_set.Candidates(np.asarray(keys), np.asarray(counts), dim))
        chosen = hot_set.choose_hot_keys(candidates, budget)
        # After the choice: a factor of 0 would leave nothing to choose by.
        self._store.decay_counts(self._config.count_decay)

        previous, self._hot_keys, self._snapshots = self._hot_keys, [], []
        common = 0
        for name, keys, before in zip(self._tables, chosen, previous, strict=True):
            rows, found = _gather(self._store, name, keys)
            self._hot_keys.append(keys[found])
            self._snapshots.append(rows[found])  # a copy, whatever the store returned
            common += np.intersect1d(keys[found], before, assume_unique=True).size
        total = sum(keys.size for keys in self._hot_keys)
        return common / total if total else 0.0

    def _log_anomalies(self, tables: np.ndarray, keys: np.ndarray) -> None:
        logging.warning(
            "Window %d, step %d: %d hot keys have a drift that is not finite and count as varying. "
            "First: key %d of table %r.",
            len(self._reports),
            self._step,
            keys.size,
            keys[0],
            self._tables[tables[0]],
        )


def _gather(store: EmbeddingStore, name: str, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, found = store.gather(name, keys)
    return np.asarray(rows, np.float32), np.asarray(found, bool)
