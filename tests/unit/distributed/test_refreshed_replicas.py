"""Refreshed replicas of hot rows: never further from their rows than they may be, and cheap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from engine_settings import engine_arguments, engine_settings

from slipstream_tf import Slipstream, Table, initializers, optimizers
from slipstream_tf.distributed import ReplicatedStore, ShardedStore, SingleProcess
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.saturation.tracker import SaturationTracker

TABLES = [
    Table("a", 4, initializer=initializers.RandomUniform(seed=1)),
    Table("b", 3, initializer=initializers.RandomUniform(seed=2)),
]
SPECS = [FeatureSpec("a", "a"), FeatureSpec("b", "b")]
KEYS, BATCH = 40, 24


def batch(rank: int, step: int, size: int = BATCH) -> Any:
    """A rank's keys of a step."""
    random = np.random.default_rng([rank, step])
    keys = (random.zipf(1.4, (size, 2)) % KEYS).astype(np.int64)
    return pack({"a": tf.constant(keys[:, 0]), "b": tf.constant(keys[:, 1])}, SPECS)


def everything() -> Any:
    keys = tf.range(KEYS, dtype=tf.int64)
    return pack({"a": keys, "b": keys}, SPECS)


def make(comm: Any, movement: float | None = None, **settings: Any) -> ShardedStore:
    store = ShardedStore(TABLES, optimizers.Adagrad(0.1), comm, **settings)
    if movement is not None:
        store.keep_replicas(movement)
    return store


def rows_of_owners(store: ShardedStore, table: str) -> np.ndarray:
    """All rows of a table, as their owners have them: [KEYS, dim]."""
    keys = np.arange(KEYS)
    rows, _ = store.gather(table, keys)
    mine = np.where((store.owners(table, keys) == store.comm.rank)[:, None], rows.numpy(), 0)
    return store.comm.sum(mine, "control", "check").numpy()


def train(comm: Any, store: ShardedStore, steps: int, evaluates: bool = False) -> list[Any]:
    """Trains; the hot rows change every 10 steps. Returns pooled rows of all lookups."""
    seen = []
    for step in range(steps):
        if store.refresh_movement is not None and step % 10 == 5:
            hot = np.arange(step % 3, KEYS, 2)
            store.set_replicated({"a": hot, "b": hot[:4]})
        pooled, plan = store.lookup(batch(comm.rank, step), SPECS, training=True)
        seen += pooled
        store.apply_gradients(plan, [rows - 0.02 * step for rows in pooled])
        if evaluates and step % 7 == 3:
            seen += store.lookup(batch(comm.rank, step + 1000), SPECS, training=False)[0]
    return seen


@pytest.mark.parametrize("few", [False, True])
def test_without_movement_every_bit_is_as_without_replicas(run_as_ranks: Any, few: bool) -> None:
    settings: dict[str, Any] = {"cache_bytes": 4800 if few else 1 << 20}

    def program(comm: Any) -> Any:
        plain, refreshing = make(comm, **settings), make(comm, 0.0, **settings)
        policy = UpdatePolicy("defer", movement=0.02, max_age=10, max_rows=100)
        for store in (plain, refreshing):
            store.set_update_policy("a", policy)
        for one, other in zip(
            train(comm, plain, 40, True), train(comm, refreshing, 40, True), strict=True
        ):
            np.testing.assert_array_equal(one, other)
        for table in ("a", "b"):
            one, other = (s.export_table(table, flush=False) for s in (plain, refreshing))
            for name in ("keys", "rows", "slots", "counts"):
                np.testing.assert_array_equal(one[name], other[name], name)

    assert run_as_ranks(3, program) == [None] * 3


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_replicas_are_within_the_movement_and_evaluations_exact(
    run_as_ranks: Any, wire: str
) -> None:
    movement = 0.05
    rounding = 0.0 if wire == "float32" else 2.0**-8

    def program(comm: Any) -> Any:
        store = make(comm, movement, wire_dtype=wire)
        furthest = 0.0
        for step in range(40):
            if step % 10 == 5:
                store.set_replicated({"a": np.arange(0, KEYS, 2)})
            inputs = batch(comm.rank, step)
            now = rows_of_owners(store, "a")[inputs.keys[0].numpy()]
            pooled, plan = store.lookup(inputs, SPECS, training=True)
            furthest = max(furthest, float(np.abs(pooled[0].numpy() - now).max()))
            store.apply_gradients(plan, [rows - 0.02 * step for rows in pooled])
            if step == 32:
                exact = store.lookup(everything(), SPECS, training=False)[0][0].numpy()
                now = rows_of_owners(store, "a")
                np.testing.assert_allclose(exact, now, atol=rounding, rtol=0)
        return furthest

    for furthest in run_as_ranks(2, program):
        assert 0.2 * movement < furthest <= movement + rounding, furthest


