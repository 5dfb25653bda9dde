"""What all stores of tables in SOK share: each row is on the rank that SOK puts its key on.

What SOK sends for this package is counted beside what the communicator sends itself. Of a key that
another rank owns 8 bytes go there, its row comes back, and its gradient goes there. This rank
counts all three: the row, which the other rank sends, with the one that requested it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.errors import invalid
from slipstream_tf.stores.base import UpdatedElsewhere
from slipstream_tf.stores.sok.table import SokTable

KEY_BYTES = 8
FLOAT_BYTES = 4


class SpreadStore(UpdatedElsewhere):
    """Base of the stores whose rows are in SOK."""

    is_in_sok = True
    is_spread = True
    _opened: Mapping[str, SokTable]

    def _require_ranks(self, ranks: int) -> None:
        """Raises ValueError unless the store was given as many ranks as SOK has."""
        if ranks != self._ranks:
            allowed = f"distributed.init(): SOK has {ranks} ranks"
            raise invalid("comm", self.comm, type(self).__name__, allowed)

    @property
    def _ranks(self) -> int:
        return 1 if self.comm is None else self.comm.size

    def _table(self, table: str) -> SokTable:
        return self._opened[self._require(table)]

    def owners(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns int64 [n]: the rank that SOK puts each key, int64 [n], on."""
        return self._table(table).owners(np.asarray(keys, np.int64))

    def size(self, table: str) -> int:
        """Returns the number of rows of a table on this rank."""
        return self._table(table).size()

    def gather(self, table: str, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads rows of this rank.

        Args:
            table: name of the table.
            keys: int64 [n], keys that this rank owns.

        Returns:
            rows float32 [n, dim] and found bool [n], all true: SOK makes a row that is missing.
        """
        keys = np.asarray(keys, np.int64)
        return self._read(self._table(table), keys), tf.ones([keys.size], tf.bool)

    def _read(self, found: SokTable, keys: np.ndarray) -> tf.Tensor:
        return found.read(keys)

    def reserved_keys(self, table: str) -> tuple[int, ...]:
        """Returns the keys that SOK's table uses itself, and can have no row of."""
        return self._table(table).reserved_keys

    def num_keys(self, table: str) -> int | None:
        """Returns how many keys, from 0, a table has on all ranks; None: any number of any."""
        return self._table(table).num_keys

    def _everyones(self, found: SokTable, keys: np.ndarray) -> tuple[tf.Tensor, tf.Tensor]:
        """Gives all ranks the keys, int64 [n], and rows, as SOK has them, that they own."""
        own, name = found.own(keys), f"slipstream.sok.frozen.{found.name}"
        everyones = self.comm.gather(tf.constant(own, tf.int64), "keys", f"{name}.keys")
        return everyones, self.comm.gather(found.read(own), "rows", f"{name}.rows")

    def _lookup(self, found: SokTable, keys: tf.Tensor) -> tf.Tensor:
        """Looks rows up as `SokTable.lookup`; counts what is sent, in the backward pass, too."""
        rows = found.lookup(keys)
        if self._ranks == 1:
            return rows
        with tf.device("CPU:0"):
            others = tf.math.count_nonzero(found.spread(keys) != found.rank)
            row_bytes = others * (FLOAT_BYTES * found.dim)
            self._count_sent(others * KEY_BYTES, "keys")
            self._count_sent(row_bytes, "rows")

        @tf.custom_gradient
        def counted(values: tf.Tensor) -> Any:
            def backward(upstream: tf.Tensor) -> tf.Tensor:
                self._count_sent(row_bytes, "gradients")
                return upstream

            return tf.identity(values), backward

        return counted(rows)

    def _count_sent(self, nbytes: Any, kind: str) -> None:
        """Counts bytes, int64, of a kind, if there are ranks to send to."""
        if self._ranks > 1:
            self.comm.count_sent(nbytes, kind, f"slipstream.sok.{kind}")
