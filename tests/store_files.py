"""Stores with one table "t", saved and restored without a job.

`SokLikeStore` replaces a store of a table in SOK. It needs neither SOK's code nor a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import Table, initializers, optimizers
from slipstream_tf.checkpoint import store_parts, table_parts, table_state
from slipstream_tf.checkpoint.manifest import Manifest
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.tables.base import SavedStore

TABLE = Table("t", 2, initializer=initializers.RandomUniform(seed=4))
RULE = optimizers.Adagrad(0.1, 0.5)
SPECS = [FeatureSpec("t", "t", "sum", padding_key=None)]
DEFERS = UpdatePolicy("defer", "interval", max_age=1000, max_rows=100)


class SokLikeStore(SavedStore):
    """One rank's shard of a table, in the layout of SOK's stores.

    Rows are distributed by key modulo the number of ranks. Access counts are exported separately.
    """

    is_in_sok = True
    is_spread = True

    def __init__(
        self, rank: int, ranks: int, defers_at_owners: bool = False, optimizer: Any = RULE
    ) -> None:
        self.rank, self.ranks, self.defers_at_owners = rank, ranks, defers_at_owners
        self.tables, self.optimizer = (TABLE,), optimizer
        self.learning_rate = tf.Variable(0.1)
        self.contents: dict[str, np.ndarray] = {}
        self.accesses = {"keys": np.empty(0, np.int64), "counts": np.empty(0, np.float32)}
        self.deferred: dict[str, Any] = {}
        self.policies: list[UpdatePolicy] = []
        self.flushed = 0

    def fill(self, keys: Sequence[int], powers: Sequence[float] = ()) -> SokLikeStore:
        """Allocates this rank's rows, with access counts and deferred gradients.

        All ranks have accessed all keys. Sums are deferred for some keys only: for keys of this
        rank if `defers_at_owners` is set, else for any keys.
        """
        everyones = np.array(keys, np.int64)
        own = everyones[everyones % self.ranks == self.rank]
        values = (own[:, None] + np.array([0.0, 0.5])).astype(np.float32)
        self.contents = {
            **{"keys": own, "rows": values, "slots": values + 7, "trained": values - 1},
            **{"counts": np.zeros(own.size, np.float32), "last_used": np.empty(0, np.int64)},
            **{"steps": np.array([5, 6]), "powers": np.array(powers, np.float32)},
        }
        counts = (1.0 + self.rank + everyones % 3).astype(np.float32)
        self.accesses = {"keys": everyones, "counts": counts}
        deferred = (own if self.defers_at_owners else everyones)[:: 3 + self.rank]
        self.deferred = {
            **{"keys": deferred, "ages": np.arange(deferred.size)[::-1].copy()},
            **{"ranks": np.zeros(deferred.size, np.int32), "learning_rate": np.float32(0.1)},
            "sums": np.stack([deferred + 0.25, -deferred - 1.0 - self.rank], 1).astype(np.float32),
        }
        return self

    def owners(self, table: str, keys: np.ndarray) -> np.ndarray:
        return keys % self.ranks

    def reserved_keys(self, table: str) -> tuple[int, ...]:
        return (-4, -3, -2, -1)

    def export_table(self, table: str, flush: bool = True) -> dict[str, np.ndarray]:
        assert not flush
        return dict(self.contents)

    def import_table(self, table: str, contents: dict[str, np.ndarray]) -> None:
        self.contents = contents

    def export_accesses(self, table: str) -> dict[str, np.ndarray]:
        return self.accesses

    def import_accesses(self, table: str, accesses: dict[str, np.ndarray]) -> None:
        self.accesses = accesses

    def export_deferred(self, table: str) -> dict[str, Any]:
        return dict(self.deferred)

    def import_deferred(self, table: str, contents: dict[str, Any]) -> None:
        self.deferred = contents

    def policy_of(self, table: str) -> UpdatePolicy:
        return self.policies[-1] if self.policies else UpdatePolicy()

    def set_update_policy(self, table: str, policy: UpdatePolicy) -> None:
        self.policies.append(policy)

    def flush(self) -> None:
        self.flushed += 1


def save(folder: Path, stores: Sequence[Any], placement: str, writer: int = 0) -> Manifest:
    """Writes the table files of a job.

    Rank `writer` writes the rows of a replicated table.
    """
    (folder / "rank-0").parent.mkdir(exist_ok=True)
    entries: list[dict[str, Any]] = []
    for number, store in enumerate(stores):
        rank = store_parts.Rank(number, len(stores), placement)
        (part,) = table_parts.cut(store, rank, writers={"t": writer})
        (folder / f"rank-{number}").mkdir()
        part.write(folder / store_parts.file_name(number, 0), "this", number)
        entries.append(part.entry())
    described = {**entries[0], "rows": sum(entry["rows"] for entry in entries)}
    return Manifest("this", 1, len(stores), placement, [described])


def restore(
    folder: Path,
    manifest: Manifest,
    stores: Sequence[Any],
    placement: str,
    policy: UpdatePolicy = DEFERS,
) -> None:
    """Restores the files into the stores of another job."""
    for number, store in enumerate(stores):
        rank = store_parts.Rank(number, len(stores), placement)
        ready = store_parts.prepare(folder, manifest, store, rank)
        table_state.replace(store, ready)
        store.set_update_policy("t", policy)
        table_state.replace_replicas(store, ready, is_in_window=True)
        table_state.defer(store, ready)
