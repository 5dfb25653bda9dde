"""Collectives of a window's end, and the engine's state at another number of ranks.

In: a rank's counts, scores and losses. Out: the totals of all ranks, and an error if the saturated
keys or thresholds of ranks differ. `part_of` makes one rank's state of the states of all ranks:
states of keys, T, reports and steering are the same on all ranks; the snapshots of a rank's own
rows, and the counts and the sample of its examples, are its own.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.comm import Communicator
from slipstream_tf._utils.errors import invalid
from slipstream_tf.ops.loss_statistics import LossStatistics

_Counts = TypeVar("_Counts")


class DivergenceError(RuntimeError):
    """Ranks disagree on the saturated keys or on T."""


class Ranks:
    """Adds up what the ranks of a job counted; every method is a collective.

    Attributes:
        merged_pilots: "buckets" of pilots and their "accumulators" at the last `merge_pilots`.
    """

    def __init__(self, comm: Communicator | None):
        """Takes the ranks.

        Args:
            comm: the ranks; None: this process alone.
        """
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._traffic: dict[str, int] = {}
        self.merged_pilots: dict[str, np.ndarray] = {
            "buckets": np.empty(0, np.int64),
            "accumulators": np.empty(0, np.float32),
        }

    @property
    def size(self) -> int:
        """Number of ranks."""
        return 1 if self._comm is None else self._comm.size

    @property
    def rank(self) -> int:
        """This rank's number."""
        return 0 if self._comm is None else self._comm.rank

    def concatenate(self, values: np.ndarray, name: str) -> np.ndarray:
        """Returns the ranks' arrays [n] behind each other, rank 0 first."""
        if self._comm is None:
            return values
        tensor = tf.constant(values)
        return self._comm.gather(tensor, "control", f"slipstream.window.{name}").numpy()

    def total(self, values: np.ndarray, name: str) -> np.ndarray:
        """Returns the sums of the ranks' arrays [n], added in the order of ranks."""
        return self.concatenate(values, name).reshape(self.size, -1).sum(axis=0)

    def merge_accesses(
        self, keys: np.ndarray, counts: np.ndarray, name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Adds up the access counts of the keys that ranks found hottest.

        Args:
            keys: int64 [n] of this rank, each once.
            counts: float32 [n].
            name: of the collective.

        Returns:
            keys int64 [m] and counts float32 [m], by count descending, then key ascending.
        """
        if self._comm is None:
            return keys, counts
        order = np.argsort(keys)
        all_keys = self.concatenate(np.asarray(keys, np.int64)[order], f"{name}.keys")
        all_counts = self.concatenate(np.asarray(counts, np.float32)[order], f"{name}.counts")
        merged, index = np.unique(all_keys, return_inverse=True)
        total = np.zeros(merged.size, np.float32)
        np.add.at(total, index.ravel(), all_counts)  # in the order of ranks
        order = np.lexsort((merged, -total))
        return merged[order], total[order]

    def merge_pilots(self, pilot: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Returns what the ranks' pilots have learnt since the last call, put together.

        Args:
            pilot: of this rank, as `ops.classifier.InputClassifier.export_pilot` gives it.

        Returns:
            The same for all ranks: of each bucket the mean over those that have learnt in it since,
            by how much their accumulators grew.
        """
        if self._comm is None:
            return pilot
        base = self.concatenate(pilot["base"], "pilot.base").reshape(self.size, -1)
        steps = base[:, 1].sum()
        rate = (base[:, 0] * base[:, 1]).sum() / steps if steps else base[0, 0]
        buckets = self.concatenate(pilot["buckets"], "pilot.buckets")
        numbers = self.concatenate(pilot["numbers"], "pilot.numbers")
        order = np.argsort(buckets, kind="stable")  # in the order of ranks
        buckets, numbers = buckets[order], numbers[order]
        merged, first, having = np.unique(buckets, return_index=True, return_counts=True)
        if merged.size:
            growth = np.maximum(_accumulators(numbers) - self._before(buckets), 0.0).astype("d")
            total = np.add.reduceat(growth, first)
            # Where nobody has learnt, all have the same.
            weights = np.where(np.repeat(total, having) > 0.0, growth, 1.0)[:, None]
            sums = np.add.reduceat(numbers * weights, first, axis=0)
            numbers = (sums / np.add.reduceat(weights, first, axis=0)).astype(np.float32)
            self.merged_pilots = {"buckets": merged, "accumulators": _accumulators(numbers)}
        base = np.array([rate, base[:, 1].max()])
        return {"base": base, "buckets": merged, "numbers": numbers}

    def _before(self, buckets: np.ndarray) -> np.ndarray:
        """The buckets' accumulators when pilots were merged last, [n]; 0 of new ones."""
        known, accumulators = (self.merged_pilots[name] for name in ("buckets", "accumulators"))
        if not known.size:
            return np.zeros(buckets.size)
        index = np.minimum(np.searchsorted(known, buckets), known.size - 1)
        return np.where(known[index] == buckets, accumulators[index], 0.0)

    def of_owners(self, values: np.ndarray, owners: np.ndarray, name: str) -> np.ndarray:
        """Puts together what each rank knows of the keys that it owns.

        Args:
            values: [own keys] of this rank, in the order of the keys.
            owners: int64 [keys], the rank that owns each.
            name: of the collective.

        Returns:
            [keys].
        """
        gathered = self.concatenate(values, name)
        whole = np.empty(owners.size, values.dtype)
        whole[np.argsort(owners, kind="stable")] = gathered
        return whole

    def total_counts(self, counts: Sequence[_Counts], name: str) -> list[_Counts]:
        """Adds up dataclasses of integers, field by field.

        Args:
            counts: of this rank; every rank has as many, of the same class.
            name: of the collective.
        """
        own = [dataclasses.astuple(c) for c in counts]  # type: ignore[call-overload]
        totals = self.total(np.array(own, np.int64).ravel(), name).reshape(len(own), -1)
        return [type(c)(*of) for c, of in zip(counts, totals.tolist(), strict=True)]

    def total_losses(self, losses: LossStatistics) -> LossStatistics:
        """Adds up the ranks' statistics of losses."""
        sums = losses.sums()
        flat = np.concatenate([sums, losses.histogram.ravel()])
        total = self.total(flat, "losses")
        histogram = total[sums.size :].reshape(losses.histogram.shape)
        return LossStatistics.from_sums(total[: sums.size], histogram)

    def take_traffic(self) -> dict[str, int]:
        """Returns the bytes by kind that all ranks gave to the network since the last call."""
        own, self._traffic = self.traffic_so_far(), self._sent_bytes()
        total = self.total(np.array([*own.values()], np.int64), "traffic")
        return dict(zip(own, map(int, total), strict=True))

    def traffic_so_far(self) -> dict[str, int]:
        """Returns the bytes by kind that this rank gave to the network since `take_traffic`."""
        sent = self._sent_bytes()
        return {kind: count - self._traffic.get(kind, 0) for kind, count in sent.items()}

    def restore_traffic(self, traffic: Mapping[str, int]) -> None:
        """Counts bytes that `traffic_so_far` gave with those of the present window."""
        sent = self._sent_bytes()
        self._traffic = {kind: count - traffic.get(kind, 0) for kind, count in sent.items()}

    def _sent_bytes(self) -> dict[str, int]:
        """The bytes by kind that this rank gave to the network so far."""
        sent = {} if self._comm is None else self._comm.traffic().bytes
        return {kind: int(count) for kind, count in sent.items()}

    def require_agreement(self, window: int, threshold: float, keys: Iterable[np.ndarray]) -> None:
        """Compares a digest of T and the saturated keys over the ranks.

        Args:
            window: that begins, for the error.
            threshold: T.
            keys: int64 arrays, table by table.

        Raises:
            DivergenceError: a rank's differ from those of rank 0; every rank raises it.
        """
        if self._comm is None:
            return
        digest = hashlib.blake2b(np.float32(threshold).tobytes(), digest_size=8)
        for of_table in keys:
            digest.update(np.int64(of_table.size).tobytes())
            digest.update(np.ascontiguousarray(of_table, np.int64).tobytes())
        own = np.frombuffer(digest.digest(), np.int64)
        digests = self.concatenate(own, "digest")
        others = [rank for rank in range(self.size) if digests[rank] != digests[0]]
        if others:
            raise DivergenceError(
                f"Window {window}: the saturated keys or T of rank(s) "
                f"{', '.join(map(str, others))} differ from those of rank 0 (digests "
                f"{', '.join(f'{int(d) & (2**64 - 1):016x}' for d in digests)}). Ranks must have "
                "the same settings, seeds and software, and their rows must only change by "
                "training. Restart from the last checkpoint."
            )


def _accumulators(numbers: np.ndarray) -> np.ndarray:
    """Of a pilot's buckets [n, width]: how much each has learnt, float32 [n]."""
    # Behind the factors, of which there are 0, 4 or 8, comes the key's number.
    column = {4: 1, 8: 5, 16: 9}[numbers.shape[1]]
    return numbers[:, column]


# In the "numbers" of a window, see the op SlipstreamClassifierExportWindow.
_COUNTS, _OFFERED_IN_WINDOW = slice(0, 5), 7
_SUMS = 12
_SAMPLE = ("tables", "keys", "ends", "losses")
_SNAPSHOT = ("snapshot_keys", "snapshot")


def require_restorable(
    states: Sequence[Mapping[str, Any]], dims: Mapping[str, int], metric: str
) -> None:
    """Raises ValueError unless an engine with these tables and settings can take the states."""
    place = "a saved state of the saturation engine"
    if not states:
        raise invalid("states", [], place, "one per rank that saved it")
    for state in states:
        saved = {name: table["dim"] for name, table in state["tables"].items()}
        if saved != dims:
            raise invalid("tables", saved, place, f"the tracked tables and their dims, {dims}")
        if state["metric"] != metric:
            raise invalid("metric", state["metric"], place, f"{metric!r}, as configured")


def part_of(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Returns the state that a rank continues from.

    Args:
        states: of every rank that saved, rank 0 first.
        rank: that continues.
        size: number of ranks that continue. If as many ranks saved, each gets its state back;
            else the counts of rank i go to rank i modulo `size`.

    Returns:
        A state with the snapshots of all ranks.
    """
    if len(states) == size:
        own = dict(states[rank])
    else:
        own = {**states[0], "window": _window(states, rank, size), "traffic": {}}
    assigned = states[rank : rank + 1] if len(states) == size else states[rank::size]
    own["tables"] = {
        name: {
            **table,
            **_snapshots([state["tables"][name] for state in states]),
            "counts": {
                kind: sum(state["tables"][name]["counts"][kind] for state in assigned)
                for kind in table["counts"]
            },
        }
        for name, table in own["tables"].items()
    }
    return own


def _snapshots(tables: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """The snapshots of all ranks, each key's once."""
    joined = {name: np.concatenate([table[name] for table in tables]) for name in _SNAPSHOT}
    _, first = np.unique(joined["snapshot_keys"], return_index=True)
    return {name: values[first] for name, values in joined.items()}


def _window(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, np.ndarray]:
    """The sums of the window's counts that a rank continues from, without samples."""
    window = dict(states[min(rank, len(states) - 1)]["window"])
    assigned = [state["window"] for state in states[rank::size]]
    for name in ("sums", "histogram"):
        window[name] = sum((w[name] for w in assigned), np.zeros_like(window[name]))
    numbers = window["numbers"].copy()
    numbers[_COUNTS] = sum((w["numbers"][_COUNTS] for w in assigned), np.zeros(5, np.int64))
    numbers[_OFFERED_IN_WINDOW] = 0
    window["numbers"] = numbers
    return {**window, **{name: window[name][:0] for name in _SAMPLE}}
