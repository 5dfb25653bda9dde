"""What all stores of tables in SOK share: each row is on the rank that SOK puts its key on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.errors import invalid
from slipstream_tf.stores.base import UpdatedElsewhere
from slipstream_tf.stores.sok.table import SokTable


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

    @property
    def least_accesses(self) -> float:
        """Decayed accesses from which a copy on every rank is less to send than single rows."""
        return 2.0 * self._ranks

    def _everyones(self, found: SokTable, keys: np.ndarray) -> tuple[tf.Tensor, tf.Tensor]:
        """Gives all ranks the keys, int64 [n], and rows, as SOK has them, that they own."""
        own, name = found.own(keys), f"slipstream.sok.frozen.{found.name}"
        everyones = self.comm.gather(tf.constant(own, tf.int64), "keys", f"{name}.keys")
        return everyones, self.comm.gather(found.read(own), "rows", f"{name}.rows")
