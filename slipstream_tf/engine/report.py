"""Reports of windows as JSON-serializable records, and a compressed log.

Old reports are stored compressed, because a run of weeks has many windows. A report of 26 tables
takes 35 kB as Python objects and about 3 kB compressed.
"""

import collections
import dataclasses
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from slipstream_tf.ops.update_policy import UpdateCounts

_KEY_BYTES, _VALUE_BYTES = 8, 4
DRIFT_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
# All windows use the same histogram buckets, so that they can be compared.
_BUCKETS_PER_DECADE = 4
_MIN_DECADE, _MAX_DECADE = -9, 9
# Number of reports that are compressed together.
BLOCK = 128
# Maximum size of a decompressed block: 8 MiB per report, enough for 17,000 tables. The limit
# protects against corrupt files.
_MAX_BYTES = BLOCK << 23


@dataclasses.dataclass(frozen=True)
class TableWindow:
    """Statistics of one table in one window.

    Attributes:
        table: Name of the table.
        dim: Number of values per row.
        hot_keys: Number of keys in the hot set of this window.
        states: Number of hot keys per state in the next window.
        rows: Counts of gradient rows in this window. A gradient row is the gradient of one key in
            one step on one rank. `deferred_now` and `deferred_bytes` are the values at the end of
            the window.
    """

    table: str
    dim: int
    hot_keys: int
    states: Mapping[str, int]
    rows: UpdateCounts

    @property
    def row_bytes(self) -> int:
        """Bytes of a gradient row in a message: int64 key, float32 values."""
        return _KEY_BYTES + _VALUE_BYTES * self.dim

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, "bytes_offered" and "bytes_sent" as JSON-serializable values."""
        sent, offered = self.rows.sent * self.row_bytes, self.rows.offered * self.row_bytes
        return {**dataclasses.asdict(self), "bytes_offered": offered, "bytes_sent": sent}


@dataclasses.dataclass(frozen=True)
class WindowReport:
    """Statistics and decisions of one window.

    Attributes:
        window: Number of the window, from 0.
        step: Number of trained steps at the end of the window.
        is_warming_up: Whether the window began during the warm-up, in which no example is skipped.
        hot_keys: Number of hot keys in this window. 0 in the first window.
        snapshot_bytes: Bytes of the snapshots of these keys.
        evicted: Number of hot keys without a drift, because their row was evicted.
        anomalies: Number of hot keys with a drift that is not finite, because their row contains a
            NaN or an infinity. They are never saturated.
        drift_quantiles: Maps quantiles in [0, 1] to finite drifts. Empty without finite drifts.
        drift_histogram: Tuples (lower bound, upper bound, number of keys) of the nonempty buckets
            of finite drifts, in ascending order.
        threshold: T for the next window, or 0 if no example was hot.
        is_threshold_capped: Whether `max_threshold` lowered T.
        is_skipping: Whether examples may be skipped in the next window. False during the warm-up,
            in a dry run, and without a policy that skips examples. T is computed in any case.
        saturated_keys: Number of hot keys that are saturated or probing in the next window.
        examples_seen: Number of examples classified in this window.
        examples_skipped: Number of examples dropped in this window.
        examples_skippable: Number of skippable examples. With `SkipExamples(keep_rate=)` only
            some of them are dropped, and in a dry run none.
        examples_kept: Number of skippable examples that subsampling kept.
        hot_examples: Number of examples with a finite skip score under the drifts of the previous
            window.
        next_hot_keys: Number of hot keys in the next window.
        hot_set_overlap: Fraction of the next hot set that was in the current hot set, in [0, 1].
        seconds: Duration of the computation at the end of the window.
        policies: State of each policy for the next window, by class name.
        target_fraction: Fraction of the hot examples for which T was found, bounded by
            `max_auc_loss`.
        log_loss: Mean loss of the trained examples, each measured before training on it. None if no
            losses were recorded.
        auc: AUC of the same examples. None without losses or with only one label.
        auc_loss_plan: A sentence about the fraction that `max_auc_loss` allows. Empty without a
            bound.
        predicted_cost: Estimated AUC loss at the end of training, by the same plan.
        skippable_value: Value of training on a skippable example relative to an average example.
            Estimated by the policy if it can, else from squared residuals (label - prediction) and
            the weights of the kept examples. Without losses, the residuals count as equal.
        tables: Statistics of the tracked tables, in order.
        traffic: Bytes by kind that the ranks sent in this window, including its end. Empty for a
            single process.
    """

    window: int
    step: int
    is_warming_up: bool
    hot_keys: int
    snapshot_bytes: int
    evicted: int
    anomalies: int
    drift_quantiles: Mapping[float, float]
    threshold: float
    is_threshold_capped: bool
    is_skipping: bool
    saturated_keys: int
    examples_seen: int
    examples_skipped: int
    hot_examples: int
    next_hot_keys: int
    hot_set_overlap: float
    seconds: float
    examples_skippable: int = 0
    examples_kept: int = 0
    policies: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    target_fraction: float = 0.0
    log_loss: float | None = None
    auc: float | None = None
    auc_loss_plan: str = ""
    predicted_cost: float | None = None
    skippable_value: float = 1.0
    tables: tuple[TableWindow, ...] = ()
    traffic: Mapping[str, int] = dataclasses.field(default_factory=dict)
    drift_histogram: tuple[tuple[float, float, int], ...] = ()

    @property
    def saturated_fraction(self) -> float:
        """`saturated_keys` / `hot_keys`: fraction of hot keys that stay or become saturated."""
        return fraction_of(self.saturated_keys, self.hot_keys)

    @property
    def rows_offered(self) -> int:
        """Number of gradient rows of all tables."""
        return sum(table.rows.offered for table in self.tables)

    @property
    def rows_sent(self) -> int:
        """Number of gradient rows of all tables that were applied or exchanged."""
        return sum(table.rows.sent for table in self.tables)

    @property
    def rows_masked(self) -> int:
        """Number of gradient rows of all tables that were masked."""
        return sum(table.rows.masked for table in self.tables)

    @property
    def skipped_fraction(self) -> float:
        """Skipped examples as a fraction of the examples seen, 0 to 1."""
        return fraction_of(self.examples_skipped, self.examples_seen)

    @property
    def hot_example_fraction(self) -> float:
        """Hot examples as a fraction of the examples seen, 0 to 1."""
        return fraction_of(self.hot_examples, self.examples_seen)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields and fractions as JSON-serializable values."""
        values = self.state()
        values["tables"] = [table.to_dict() for table in self.tables]
        values["drift_quantiles"] = {f"{q:g}": v for q, v in self.drift_quantiles.items()}
        for fraction in ("saturated_fraction", "skipped_fraction", "hot_example_fraction"):
            values[fraction] = getattr(self, fraction)
        return values

    def state(self) -> dict[str, Any]:
        """Returns all fields as JSON-serializable values, for `from_state`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["traffic"] = dict(self.traffic)
        values["policies"] = {name: dict(state) for name, state in self.policies.items()}
        values["drift_quantiles"] = [list(pair) for pair in self.drift_quantiles.items()]
        values["drift_histogram"] = [list(bucket) for bucket in self.drift_histogram]
        values["tables"] = [dataclasses.asdict(table) for table in self.tables]
        return values

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "WindowReport":
        """Returns a report from the result of `state`."""
        tables = tuple(
            TableWindow(**{**table, "rows": UpdateCounts(**table["rows"])})
            for table in state["tables"]
        )
        quantiles = MappingProxyType(dict(state["drift_quantiles"]))
        histogram = tuple(map(tuple, state["drift_histogram"]))
        changed = {"tables": tables, "drift_quantiles": quantiles, "drift_histogram": histogram}
        return cls(**{**state, **changed})


def drift_quantiles(finite: np.ndarray) -> Mapping[float, float]:
    """Returns quantiles of finite drifts; empty without drifts.

    Args:
        finite: float32 [n], ascending.
    """
    if not finite.size:
        return MappingProxyType({})
    values = np.quantile(finite, DRIFT_QUANTILES)
    return MappingProxyType(dict(zip(DRIFT_QUANTILES, map(float, values), strict=True)))


def drift_histogram(finite: np.ndarray) -> tuple[tuple[float, float, int], ...]:
    """Counts drifts in buckets of a quarter of a decade.

    Args:
        finite: float32 [n], at least 0, ascending.

    Returns:
        (lower bound, upper bound, count) of each nonempty bucket. The lowest bucket is [0, 1e-9).
        Drifts above 1e9 are counted in the highest bucket.
    """
    steps = np.arange(_MIN_DECADE * _BUCKETS_PER_DECADE, _MAX_DECADE * _BUCKETS_PER_DECADE + 1)
    bounds = np.concatenate([[0.0], 10.0 ** (steps / _BUCKETS_PER_DECADE)])
    counts = np.diff(np.append(np.searchsorted(finite, bounds[:-1]), finite.size))
    return tuple(
        (float(bounds[i]), float(bounds[i + 1]), int(counts[i])) for i in np.flatnonzero(counts)
    )


def added_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums mappings of counts by name."""
    total: collections.Counter[str] = collections.Counter()
    for part in counts:
        total.update(part)
    return dict(total)


