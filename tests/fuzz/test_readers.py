"""File readers return rows or raise an error that names the file."""

from __future__ import annotations

import gzip
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from absl import logging
from fuzzing import CORPUS, bounded_space, changed, changes, error_of, fuzz, watched
from hypothesis import strategies as st

from slipstream_tf.data.json_source import JsonSource
from slipstream_tf.data.line_source import CsvSource
from slipstream_tf.data.opening import open_source
from slipstream_tf.data.preparation import Options, OtherPreparation, prepare
from slipstream_tf.data.readers import text
from slipstream_tf.data.readers.avazu import HEADER, AvazuReader
from slipstream_tf.data.readers.criteo import CriteoReader
from slipstream_tf.data.readers.parquet import ParquetReader, to_keys
from slipstream_tf.data.readers.prepared import PreparedReader
from slipstream_tf.data.schema import parse_schema, read_schema
from slipstream_tf.data.sources import Position, Source
from slipstream_tf.data.spec import BadLineError

SCHEMA = {
    "label": {"column": "rating", "positive_from": 4},
    "keys": [
        *("user", {"column": "genres", "separator": "|"}),
        *({"column": "ad", "as": "integer"}, {"column": "site", "as": "hex"}),
    ],
    "dense": [{"column": "price", "transform": "log"}, "age"],
    "missing": ["", "NA"],
}
COLUMNS = {"click": [0, 1, 1, 0] * 9, "row": list(range(36)), "text": ["a", "b", None, "ü"] * 9}
COLUMNS |= {"list": [[1, 2], [], None, [3]] * 9, "price": [0.5, 1.5, None, 2.5] * 9}
SHARE = 0.5 / 13


def criteo() -> bytes:
    lines = [
        "\t".join([str(i % 2), *(str(i * j) if j % 3 else "" for j in range(13))]
                  + [f"{i * j * 7919:08x}" if j % 5 else "" for j in range(26)])
        for i in range(6)
    ]  # fmt: skip
    return ("\n".join(lines) + "\n").encode()


def avazu() -> bytes:
    lines = [f"{i},{i % 2},141021{i:02d}," + ",".join(f"v{i * j % 7}" for j in range(21))
             for i in range(6)]  # fmt: skip
    return HEADER + b"\n" + "\n".join(lines).encode() + b"\n"


def table() -> bytes:
    return (
        b"rating,user,genres,ad,site,price,age,other\n"
        b'4,"u 1",a|b,12,0a,1.5,3,x\n3,u2,,-7,ff,NA,,y\n5,"u,3",c,NA,,2e3,9,"z"\n'
    )


def json_lines() -> bytes:
    return (
        b'{"rating": 4, "user": "u 1", "genres": ["a", 2], "ad": 12, "site": "0a", "price": 1.5}\n'
        b'{"rating": "3", "user": 2, "genres": null, "ad": -7, "age": true, "other": {"x": [1]}}\n'
    )


def zipped(content: bytes) -> bytes:
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.csv", content)
    return stored.getvalue()


def parquet(**options: Any) -> bytes:
    content = io.BytesIO()
    pq.write_table(pa.table(COLUMNS), content, row_group_size=20, **options)
    return content.getvalue()


def taken(reader: Any) -> int:
    """Reads all batches, checks their shapes, and returns the number of examples."""
    inputs = 0
    for features, label in reader._batches():
        keys = features["keys"]
        assert label.ndim == 1 and np.isfinite(label).all()
        if not isinstance(keys, dict):
            assert keys.shape == (len(label), len(reader.spec.fields)) and keys.dtype == np.int64
        inputs += len(label)
    return inputs


def empty_lines(content: bytes) -> int:
    """Returns the number of empty lines of a block."""
    return sum(line in (b"", b"\r") for line in content.removesuffix(b"\n").split(b"\n"))


