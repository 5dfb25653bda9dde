"""Reads and writes files in SOK's format for a `SokStore`.

Unlike plain `sok.dump` and `sok.load`, these functions never lose slots silently.
"""

import datetime
import os
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import invalid
from slipstream_tf.tables.sok.store import SokStore
from slipstream_tf.tables.sok.table import open_sok, slots_of

_FIRST = "OptimizerWrapperV1"


def dump(store: SokStore, folder: str | os.PathLike[str]) -> None:
    """Writes variables and slots with `sok.dump`; a collective, in eager mode.

    `sok.dump` writes only slots that exist, and `sok.load` fails if a key has a row but no slots,
    for example because the key was looked up but never updated. Therefore missing slots are created
    first. The optimizer's iteration count is not saved.

    Args:
        store: The store. Call `flush` first, because deferred gradients are not saved.
        folder: Output folder, created if missing. All ranks must see the same folder.

    Raises:
        ValueError: A table is empty on all ranks, or SOK would not save the optimizer's slots.
        RuntimeError: This rank has deferred gradients.
    """
    sok, optimizer = open_sok(), _optimizer_of(store)
    tables = store.opened
    for table in tables:
        deferred = store.update_counts(table.name).deferred_now
        if deferred:
            raise RuntimeError(
                f"Rank {table.rank} has {deferred} deferred gradients of table {table.name!r}. "
                "Call flush() of the store on all ranks first."
            )
        own = tf.constant([table.size()], tf.int64)
        # SOK would detect this on one rank only, and the other ranks would wait forever.
        if not int(sok.communication.allreduce(own, op="sum")[0]):
            allowed = "at least one row, because SOK cannot save an empty table"
            raise invalid("store", "0 rows", f"dump of table {table.name!r}", allowed)
        if table.is_dynamic:
            keys, _ = sok.export(table.variable)
            for slot in slots_of(optimizer, table.variable).values():
                slot.sparse_read(keys)
    sok.dump(os.fspath(folder), [table.variable for table in tables], optimizer)


def load(store: SokStore, folder: str | os.PathLike[str]) -> None:
    """Reads files of `dump`, written with any number of ranks; a collective.

    Runs in eager mode only. Rows of other keys stay unchanged, so load into new variables.
    Variables must have the same names as when they were saved.

    Args:
        store: The store. Its optimizer receives the slots.
        folder: The folder of `dump`. All ranks must see the same folder.

    Raises:
        ValueError: SOK would not load the optimizer's slots.
    """
    variables = [table.variable for table in store.opened]
    open_sok().load(os.fspath(folder), variables, _optimizer_of(store))


def written_since(
    store: SokStore, time: datetime.datetime
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the rows of HKV tables changed after a time; a collective.

    HKV (HierarchicalKV) tables are variables with `var_type="hybrid"`. SOK reports every written
    row, including rows of masked keys, which the store rewrites unchanged once per window. Keys
    that have been masked without a break since before `time` are excluded.

    Note: the result may contain rows that did not change, because SOK reports only the fact of a
    write: keys that were masked or unmasked after `time`, and rows that SOK created after `time`
    for a lookup.

    Args:
        store: The store. Only its HKV tables are read, without slots.
        time: A datetime with a time zone. Choose it a few seconds early, because it is compared
            with the GPU's clock.

    Returns:
        A dictionary from table names to keys int64 [n] and rows float32 [n, dim] of all ranks, in
        no particular order.

    Raises:
        ValueError: The time has no time zone, or the store has no HKV table.
    """
    if time.tzinfo is None:
        allowed = "a datetime with a time zone. Pass tzinfo, for example datetime.timezone.utc"
        raise invalid("time", time, "written_since", allowed)
    tables = [table for table in store.opened if table.is_hybrid]
    if not tables:
        allowed = "a store with at least one HKV table"
        raise invalid("store", [t.name for t in store.opened], "written_since", allowed)
    written = open_sok().incremental_model_dump([t.variable for t in tables], [time])
    found = {}
    for table, keys, rows in zip(tables, *written, strict=True):
        unchanged = store.unchanged_since(table.name, time.timestamp())
        if store.comm is not None and store.comm.size > 1:
            own, name = tf.constant(unchanged, tf.int64), f"slipstream.sok.unchanged.{table.name}"
            unchanged = store.comm.gather(own, "control", name).numpy()
        is_changed = ~np.isin(keys, unchanged)
        found[table.name] = keys[is_changed], rows[is_changed]
    return found


def _optimizer_of(store: SokStore) -> Any:
    """Returns the optimizer for `sok.dump` and `sok.load`; None without slots."""
    optimizer = store.optimizer
    names = optimizer.get_slot_names() if hasattr(optimizer, "get_slot_names") else ()
    if not names:
        return None
    if type(optimizer).__name__ == _FIRST:
        allowed = (
            "a wrapped optimizer of tf_keras.optimizers.legacy, because sok.dump silently omits "
            "the slots of tf.compat.v1.train"
        )
        kind = type(optimizer._optimizer).__name__
        raise invalid("optimizer", kind, "files of SOK", allowed)
    return optimizer
