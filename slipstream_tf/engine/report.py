"""What a window's end found: a record that can be had as JSON; and the log of all of them.

A run of weeks has many windows. A report of 26 tables takes 35 kB as objects, and a thirteenth of
that packed, in memory and in checkpoints.
"""

import collections
import dataclasses
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from slipstream_tf.ops.update_policy import UpdateCounts

_KEY_BYTES, _VALUE_BYTES = 8, 4
DRIFT_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
# Bounds of a drift histogram's buckets: as wide in every window, so that windows can be compared.
_BUCKETS_PER_DECADE = 4
_LEAST_DECADE, _MOST_DECADE = -9, 9
# Windows whose reports are packed together.
BLOCK = 128
# Of an unpacked block, 8 MiB a report (that of 17,000 tables): a file that claims more is refused.
_MOST_BYTES = BLOCK << 23


@dataclasses.dataclass(frozen=True)
class TableWindow:
    """One table in one window.

    Attributes:
        table: its name.
        dim: values per row.
        hot_keys: keys of its hot set in this window.
        states: state name -> hot keys in it in the next window.
        rows: what became of its gradient rows (one per key, step and rank) in this window;
            `pending` and `pending_bytes` are as of the window's end.
    """

    table: str
    dim: int
    hot_keys: int
    states: Mapping[str, int]
    rows: UpdateCounts

    @property
    def row_bytes(self) -> int:
        """Bytes of one gradient row on a wire: an int64 key and float32 values."""
        return _KEY_BYTES + _VALUE_BYTES * self.dim

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, and the bytes, as JSON-serialisable values."""
        sent, offered = self.rows.sent * self.row_bytes, self.rows.offered * self.row_bytes
        return {**dataclasses.asdict(self), "bytes_offered": offered, "bytes_sent": sent}


@dataclasses.dataclass(frozen=True)
class WindowReport:
    """One window, from its first step to its end.

    Attributes:
        window: number of the window, from 0.
        step: trained steps since the start, at the window's end.
        is_warming_up: whether the window began within the warm-up, when nothing is skipped.
        hot_keys: keys whose drift over this window was measured; 0 in the first window.
        snapshot_bytes: bytes of those keys' snapshots.
        evicted: hot keys that the store no longer holds; they have no drift.
        anomalies: hot keys whose drift is not finite (a NaN or infinite row); never saturated.
        drift_quantiles: quantile (0 to 1) -> drift, of the finite drifts; empty without any.
        drift_histogram: (lower bound, upper bound, keys) of each bucket that has keys, upwards, of
            the finite drifts.
        threshold: T for the next window; 0 if no input was hot.
        is_threshold_capped: whether `max_threshold` lowered T.
        is_skipping: whether examples may be skipped in the next window (not while warming up, nor
            without a policy that skips, when T is what it would have been).
        saturated_keys: hot keys that are saturated in the next window, probing ones included.
        examples_seen: examples classified in this window.
        examples_skipped: examples left out in this window.
        examples_skippable: examples that could be skipped; with `keep` or in a dry run not all
            of them were.
        examples_kept: skippable examples that thinning kept.
        hot_examples: examples with a finite skip score under the drifts of the window before.
        next_hot_keys: keys of the next window's hot set.
        hot_set_overlap: share of the next hot set that was in this window's, 0 to 1.
        seconds: time that the window's end took.
        policies: what each policy decided for the next window, by its name: its state.
        target_share: share that T was found for, bounded by `max_auc_loss`.
        log_loss: mean loss of the window's trained examples before they were trained on; None if no
            losses were recorded. Likewise `auc`.
        auc_loss_plan: a sentence about the share that `max_auc_loss` allows; empty without a bound.
        predicted_cost: AUC that saving will have cost at the end, by that plan's estimate.
        skippable_value: what training on a skippable example was worth, in average examples, by the
            squares of label - prediction; 1 where no losses came in.
        tables: the tracked tables, in order.
        traffic: bytes by kind that the ranks gave to the network in this window, its end included;
            empty for one process.
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
    target_share: float = 0.0
    log_loss: float | None = None
    auc: float | None = None
    auc_loss_plan: str = ""
    predicted_cost: float | None = None
    skippable_value: float = 1.0
    tables: tuple[TableWindow, ...] = ()
    traffic: Mapping[str, int] = dataclasses.field(default_factory=dict)
    drift_histogram: tuple[tuple[float, float, int], ...] = ()

    @property
    def saturated_share(self) -> float:
        """Saturated keys as a share of the hot keys, 0 to 1."""
        return share_of(self.saturated_keys, self.hot_keys)

    @property
    def rows_offered(self) -> int:
        """Gradient rows of all tables that came in."""
        return sum(table.rows.offered for table in self.tables)

    @property
    def rows_sent(self) -> int:
        """Gradient rows of all tables that were applied (ranks: exchanged)."""
        return sum(table.rows.sent for table in self.tables)

    @property
    def rows_masked(self) -> int:
        """Gradient rows of all tables that were thrown away."""
        return sum(table.rows.masked for table in self.tables)

    @property
    def skipped_share(self) -> float:
        """Skipped examples as a share of the examples seen, 0 to 1."""
        return share_of(self.examples_skipped, self.examples_seen)

    @property
    def hot_example_share(self) -> float:
        """Hot examples as a share of the examples seen, 0 to 1."""
        return share_of(self.hot_examples, self.examples_seen)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields and shares as JSON-serialisable values."""
        values = self.state()
        values["tables"] = [table.to_dict() for table in self.tables]
        values["drift_quantiles"] = {f"{q:g}": v for q, v in self.drift_quantiles.items()}
        for share in ("saturated_share", "skipped_share", "hot_example_share"):
            values[share] = getattr(self, share)
        return values

    def state(self) -> dict[str, Any]:
        """Returns all fields as JSON-serialisable values, for `from_state`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["traffic"] = dict(self.traffic)
        values["policies"] = {name: dict(state) for name, state in self.policies.items()}
        values["drift_quantiles"] = [list(pair) for pair in self.drift_quantiles.items()]
        values["drift_histogram"] = [list(bucket) for bucket in self.drift_histogram]
        values["tables"] = [dataclasses.asdict(table) for table in self.tables]
        return values

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "WindowReport":
        """Returns the report that `state` was had of."""
        tables = tuple(
            TableWindow(**{**table, "rows": UpdateCounts(**table["rows"])})
            for table in state["tables"]
        )
        quantiles = MappingProxyType(dict(state["drift_quantiles"]))
        histogram = tuple(map(tuple, state["drift_histogram"]))
        changed = {"tables": tables, "drift_quantiles": quantiles, "drift_histogram": histogram}
        return cls(**{**state, **changed})


