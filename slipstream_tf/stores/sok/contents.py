"""All of a variable of SOK's on this rank, with its slots: read, and replaced.

In: a table, and the rule of its optimizer. Out: arrays by key; or a table that has the rows of such
arrays, and nothing of before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from slipstream_tf.errors import invalid
from slipstream_tf.stores.sok.optimizers import SokRule
from slipstream_tf.stores.sok.table import SokTable


def export_rows(found: SokTable, rule: SokRule) -> dict[str, np.ndarray]:
    """Copies this rank's rows; SOK makes slots that are missing.

    Args:
        found: the table.
        rule: of its optimizer.

    Returns:
        "keys" int64 [n], ascending; "rows" float32 [n, dim]; "slots" float32 [n, slots * dim].
    """
    if found.is_dynamic:
        keys, rows = (part.numpy() for part in found.sok.export(found.variable))
    else:
        keys, rows = found.keys_of(np.arange(found.size())), found.variable.numpy()
    order = np.argsort(keys)
    keys, rows = keys[order], rows[order]
    parts = [slot.sparse_read(tf.constant(keys)).numpy() for slot in rule.slots(found)]
    joined = np.concatenate([np.empty((keys.size, 0), np.float32), *parts], axis=1)
    return {"keys": keys, "rows": rows, "slots": joined}


def own_part(
    found: SokTable, rule: SokRule, contents: Mapping[str, Any], optional: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Returns what contents have of this rank's keys.

    Args:
        found: the table.
        rule: of its optimizer.
        contents: "keys", "rows" and "slots" of any ranks' keys.
        optional: other arrays of one row per key, which may be missing.

    Raises:
        ValueError: a shape does not fit the table, or a key is one that SOK uses itself.
    """
    keys, place = np.asarray(contents["keys"], np.int64), f"table {found.name!r}"
    slots_per_row = len(rule.slots(found)) * found.dim
    for name, columns in (("rows", found.dim), ("slots", slots_per_row)):
        shape = np.shape(contents[name])
        if shape != (keys.size, columns):
            raise invalid(name, list(shape), place, f"float32 [{keys.size}, {columns}]")
    is_reserved = np.isin(keys, found.reserved_keys)
    if is_reserved.any():
        allowed = f"others than {', '.join(map(str, found.reserved_keys))}, which SOK uses"
        raise invalid("keys", int(keys[is_reserved][0]), place, allowed)
    is_own = found.owners(keys) == found.rank
    names = ["keys", "rows", "slots", *(name for name in optional if name in contents)]
    return {name: np.asarray(contents[name])[is_own] for name in names}


def replace_rows(found: SokTable, rule: SokRule, own: Mapping[str, np.ndarray]) -> None:
    """Writes rows and slots; other keys of the table start anew, as SOK cannot take keys out.

    Those of a `sok.Variable` stay as they are, and so do those whose initial rows are random.

    Args:
        found: the table.
        rule: of its optimizer.
        own: "keys", "rows" and "slots" of this rank's keys.

    Raises:
        RuntimeError: the table had no room, and SOK evicted some of these rows.
    """
    keys = own["keys"]
    if not found.is_dynamic:
        rows = found.variable.numpy()
        rows[found.indices(keys)] = own["rows"]
        found.variable.assign(rows)
        return
    slots, initial = rule.slots(found), found.initial_value
    others = np.setdiff1d(found.sok.export(found.variable)[0].numpy(), keys)
    if initial is None and others.size:
        logging.warning(
            "Table %r keeps rows of %d keys that are not among those that are loaded: SOK cannot "
            "take keys out, nor make their random initial rows again. Load into a new variable.",
            found.name,
            others.size,
        )
    elif initial is not None:
        # Before the others: what is written last is evicted last.
        _fill(found, found.variable, others, initial)
        for slot, value in zip(slots, rule.initial_slots(), strict=True):
            _fill(found, slot, others, value)
    found.sok.assign(found.variable, tf.constant(keys), tf.constant(own["rows"], tf.float32))
    for slot, values in zip(slots, np.split(own["slots"], len(slots) or 1, 1), strict=False):
        found.sok.assign(slot, tf.constant(keys), tf.constant(values, tf.float32))
    if found.size() < keys.size + others.size:
        _require_rows(found, keys)


def _fill(found: SokTable, variable: Any, keys: np.ndarray, value: float) -> None:
    rows = tf.fill([keys.size, found.dim], np.float32(value))
    found.sok.assign(variable, tf.constant(keys, tf.int64), rows)


def _require_rows(found: SokTable, keys: np.ndarray) -> None:
    """Raises RuntimeError unless SOK kept the rows that were written just now."""
    kept = found.sok.export(found.variable)[0].numpy()
    lost = np.setdiff1d(keys, kept)
    if lost.size:
        raise RuntimeError(
            f"Table {found.name!r} had no room for {keys.size} rows on rank {found.rank}: SOK "
            f"evicted {lost.size} of them, such as {lost[0]}, and others that were there. Give the "
            "table more capacity, and load into a new store."
        )
    logging.warning(
        "Table %r had no room for its rows and those that were loaded: SOK evicted older ones.",
        found.name,
    )
