"""Collectives at a window's end, and redistribution of the engine's saved state.

The ranks exchange their counts, scores and losses, and compare their saturated keys and thresholds.
`part_of` computes the state of one rank from the saved states of all ranks. Key states, T, reports
and steering are equal on all ranks. The snapshots of the rows that a rank owns, its access counts
and its sample of examples differ between ranks.
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
    """Raised if ranks disagree on the saturated keys or on T."""


class Ranks:
    """Combines the statistics of all ranks at the end of a window.

    Every method that communicates is a collective: all ranks must call it in the same order.

    Attributes:
        merged_pilots: Result of the last `merge_pilots`: "buckets" int64 [n], the indices of the
            trained buckets, and "accumulators" float32 [n], the amount of training of each bucket.
    """

    def __init__(self, comm: Communicator | None):
        """Creates the collectives.

        Args:
            comm: The communicator of the ranks, or None for a single process.
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
        """Number of this rank."""
        return 0 if self._comm is None else self._comm.rank

    def concatenate(self, values: np.ndarray, name: str) -> np.ndarray:
        """Returns the concatenated arrays of all ranks, in rank order.

        Args:
            values: [n], or [n, width] with an equal width on all ranks. n may differ.
            name: Name of the collective.
        """
        if self._comm is None:
            return values
        tensor = tf.constant(values)
        return self._comm.gather(tensor, "control", f"slipstream.window.{name}").numpy()

    def total(self, values: np.ndarray, name: str) -> np.ndarray:
        """Returns the sum of the arrays of all ranks.

        The arrays are added in rank order, so that the result is deterministic.

        Args:
            values: [n], with an equal n on all ranks.
            name: Name of the collective.
        """
        return self.concatenate(values, name).reshape(self.size, -1).sum(axis=0)

    def merge_accesses(
        self, keys: np.ndarray, counts: np.ndarray, name: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Sums the access counts of the hottest keys of each rank.

        Args:
            keys: int64 [n], keys of this rank, unique.
            counts: float32 [n].
            name: Name of the collective.

        Returns:
            keys int64 [m] and counts float32 [m], sorted by descending count, then by ascending
            key. For a single process, the arguments.
        """
        if self._comm is None:
            return keys, counts
        order = np.argsort(keys)
        all_keys = self.concatenate(np.asarray(keys, np.int64)[order], f"{name}.keys")
        all_counts = self.concatenate(np.asarray(counts, np.float32)[order], f"{name}.counts")
        merged, index = np.unique(all_keys, return_inverse=True)
        total = np.zeros(merged.size, np.float32)
        np.add.at(total, index.ravel(), all_counts)  # in rank order
        order = np.lexsort((merged, -total))
        return merged[order], total[order]

    def merge_pilots(self, pilot: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Averages the parameters of the pilots of all ranks, bucket by bucket.

        Args:
            pilot: The pilot of this rank, from `ops.classifier.InputClassifier.export_pilot`.

        Returns:
            The merged pilot, equal on all ranks. Each bucket is the mean over the ranks that
            updated it since the last merge, weighted by the growth of their accumulators.
        """
        if self._comm is None:
            return pilot
        base = self.concatenate(pilot["base"], "pilot.base").reshape(self.size, -1)
        steps = base[:, 1].sum()
        rate = (base[:, 0] * base[:, 1]).sum() / steps if steps else base[0, 0]
        buckets = self.concatenate(pilot["buckets"], "pilot.buckets")
        numbers = self.concatenate(pilot["numbers"], "pilot.numbers")
        order = np.argsort(buckets, kind="stable")  # stable: keeps the rank order
        buckets, numbers = buckets[order], numbers[order]
        merged, first, having = np.unique(buckets, return_index=True, return_counts=True)
        if merged.size:
            growth = np.maximum(_accumulators(numbers) - self._before(buckets), 0.0).astype("d")
            total = np.add.reduceat(growth, first)
            # A bucket that no rank has updated has the same values on all ranks.
            weights = np.where(np.repeat(total, having) > 0.0, growth, 1.0)[:, None]
            sums = np.add.reduceat(numbers * weights, first, axis=0)
            numbers = (sums / np.add.reduceat(weights, first, axis=0)).astype(np.float32)
            self.merged_pilots = {"buckets": merged, "accumulators": _accumulators(numbers)}
        base = np.array([rate, base[:, 1].max()])
        return {"base": base, "buckets": merged, "numbers": numbers}

    def _before(self, buckets: np.ndarray) -> np.ndarray:
        """Returns the accumulators of the buckets [n] after the last merge, [n].

        Buckets that were not part of the last merge have an accumulator of 0.
        """
        known, accumulators = (self.merged_pilots[name] for name in ("buckets", "accumulators"))
        if not known.size:
            return np.zeros(buckets.size)
        index = np.minimum(np.searchsorted(known, buckets), known.size - 1)
        return np.where(known[index] == buckets, accumulators[index], 0.0)

    def of_owners(self, values: np.ndarray, owners: np.ndarray, name: str) -> np.ndarray:
        """Combines values that each rank has for the keys that it owns.

        Args:
            values: [own keys], values of this rank, in the order of the keys.
            owners: int64 [keys], the owning rank of each key.
            name: Name of the collective.

        Returns:
            [keys], the values of all keys.
        """
        gathered = self.concatenate(values, name)
        whole = np.empty(owners.size, values.dtype)
        whole[np.argsort(owners, kind="stable")] = gathered
        return whole

    def total_counts(self, counts: Sequence[_Counts], name: str) -> list[_Counts]:
        """Sums dataclasses of integers over the ranks, field by field.

        Args:
            counts: Counts of this rank. Every rank must pass the same number and classes.
            name: Name of the collective.
        """
        own = [dataclasses.astuple(c) for c in counts]  # type: ignore[call-overload]
        totals = self.total(np.array(own, np.int64).ravel(), name).reshape(len(own), -1)
        return [type(c)(*of) for c, of in zip(counts, totals.tolist(), strict=True)]

    def total_losses(self, losses: LossStatistics) -> LossStatistics:
        """Sums the loss statistics of all ranks."""
        sums = losses.sums()
        flat = np.concatenate([sums, losses.histogram.ravel()])
        total = self.total(flat, "losses")
        histogram = total[sums.size :].reshape(losses.histogram.shape)
        return LossStatistics.from_sums(total[: sums.size], histogram)

    def take_traffic(self) -> dict[str, int]:
        """Returns the bytes by kind that all ranks sent.

        The counts start again from 0 for the next call.
        """
        own, self._traffic = self.traffic_so_far(), self._sent_bytes()
        total = self.total(np.array([*own.values()], np.int64), "traffic")
        return dict(zip(own, map(int, total), strict=True))

    def traffic_so_far(self) -> dict[str, int]:
        """Returns this rank's sent bytes by kind since the last `take_traffic`."""
        sent = self._sent_bytes()
        return {kind: count - self._traffic.get(kind, 0) for kind, count in sent.items()}

    def restore_traffic(self, traffic: Mapping[str, int]) -> None:
        """Sets the counts of the current window to a result of `traffic_so_far`."""
        sent = self._sent_bytes()
        self._traffic = {kind: count - traffic.get(kind, 0) for kind, count in sent.items()}

    def _sent_bytes(self) -> dict[str, int]:
        """Returns the bytes by kind that this rank has sent in total."""
        sent = {} if self._comm is None else self._comm.traffic().bytes
        return {kind: int(count) for kind, count in sent.items()}

    def require_agreement(self, window: int, threshold: float, keys: Iterable[np.ndarray]) -> None:
        """Compares a digest of T and the saturated keys over the ranks.

        Args:
            window: Number of the window that begins, for the error message.
            threshold: T.
            keys: int64 arrays, table by table.

        Raises:
            DivergenceError: The digest of a rank differs from the digest of rank 0. All ranks raise
                it.
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
                f"Window {window}: the saturated keys or the threshold T differ between rank 0 and "
                f"ranks {others} (digests "
                f"{', '.join(f'{int(d) & (2**64 - 1):016x}' for d in digests)}). Use the same "
                "settings, seeds and software on all ranks, change rows only by training, and "
                "restart from the last checkpoint."
            )


def _accumulators(numbers: np.ndarray) -> np.ndarray:
    """Returns the accumulator of each pilot bucket [n, width], float32 [n].

    An accumulator shows how much its bucket has been trained.
    """
    # A bucket starts with 0, 4 or 8 factors and a linear weight. The accumulator is next.
    column = {4: 1, 8: 5, 16: 9}[numbers.shape[1]]
    return numbers[:, column]


# Positions in the "numbers" of a window; see the op SlipstreamClassifierExportWindow.
_COUNTS, _OFFERED_IN_WINDOW = slice(0, 5), 7
_SUMS = 12
_SAMPLE = ("tables", "keys", "ends", "losses")
_SNAPSHOT = ("snapshot_keys", "snapshot")


def require_restorable(
    states: Sequence[Mapping[str, Any]], dims: Mapping[str, int], metric: str
) -> None:
    """Raises ValueError unless an engine with these settings accepts the states.

    Args:
        states: The saved states.
        dims: Maps each tracked table to its dim.
        metric: The drift metric.
    """
    place = "a saved state of the saturation engine"
    if not states:
        raise invalid("states", [], place, "one state for each rank that saved")
    for state in states:
        saved = {name: table["dim"] for name, table in state["tables"].items()}
        if saved != dims:
            allowed = f"the dims of the tables that this engine tracks, {dims}"
            raise invalid("tables", saved, place, allowed)
        if state["metric"] != metric:
            allowed = f"{metric!r}, the `Saturation.metric` of this engine"
            raise invalid("metric", state["metric"], place, allowed)


def part_of(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Returns the state from which one rank continues.

    Args:
        states: States of all ranks that saved, in rank order.
        rank: The rank that continues.
        size: Number of ranks that continue. If it equals the number of saved states, each rank gets
            its own state. Otherwise the counts of saved rank i go to rank i modulo `size`.

    Returns:
        A state for `SaturationTracker.restore`. Its tables contain the snapshots of all ranks.
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
    """Returns the snapshots of all ranks, without duplicate keys."""
    joined = {name: np.concatenate([table[name] for table in tables]) for name in _SNAPSHOT}
    _, first = np.unique(joined["snapshot_keys"], return_index=True)
    return {name: values[first] for name, values in joined.items()}


def _window(states: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, np.ndarray]:
    """Returns the summed window counts for one rank, without samples."""
    window = dict(states[min(rank, len(states) - 1)]["window"])
    assigned = [state["window"] for state in states[rank::size]]
    for name in ("sums", "histogram"):
        window[name] = sum((w[name] for w in assigned), np.zeros_like(window[name]))
    numbers = window["numbers"].copy()
    numbers[_COUNTS] = sum((w["numbers"][_COUNTS] for w in assigned), np.zeros(5, np.int64))
    numbers[_OFFERED_IN_WINDOW] = 0
    window["numbers"] = numbers
    return {**window, **{name: window[name][:0] for name in _SAMPLE}}