def parsed(source: Source) -> list[Any]:
    """Parses all blocks of a source and returns the tables."""
    tables = []
    for block in source.blocks(Position(), 5):
        found = source.parse(block)
        assert len(found.is_good) == block.num_rows
        has_empty_lines = isinstance(source, (CsvSource, JsonSource))
        empty = empty_lines(block.content) if has_empty_lines else 0
        assert found.is_good.sum() == len(found.table)
        assert len(found.table) == block.num_rows - len(found.reasons) - empty
        for place in found.reasons:
            assert source.line(block, place)[1] >= 1
        tables.append(found.table)
    return tables


def read_lines(reader_class: Any, path: Path) -> None:
    reader = reader_class(path, 3)
    keys = [rows.keys for rows in reader.rows()]
    error = None
    try:
        taken(reader_class(path, 3, strict=True))
    except BadLineError as raised:
        error = raised
        assert re.match(rf"{re.escape(str(path))}:\d+: ", str(error))
    assert (error is None) == (reader.bad_lines.count == 0)
    assert error is None or str(error) == reader.bad_lines.first
    kind = "avazu" if reader_class is AvazuReader else "criteo"
    tables = parsed(open_source([str(path)], kind)[0])
    fields = reader.spec.fields
    prepared = [np.stack([to_keys(t[name]) for name in fields], 1) for t in tables]
    none = np.empty((0, len(fields)), np.int64)
    np.testing.assert_array_equal(np.concatenate([none, *prepared]), np.concatenate([none, *keys]))


def read_table(path: Path) -> None:
    parsed(open_source([str(path)], "csv", parse_schema(SCHEMA))[0])


def read_json(path: Path) -> None:
    schema = {**SCHEMA, "keys": ["user", "genres", *SCHEMA["keys"][2:]]}
    parsed(open_source([str(path)], "json", parse_schema(schema))[0])


def read_parquet(path: Path) -> None:
    for keys in (["row", "text"], ["row", "list"]):
        taken(ParquetReader(path, 7, label="click", keys=keys, dense=["price"]))
    schema = parse_schema({"label": "click", "keys": ["row", "text", "list"], "dense": ["price"]})
    parsed(open_source([str(path)], "parquet", schema)[0])


def packed_text(content: bytes) -> Callable[[Any], bytes]:
    return lambda drawn: changed(gzip.compress(changed(content, drawn[0]), 1, mtime=0), drawn[1])


Form = tuple[str, Callable[[Any], bytes], Callable[[Path], None]]
PAIR = st.tuples(changes(), st.one_of(st.just([]), changes()))


def plain(content: bytes) -> Callable[[Any], bytes]:
    return lambda drawn: changed(content, drawn[0])


FORMS: dict[str, Form] = {
    "criteo": ("a.tsv", plain(criteo()), lambda path: read_lines(CriteoReader, path)),
    "criteo_gz": ("a.tsv.gz", packed_text(criteo()), lambda path: read_lines(CriteoReader, path)),
    "avazu": ("a.csv", plain(avazu()), lambda path: read_lines(AvazuReader, path)),
    "avazu_gz": ("a.csv.gz", packed_text(avazu()), lambda path: read_lines(AvazuReader, path)),
    "csv": ("a.csv", plain(table()), read_table),
    "csv_zip": ("a.csv.zip", plain(zipped(table())), read_table),
    "json": ("a.jsonl", plain(json_lines()), read_json),
    "parquet": ("a.parquet", plain(parquet(compression="none")), read_parquet),
    "parquet_packed": ("a.parquet", plain(parquet(compression="zstd")), read_parquet),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _bounded() -> Iterator[None]:
    with bounded_space():
        yield


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 300)
    logging.set_verbosity(logging.ERROR)


@pytest.mark.parametrize("name", FORMS)
def test_random_file_yields_rows_or_error_names_file(name: str, tmp_path: Path) -> None:
    file, make, read = FORMS[name]
    path = tmp_path / file
    path.write_bytes(make(([], [])))
    read(path)

    def check(drawn: Any) -> None:
        path.write_bytes(drawn if isinstance(drawn, bytes) else make(drawn))
        error_of(lambda: read(path), ValueError, names=path)

    for example in sorted((CORPUS / name).glob("*")):
        check(example.read_bytes())
    fuzz(st.one_of(PAIR, PAIR, PAIR, PAIR, PAIR, PAIR, PAIR, st.binary()), check, 60, SHARE)


