"""Rows from elsewhere: of a matrix, such as a `keras.layers.Embedding`'s, or of other keys.

In: the rows of a table, `layer.table(name)`. Out: the same table, with other rows in it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import logging

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid
from slipstream_tf.tables.rows import TableRows, checked_keys


def from_embedding(table: TableRows, weights: Any, keys: Any = None) -> int:
    """Writes a matrix of weights to a table; its optimizer slots start anew where rows are new.

    Args:
        table: from `layer.table(name)`.
        weights: a built `keras.layers.Embedding`, or a matrix float32 [n, dim].
        keys: integers [n], the key of each row of the matrix; None: 0, 1, ..., n - 1, as
            `keras.layers.Embedding` counts them.

    Returns:
        How many rows were written.

    Raises:
        ValueError: the layer has no weights yet, or shapes do not fit.
    """
    if getattr(weights, "built", True) is False:
        allowed = "a built layer: call it once, or load its weights"
        raise invalid("weights", weights, f"table {table.name!r}", allowed)
    matrix = getattr(weights, "embeddings", weights)
    variable = None if isinstance(matrix, np.ndarray) else _compat.tensorflow_variable(matrix)
    rows = np.asarray(matrix if variable is None else variable.numpy(), np.float32)
    if rows.ndim != 2 or rows.shape[1] != table.dim:
        allowed = f"[n, {table.dim}]"
        raise invalid("weights", list(rows.shape), f"table {table.name!r}", allowed)
    table.write(np.arange(len(rows)) if keys is None else keys, rows)
    return len(rows)


def rename_keys(table: TableRows, new_keys: Mapping[int, int], keep_others: bool = False) -> int:
    """Gives rows other keys, as after a change of vocabulary; with slots and access counts.

    Flags end, and deferred gradients are applied before. With replicated tables a collective, after
    the store's `flush`.

    Args:
        table: from `layer.table(name)`.
        new_keys: old key -> new key, each new one once; old ones without a row are ignored.
        keep_others: whether rows whose key is not named stay as they are; else they leave.

    Returns:
        How many rows got another key, or kept it as they were told to.

    Raises:
        ValueError: two rows would have one key, or the table is spread over ranks.
    """
    store, place = table.store, f"table {table.name!r}"
    if not store.writes_rows or (store.is_spread and store.comm.size > 1):
        allowed = "a native table that is not spread over ranks; load it in one process"
        raise invalid("store", type(store).__name__, f"rename_keys of {place}", allowed)
    old = checked_keys(list(new_keys))
    new = checked_keys([new_keys[key] for key in new_keys])
    contents = dict(store.export_table(table.name))
    named = dict(zip(old.tolist(), new.tolist(), strict=True))
    is_named = np.isin(contents["keys"], old)
    keys = np.array([named.get(key, key) for key in contents["keys"].tolist()], np.int64)
    stays = is_named | keep_others
    keys, left = keys[stays], int(np.sum(~stays))
    found, times = np.unique(keys, return_counts=True)
    if (times > 1).any():
        allowed = "each new key once, and none that another row keeps"
        raise invalid("new_keys", int(found[times > 1][0]), place, allowed)
    order = np.argsort(keys)
    contents["keys"] = keys[order]
    for name in ("rows", "slots", "counts", "last_used"):
        if len(contents[name]):
            contents[name] = contents[name][stays][order]
    store.import_table(table.name, contents)
    if left:
        logging.info("%s: %d rows whose keys were not named have left.", place, left)
    return int(is_named.sum())