def fraction_of(part: float, whole: float) -> float:
    """Returns part / whole, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0


def _sum_of(name: str, text: str) -> Any:
    """Returns a property with the sum of a `WindowReport` field over the windows."""
    return property(lambda self: sum(getattr(r, name) for r in self.reports), doc=text)


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums of window reports: examples, gradient rows, bytes and seconds.

    `bytes_offered` and `bytes_sent` are sizes of gradient rows; `traffic` is all bytes that ranks
    sent.

    Attributes:
        reports: The reports of the windows, in order.
    """

    reports: Sequence[WindowReport]

    examples_seen = _sum_of("examples_seen", "Number of classified examples, kept and skipped.")
    examples_skipped = _sum_of("examples_skipped", "Number of examples that were dropped.")
    examples_skippable = _sum_of(
        "examples_skippable", "Number of skippable examples, dropped or kept."
    )
    examples_kept = _sum_of(
        "examples_kept", "Number of skippable examples that were kept by subsampling."
    )
    seconds = _sum_of("seconds", "Time spent at window ends (drift, threshold, hot set).")

    @property
    def skipped_fraction(self) -> float:
        """The skipped fraction of the examples seen, 0 to 1."""
        return fraction_of(self.examples_skipped, self.examples_seen)

    @property
    def rows(self) -> UpdateCounts:
        """Gradient rows, summed over windows and tables.

        `deferred_now` and `deferred_bytes` are the values at the end of the last window.
        """
        tables = (table for report in self.reports for table in report.tables)
        total = added_up(dataclasses.asdict(table.rows) for table in tables)
        last = self.reports[-1].tables if self.reports else ()
        total["deferred_now"] = sum(table.rows.deferred_now for table in last)
        total["deferred_bytes"] = sum(table.rows.deferred_bytes for table in last)
        return UpdateCounts(**total)

    @property
    def traffic(self) -> Mapping[str, int]:
        """Bytes that the ranks sent, by kind; empty for a single process."""
        return added_up(report.traffic for report in self.reports)

    @property
    def bytes_offered(self) -> int:
        """Bytes of all gradient rows, with int64 keys and float32 values."""
        return sum(t.rows.offered * t.row_bytes for r in self.reports for t in r.tables)

    @property
    def bytes_sent(self) -> int:
        """Bytes of the gradient rows that were applied or exchanged."""
        return sum(t.rows.sent * t.row_bytes for r in self.reports for t in r.tables)


