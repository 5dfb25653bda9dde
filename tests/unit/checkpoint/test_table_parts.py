"""Tests of incremental table files, restored together with earlier files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import Table
from slipstream_tf.checkpoint import CheckpointError, array_file, table_parts
from slipstream_tf.checkpoint.store_parts import Rank, file_name
from slipstream_tf.checkpoint.table_parts import EarlierFiles
from slipstream_tf.checkpoint.tables import SavedTable, name_before
from slipstream_tf.config import Retention
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.tables.native import NativeStore

DIM = 4
ALONE = Rank(0, 1, "replicated")


def store_of() -> NativeStore:
    return NativeStore([Table("t", DIM)])


def written(parts: list, folder: Path, checkpoint: str) -> dict[str, EarlierFiles]:
    found = table_parts.next_before(parts, folder, checkpoint)
    return {name: files.written() for name, files in found.items()}


class Saved:
    """Saves a store repeatedly; each checkpoint builds on the previous one."""

    def __init__(self, store: NativeStore, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._before: dict[str, EarlierFiles] = {}
        self.parts: list[table_parts.TablePart] = []

    @property
    def newest(self) -> Path:
        """Path of the newest table file."""
        return self._folder / str(len(self.parts)) / file_name(0, 0)

    def save(self) -> SavedTable:
        """Writes another checkpoint and returns the table read from it."""
        name = str(len(self.parts) + 1)
        folder = self._folder / name / "rank-0"
        folder.mkdir(parents=True)
        (part,) = table_parts.cut(self._store, ALONE, folder, self._before)
        part.write(folder / "table-000", name, 0)
        self._before = written([part], folder, name)
        self.parts.append(part)
        return self.read()

    def read(self) -> SavedTable:
        """Returns the table read from the newest checkpoint."""
        return SavedTable([self.newest], str(len(self.parts)), self.parts[-1].entry())


def write(store: NativeStore, keys: np.ndarray, value: float) -> None:
    store.write_rows("t", keys, np.full((len(keys), DIM), value, np.float32))


def assert_is(store: NativeStore, saved: SavedTable) -> None:
    expected, found = store.export_table("t", flush=False), saved.contents()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, name)


@pytest.mark.parametrize("sizes", [(0, 0, 0, 0), (1000, 600, 300, 250)])
def test_replicated_tables_are_distributed_among_writers_by_size(sizes: tuple[int, ...]) -> None:
    store = NativeStore([Table(f"t{i}", DIM) for i in range(len(sizes))])
    for index, size in enumerate(sizes):
        store.write_rows(f"t{index}", np.arange(size), np.zeros((size, DIM), np.float32))
    found = table_parts.writers_of(store, 2)
    of_rank = [sum(sizes[int(n[1:])] for n, r in found.items() if r == rank) for rank in (0, 1)]
    assert set(found.values()) == {0, 1} and abs(of_rank[0] - of_rank[1]) <= 150
    assert table_parts.writers_of(store, 1) == dict.fromkeys(found, 0)


@pytest.mark.parametrize("capacity", [None, 50])
def test_random_changes_read_back_as_table(tmp_path, capacity):
    draw = np.random.default_rng(5)
    retention = Retention(capacity=capacity, eviction="lru") if capacity else None
    layer = EmbeddingCollection([Table("t", DIM, retention=retention)], features={"f": "t"})
    store = layer.store
    saved = Saved(store, tmp_path)
    decays = 0
    for number in range(60):
        for _ in range(draw.integers(4)):
            layer({"f": tf.constant(draw.choice(200, (10, 1)))}, training=True)
            write(store, draw.choice(200, draw.integers(1, 12), replace=False), number)
            store.remove_rows("t", draw.choice(200, 5, replace=False))
        for _ in range(draw.integers(3)):
            store.decay_counts(draw.uniform(0.3, 1.0))
        assert_is(store, saved.save())
        decays += saved.parts[-1].decays.size
    goes_on = [part.before is not None for part in saved.parts]
    assert any(goes_on) and not all(goes_on[1:])
    assert decays > 5
    contents = store.export_table("t", flush=False)
    assert contents["counts"].any() and (capacity is None or contents["last_used"].any())


def test_file_contains_changed_rows_only(tmp_path):
    store = store_of()
    write(store, np.arange(1000), 1.0)
    saved = Saved(store, tmp_path)
    saved.save()
    first = saved.newest
    write(store, np.arange(5), 2.0)
    store.remove_rows("t", np.array([999]))
    assert_is(store, saved.save())
    assert len(saved.parts[-1].state.contents["keys"]) == 5
    assert saved.newest.stat().st_size < first.stat().st_size / 20
    before = name_before(saved.newest, 0)
    assert before.samefile(first)
    first.unlink()  # Simulates the removal of an old checkpoint.
    assert_is(store, saved.read())


def test_full_part_is_written_before_changes_exceed_table(tmp_path):
    store = store_of()
    write(store, np.arange(100), 0.0)
    saved = Saved(store, tmp_path)
    for number in range(12):
        write(store, np.arange(40), number)
        assert_is(store, saved.save())
    rows = [len(part.state.contents["keys"]) for part in saved.parts]
    assert rows == [100, 40, 40, 40] * 3
    write(store, np.arange(1), 1.0)
    saved = Saved(store, tmp_path / "small")
    for number in range(20):
        write(store, np.arange(1), number)
        saved.save()
    rows = [len(part.state.contents["keys"]) for part in saved.parts]
    assert rows == [100, *[1] * 8] * 2 + [100, 1]


def test_all_rows_are_written_without_hard_links(tmp_path, monkeypatch):
    store = store_of()
    write(store, np.arange(10), 1.0)
    saved = Saved(store, tmp_path)
    saved.save()
    monkeypatch.setattr(table_parts.disk, "link", lambda old, new: False)
    write(store, np.arange(2), 2.0)
    assert_is(store, saved.save())
    assert len(saved.parts[-1].state.contents["keys"]) == 10
    monkeypatch.undo()
    write(store, np.arange(2), 3.0)
    assert_is(store, saved.save())
    assert len(saved.parts[-1].state.contents["keys"]) == 2


def test_earlier_part_is_verified(tmp_path):
    store = store_of()
    write(store, np.arange(100), 1.0)
    saved = Saved(store, tmp_path)
    saved.save()
    write(store, np.arange(2), 2.0)
    saved.save()
    before = name_before(saved.newest, 0)
    damaged = bytearray(before.read_bytes())
    damaged[-40] ^= 1
    before.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="table-000-before-0"):
        saved.read().contents()
    before.unlink()
    with pytest.raises(CheckpointError, match="table-000-before-0"):
        saved.read()


def test_truncated_part_is_not_extended(tmp_path):
    store = store_of()
    write(store, np.arange(100), 1.0)
    saved = Saved(store, tmp_path)
    saved.save()
    with saved.newest.open("r+b") as file:
        file.truncate(100)
    write(store, np.arange(2), 2.0)
    assert_is(store, saved.save())
    assert saved.parts[-1].before is None
    assert not name_before(saved.newest, 0).exists()


def test_part_of_other_table_raises(tmp_path):
    tables = [Table(name, DIM) for name in "ab"]
    store, folder, before = NativeStore(tables), tmp_path / "rank-0", {}
    for number in range(2):
        folder = tmp_path / str(number) / "rank-0"
        folder.mkdir(parents=True)
        for table in tables:
            store.write_rows(table.name, np.arange(10 - number), np.ones((10 - number, DIM)))
        parts = table_parts.cut(store, ALONE, folder, before)
        for index, part in enumerate(parts):
            part.write(folder.parent / file_name(0, index), str(number), 0)
        before = written(parts, folder, str(number))
    name_before(folder / "table-001", 0).rename(name_before(folder / "table-000", 0))
    with pytest.raises(CheckpointError, match=r"table-000-before-0.*has name 'b'; expected 'a'"):
        SavedTable([folder / "table-000"], "1", parts[0].entry())


@pytest.mark.parametrize("reported", [{"before": 5}, {"rows": "x"}, {"before": [7]}])
def test_forged_header_raises(tmp_path, monkeypatch, reported):
    store = store_of()
    write(store, np.arange(10), 1.0)
    saved, plain = Saved(store, tmp_path), array_file.write

    def forged(path, checkpoint, meta, groups):
        return plain(path, checkpoint, {**meta, **reported}, groups)

    monkeypatch.setattr(array_file, "write", forged)
    with pytest.raises(CheckpointError):
        saved.save()


def test_wrong_row_count_raises(tmp_path):
    store = store_of()
    write(store, np.arange(100), 1.0)
    saved = Saved(store, tmp_path)
    saved.save()
    write(store, np.arange(2), 2.0)
    saved.save()
    (part,) = saved.parts[-1:]
    object.__setattr__(part, "rows", 99)
    part.write(saved.newest, "2", 0)
    with pytest.raises(CheckpointError, match="earlier files have 100 rows; expected 99 rows"):
        saved.read().contents()
