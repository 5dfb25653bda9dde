"""The rows of one table, for people: read, write, remove, list.

In: a store and a table's name, or a layer's `table(name)`. Out: NumPy arrays by key.
"""

from typing import Any

import numpy as np
import tensorflow as tf

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
        names = [table.name for table in store.tables]
        if name not in names:
            allowed = "one of " + ", ".join(map(repr, names))
            raise invalid("table", name, "an embedding store", allowed)
        self._index = names.index(name)
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
            keys = np.sort(self._everyones(keys, "keys"))
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

    def _everyones(self, values: np.ndarray, what: str) -> np.ndarray:
        name = f"slipstream.table.{what}"
        return self.store.comm.gather(tf.constant(values), "control", name).numpy()

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
