"""Files of SOK's own format, of the variables that a `SokStore` watches; nothing is lost.

In: a store with its optimizer, and a folder. Out: SOK's files in it, or variables as they were.
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
    """Writes variables and slots as `sok.dump` does; a collective, in eager mode.

    SOK writes the slots of the keys that have any beside those of all keys, and cannot load the
    files if these differ, as they do once a key was looked up but not updated. The slots that are
    missing are made before. What the optimizer counts (its iterations) is not in the files.

    Args:
        store: deferred gradients are not written: call `flush` first.
        folder: is made if it is not there; all ranks must see the same one.

    Raises:
        ValueError: a table is empty, on all ranks, or SOK would pass over the optimizer's slots.
        RuntimeError: gradients are deferred.
    """
    sok, optimizer = open_sok(), _optimizer_of(store)
    tables = store.opened
    for table in tables:
        deferred = store.update_counts(table.name).deferred_now
        if deferred:
            raise RuntimeError(
                f"{deferred} gradient sums of table {table.name!r} are deferred on rank "
                f"{table.rank}. Call flush() of the store on all ranks first."
            )
        own = tf.constant([table.size()], tf.int64)
        # SOK finds this out on one rank, and the others wait for it for ever.
        if not int(sok.communication.allreduce(own, op="sum")[0]):
            raise invalid("store", 0, f"dump: rows of table {table.name!r}", "one or more")
        if table.is_dynamic:
            keys, _ = sok.export(table.variable)
            for slot in slots_of(optimizer, table.variable).values():
                slot.sparse_read(keys)
    sok.dump(os.fspath(folder), [table.variable for table in tables], optimizer)


def load(store: SokStore, folder: str | os.PathLike[str]) -> None:
    """Reads what `dump` wrote, at any number of ranks; a collective, in eager mode.

    Rows of other keys stay: load into new variables. Variables must have the names that they had.

    Args:
        store: its optimizer gets the slots.
        folder: all ranks must see the same one.

    Raises:
        ValueError: SOK would pass over the optimizer's slots.
    """
    variables = [table.variable for table in store.opened]
    open_sok().load(os.fspath(folder), variables, _optimizer_of(store))


def written_since(
    store: SokStore, time: datetime.datetime
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the rows of HKV tables that were changed after a time; a collective.

    SOK tells what was written. Rows of masked keys are, once a window, as they are: those of keys
    that were masked without a break since before the time are left out. Where a key was masked, or
    updated again, after the time, nobody can tell whether its row has changed besides: it is among
    them, and so are rows that SOK made after the time because they were looked up.

    Args:
        store: its HKV tables are asked; slots are not.
        time: with a time zone; some seconds earlier than it matters: it is compared with the GPU's
            clock.

    Returns:
        Table -> keys int64 [n] and rows float32 [n, dim] of all ranks, in no order.

    Raises:
        ValueError: the time has no time zone, or no table is in HKV.
    """
    if time.tzinfo is None:
        raise invalid("time", time, "written_since", "a datetime with a time zone")
    tables = [table for table in store.opened if table.is_hybrid]
    if not tables:
        raise invalid("store", [t.name for t in store.opened], "written_since", "HKV tables")
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
    """The optimizer as SOK's functions want it; None: there are no slots."""
    optimizer = store.optimizer
    names = optimizer.get_slot_names() if hasattr(optimizer, "get_slot_names") else ()
    if not names:
        return None
    if type(optimizer).__name__ == _FIRST:
        allowed = (
            "tf_keras.optimizers.legacy, wrapped: sok.dump leaves out the slots of "
            "tf.compat.v1.train without a word"
        )
        kind = type(optimizer._optimizer).__name__
        raise invalid("optimizer", kind, "files of SOK", allowed)
    return optimizer