def test_many_empty_lines_use_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 4 << 20)
    path = tmp_path / "a.tsv.gz"
    path.write_bytes(gzip.compress(b"\n" * 300_000))
    reader = CriteoReader(path, 3)
    with watched(48 << 20):
        assert not list(reader.rows()) and reader.bad_lines.count == 300_000
    source = open_source([str(path)], "criteo")[0]
    with watched(48 << 20):
        for block in source.blocks(Position(), 1 << 20):
            assert block.num_rows <= text.BLOCK_LINES
        source.parse(block)


SCHEMA_TEXT = json.dumps({**SCHEMA, "delimiter": ",", "columns": None}).encode()


def test_random_schema_parses_or_raises(tmp_path: Path) -> None:
    path, data = tmp_path / "schema.json", tmp_path / "data.csv"
    data.write_bytes(table())

    def check(content: Any) -> None:
        path.write_bytes(content if isinstance(content, bytes) else changed(SCHEMA_TEXT, content))
        found = []
        error_of(lambda: found.append(read_schema(path)), ValueError, names=path)
        if found:
            read = lambda: parsed(open_source([str(data)], "csv", found[0])[0])  # noqa: E731
            error_of(read, ValueError, names=data)

    check([])
    for example in sorted((CORPUS / "schema").glob("*")):
        check(example.read_bytes())
    fuzz(changes(), check, 80, SHARE)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "a.csv").write_bytes(table() + b"4,u9,a|b,12,0a,1.5,3,x\n" * 20)
    source, files = open_source([str(folder / "a.csv")], "csv", parse_schema(SCHEMA))
    prepare(source, files, str(folder / "out"), Options(shard_rows=10, max_bad_fraction=1.0))
    return folder / "out"


@pytest.mark.parametrize("what", ["prepared.json", "train/000000.parquet"])
def test_damaged_prepared_data_reads_or_raises(what: str, prepared: Path) -> None:
    path = prepared / what
    whole = path.read_bytes()

    def check(drawn: Any) -> None:
        path.write_bytes(drawn if isinstance(drawn, bytes) else changed(whole, drawn))
        reader = lambda: taken(PreparedReader(prepared, 4, part="train", shuffle_seed=1))  # noqa: E731
        # A manifest may name a shard or columns that do not exist.
        error_of(reader, ValueError, FileNotFoundError, names=prepared)

    try:
        check([])
        for example in sorted((CORPUS / path.name).glob("*")):
            check(example.read_bytes())
        fuzz(changes(), check, 50, SHARE)
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("name", ["csv", "parquet"])
def test_prepared_data_reads_back(name: str, tmp_path: Path) -> None:
    file, make, _ = FORMS[name]
    path, number = tmp_path / file, 0
    schema = SCHEMA if name == "csv" else {"label": "click", "keys": ["row", "list"]}

    def check(drawn: Any) -> None:
        nonlocal number
        number += 1
        path.write_bytes(make(drawn))
        folder = tmp_path / f"out-{number}"

        def work() -> None:
            source, files = open_source([str(path)], name, parse_schema(schema))
            prepare(
                source,
                files,
                str(folder),
                Options(shard_rows=10, count_bytes=1 << 20, max_bad_fraction=1.0),
            )
            reported = json.loads((folder / "prepared.json").read_text())
            inputs = sum(
                s[p]["inputs"] for s in reported["shards"] for p in ("train", "test") if s[p]
            )
            assert taken(PreparedReader(folder, 4)) == inputs

        error = error_of(work, ValueError, OtherPreparation, names=path)
        if error is None:
            return
        left = list(folder.rglob("*.part")) if folder.exists() else []
        assert not left, f"{left} are left after {error}"

    fuzz(PAIR, check, 15, SHARE)
