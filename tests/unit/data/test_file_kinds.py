"""Tests of the kinds of files that `open_source` reads, and of advice for kinds it does not."""

from __future__ import annotations

import bz2
import datetime
import errno
import gzip
import io
import json
import lzma
import os
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from absl import logging

from slipstream_tf.data import json_source
from slipstream_tf.data.opening import open_source
from slipstream_tf.data.readers import text
from slipstream_tf.data.readers.criteo import CriteoReader
from slipstream_tf.data.readers.hashing import hash_string
from slipstream_tf.data.schema import parse_schema
from slipstream_tf.data.sources import Position

SCHEMA = {"label": "click", "keys": ["user", {"column": "ad", "as": "integer"}]}
LINES = ["click,user,ad", *(f"{i % 2},u{i},{i}" for i in range(50))]


def read(path, schema=SCHEMA, kind="auto"):
    """Returns the rows of all files, and the errors of malformed lines."""
    source, files = open_source([str(path)], kind, parse_schema(schema) if schema else None)
    rows, reasons = [], []
    for block in source.blocks(Position(), 30):
        parsed = source.parse(block)
        rows += parsed.table.to_pylist()
        reasons += [(*source.line(block, row), text) for row, text in parsed.reasons.items()]
        assert block.done <= source.size
    assert not reasons or reasons[0][0] in files
    return rows, [(line, text) for _, line, text in reasons]


def expected(ids=range(50)):
    return [{"click": i % 2, "user": hash_string(b"u%d" % i), "ad": i} for i in ids]


def test_size_of_blocks_does_not_change_rows(tmp_path, monkeypatch):
    lines = [LINES[0]]
    for i, name in enumerate(['"Big" Jim', '"oops', '"a ""b"", c"', "", '12" x', "\ufeffé"] * 4):
        lines += [f"{i % 2},{name},{i}", "", f"1,a,{i}\r"]
    (tmp_path / "a.csv").write_bytes("\n".join(lines).encode())
    found = []
    for size in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(text, "BLOCK_BYTES", size)
        found.append(read(tmp_path / "a.csv"))
    assert found[0] == found[1] == found[2] == found[3]
    rows, reasons = found[0]
    assert len(rows) == 44 and [line for line, _ in reasons] == [5, 23, 41, 59]
    assert {row["user"] for row in rows if row["ad"] == 5} == {
        hash_string("\ufeffé".encode()),
        hash_string(b"a"),
    }


def zipped(path, *names):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, "\n".join(LINES))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", text.COMPRESSIONS)
def test_compressed_csv_is_read(tmp_path, monkeypatch, end, mark):
    monkeypatch.setattr(text, "BLOCK_BYTES", 64)
    path, content = tmp_path / f"a.csv{end}", mark + "\n".join(LINES).encode()
    if end == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data/", "")
            archive.writestr("data/a.csv", content)
            archive.writestr("__MACOSX/data/._a.csv", "x")
    else:
        compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[end]
        path.write_bytes(compress(content))
    assert read(path) == (expected(), [])
    # A preparation continues from the position of a row.
    source, _ = open_source([str(path)], "csv", parse_schema(SCHEMA))
    for block in source.blocks(Position(), 30):
        after = list(source.blocks(block.end, 30))
        assert sum(b.num_rows for b in after) == 50 - block.end.row


@pytest.mark.parametrize("end", text.COMPRESSIONS)
def test_damaged_compressed_csv_is_named(tmp_path, end):
    path = tmp_path / f"a.csv{end}"
    path.write_bytes(b"click,user,ad\n")
    with pytest.raises(ValueError, match=f"a.csv{end}"):
        read(path)