def test_rows_that_rest_are_sent_once(run_as_ranks: Any) -> None:
    def program(comm: Any) -> Any:
        store = make(comm, 0.0)
        # A row that is as it starts is told by its key.
        pooled, plan = store.lookup(everything(), SPECS, training=True)
        store.apply_gradients(plan, [tf.ones_like(rows) for rows in pooled])
        store.set_replicated({"a": np.arange(KEYS), "b": np.arange(KEYS)})
        sent = []
        for _ in range(3):
            before = comm.sent["rows"]
            store.lookup(everything(), SPECS, training=True)
            sent.append(comm.sent["rows"] - before)
        store.set_replicated({"a": np.arange(KEYS)})
        for _ in range(2):
            before = comm.sent["rows"]
            store.lookup(everything(), SPECS, training=True)
            sent.append(comm.sent["rows"] - before)
        own = [int((store.owners(t.name, np.arange(KEYS)) == comm.rank).sum()) for t in TABLES]
        # Two bits a row.
        bits = sum(2 * -(-keys // 8) for keys in own)
        rows = sum(keys * 4 * table.dim for keys, table in zip(own, TABLES, strict=True))
        row_bytes_of_b = own[1] * 4 * TABLES[1].dim
        return np.array(sent) - bits, rows, row_bytes_of_b

    for sent, rows, of_b in run_as_ranks(2, program):
        # What is published no more is sent at every step.
        assert sent.tolist() == [rows, 0, 0, of_b, of_b]


def test_ranks_need_a_store_that_refreshes_replicas(run_as_ranks: Any) -> None:
    def program(comm: Any) -> Any:
        with pytest.raises(ValueError, match="None for set_replicated of a ShardedStore"):
            make(comm).set_replicated({"a": np.arange(3)})
        with pytest.raises(ValueError, match="`movement`: -1"):
            make(comm, -1.0)
        trained = make(comm)
        trained.lookup(batch(comm.rank, 0), SPECS, training=True)
        with pytest.raises(ValueError, match=r"`movement`: 0.1.*before the first lookup"):
            trained.keep_replicas(0.1)
        replicated = ReplicatedStore(TABLES, optimizers.SGD(0.1), comm)
        with pytest.raises(ValueError, match="'ReplicatedStore' for keep_replicas"):
            replicated.keep_replicas(0.1)
        assert replicated.refresh_movement is None

    assert run_as_ranks(2, program) == [None] * 2
    # One rank sends nothing.
    alone = make(SingleProcess(), 0.1)
    alone.set_replicated({"a": np.arange(3)})
    assert alone.replicated_keys("a") == 0


@pytest.mark.parametrize(
    "policies, settings, replicates",
    [
        (("defer_gradients", "cache_rows"), {"defer_movement": 0.01}, True),
        (("cache_rows",), {}, True),
        (("defer_gradients", "cache_rows"), {"defer_movement": 0.01, "dry_run": True}, False),
    ],
)
def test_the_engine_refreshes_hot_rows_after_the_warm_up(
    run_as_ranks: Any, policies: tuple[str, ...], settings: dict[str, Any], replicates: bool
) -> None:
    def program(comm: Any) -> Any:
        store = make(comm, 0.1)
        settled = engine_settings(
            *policies, window_steps=4, warmup=8, cache_movement=0.1, **settings
        )
        tracker = SaturationTracker(store, settled, SPECS, comm)
        replicated = []
        for step in range(12):
            _, plan = store.lookup(batch(comm.rank, step), SPECS, training=True)
            store.apply_gradients(plan, [tf.zeros([BATCH, t.dim]) for t in TABLES])
            tracker.step()
            replicated.append(sum(store.replicated_keys(table.name) for table in TABLES))
        return replicated

    for replicated in run_as_ranks(2, program):
        assert replicated[:7] == [0] * 7
        assert all(count > 0 for count in replicated[7:]) if replicates else not any(replicated)


@pytest.mark.parametrize("placement", ["sharded", "replicated"])
def test_slipstream_has_the_layer_keep_replicas(run_as_ranks: Any, placement: str) -> None:
    def program(comm: Any) -> Any:
        rule = optimizers.SGD(0.1)
        layer = EmbeddingCollection(TABLES, rule, comm=comm, placement=placement)
        refreshed = engine_arguments("cache_rows", cache_movement=0.1)
        if placement == "replicated":
            for settings in (refreshed, engine_arguments("cache_rows")):
                with pytest.raises(ValueError, match=r"'CacheRows'.*only ranks with sharded"):
                    Slipstream(layer, **settings)
            return
        Slipstream(layer, **engine_arguments("defer_gradients", "cache_rows"))
        assert layer.store.refresh_movement is None, "read-only ones are chosen by drift"
        Slipstream(layer, **refreshed)
        assert layer.store.refresh_movement == 0.1

    assert run_as_ranks(2, program) == [None] * 2