def drift_quantiles(finite: np.ndarray) -> Mapping[float, float]:
    """Quantiles of finite drifts, float32 [n], ascending; empty without any."""
    if not finite.size:
        return MappingProxyType({})
    values = np.quantile(finite, DRIFT_QUANTILES)
    return MappingProxyType(dict(zip(DRIFT_QUANTILES, map(float, values), strict=True)))


def drift_histogram(finite: np.ndarray) -> tuple[tuple[float, float, int], ...]:
    """Counts drifts in buckets of a quarter of a decade.

    Args:
        finite: float32 [n], not negative, ascending.

    Returns:
        (lower bound, upper bound, count) of each bucket that is not empty. The lowest is from 0 to
        1e-9, and what is above the highest, 1e9, is counted in it.
    """
    steps = np.arange(_LEAST_DECADE * _BUCKETS_PER_DECADE, _MOST_DECADE * _BUCKETS_PER_DECADE + 1)
    bounds = np.concatenate([[0.0], 10.0 ** (steps / _BUCKETS_PER_DECADE)])
    counts = np.diff(np.append(np.searchsorted(finite, bounds[:-1]), finite.size))
    return tuple(
        (float(bounds[i]), float(bounds[i + 1]), int(counts[i])) for i in np.flatnonzero(counts)
    )


def added_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns the sum of counts of equal names."""
    total: collections.Counter[str] = collections.Counter()
    for part in counts:
        total.update(part)
    return dict(total)


def share_of(part: float, whole: float) -> float:
    """Returns part / whole, or 0 of nothing."""
    return part / whole if whole else 0.0


class ReportLog:
    """Appends reports; those before the last `BLOCK` to `2 * BLOCK` are kept packed.

    Attributes:
        examples_skipped: in all of these windows.
    """

    def __init__(self) -> None:
        """Has no report."""
        self._packed: list[np.ndarray] = []
        self._recent: list[WindowReport] = []
        self.examples_skipped = 0

    def __len__(self) -> int:
        """Returns the number of windows that have ended."""
        return BLOCK * len(self._packed) + len(self._recent)

    def __iter__(self) -> Iterator[WindowReport]:
        """Gives all reports, the first window's first."""
        for block in self._packed:
            unpacker = zlib.decompressobj()
            text = unpacker.decompress(block.tobytes(), _MOST_BYTES)
            if unpacker.unconsumed_tail:
                raise ValueError(f"Packed reports take more than {_MOST_BYTES} bytes.")
            yield from map(WindowReport.from_state, json.loads(text))
        yield from self._recent

    def append(self, report: WindowReport) -> None:
        """Takes the report of the window that has just ended."""
        self._recent.append(report)
        self.examples_skipped += report.examples_skipped
        if len(self._recent) == 2 * BLOCK:
            states = [old.state() for old in self._recent[:BLOCK]]
            text = json.dumps(states, default=lambda value: value.item())
            self._packed.append(np.frombuffer(zlib.compress(text.encode()), np.uint8))
            del self._recent[:BLOCK]

    def state(self) -> dict[str, Any]:
        """Returns all reports: nested dictionaries and lists of JSON-serialisable values, arrays.

        Returns:
            "windows": how many; "packed": uint8 [bytes] per block; "recent": the others;
            "examples_skipped".
        """
        return {
            "windows": len(self),
            "packed": list(self._packed),
            "recent": [report.state() for report in self._recent],
            "examples_skipped": self.examples_skipped,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "ReportLog":
        """Returns the reports that `state` was had of."""
        log = cls()
        log._packed = [np.asarray(block, np.uint8) for block in state["packed"]]
        log._recent = [WindowReport.from_state(report) for report in state["recent"]]
        log.examples_skipped = state["examples_skipped"]
        return log