@pytest.mark.parametrize("other", [".DS_Store", "data/._a.csv", "__MACOSX/a.csv", ".git/a"])
def test_hidden_files_in_zip_are_ignored(tmp_path, other):
    zipped(tmp_path / "a.zip", other, "./data/a.csv")
    assert read(tmp_path / "a.zip") == (expected(), [])


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.csv.bz2", "a.csv.xz"])
def test_errors_of_the_system_are_not_reported_as_damage(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(b"click,user,ad\n1,u1,1\n")

    class Failing(io.BytesIO):
        def read(self, *_):
            raise OSError(errno.EIO, "Input/output error")

        readline = readinto = read

    monkeypatch.setattr(text, "open", lambda *_: Failing(), raising=False)
    with pytest.raises(OSError, match=f"Input/output error.*{name}"):
        read(tmp_path / name)


def test_zip_with_other_than_one_file_is_refused(tmp_path):
    zipped(tmp_path / "a.zip", "ratings.csv", "users.csv")
    with pytest.raises(ValueError, match=r"contains 2 files: \['ratings.csv', 'users.csv'\]"):
        read(tmp_path / "a.zip")


def test_criteo_with_byte_order_mark_is_read_by_reader_and_source(tmp_path):
    line = "\t".join(["1", *["3"] * 13, *["0a"] * 26])
    (tmp_path / "a.tsv").write_bytes(b"\xef\xbb\xbf" + f"{line}\n{line}".encode())
    reader = CriteoReader(tmp_path / "a.tsv", 8)
    assert sum(len(rows) for rows in reader.rows()) == 2
    assert len(read(tmp_path / "a.tsv", None)[0]) == 2


def test_folder_of_text_files_is_read_in_order(tmp_path):
    (tmp_path / "day=2").mkdir()
    for name, ids in (("a.csv", range(9)), ("day=2/b.tsv.gz", range(9, 20))):
        content = "\n".join([LINES[0], *(f"{i % 2},u{i},{i}" for i in ids)]).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    for other in ("_SUCCESS", ".a.csv.crc", "readme.md", "_temporary.csv"):
        (tmp_path / other).write_text("x")
    assert read(tmp_path) == (expected(range(20)), [])
    pq.write_table(pa.table({"click": [0], "user": ["u0"], "ad": ["0"]}), tmp_path / "a.pq")
    with pytest.raises(ValueError, match="formats parquet and csv"):
        read(tmp_path)
    assert read(tmp_path, kind="csv") == (expected(range(20)), [])
    assert read(tmp_path, kind="parquet") == (expected(range(1)), [])


def test_partition_columns_are_in_paths_of_parquet_files(tmp_path):
    folders = {"country=de/day=1": [0, 1], "country=__HIVE_DEFAULT_PARTITION__/day=2": [1]}
    folders["country=a%2Fb/day=3"] = [0]
    for folder, clicks in folders.items():
        os.makedirs(tmp_path / folder)
        table = pa.table({"click": clicks, "unused": clicks})
        pq.write_table(table, tmp_path / folder / "part-0.parquet")
    keys = ["country", {"column": "day", "as": "integer"}]
    rows, _ = read(tmp_path, {"label": "click", "keys": keys})
    assert [row["day"] for row in rows] == [2, 3, 1, 1]
    assert [row["click"] for row in rows] == [1, 0, 0, 1]
    assert [row["country"] for row in rows[1:]] == [
        hash_string(country) for country in (b"a/b", b"de", b"de")
    ]
    with pytest.raises(ValueError, match="the column 'hour' is missing"):
        read(tmp_path, {"label": "click", "keys": ["hour"]})


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ("Click, User,x", r"'click' \(similar: 'Click'\), 'user' \(similar: ' User'\), 'ad' are "),
        (
            "click,x,ad",
            r"'user' is missing\. Expected it once; the file has .*, separated by ','\.",
        ),
        (
            "1,u0,7",
            r"\['1', 'u0', '7'\].* If the first line is no header, set `columns` in the sch",
        ),
        (
            "click;user;ad",
            r"Set the `delimiter` of the file in the schema\. The line contains ';'\.",
        ),
        ("click", r"Set the `delimiter` of the file in the schema\.$"),
        ("click,user,ad,user", "the column 'user' occurs 2 times. Expected it once; the file has"),
    ],
)
def test_all_missing_columns_are_named_with_advice(tmp_path, header, named):
    (tmp_path / "a.csv").write_text(f"{header}\n1,a,2\n")
    with pytest.raises(ValueError, match=named):
        read(tmp_path / "a.csv")


def test_header_in_latin_1_is_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes("clíck,prénom,\xff\n1,José,x\n".encode("latin-1"))
    rows, _ = read(path, {"label": "clíck", "keys": ["prénom"]})
    assert rows == [{"clíck": 1, "prénom": hash_string("José".encode("latin-1"))}]
    path.write_text("click,user\n1,a\n", "utf-16")
    with pytest.raises(ValueError, match=r"in UTF-16.*iconv --from-code=UTF-16 --to-code=UTF-8"):
        read(path)


