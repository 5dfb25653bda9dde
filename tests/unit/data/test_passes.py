"""Tests that an iterator saved during a pass continues in another reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from slipstream_tf.data.readers.avazu import AvazuReader
from slipstream_tf.data.readers.base import Passes
from slipstream_tf.data.readers.criteo import CriteoReader
from slipstream_tf.data.readers.generator import GeneratedReader
from slipstream_tf.data.readers.parquet import ParquetReader

BATCH, EPOCHS = 7, 3
SPEC = tf.TensorSpec([None], tf.int64)


def shuffled(folder: Path) -> Any:
    return parquet(folder).in_memory(3)


def criteo(folder: Path) -> Any:
    lines = ["\t".join([str(i % 2), *["3"] * 13, *[f"{i % 9:08x}"] * 26]) + "\n" for i in range(60)]
    lines[10] = "torn\n"
    (folder / "part.tsv").write_text("".join(lines))
    return CriteoReader(str(folder / "part.tsv"), BATCH)


def avazu(folder: Path) -> Any:
    from slipstream_tf.data.readers.avazu import AvazuFormat

    header = AvazuFormat().header
    assert header is not None
    columns = header.decode().split(",")
    lines = [header.decode()]
    for i in range(60):
        values = {"id": str(i), "click": str(i % 2), "hour": "14102100"}
        lines.append(",".join(values.get(name, f"{i % 5:x}") for name in columns))
    (folder / "part.csv").write_text("\n".join(lines) + "\n")
    return AvazuReader(str(folder / "part.csv"), BATCH)


def parquet(folder: Path) -> Any:
    names = []
    for part in range(4):
        keys = np.arange(part * 10, part * 10 + 10)
        lists = [[int(key)] * (int(key) % 3) for key in keys]
        columns = {"y": keys % 2, "k": keys, "bag": pa.array(lists, pa.list_(pa.int64()))}
        names.append(folder / f"{part}.parquet")
        pq.write_table(pa.table(columns), names[-1])
    return ParquetReader(names, BATCH, label="y", keys=["k", "bag"], shuffle_seed=5)


def generated(_: Path) -> Any:
    return GeneratedReader(50, "train", BATCH, fields=3, dense=2)


def at_once(data: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_optimization.map_parallelization = False
    options.experimental_optimization.inject_prefetch = False
    return data.with_options(options)


def flat(batch: Any) -> list[np.ndarray]:
    return [part.numpy() for part in tf.nest.flatten(batch, expand_composites=True)]


@pytest.mark.parametrize("make", [shuffled, criteo, avazu, parquet, generated])
@pytest.mark.parametrize("at", [0, 1, 5, 8, 11])
def test_saved_iterator_resumes_in_other_reader(make: Any, at: int, tmp_path: Path) -> None:
    def data(reader: Any) -> tf.data.Dataset:
        # As in training, some batches span the end of a pass.
        return at_once(reader.dataset().repeat(EPOCHS).rebatch(BATCH + 2))

    reader = make(tmp_path)
    iterator = iter(data(reader))
    for _ in range(at):
        next(iterator)
    path = tf.train.Checkpoint(inputs=iterator).write(str(tmp_path / "saved"))
    expected = [flat(batch) for batch in iterator]
    other = make(tmp_path)
    restored = iter(data(other))
    tf.train.Checkpoint(inputs=restored).read(path).assert_consumed()
    found = [flat(batch) for batch in restored]
    assert len(found) == len(expected) > 0
    for one, two in zip(found, expected, strict=True):
        for a, b in zip(one, two, strict=True):
            np.testing.assert_array_equal(a, b)
    assert other.bad_lines.count == reader.bad_lines.count


def numbers(begun: list[int]) -> Passes:
    def begin(number: int) -> Iterator[np.ndarray]:
        begun.append(number)
        for index in range(3):
            yield np.full(2, 10 * number + index)

    return Passes(begin)


def test_each_iteration_is_separate_pass() -> None:
    begun: list[int] = []
    data = at_once(numbers(begun).dataset(SPEC))
    first = [batch.numpy()[0] for batch in data.repeat(2)]
    assert first == [0, 1, 2, 10, 11, 12] and begun == [0, 1]
    pairs = [(a.numpy()[0], b.numpy()[0]) for a, b in tf.data.Dataset.zip((data, data))]
    assert pairs == [(20, 30), (21, 31), (22, 32)] and begun == [0, 1, 2, 3]


def test_abandoned_passes_are_closed_and_reopened_on_demand() -> None:
    begun: list[int] = []
    data = at_once(numbers(begun).dataset(SPEC))
    iterators = [iter(data) for _ in range(6)]
    assert [next(iterator).numpy()[0] for iterator in iterators] == [0, 10, 20, 30, 40, 50]
    assert begun == [0, 1, 2, 3, 4, 5]
    assert next(iterators[5]).numpy()[0] == 51 and next(iterators[0]).numpy()[0] == 1
    assert begun == [0, 1, 2, 3, 4, 5, 0]


def test_pass_number_continues_after_restore(tmp_path: Path) -> None:
    iterator = iter(at_once(numbers([]).dataset(SPEC).repeat()))
    for _ in range(5):
        next(iterator)
    path = tf.train.Checkpoint(inputs=iterator).write(str(tmp_path / "saved"))
    begun: list[int] = []
    restored = iter(at_once(numbers(begun).dataset(SPEC).repeat()))
    tf.train.Checkpoint(inputs=restored).read(path)
    assert [next(restored).numpy()[0] for _ in range(3)] == [12, 20, 21] and begun == [1, 2]


def test_empty_pass_ends_and_reader_error_is_raised() -> None:
    assert not list(Passes(lambda number: iter(())).dataset(SPEC))

    def fail(number: int) -> Iterator[np.ndarray]:
        yield np.zeros(1)
        raise ValueError("line 3 is torn")

    iterator = iter(Passes(fail).dataset(SPEC))
    next(iterator)
    with pytest.raises(tf.errors.InvalidArgumentError, match="line 3 is torn"):
        next(iterator)
