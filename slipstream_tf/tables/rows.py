"""Read, write, remove and list the rows of one table.

A `TableRows` maps keys to NumPy arrays. Get it with a layer's `table(name)`. `from_embedding` fills
a table from a matrix, and `rename_keys` changes the keys of rows.
"""

import contextlib
import numbers
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

_WRITABLE = "a NativeStore, a ReplicatedStore or a ShardedStore"


class TableRows:
    """The rows of one table, for use outside of training steps.

    Methods run eagerly and cannot be part of a graph.

    In a single process, deferred gradients are applied before rows are read, as in evaluation
    lookups. With multiple ranks, call the store's `flush` first.

    Note: with multiple ranks, `write`, `remove` and `clear` are collectives: every rank must call
    them with the same arguments. For sharded tables all methods except `shrink` are collectives.

    Example:

    >>> table = layer.table("items")
    >>> vectors = table.read([42, 43])  # float32 [2, dim]
    >>> table.write([42], vectors[1:])

    Attributes:
        store: The store that has the table.
        name: Name of the table.
        dim: Number of values per row.
    """

    def __init__(self, store: SavedStore, name: str):
        """Selects a table of a store.

        Raises:
            ValueError: The store has no table of this name.
        """
        self.store, self.name = store, name
        self._index = store.index_of(name)
        self.dim = store.tables[self._index].dim

    def __repr__(self) -> str:
        return f"<TableRows of table {self.name!r} with dim={self.dim} in {self.store!r}>"

    def read(self, keys: Any) -> np.ndarray:
        """Returns the rows of keys without counting accesses.

        No rows are created, except by SOK, which creates the missing rows.

        Args:
            keys: Integers or strings, [n].

        Returns:
            float32 [n, dim]. A key without a row returns its initial row.
        """
        return self._gather(keys)[0]

    def has(self, keys: Any) -> np.ndarray:
        """Returns whether each key has a row, bool [n].

        Replicated tables on multiple ranks return True for every key.

        Args:
            keys: Integers or strings, [n].

        Raises:
            ValueError: The table is stored in SOK, which does not report missing keys.
        """
        if self.store.is_in_sok:
            place = f"`has` of table {self.name!r}"
            allowed = "a store outside SOK, because SOK does not report missing keys"
            raise invalid("store", type(self.store).__name__, place, allowed)
        return self._gather(keys)[1]

    def write(self, keys: Any, rows: Any) -> None:
        """Replaces the values of rows and creates missing rows.

        Existing rows keep their optimizer slots, access counts and flags, but lose their deferred
        gradients. A table with a capacity evicts other rows to make room for new ones.

        Args:
            keys: Distinct integers or strings, [n].
            rows: float32 [n, dim], finite.

        Raises:
            ValueError: The shapes do not match, or the store does not support writing.
            tf.errors.InvalidArgumentError: A key occurs twice, or a value is not finite.
        """
        keys = checked_keys(keys)
        with np.errstate(over="ignore"):  # The op reports values that overflow float32.
            values = np.asarray(rows, np.float32)
        if values.shape != (keys.size, self.dim):
            allowed = f"the shape [{keys.size}, {self.dim}] with one row per key"
            raise invalid("rows", list(values.shape), f"table {self.name!r}", allowed)
        self._writable().write_rows(self.name, keys, values)

    def remove(self, keys: Any) -> int:
        """Removes rows with their slots, access counts, flags and deferred gradients.

        If a removed key is looked up again in training, it starts as a new key.

        Args:
            keys: Integers or strings, [n]. Keys without a row are ignored.

        Returns:
            The number of removed rows; for sharded tables, summed over all ranks.
        """
        return self._writable().remove_rows(self.name, checked_keys(keys))

    def clear(self) -> None:
        """Removes all rows with their slots, access counts, flags and deferred gradients.

        The memory of the rows is returned to the system. Accesses of keys that have no row yet are
        no longer counted for `Retention.admit_after`. The learning rate and the number of steps do
        not change.
        """
        self._writable().clear_rows(self.name)

    def shrink(self) -> int:
        """Returns the memory of removed, evicted and expired rows to the system.

        Without this call, the table keeps the memory for new rows. The remaining rows move to new
        memory and therefore need memory twice for a moment. With `Storage.spill` the table does not
        change, because its memory is limited. Other threads can train meanwhile; their lookups wait
        until the rows have moved.

        Returns:
            The number of bytes that this rank returned.
        """
        return self._writable().shrink_rows(self.name)

    def keys(self) -> np.ndarray:
        """Returns the keys that have a row, int64 [n], ascending."""
        keys = self.store.keys_of(self.name)
        if self._is_spread:
            own = tf.constant(keys)
            keys = np.sort(self.store.comm.gather(own, "control", "slipstream.table.keys").numpy())
        return keys

    def __len__(self) -> int:
        """Returns the number of rows."""
        size = self.store.size(self.name)
        return int(self._summed(np.int64(size), "size")) if self._is_spread else size

    @property
    def optimizer(self) -> SparseOptimizer | None:
        """The table's sparse optimizer, or None for an external optimizer."""
        return self.store.optimizer_of(self.name)

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the next update.

        Assign a number to change it. Tables without an `optimizer` setting share one rate and
        change together.
        """
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
        # Each row is nonzero on at most one rank, so that the sum over ranks is the row.
        return self._summed(rows, "rows"), self._summed(found, "found") > 0

    def _summed(self, values: Any, what: str) -> np.ndarray:
        name = f"slipstream.table.{what}"
        return self.store.comm.sum(tf.constant(values), "control", name).numpy()

    def _writable(self) -> Any:
        if not self.store.writes_rows:
            place = f"a change of table {self.name!r}"
            raise invalid("store", type(self.store).__name__, place, _WRITABLE)
        return self.store


def checked_keys(keys: Any) -> np.ndarray:
    """Returns keys as int64 [n].

    Args:
        keys: Integers or strings [n]: an array, also of Python objects, a list or a tensor.
            Unsigned integers keep their bits. Strings are hashed in the same way as in layers.

    Raises:
        ValueError: The keys have another dtype or shape.
    """
    found = np.asarray(keys)
    if found.size == 0 and found.ndim == 1:
        return np.empty(0, np.int64)
    if found.ndim == 1 and found.dtype == object:
        # For example a string tensor or a column of pandas.
        values = found.tolist()
        if all(isinstance(value, (str, bytes)) for value in values):
            return hash_texts(tf.constant(values)).numpy()
        if all(isinstance(v, numbers.Integral) and not isinstance(v, bool) for v in values):
            with contextlib.suppress(OverflowError):
                found = np.array(values, np.int64 if max(values) < 1 << 63 else np.uint64)
    if found.ndim == 1 and found.dtype.kind in "US":
        return hash_texts(tf.constant(found)).numpy()
    if found.ndim != 1 or found.dtype.kind not in "iu":
        details = f"{found.dtype.name} {list(found.shape)}"
        raise invalid("keys", details, "the rows of a table", "integers or strings of shape [n]")
    return found.astype(np.int64)


def from_embedding(table: TableRows, weights: Any, keys: Any = None) -> int:
    """Writes a matrix of weights to a table.

    The optimizer slots of new rows get their initial values. Existing rows keep their slots.

    Example:

    >>> layer = slip.keras.Embedding(10, 2, optimizer=slip.optimizers.SGD(0.1))
    >>> slip.tables.from_embedding(layer.table("embedding"), np.ones([3, 2], np.float32))
    3

    Args:
        table: The table, from `layer.table(name)`.
        weights: A built `keras.layers.Embedding`, or a matrix, float32 [n, dim].
        keys: Distinct integers or strings [n], the key of each row of the matrix. Defaults to 0, 1,
            ..., n - 1, the indices of a `keras.layers.Embedding`.

    Returns:
        The number of written rows.

    Raises:
        ValueError: The layer has no weights yet, or the shapes do not match.
    """
    if getattr(weights, "built", True) is False:
        allowed = "a built layer. Call it once, or load its weights"
        raise invalid("weights", weights, f"table {table.name!r}", allowed)
    matrix = getattr(weights, "embeddings", weights)
    variable = None if isinstance(matrix, np.ndarray) else _compat.tensorflow_variable(matrix)
    rows = np.asarray(matrix if variable is None else variable.numpy(), np.float32)
    if rows.ndim != 2 or rows.shape[1] != table.dim:
        allowed = f"a shape [n, {table.dim}]"
        raise invalid("weights", list(rows.shape), f"table {table.name!r}", allowed)
    table.write(np.arange(len(rows)) if keys is None else keys, rows)
    return len(rows)


def rename_keys(table: TableRows, new_keys: Mapping[int, int], keep_others: bool = False) -> int:
    """Changes the keys of rows, for example after a change of vocabulary.

    Rows keep their optimizer slots and access counts. Row flags are cleared, and deferred gradients
    are applied first.

    Note: for replicated tables on multiple ranks, call the store's `flush` first, and then this
    function on all ranks with the same arguments.

    Example:

    >>> layer = slip.keras.Embedding(10, 2, optimizer=slip.optimizers.SGD(0.1))
    >>> table = layer.table("embedding")
    >>> _ = slip.tables.from_embedding(table, np.ones([3, 2], np.float32))
    >>> slip.tables.rename_keys(table, {0: 7, 1: 8})
    2
    >>> table.keys().tolist()
    [7, 8]

    Args:
        table: The table, from `layer.table(name)`.
        new_keys: Maps old keys to distinct new keys. Old keys without a row are ignored.
        keep_others: If True, rows of keys not in `new_keys` keep their key. If False, they are
            removed.

    Returns:
        The number of rows that had a key in `new_keys`.

    Raises:
        ValueError: Two rows would have the same key, the table is sharded over multiple ranks, or
            its store does not support writing.
        RuntimeError: There are multiple ranks, and this rank has deferred gradients.
    """
    store, place = table.store, f"table {table.name!r}"
    if not store.writes_rows or (store.is_spread and store.comm.size > 1):
        allowed = (
            "a native store that is not sharded over ranks. Load a sharded table in a single "
            "process to rename its keys"
        )
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
        allowed = "distinct new keys that no other row has"
        raise invalid("new_keys", int(found[times > 1][0]), place, allowed)
    order = np.argsort(keys)
    contents["keys"] = keys[order]
    for name in ("rows", "slots", "counts", "last_used"):
        if len(contents[name]):
            contents[name] = contents[name][stays][order]
    store.import_table(table.name, contents)
    if left:
        logging.info(
            "rename_keys removed %d rows of %s, because their keys are not in new_keys. Pass "
            "keep_others=True to keep such rows.",
            *(left, place),
        )
    return int(is_named.sum())