@pytest.mark.parametrize("columns", [["action", "user"], None])
def test_lines_that_repeat_the_header_are_malformed(tmp_path, columns):
    lines = ["action,user", "buy,a", "view,action", "action,user", "view,b"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    label = {"column": "action", "positive": ["buy"]}
    rows, reasons = read(tmp_path / "a.csv", {"label": label, "keys": ["user"], "columns": columns})
    assert [row["action"] for row in rows] == [1, 0, 0]
    assert [line for line, _ in reasons] == ([1, 4] if columns else [4])
    assert "the line is a header" in reasons[0][1] and "remove `columns`" in reasons[0][1]


def test_text_that_is_not_in_utf_8_is_reported_once(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: messages.append(text % values))
    lines = "click,user,note\n" + "1,é,ü\n" * 70
    for encoding in ("utf-8", "latin-1"):
        (tmp_path / "a.csv").write_text(lines, encoding)
        rows, _ = read(tmp_path / "a.csv", {"label": "click", "keys": ["user"]})
        assert rows[-1]["user"] == hash_string("é".encode(encoding))
        assert len(messages) == (encoding == "latin-1")
    assert "'user' contains text that is not in UTF-8" in messages[0]
    schema = {"label": {"column": "click", "positive": ["gültig"]}, "missing": ["é"]}
    for name, line in (("click", "gültig,7,a"), ("user", "1,é,a")):
        (tmp_path / "a.csv").write_text(f"click,user,note\n{line}\n", "latin-1")
        read(tmp_path / "a.csv", {**schema, "keys": [{"column": "user", "as": "integer"}]})
        assert f"The column '{name}' contains text that is not in UTF-8" in messages.pop()
    (tmp_path / "a.csv").write_bytes(b"click,user,note\n1,a,\xff\n")
    read(tmp_path / "a.csv", {"label": "click", "keys": ["user"]})
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (gzip.compress(b"click\n"), "compressed with gzip.*ends with .gz"),
        (bz2.compress(b"click\n"), "compressed with bzip2.*ends with .bz2"),
        (lzma.compress(b"click\n"), "compressed with xz.*ends with .xz"),
        (b"PK\3\4", "a .zip archive.*ends with .zip"),
        (b"PAR1\x15\4", "a Parquet file.*ends with .parquet"),
    ],
    ids=["gzip", "bzip2", "xz", "zip", "parquet"],
)
def test_content_that_differs_from_the_name_is_refused(tmp_path, content, named):
    (tmp_path / "a.csv").write_bytes(content)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(content))
    for name in ("a.csv", "a.json.gz"):
        with pytest.raises(ValueError, match=f"{name}: the content is {named}"):
            read(tmp_path / name, {**SCHEMA, "columns": LINES[0].split(",")})


JSON_SCHEMA = {"label": "click", "keys": ["user", "tags"], "dense": ["price"]}


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson.gz", "a.json"])
def test_json_lines_are_read(tmp_path, name):
    records = [
        {"click": 1, "user": "é\n", "tags": ["a", "", 7], "price": 1.5, "other": {"x": 1}},
        {"user": 12, "click": 0, "tags": [["a"], [], [None]], "price": None},
        {"user": "12", "click": 0.0, "price": True},
        {"click": True, "user": False, "tags": "b", "price": "2e1"},
    ]
    content = "\r\n".join(json.dumps(record) for record in records) + "\n\n"
    content += json.dumps({"click": 1, "user": "x", "tags": []}, ensure_ascii=False)
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    rows, reasons = read(tmp_path / name, JSON_SCHEMA)
    assert not reasons
    keys = {word: hash_string(word.encode()) for word in ("é\n", "a", "7", "12", "b", "x")}
    assert [row["click"] for row in rows] == [1, 0, 0, 1, 1]
    assert [row["price"] for row in rows] == [1.5, None, 1.0, 20.0, None]
    assert [row["user"] for row in rows[:3]] == [keys["é\n"], keys["12"], keys["12"]]
    assert rows[3]["user"] == hash_string(b"false") and rows[4]["user"] == keys["x"]
    assert rows[0]["tags"] == [keys["a"], keys["7"]] and rows[1]["tags"] == [keys["a"]]
    assert rows[2]["tags"] == []
    assert rows[3]["tags"] == [keys["b"]] and rows[4]["tags"] == []


