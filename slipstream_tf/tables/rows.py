"""The rows of one table, for people: read, write, remove, list.

In: a store and a table's name, or a layer's `table(name)`. Out: NumPy arrays by key.
`from_embedding` and `rename_keys` fill a table from a matrix or from other keys.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid
from slipstream_tf.ops.text_keys import hash_texts
from slipstream_tf.optimizers import SparseOptimizer
from slipstream_tf.tables.base import EmbeddingStore, SavedStore

_WRITABLE = "a table of a native store, replicated and sharded ones included"


class TableRows:
    """One table of a store. Not for the step: nothing here is part of a graph.

    With several ranks `write` and `remove`, and of sharded tables everything, are collectives:
    every rank calls them alike. Evaluation sees deferred gradients; so does this, in one process.
    With several ranks call the store's `flush` first.

    Attributes:
        store: whose table it is.
        name: of the table.
        dim: values of a row.
    """

    def __init__(self, store: SavedStore, name: str):
        """Takes a table of a store.

        Raises:
            ValueError: there is no table of that name.
        """
        self.store, self.name = store, name
        self._index = store.index_of(name)
        self.dim = store.tables[self._index].dim

    def read(self, keys: Any) -> np.ndarray:
        """Returns float32 [n, dim] of keys [n], integers or texts; an absent one its first row.

        Nothing is made or counted.
        """
        return self._gather(keys)[0]

    def has(self, keys: Any) -> np.ndarray:
        """Returns bool [n]: whether keys, integers [n], have a row.

        Raises:
            ValueError: the table is in SOK, which does not tell.
        """
        if self.store.is_in_sok:
            place = f"`has` of table {self.name!r}"
            raise invalid("store", type(self.store).__name__, place, "a store that is not in SOK")
        return self._gather(keys)[1]

    def write(self, keys: Any, rows: Any) -> None:
        """Replaces the values of rows, and makes those of absent keys.

        Optimizer slots, access counts and flags of rows that are there stay; their deferred
        gradients go. A table with a capacity evicts others for new ones.

        Args:
            keys: integers [n], each once.
            rows: float32 [n, dim], finite.

        Raises:
            ValueError: shapes do not fit, or the store does not own its rows.
            tf.errors.InvalidArgumentError: a key comes twice, or a value is not finite.
        """
        keys = checked_keys(keys)
        with np.errstate(over="ignore"):  # The op tells.
            values = np.asarray(rows, np.float32)
        if values.shape != (keys.size, self.dim):
            allowed = f"[{keys.size}, {self.dim}], a row per key"
            raise invalid("rows", list(values.shape), f"table {self.name!r}", allowed)
        self._writable().write_rows(self.name, keys, values)

    def remove(self, keys: Any) -> int:
        """Removes rows with their slots, access counts, flags and deferred gradients.

        A key that comes again starts as a new one.

        Args:
            keys: integers [n]; those without a row are ignored.

        Returns:
            How many rows there were; with sharded tables, on all ranks.
        """
        return self._writable().remove_rows(self.name, checked_keys(keys))

    def keys(self) -> np.ndarray:
        """Returns int64 [n], the keys that have a row, ascending."""
        keys = self.store.keys_of(self.name)
        if self._is_spread:
            own = tf.constant(keys)
            keys = np.sort(self.store.comm.gather(own, "control", "slipstream.table.keys").numpy())
        return keys

    def __len__(self) -> int:
        """The number of rows."""
        size = self.store.size(self.name)
        return int(self._summed(np.int64(size), "size")) if self._is_spread else size

    @property
    def optimizer(self) -> SparseOptimizer | None:
        """The rule of the rows; None: they are not the store's to update."""
        return self.store.rule_of(self.name)

    @property
    def learning_rate(self) -> float | None:
        """The rate of the next update; assign a number to change it."""
        return self.store.learning_rate_of(self.name)

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self._writable().rates.assign(self._index, rate)

    @property
    def _is_spread(self) -> bool:
        return self.store.is_spread and self.store.comm is not None and self.store.comm.size > 1

    def _gather(self, keys: Any) -> tuple[np.ndarray, np.ndarray]:
        keys = checked_keys(keys)
        store = self.store
        if isinstance(store, EmbeddingStore) and (store.comm is None or store.comm.size == 1):
            store.flush()
        if not self._is_spread:
            rows, found = store.gather(self.name, keys)
            return rows.numpy(), found.numpy()
        own = store.owners(self.name, keys) == store.comm.rank
        rows, found = np.zeros((keys.size, self.dim), np.float32), np.zeros(keys.size, np.int32)
        own_rows, own_found = store.gather(self.name, keys[own])
        rows[own], found[own] = own_rows.numpy(), own_found.numpy()
        # Of each row there is one part that is not 0.
        return self._summed(rows, "rows"), self._summed(found, "found") > 0

    def _summed(self, values: Any, what: str) -> np.ndarray:
        name = f"slipstream.table.{what}"
        return self.store.comm.sum(tf.constant(values), "control", name).numpy()

    def _writable(self) -> Any:
        if not self.store.writes_rows:
            place = f"table {self.name!r}, which is changed"
            raise invalid("store", type(self.store).__name__, place, _WRITABLE)
        return self.store


def checked_keys(keys: Any) -> np.ndarray:
    """Returns int64 [n]; unsigned ones keep their bits, and texts are hashed as layers do."""
    found = np.asarray(keys)
    if found.size == 0 and found.ndim == 1:
        return np.empty(0, np.int64)
    if found.ndim == 1 and found.dtype.kind in "US":
        return hash_texts(tf.constant(found)).numpy()
    if found.ndim != 1 or found.dtype.kind not in "iu":
        told = f"{found.dtype.name} {list(found.shape)}"
        raise invalid("keys", told, "the rows of a table", "integers or texts [n]")
    return found.astype(np.int64)


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
