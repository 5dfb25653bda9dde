"""Collectives over Python values: gather JSON, compare settings and rows, propagate errors."""

import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.comm import Communicator
from slipstream_tf._utils.errors import shown
from slipstream_tf._utils.hashing import mix64


def gather_json(comm: Communicator, value: Any, name: str) -> list[Any]:
    """Returns every rank's value, rank 0 first; a collective.

    Args:
        comm: The communicator.
        value: JSON-serializable. Sizes may differ between ranks.
        name: Name of the collective.
    """
    if comm.size == 1:
        return [json.loads(json.dumps(value))]
    line = np.frombuffer(json.dumps(value).encode() + b"\n", np.uint8)
    gathered = _gather(comm, line, name).tobytes()
    return [json.loads(text) for text in gathered.splitlines()]


def max_known(comm: Communicator, own: int | None, name: str) -> int | None:
    """Returns the maximum over the ranks, or None if any is unknown.

    A collective.

    Args:
        comm: The communicator.
        own: This rank's number, at least 0, or None if unknown.
        name: Name of the collective.
    """
    if comm.size == 1:
        return own
    known = comm.gather(tf.constant([-1 if own is None else own], tf.int64), "control", name)
    numbers = np.asarray(known)
    return None if (numbers < 0).any() else int(numbers.max())


def on_all_ranks(comm: Communicator, work: Callable[[], Any], name: str, what: str) -> list[Any]:
    """Runs a function on every rank and waits for all; a collective.

    Args:
        comm: The communicator.
        work: The function. It must not call collectives. Returns a JSON-serializable value.
        name: Name of the collective.
        what: Description of the work for errors, for example "write a file".

    Returns:
        The result of each rank, rank 0 first.

    Raises:
        RuntimeError: The function failed on another rank; the message names it. A failing rank
            raises its original error.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    reason = None if error is None else f"{type(error).__name__}: {error}"
    reports = gather_json(comm, [reason, result], name)
    if error is not None:
        raise error
    for rank, (problem, _) in enumerate(reports):
        if problem is not None:
            raise RuntimeError(f"Rank {rank} could not {what}: {problem}")
    return [result for _, result in reports]


def require_same(comm: Communicator, settings: Any, name: str, what: str) -> None:
    """Raises ValueError unless all ranks have the same settings; a collective.

    Args:
        comm: The communicator.
        settings: JSON-serializable. Tuples are compared as lists.
        name: Name of the collective.
        what: Description of the settings, for errors.

    Raises:
        ValueError: A rank's settings differ from rank 0. Every rank raises it.
    """
    if comm.size == 1:
        return
    # Compare as text, in which 1, 1.0 and True differ.
    texts = gather_json(comm, json.dumps(settings, sort_keys=True, default=repr), name)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            place, first, second = _first_difference(json.loads(texts[0]), json.loads(other), "")
            raise ValueError(
                f"Invalid settings of {what} on rank {rank}: {place or 'the value'} is "
                f"{shown(second)}, but it is {shown(first)} on rank 0. Expected the same settings "
                "on all ranks."
            )


def _first_difference(first: Any, second: Any, place: str) -> tuple[str, Any, Any]:
    if isinstance(first, dict) and isinstance(second, dict) and set(first) == set(second):
        pairs = [(f"{place}.{key}" if place else key, first[key], second[key]) for key in first]
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = [(f"{place}[{i}]", *pair) for i, pair in enumerate(zip(first, second, strict=True))]
    else:
        return place, first, second
    for inner, one, other in pairs:
        if one != other:
            return _first_difference(one, other, inner)
    return place, first, second


def require_same_rows(store: Any, comm: Communicator) -> None:
    """Raises ValueError unless all ranks have equal rows and slots; a collective.

    Access counts may differ. A key without a row is compared by its initial row. Ranks exchange a
    digest of each table, and further data only for tables that differ. Needs additional memory of
    the size of the largest table.

    Args:
        store: A `ReplicatedStore` without deferred gradients; call its `flush` before.
        comm: The communicator.

    Raises:
        ValueError: A rank's rows differ from rank 0. Every rank raises it.
    """
    if comm.size == 1:
        return
    digests = {table.name: _digest(store.export_table(table.name)) for table in store.tables}
    all_digests = gather_json(comm, digests, "slipstream.rows")
    for table in store.tables:
        if any(other[table.name] != all_digests[0][table.name] for other in all_digests):
            _compare(store, table.name, comm)


def _digest(contents: dict[str, np.ndarray]) -> str:
    """Returns a hash of a table's export, which is sorted by key."""
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
            raise _error(table, rank, f"it had {other} updates, but {updates[0]} on rank 0")
    own_keys = contents["keys"]
    keys = np.unique(_gather(comm, own_keys, "slipstream.rows.keys"))
    rows = _hashes(store.gather(table, keys)[0].numpy())
    # 0 for keys that have no slots on this rank.
    slots = np.zeros(keys.size, np.int64)
    if contents["slots"].size:
        slots[np.searchsorted(keys, own_keys)] = _hashes(contents["slots"]) | 1
    all_rows = _gather(comm, rows, "slipstream.rows.values").reshape(comm.size, -1)
    all_slots = _gather(comm, slots, "slipstream.rows.slots").reshape(comm.size, -1)
    for rank in range(1, comm.size):
        have_slots = (all_slots[0] != 0) & (all_slots[rank] != 0)
        for what, differs in (
            ("rows", all_rows[rank] != all_rows[0]),
            ("slots", have_slots & (all_slots[rank] != all_slots[0])),
        ):
            if differs.any():
                count, key = int(differs.sum()), int(keys[differs][0])
                all_digests = (
                    f"the {what} of {count} keys differ from rank 0, for example of key {key}"
                )
                raise _error(table, rank, all_digests)


def _error(table: str, rank: int, difference: str) -> ValueError:
    return ValueError(
        f"Invalid rows of table {table!r} on rank {rank}: {difference}. Replicated tables must be "
        "equal on all ranks when training starts. Load the same rows on all ranks, for example "
        "with slipstream_tf.distributed.CheckpointManager."
    )


def _gather(comm: Communicator, values: np.ndarray, name: str) -> np.ndarray:
    with tf.device("CPU:0"):
        return comm.gather(tf.constant(values), "control", name).numpy()


def _hashes(rows: np.ndarray) -> np.ndarray:
    """Returns a hash of the bits of each row, int64 [n].

    Args:
        rows: float32 [n, width].
    """
    words = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    hashes = np.zeros(len(rows), np.uint64)
    for column in words.T:
        hashes = mix64(hashes ^ column)
    return hashes.view(np.int64)