def test_malformed_json_lines_are_named_and_others_kept(tmp_path):
    path, good = tmp_path / "a.jsonl", '{"click": 1, "user": "a", "tags": ["b"]}'
    bad = {
        "[1]": r"the line is '\[1\]'; expected an object.*jq --compact-output",
        '{"click": 1,': "the line is not JSON: .*; expected an object",
        "{'click': 1}": "ast.literal_eval and json.dumps",
        '{"click": 1, "user": ["a"]}': r"user is \['a'\]; expected a value, as in the first lines. "
        "If some lines have a list, write one in each",
        '{"click": 1, "price": [1]}': r"price is \['1'\]; expected a value$",
        '{"click": 1, "user": {"id": 1}}': "user is {'id': '1'}; expected a value, not an object. "
        "Write each value of an object as a column of the line",
        '{"click": 1, "tags": [{"id": 1}]}': "tags is .*; expected a list of values, not an object",
        '{"click": 1, "price": "x"}': "price is 'x'; expected a finite number",
        '{"click": "\xff"}': "codec can't decode",
        '{"user": ' + "[" * 5_000: "the line is not JSON",
    }
    lines = [line.encode("latin-1") for word in bad for line in (good, word)]
    price = b'{"price": 1, "click": 0, "user": "a"}'
    path.write_bytes(b"\n".join([price, *lines, good.encode()]))
    rows, reasons = read(path, JSON_SCHEMA)
    assert len(rows) == len(bad) + 2
    assert [line for line, _ in reasons] == [3 + 2 * i for i in range(len(bad))]
    for (_, reason), named in zip(reasons, bad.values(), strict=True):
        with pytest.raises(ValueError, match=named):
            raise ValueError(reason)


@pytest.mark.parametrize("several", [False, True])
def test_json_lists_after_nulls_are_read(tmp_path, monkeypatch, several):
    monkeypatch.setattr(json_source, "_SAMPLE_LINES", 2)
    lines = [{"click": 0, "user": None, "tags": None, "price": None} for _ in range(5)]
    lines += [{"click": 1, "user": "a", "tags": ["b", "c"], "price": 2}]
    files = [lines[:5], lines[5:]] if several else [lines]
    for i, part in enumerate(files):
        content = "".join(json.dumps(line) + "\n" for line in part)
        (tmp_path / f"{i}.jsonl").write_text(content)
    rows, reasons = read(tmp_path, JSON_SCHEMA)
    a, b, c = (hash_string(v) for v in (b"a", b"b", b"c"))
    assert not reasons and len(rows) == 6
    assert rows[0] == {"click": 0, "user": None, "tags": [], "price": None}
    assert rows[5] == {"click": 1, "user": a, "tags": [b, c], "price": 2}


def test_json_column_of_nulls_makes_no_line_malformed(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"click": 1, "user": "a", "tags": null, "price": 1}\n' * 3)
    rows, reasons = read(tmp_path, JSON_SCHEMA)
    assert not reasons and [row["tags"] for row in rows] == [None] * 3


