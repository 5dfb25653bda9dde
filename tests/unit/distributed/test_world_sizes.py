"""Tests of restoring checkpoints at other world sizes and placements.

The ranks are threads of this process. The tests check that no row, slot or deferred gradient is
lost or duplicated, that the engine has the same state, and that the ranks continue to train.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from rank_simulation import simulate_ranks
from thread_jobs import GLOBAL_BATCH, KEYS, SPECS, TABLES, Job, Threads

from slipstream_tf import Retention, Storage, Table, optimizers
from slipstream_tf.checkpoint import CheckpointMismatchError
from slipstream_tf.checkpoint.manifest import sealed
from slipstream_tf.distributed import CheckpointManager, SingleProcess
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.tables import NativeStore, VariableStore


def start(size: int, placement: str, directory: Path, begin: int, end: int, saves: bool) -> Any:
    """Restores a job if possible, trains, and optionally saves.

    Returns:
        For each rank, the restored and the final contents.
    """

    on_disk = Storage(memory="4KB", spill=str(directory)) if placement.endswith(ON_DISK) else None

    def work(comm: Any) -> Any:
        job = Job(comm, placement.removesuffix(ON_DISK), directory, storage=on_disk)
        last = job.checkpoints.restore()
        assert (last is None) == (begin == 0)
        assert last is None or last.step == begin
        restored = job.found()
        job.train(begin, end)
        if saves:
            job.checkpoints.save(end)
            job.checkpoints.wait()
        return restored, job.found()

    return Threads(size).run(work) if size > 1 else [work(SingleProcess())]


def total(ranks: list[dict[str, Any]], placement: str, table: str) -> dict[int, Any]:
    """Returns key -> (row, slots) and checks that keys are unique."""
    parts = ranks if placement.startswith("sharded") else ranks[:1]
    rows: dict[int, Any] = {}
    for part in parts:
        contents = part[table]
        for key, row, slots in zip(
            contents["keys"], contents["rows"], contents["slots"], strict=True
        ):
            assert key not in rows
            rows[int(key)] = (row.tobytes(), slots.tobytes())
    return rows


def deferred_sums(ranks: list[dict[str, Any]], table: str) -> dict[int, np.ndarray]:
    """Returns key -> the sum of the deferred gradients of all ranks."""
    sums: dict[int, np.ndarray] = {}
    for part in ranks:
        deferred = part[f"{table} held"]
        for key, values in zip(deferred["keys"], deferred["sums"], strict=True):
            sums[int(key)] = sums.get(int(key), 0.0) + values
    return sums


ON_DISK = ", on disk"
CHAINS = (
    (("sharded", 2), ("native", 1), ("sharded", 3)),
    (("replicated", 2), ("native", 1), ("replicated", 3)),
    (("native", 1), ("sharded", 2), ("replicated", 2)),
    (("sharded", 3), ("sharded", 2), ("replicated", 3)),
    (("sharded, on disk", 2), ("native, on disk", 1), ("sharded, on disk", 3), ("native", 1)),
    (("replicated, on disk", 2), ("replicated, on disk", 3), ("sharded, on disk", 2)),
    (("native", 1), ("replicated, on disk", 2), ("native, on disk", 1), ("replicated", 2)),
)


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_changing_world_size_keeps_all_state(chain: Any, tmp_path: Path) -> None:
    before, step = None, 0
    for placement, size in chain:
        ranks = start(size, placement, tmp_path, step, step + 10, saves=True)
        if before is not None:
            was, old_placement = before
            now = [restored for restored, _ in ranks]
            for table in ("a", "b"):
                rows, old_rows = total(now, placement, table), total(was, old_placement, table)
                sums, old_sums = deferred_sums(now, table), deferred_sums(was, table)
                # A key with only a deferred gradient gets its row when the gradient is applied.
                assert old_rows.items() <= rows.items() and set(rows) <= set(old_rows) | set(sums)
                assert set(sums) == set(old_sums) and old_sums
                for key, values in old_sums.items():
                    np.testing.assert_allclose(sums[key], values, rtol=1e-6)
                for part in now:
                    states, old = part[f"{table} states"], was[0][f"{table} states"]
                    for name in ("keys", "states", "drift"):
                        np.testing.assert_array_equal(getattr(states, name), getattr(old, name))
                    assert part["threshold"] == was[0]["threshold"] and part["reports"] == step // 4
        before, step = ([last for _, last in ranks], placement), step + 10


# Rows move far enough that gradients are deferred and sent.
MOVING: dict[str, Any] = {
    **{"batch": 48, "defer_movement": 0.02, "defer_max_age": 30, "window_steps": 5},
}
MASKED: dict[str, Any] = {
    **{"policies": ("mask_gradients",), "fraction": 0.9},
    **{"defer_movement": None, "defer_max_age": None},
}
WAYS: dict[str, dict[str, Any]] = {
    "replicated": {"placement": "replicated"},
    "defer": {},
    "moving": MOVING,
    "evaluated": {**MOVING, "evaluates": True},
    "bounded": {**MOVING, "evaluates": True, "capacity": 17},
    "few replicas": {**MOVING, "evaluates": True, "cache_bytes": 5000},
    "masked": {**MOVING, **MASKED, "batch": 24, "capacity": 13},
}


@pytest.mark.parametrize("way", WAYS)
def test_same_number_of_ranks_continues_identically(way: str, tmp_path: Path) -> None:
    settings = dict(WAYS[way])
    placement, batch = settings.pop("placement", "sharded"), settings.pop("batch", GLOBAL_BATCH)
    evaluates = settings.pop("evaluates", False)

    def run(directory: Path, begin: int, end: int, stop: int) -> list[Any]:
        """Trains steps; saves at `stop`, which may be inside a window."""

        def work(comm: Any) -> Any:
            job = Job(comm, placement, directory, **settings)
            job.checkpoints.restore()
            for step in range(begin, end):
                job.train(step, step + 1, batch)
                if evaluates and step % 3 == 0:
                    job.evaluate()
            if end == stop:
                job.checkpoints.save(end)
                job.checkpoints.wait()
            replicas = 0
            if placement == "sharded":
                replicas = sum(job.store._replicas.size(table.name) for table in TABLES)
            statistics = [job.store.statistics(t.name) for t in TABLES]
            return {**job.found(), "evicted": sum(s.evicted_rows for s in statistics)}, replicas

        return Threads(2).run(work)

    straight = run(tmp_path / "a", 0, 26, -1)
    stopped = run(tmp_path / "b", 0, 13, 13)
    resumed = run(tmp_path / "b", 13, 26, -1)
    for (one, _), (other, _), (_, replicas) in zip(straight, resumed, stopped, strict=True):
        assert (replicas > 0) == (placement == "sharded"), replicas
        assert (one["evicted"] > 0) == (settings.get("capacity") is not None), one["evicted"]
        assert one["threshold"] == other["threshold"] and one["reports"] == other["reports"]
        for table in ("a", "b"):
            for part in (table, f"{table} held"):
                for name, values in one[part].items():
                    np.testing.assert_array_equal(values, other[part][name], f"{part} {name}")
            states, others = one[f"{table} states"], other[f"{table} states"]
            for field in dataclasses.fields(states):
                np.testing.assert_array_equal(*(getattr(s, field.name) for s in (states, others)))


def saved_native(directory: Path) -> dict[str, Any]:
    ((_, found),) = start(1, "native", directory, 0, 10, saves=True)
    return found


def test_native_tables_move_to_variables_and_back(tmp_path: Path) -> None:
    was = saved_native(tmp_path / "a")
    variables = {t.name: tf.Variable(tf.fill([KEYS, t.dim], 9.0)) for t in TABLES}
    store = VariableStore(variables)
    # Without an engine no gradients are deferred, and the restored ones are applied in the next
    # step.
    checkpoints = CheckpointManager(
        tmp_path / "a", tf.train.Checkpoint(), SingleProcess(), store, background=False
    )
    assert checkpoints.restore() is not None
    for table in TABLES:
        contents = was[table.name]
        np.testing.assert_array_equal(
            variables[table.name].numpy()[contents["keys"]], contents["rows"]
        )
        absent = np.setdiff1d(np.arange(KEYS), contents["keys"])
        assert (variables[table.name].numpy()[absent] == 9.0).all()
        counts = store.export_table(table.name)["counts"]
        np.testing.assert_array_equal(counts[contents["keys"]], contents["counts"])
        assert store.deferred_rows()[table.name] == len(was[f"{table.name} held"]["keys"]) > 0

    there = CheckpointManager(
        tmp_path / "b", tf.train.Checkpoint(), SingleProcess(), store, background=False
    )
    there.save(3)
    rule = optimizers.Adagrad(0.1, 0.25)
    back = NativeStore(TABLES, rule)
    found = CheckpointManager(
        tmp_path / "b", tf.train.Checkpoint(), SingleProcess(), back
    ).restore()
    assert found is not None and found.step == 3
    for table in TABLES:
        contents = back.export_table(table.name)
        np.testing.assert_array_equal(contents["keys"], np.arange(KEYS))
        assert contents["slots"].shape == (KEYS, table.dim)
    # Slots of rows without a deferred gradient have the initial value of the update rule.
    assert (contents["slots"] == 0.25).any()


def test_dry_run_sums_are_never_applied(tmp_path: Path) -> None:
    """A dry run has already applied the gradients in its sums."""
    job = Job(SingleProcess(), "native", tmp_path, dry_run=True)
    for part in range(3):
        # Use many keys, because a dry run samples one key in 16.
        keys = tf.range(400 * part, 400 * (part + 1), dtype=tf.int64)
        pooled, plan = job.store.lookup(pack({"a": keys, "b": keys}, SPECS), training=True)
        job.store.apply_gradients(plan, [tf.fill(rows.shape, 1e-3) for rows in pooled])
        job.tracker.step(4)
    was = job.found()
    assert len(was["a held"]["keys"])
    job.checkpoints.save(3)
    job.checkpoints.wait()
    # Without an engine the sums of the dry run are not applied.
    store = NativeStore(TABLES, optimizers.Adagrad(0.1, 0.0, 1e-8))
    CheckpointManager(tmp_path, tf.train.Checkpoint(), SingleProcess(), store).restore()
    for table in ("a", "b"):
        found = store.export_table(table)
        for column in ("keys", "rows", "slots"):
            np.testing.assert_array_equal(found[column], was[table][column])
    # With an engine the dry run continues.
    again = Job(SingleProcess(), "native", tmp_path, dry_run=True)
    again.checkpoints.restore()
    np.testing.assert_array_equal(again.found()["a held"]["keys"], was["a held"]["keys"])


def test_sums_of_simulated_ranks_are_merged_without_simulation(tmp_path: Path) -> None:
    job = Job(SingleProcess(), "native", tmp_path)
    simulate_ranks(job.store, 3)
    job.train(0, 10)
    was = job.found()
    assert len(set(was["a held"]["ranks"])) > 1
    job.checkpoints.save(10)
    job.checkpoints.wait()
    store = VariableStore({t.name: tf.Variable(tf.zeros([KEYS, t.dim])) for t in TABLES})
    CheckpointManager(tmp_path, tf.train.Checkpoint(), SingleProcess(), store).restore()
    for table in ("a", "b"):
        now = store.export_deferred(table)
        sums = deferred_sums([was], table)
        assert sorted(now["keys"]) == sorted(sums)
        for key, values in zip(now["keys"], now["sums"], strict=True):
            np.testing.assert_allclose(values, sums[int(key)], rtol=1e-6)
    # An engine without simulated ranks restores the sums over the ranks, too.
    other = Job(SingleProcess(), "native", tmp_path)
    other.checkpoints.restore()
    found = other.found()
    for table in ("a", "b"):
        assert other.tracker.update_policies[table].ranks == 1
        sums, now = deferred_sums([was], table), deferred_sums([found], table)
        assert set(now) == set(sums) and not found[f"{table} held"]["ranks"].any()
        for key, values in now.items():
            np.testing.assert_allclose(values, sums[key], rtol=1e-6)


def test_restore_replaces_deferred_gradients_with_rows(tmp_path: Path) -> None:
    """Deferred gradients of the live store must not reach restored rows."""
    store = VariableStore({"a": tf.Variable(tf.zeros([10, 2]))})
    checkpoints = CheckpointManager(
        tmp_path, tf.train.Checkpoint(), SingleProcess(), store, background=False
    )
    checkpoints.save(1)
    store.set_update_policy("a", UpdatePolicy("defer", "interval", max_age=100, max_rows=10))
    store.set_row_flags("a", [3], [1])
    gradients = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([3]), tf.constant([10, 2]))
    store.filter_gradient("a", gradients)
    assert store.deferred_rows() == {"a": 1}
    assert checkpoints.restore() is not None
    assert store.deferred_rows() == {"a": 0}


MISMATCHES: dict[str, tuple[Any, Any, str]] = {
    "dim": (
        (Table("a", 4), Table("b", 5)),
        optimizers.Adagrad(0.1),
        "table 'b' was saved with dim=3, but this program has dim=5",
    ),
    "tables": (
        (Table("a", 4), Table("c", 3)),
        optimizers.Adagrad(0.1),
        r"was saved with tables \['a', 'b'\], but this program has \['a', 'c'\]",
    ),
    "rule": (TABLES, optimizers.Adam(0.1), "the optimizer Adagrad, but this program uses Adam"),
    "capacity": (
        (Table("a", 4, retention=Retention(3)), Table("b", 3)),
        optimizers.Adagrad(0.1),
        "more than its capacity of 3",
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_restoring_other_tables_raises_and_changes_nothing(what: str, tmp_path: Path) -> None:
    saved_native(tmp_path)
    tables, rule, message = MISMATCHES[what]
    store = NativeStore(tables, rule)
    specs = [FeatureSpec(t.name, t.name, "sum") for t in tables]
    store.lookup(pack({t.name: tf.constant([99]) for t in tables}, specs), training=True)
    before = {t.name: store.export_table(t.name) for t in tables}
    with pytest.raises(CheckpointMismatchError, match=message):
        CheckpointManager(tmp_path, tf.train.Checkpoint(), SingleProcess(), store).restore()
    for name, contents in before.items():
        for column, values in contents.items():
            np.testing.assert_array_equal(values, store.export_table(name)[column])


@pytest.mark.parametrize("where", ["table-000", "table-001", "engine"])
@pytest.mark.parametrize("how", ["flipped", "cut", "missing", "of another"])
def test_damaged_file_leaves_store_unchanged(where: str, how: str, tmp_path: Path) -> None:
    saved_native(tmp_path)
    saved_native(tmp_path / "other")
    path = tmp_path / "checkpoint-000001" / "rank-0" / where
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[-40] ^= 4
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[:-1])
    elif how == "missing":
        path.unlink()
    else:
        other = tmp_path / "other" / "checkpoint-000001" / "rank-0" / where
        path.write_bytes(other.read_bytes())
    job = Job(SingleProcess(), "native", tmp_path)
    job.train(0, 3)
    before = job.found()
    with pytest.raises(
        RuntimeError, match=f"are incomplete or damaged. .*{where}.* Restore another"
    ):
        job.checkpoints.restore()
    after = job.found()
    for table in ("a", "b"):
        for column, values in before[table].items():
            np.testing.assert_array_equal(values, after[table][column])
        assert len(before[f"{table} held"]["keys"]) == len(after[f"{table} held"]["keys"])


def exchange(folder: Path, name: str) -> None:
    ours, theirs = folder / "rank-0" / name, folder / "rank-1" / name
    content = ours.read_bytes()
    ours.write_bytes(theirs.read_bytes())
    theirs.write_bytes(content)


def edit(folder: Path, change: Callable[[Any], Any]) -> None:
    """Changes a manifest and updates its checksum and the file sizes."""
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    for name, entry in values["files"].items():
        entry["bytes"] = (folder / name).stat().st_size
    path.write_text(json.dumps(sealed(values)))


EDITS: dict[str, tuple[Callable[[Path], Any], Callable[[Any], Any], str]] = {
    "tables": (
        lambda folder: exchange(folder, "table-000"),
        id,
        "table-000: the file belongs to rank 1",
    ),
    "engines": (
        lambda folder: exchange(folder, "engine"),
        id,
        "engine: the file belongs to rank 1",
    ),
    "rows": (
        id,
        lambda v: v["tables"][1].update(rows=1),
        r"have \d+ rows of table .*; expected 1 rows as in the",
    ),
    "placement": (
        id,
        lambda v: v.update(placement="replicated"),
        "is replicated in the manifest, but its files",
    ),
}


@pytest.mark.parametrize("what", EDITS)
def test_inconsistent_files_and_manifest_raise(what: str, tmp_path: Path) -> None:
    start(2, "sharded", tmp_path, 0, 10, saves=True)
    change_files, change, message = EDITS[what]
    change_files(tmp_path / "checkpoint-000001")
    edit(tmp_path / "checkpoint-000001", change)
    with pytest.raises(RuntimeError, match=f"are incomplete or damaged. .*{message}"):
        start(2, "sharded", tmp_path, 10, 11, saves=False)


def test_engine_state_of_other_metric_raises(tmp_path: Path) -> None:
    saved_native(tmp_path)
    job = Job(SingleProcess(), "native", tmp_path, drift_metric="linf")
    with pytest.raises(ValueError, match=r"Invalid `metric`: 'l2'.* Expected 'linf'"):
        job.checkpoints.restore()
    assert job.store.size("a") == 0
