"""Compares the rows of a replicated store over the ranks. In: its tables. Out: an error or none."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.distributed.agreement import gather_json
from slipstream_tf.distributed.comm import Communicator
from slipstream_tf.hashing import mix64


def require_same_rows(store: Any, comm: Communicator) -> None:
    """Checks that all ranks have the same rows and slots; a collective.

    Counts of accesses are each rank's own. A key without a row counts as having its initial one.
    Ranks exchange a digest of each table, and more only where it differs. Needs as much memory as
    the largest table.

    Args:
        store: a `ReplicatedStore` that holds nothing back (`flush`).
        comm: the ranks.

    Raises:
        ValueError: a rank's rows differ from those of rank 0; every rank raises it.
    """
    if comm.size == 1:
        return
    digests = {table.name: _digest(store.export_table(table.name)) for table in store.tables}
    told = gather_json(comm, digests, "slipstream.rows")
    for table in store.tables:
        if any(other[table.name] != told[0][table.name] for other in told):
            _compare(store, table.name, comm)


def _digest(contents: dict[str, np.ndarray]) -> str:
    """Of a table's export, which is sorted by key."""
    hashed = hashlib.blake2b(digest_size=16)
    for name in ("keys", "rows", "slots"):
        hashed.update(np.ascontiguousarray(contents[name]).data)
    # Adam's step depends on the number of updates.
    hashed.update(contents["steps"][:1].tobytes())
    return hashed.hexdigest()


def _compare(store: Any, table: str, comm: Communicator) -> None:
    contents = store.export_table(table)
    updates = gather_json(comm, int(contents["steps"][0]), "slipstream.rows.updates")
    for rank, other in enumerate(updates):
        if other != updates[0]:
            raise _error(table, rank, f"had {other} updates, but on rank 0 {updates[0]}")
    own_keys = contents["keys"]
    keys = np.unique(_gather(comm, own_keys, "slipstream.rows.keys"))
    rows = _hashes(store.gather(table, keys)[0].numpy())
    # 0 where this rank has no slots yet.
    slots = np.zeros(keys.size, np.int64)
    if contents["slots"].size:
        slots[np.searchsorted(keys, own_keys)] = _hashes(contents["slots"]) | 1
    all_rows = _gather(comm, rows, "slipstream.rows.values").reshape(comm.size, -1)
    all_slots = _gather(comm, slots, "slipstream.rows.slots").reshape(comm.size, -1)
    for rank in range(1, comm.size):
        have_slots = (all_slots[0] != 0) & (all_slots[rank] != 0)
        for what, differs in (
            ("row", all_rows[rank] != all_rows[0]),
            ("slots", have_slots & (all_slots[rank] != all_slots[0])),
        ):
            if differs.any():
                count, key = int(differs.sum()), int(keys[differs][0])
                raise _error(table, rank, f"differs in the {what} of {count} keys, e.g. {key}")


def _error(table: str, rank: int, difference: str) -> ValueError:
    return ValueError(
        f"Invalid rows of table {table!r} on rank {rank}: it {difference}. Replicated tables must "
        "start equal on all ranks: load the same rows on each, or none "
        "(`distributed.JobCheckpoints` does so)."
    )


def _gather(comm: Communicator, values: np.ndarray, name: str) -> np.ndarray:
    with tf.device("CPU:0"):
        return comm.gather(tf.constant(values), "control", name).numpy()


def _hashes(rows: np.ndarray) -> np.ndarray:
    """Returns int64 [n], a hash of the bits of each row, float32 [n, width]."""
    words = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    hashes = np.zeros(len(rows), np.uint64)
    for column in words.T:
        hashes = mix64(hashes ^ column)
    return hashes.view(np.int64)