def test_empty_json_files_and_partial_first_lines_are_allowed(tmp_path):
    good = '{"click": 1, "user": "a", "tags": ["b"], "price": 1}\n'
    for name, content in (("a", ""), ("b", "\r\n\n"), ("c", f'er": 1}}\n{good}'), ("d", "x\n")):
        (tmp_path / f"{name}.jsonl").write_text(content)
    rows, reasons = read(tmp_path, JSON_SCHEMA)
    assert len(rows) == 1 and rows[0]["tags"] == [hash_string(b"b")]
    assert [line for line, _ in reasons] == [1, 1]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('[\n{"click": 1}\n]\n', "a.json:1: the line is not JSON.*jq"),
        ('[{"click": 1}]\n', "a.json:1: the line is .*jq"),
        ("{u'click': 1}\n", "a.json:1: .*ast.literal_eval"),
        (
            '{"click": 1}\n',
            r"the columns 'price', 'user', 'tags' are missing.*has the columns \['click'\]",
        ),
        ("", "the columns 'click', 'price', 'user', 'tags' are missing"),
    ],
)
def test_other_json_files_are_refused(tmp_path, content, named):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=named):
        read(tmp_path / "a.json", JSON_SCHEMA)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.tfrecord", b"", "TFRecord files are not read"),
        ("part-0", b"\n" + bytes(11) + b"0123456789", "TFRecord files are not read"),
        ("a.txt", b"1 0:12:1 1:7:0.5 2:3:1e-2\n", "libffm and libsvm are not read"),
        ("a.txt", b"-1 12:1 107:0.5\n", "libffm and libsvm are not read"),
    ],
)
def test_files_without_column_names_are_refused_with_advice(tmp_path, name, content, named):
    (tmp_path / name).write_bytes(content)
    for schema in (SCHEMA, None):
        with pytest.raises(ValueError, match=f'{named}.*JSON lines or Parquet.*"Your own data"'):
            read(tmp_path / name, schema)


@pytest.mark.parametrize("line", ["1 12:30", "3\t10:15"])
def test_label_and_time_of_day_are_not_libffm(tmp_path, line):
    (tmp_path / "a.txt").write_text(f"{line}\n")
    schema = {"label": {"column": "y", "positive_from": 1}, "keys": ["k"], "columns": ["y", "k"]}
    rows, _ = read(tmp_path / "a.txt", {**schema, "delimiter": line[1]})
    assert rows == [{"y": 1, "k": hash_string(line[2:].encode())}]


@pytest.mark.parametrize(("other", "kind"), [("m.parquet", "parquet"), ("m.jsonl", "json")])
def test_files_of_different_kinds_are_refused(tmp_path, other, kind):
    for name in ("m.csv", other):
        (tmp_path / name).write_text("\n".join(LINES))
    paths = [str(tmp_path / name) for name in ("m.csv", other)]
    with pytest.raises(ValueError, match=f"m.csv is a text file, but .*{other} is a {kind} file"):
        open_source(paths, "auto", parse_schema(SCHEMA))
    assert open_source(paths, "csv", parse_schema(SCHEMA))[1] == paths
    with pytest.raises(ValueError, match=f"{other} is a {kind} file, but .*m.csv is a text file"):
        open_source(paths[::-1], "auto", parse_schema(SCHEMA))


def test_parquet_files_with_other_ids_are_refused(tmp_path):
    dates = pa.array([datetime.date(2024, 1, 1)])
    schema = {"label": "y", "keys": ["day"]}
    kinds = (pa.timestamp("us"), pa.timestamp("ms"), pa.date32())
    for i, kind in enumerate(kinds):
        pq.write_table(pa.table({"y": [1], "day": dates.cast(kind)}), tmp_path / f"{i}.parquet")
    with pytest.raises(ValueError, match=r"2\.parquet: the ids .* 'day' are date32; exp"):
        read(tmp_path, schema)
    (tmp_path / "2.parquet").unlink()
    assert [row["day"] for row in read(tmp_path, schema)[0]] == [1704067200000000] * 2


def test_ignored_files_of_a_folder_are_reported(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: messages.append(text % values))
    (tmp_path / "a.csv").write_text("\n".join(LINES))
    (tmp_path / "_SUCCESS").write_text("")
    assert read(tmp_path) == (expected(), []) and not messages
    for i in range(7):
        (tmp_path / f"part-{i}").write_text("x")
    assert read(tmp_path) == (expected(), [])
    assert len(messages) == 1 and "files are ignored (7)" in messages[0]
    assert "part-0, part-1, part-2, part-3, part-4, and 2 more. Pass them as files" in messages[0]
    (tmp_path / "a.csv").rename(tmp_path / "readme.md")
    with pytest.raises(FileNotFoundError, match=r"no data files, but part-0, .* and 3 more\. Exp"):
        read(tmp_path)
    (tmp_path / "readme.md").rename(tmp_path / "a.csv.zst")
    for path in (tmp_path, tmp_path / "a.csv.zst"):
        with pytest.raises(
            ValueError, match=r"a\.csv\.zst: files that end with \.zst are not read"
        ):
            read(path)