class ReportLog:
    """A log of window reports that compresses old reports.

    The last `BLOCK` to `2 * BLOCK` reports are stored as objects.

    Attributes:
        examples_skipped: Number of examples skipped in all logged windows.
    """

    def __init__(self) -> None:
        """Creates an empty log."""
        self._packed: list[np.ndarray] = []
        self._recent: list[WindowReport] = []
        self.examples_skipped = 0

    def __len__(self) -> int:
        """Returns the number of logged windows."""
        return BLOCK * len(self._packed) + len(self._recent)

    def __iter__(self) -> Iterator[WindowReport]:
        """Iterates over all reports, from the first window on."""
        for block in self._packed:
            unpacker = zlib.decompressobj()
            text = unpacker.decompress(block.tobytes(), _MAX_BYTES)
            if unpacker.unconsumed_tail:
                raise ValueError(
                    f"A block of window reports has more than {_MAX_BYTES} bytes. The saved state "
                    "is damaged. Restore another checkpoint."
                )
            yield from map(WindowReport.from_state, json.loads(text))
        yield from self._recent

    def append(self, report: WindowReport) -> None:
        """Appends the report of the window that has just ended."""
        self._recent.append(report)
        self.examples_skipped += report.examples_skipped
        if len(self._recent) == 2 * BLOCK:
            states = [old.state() for old in self._recent[:BLOCK]]
            text = json.dumps(states, default=lambda value: value.item())
            self._packed.append(np.frombuffer(zlib.compress(text.encode()), np.uint8))
            del self._recent[:BLOCK]

    def state(self) -> dict[str, Any]:
        """Returns all reports as JSON-serializable values and arrays.

        Returns:
            A dictionary with "windows": the number of windows, "packed": uint8 [bytes] for each
            compressed block, "recent": the other reports, and "examples_skipped".
        """
        return {
            "windows": len(self),
            "packed": list(self._packed),
            "recent": [report.state() for report in self._recent],
            "examples_skipped": self.examples_skipped,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "ReportLog":
        """Returns a log from the result of `state`."""
        log = cls()
        log._packed = [np.asarray(block, np.uint8) for block in state["packed"]]
        log._recent = [WindowReport.from_state(report) for report in state["recent"]]
        log.examples_skipped = state["examples_skipped"]
        return log
