"""Tests that prepared data equals the source files, even after interruptions.

The comparison is bit by bit.
"""

from __future__ import annotations

import gzip
import json
import re

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import slipstream_tf as slip
from slipstream_tf.cli.prepare import summary
from slipstream_tf.data import preparation, shards
from slipstream_tf.data.line_counts import TooManyBadLinesError
from slipstream_tf.data.opening import open_source
from slipstream_tf.data.preparation import OtherPreparation
from slipstream_tf.data.readers import text
from slipstream_tf.data.readers.avazu import AvazuReader
from slipstream_tf.data.readers.criteo import CriteoReader
from slipstream_tf.data.readers.hashing import hash_string
from slipstream_tf.data.readers.parquet import ParquetReader, random_order
from slipstream_tf.data.readers.prepared import PreparedReader
from slipstream_tf.data.schema import parse_schema
from slipstream_tf.data.spec import BadLineError


def collect(reader):
    """Returns all examples of a pass as arrays: {"label", "dense", "keys"}."""
    found = {"label": []}
    for features, label in reader.dataset():
        found["label"].append(label.numpy())
        for name, value in features.items():
            found.setdefault(name, []).append(value.numpy())
    return {name: np.concatenate(values) for name, values in found.items() if values}


def rows_of(reader):
    """Returns all examples of a pass, each as a list."""
    found = collect(reader)
    return np.column_stack([found["label"], found["dense"], found["keys"]]).tolist()


def assert_same(ours, theirs):
    one, other = collect(ours), collect(theirs)
    assert one.keys() == other.keys()
    for name, values in other.items():
        assert one[name].dtype == values.dtype
        np.testing.assert_array_equal(one[name], values, err_msg=name)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(text, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(shards, "GROUP_ROWS", 97)


@pytest.mark.parametrize("shard_rows", [250, 1_000, 10_000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_prepared_criteo_equals_reader(
    tmp_path, small_blocks, criteo_lines, run_prepare, shard_rows, end
):
    first, second = tmp_path / "day_0", tmp_path / "day_1.gz"
    first.write_bytes(end.join(criteo_lines(1_230, bad=(0, 555, 900, 1_229))).encode())
    second.write_bytes(gzip.compress((end.join(criteo_lines(777, seed=1)) + end).encode()))
    statistics = run_prepare(
        [first, second], tmp_path / "out", kind="criteo", shard_rows=shard_rows
    )
    for part in ("train", "test"):
        theirs = CriteoReader([first, second], 256, part=part)
        assert_same(PreparedReader(tmp_path / "out", 256, part=part), theirs)
    assert statistics["bad_lines"] == 4
    assert statistics["first_bad_line"].startswith(f"{first}:1: the line has 2 columns")
    assert sum(statistics["inputs"].values()) == 1_230 + 777 - 4


def test_prepared_avazu_equals_reader(tmp_path, small_blocks, avazu_lines, run_prepare):
    path = tmp_path / "train"
    path.write_text("\n".join(avazu_lines(1_500)) + "\n")
    run_prepare(path, tmp_path / "out", shard_rows=700)
    for part in ("train", "test"):
        ours = PreparedReader(tmp_path / "out", 64, part=part)
        assert_same(ours, AvazuReader(path, 64, part=part))
        assert ours.spec.name == "avazu"
    whole, rest, valid = (
        collect(PreparedReader(tmp_path / "out", 64, part=part, hold_out=apart))["keys"].tolist()
        for part, apart in (("train", False), ("train", True), ("valid", False))
    )
    assert sorted(whole) == sorted([*rest, *valid]) and len(valid) == 100
    reader = PreparedReader(tmp_path / "out", 64, part="train", hold_out=True)
    assert reader.spec.num_examples == len(rest)


def test_examples_in_memory_are_shuffled_each_pass(tmp_path, criteo_lines, run_prepare):
    path = tmp_path / "lines.tsv"
    path.write_text("\n".join(criteo_lines(1_000)) + "\n")
    run_prepare(path, tmp_path / "out", shard_rows=300)
    reader = PreparedReader(tmp_path / "out", 64, part="train")
    ours, in_order = reader.in_memory(3), rows_of(reader)
    assert ours.spec == reader.spec
    for number in range(2):
        order = random_order(len(in_order), np.random.default_rng([3, number]))
        assert rows_of(ours) == [in_order[i] for i in order]


def test_prepared_parquet_equals_reader(tmp_path, small_blocks, run_prepare):
    (tmp_path / "in").mkdir()
    for number in range(2):
        rows = range(number * 1_100, (number + 1) * 1_100)
        table = {
            "y": [None if i == 40 else i % 4 // 3 for i in rows],
            "price": [None if i % 9 == 0 else i / 7 for i in rows],
            "word": [None if i % 5 == 0 else f"w{i % 13}" for i in rows],
            "bag": [None if i % 6 == 0 else [i % 3, None, i % 17][: i % 5] for i in rows],
        }
        pq.write_table(pa.table(table), tmp_path / "in" / f"{number}.parquet", row_group_size=400)
    schema = parse_schema({"label": "y", "dense": ["price"], "keys": ["word", "bag"]})
    found = run_prepare(tmp_path / "in", tmp_path / "out", schema=schema, shard_rows=300)
    of_word, of_bag = (
        [found["fields"][name][f"{kind}_share"] for kind in ("missing", "empty")]
        for name in ("word", "bag")
    )
    examples = [i for i in range(2_200) if i != 40 and i // 100 % 10 != 9]
    assert of_word == [sum(i % 5 == 0 for i in examples) / len(examples), None]
    empty = sum(i % 6 == 0 or i % 5 == 0 for i in examples)
    assert of_bag == [None, empty / len(examples)]
    for part in ("train", "test"):
        options = {"label": "y", "dense": ["price"], "keys": ["word", "bag"]}
        theirs = ParquetReader(tmp_path / "in", 64, part=part, **options)
        ours = PreparedReader(tmp_path / "out", 64, part=part)
        for (one, label), (other, expected) in zip(ours.dataset(), theirs.dataset(), strict=True):
            np.testing.assert_array_equal(label, expected)
            np.testing.assert_array_equal(one["dense"], other["dense"])
            np.testing.assert_array_equal(one["keys"]["word"], other["keys"]["word"])
            assert one["keys"]["bag"].to_list() == other["keys"]["bag"].to_list()


def test_files_with_text_and_integers_in_column_are_refused(tmp_path, run_prepare):
    """The keys of the text "5" and of the integer 5 differ."""
    columns = [["5"], [5]], [[["5"]], ["5"]]
    for number, values in enumerate(columns):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file, column in enumerate(values):
            pq.write_table(pa.table({"y": [1.0], "k": column}), folder / f"{file}.parquet")
        kind, names = (("text", "[]; expected ['k']"), ("list", "[]; expected ['k']"))[number]
        with pytest.raises(ValueError, match=re.escape(f"the {kind} columns are {names}")):
            run_prepare(
                folder, tmp_path / "out", schema=parse_schema({"label": "y", "keys": ["k"]})
            )


def test_negative_ids_and_missing_values_have_rows(tmp_path, run_prepare):
    """With the default padding key, -1, a layer allocates a row for the id -1 of prepared data."""
    users, path = ("-2", "-1", "0", "1", "18446744073709551615", ""), tmp_path / "a.csv"
    lines = [f"{i % 2},{users[i % 6]},x{i % 3}" for i in range(1000)]
    path.write_text("\n".join(["click,user,item", *lines]))
    keys = [{"column": "user", "as": "integer"}, "item"]
    schema = parse_schema({"label": "click", "keys": keys})
    statistics = run_prepare(path, tmp_path / "out", schema=schema)
    user = statistics["fields"]["user"]
    # -1 and the largest uint64 have the same 64 bits.
    assert (user["keys"], user["lookups"], user["missing_share"]) == (4, 900, 150 / 900)
    assert statistics["fields"]["item"]["keys"] == 3
    stored = pq.read_table(tmp_path / "out" / "train")["user"].to_pylist()
    assert stored[:6] == [-2, -1, 0, 1, -1, None]
    reader = PreparedReader(tmp_path / "out", 100)
    layer = slip.keras.EmbeddingCollection(
        [slip.Table(name, dim=2) for name in reader.spec.fields], slip.optimizers.Adagrad(0.1)
    )
    model = keras.Sequential([layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(reader.dataset().map(lambda features, label: (features["keys"], label)), verbose=0)
    assert {name: len(layer.table(name)) for name in ("user", "item")} == {"user": 5, "item": 3}
    assert len(layer.table("user").keys()) == 5


def test_histories_keep_their_order_and_train_din(tmp_path, run_prepare):
    """A history of items is read in its order, and shares the rows of the item."""
    histories = [["d", "a", "c", "a"], ["b"], [], ["c", "b", "a", "d", "b"]]
    lines = [f"{i % 2},{'abcd'[i % 4]},{' '.join(histories[i % 4])}" for i in range(1000)]
    (tmp_path / "a.csv").write_text("\n".join(["click,item,seen", *lines]))
    keys = ["item", {"column": "seen", "separator": " ", "table": "item"}]
    schema = parse_schema({"label": "click", "keys": keys})
    run_prepare(tmp_path / "a.csv", tmp_path / "out", schema=schema)
    reader = PreparedReader(tmp_path / "out", 20)
    assert reader.spec.features == {"item": "item", "seen": "item"}
    # An empty text is an empty list.
    expected = [[hash_string(item.encode()) for item in history] for history in histories]
    features, _ = next(iter(reader.dataset()))
    assert features["keys"]["seen"].to_list() == expected * 5
    layer = slip.keras.EmbeddingCollection(
        [slip.Table("item", 4)],
        features=[slip.FeatureSpec("item", "item"), slip.FeatureSpec("seen", "item", None)],
    )
    model = slip.models.DIN(layer, history={"seen": "item"}, attention=[4], deep=[4])
    model.compile("sgd", "binary_crossentropy")
    model.fit(reader.dataset(), verbose=0)
    assert sorted(layer.table("item").keys()) == sorted({key for row in expected for key in row})


class Broken(Exception):
    """Simulates a kill of the process."""


def test_interrupted_preparation_resumes_to_same_bytes(
    tmp_path, small_blocks, criteo_lines, run_prepare, digests
):
    paths = [tmp_path / "a.tsv", tmp_path / "b.tsv.gz"]
    paths[0].write_text("\n".join(criteo_lines(1_000, bad=(3, 450, 999))))
    paths[1].write_bytes(gzip.compress("\n".join(criteo_lines(650, seed=3)).encode()))
    options = {"shard_rows": 200, "hot_budget_bytes": 4 * 16 * 300, "count_bytes": 1 << 20}
    calls = []
    whole = run_prepare(paths, tmp_path / "whole", progress=lambda *a: calls.append(a), **options)
    expected = digests(tmp_path / "whole")
    assert len(expected) == 9 + 1 + 3
    written = 0
    for stop in range(0, len(calls), 3):
        folder = tmp_path / "broken"
        left = stop

        def stop_there(*_):
            nonlocal left
            left -= 1
            if left < 0:
                raise Broken

        with pytest.raises(Broken):
            run_prepare(paths, folder, progress=stop_there, **options)
        before = {p: p.stat().st_mtime_ns for p in folder.rglob("0*.parquet")}
        assert run_prepare(paths, folder, **options) == whole
        assert digests(folder) == expected
        # Complete shards are not written again.
        assert all(path.stat().st_mtime_ns == time for path, time in before.items())
        written += len(before)
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    assert written > 0


def test_output_is_independent_of_threads_and_blocks(
    tmp_path, monkeypatch, criteo_lines, run_prepare, digests
):
    path = tmp_path / "a.tsv"
    path.write_text("\n".join(criteo_lines(1_000, bad=(999,))))
    found = []
    for threads, block in ((1, 1 << 12), (3, 1 << 15), (2, 1 << 22)):
        monkeypatch.setattr(text, "BLOCK_BYTES", block)
        run_prepare(path, tmp_path / str(block), shard_rows=300, threads=threads)
        found.append(digests(tmp_path / str(block)))
    assert found[0] == found[1] == found[2]


def test_complete_preparation_is_reused_and_new_budget_is_counted(
    tmp_path, criteo_lines, run_prepare, digests
):
    path = tmp_path / "a.tsv"
    path.write_text("\n".join(criteo_lines(500)))
    first = run_prepare(path, tmp_path / "out", shard_rows=200)
    calls = []
    again = run_prepare(path, tmp_path / "out", shard_rows=200, progress=lambda *a: calls.append(a))
    assert again == first and not calls
    before = digests(tmp_path / "out")
    small = run_prepare(path, tmp_path / "out", shard_rows=200, hot_budget_bytes=64 * 30)
    after = digests(tmp_path / "out")
    assert small["hot"]["keys"] == 30 < first["hot"]["keys"]
    assert {name for name in after if after[name] != before[name]} == {"statistics.json"}


def test_other_preparation_in_directory_is_refused_or_replaced(
    tmp_path, criteo_lines, run_prepare, digests
):
    path, other = tmp_path / "a.tsv", tmp_path / "b.tsv"
    path.write_text("\n".join(criteo_lines(300)))
    other.write_text("\n".join(criteo_lines(100, seed=2)))
    run_prepare(path, tmp_path / "out", shard_rows=100)
    before = digests(tmp_path / "out")
    for paths, options in ((other, {"shard_rows": 100}), (path, {"shard_rows": 150})):
        with pytest.raises(OtherPreparation, match="shard_rows" if paths == path else "files"):
            run_prepare(paths, tmp_path / "out", **options)
    assert digests(tmp_path / "out") == before
    run_prepare(other, tmp_path / "out", shard_rows=100, overwrite=True)
    run_prepare(other, tmp_path / "new", shard_rows=100)
    assert digests(tmp_path / "out") == digests(tmp_path / "new")


def test_renamed_folder_of_partition_is_another_preparation(tmp_path, run_prepare):
    folder = tmp_path / "data"
    (folder / "country=de").mkdir(parents=True)
    table = pa.table({"click": [0, 1] * 10, "user": list(range(20))})
    pq.write_table(table, folder / "country=de" / "a.parquet")
    for keys in (["user", "country"], ["user"]):
        schema, out = parse_schema({"label": "click", "keys": keys}), tmp_path / str(len(keys))
        first = run_prepare(folder, out, schema=schema)
        assert run_prepare(folder, out, schema=schema) == first
    (folder / "country=de").rename(folder / "country=fr")
    # The schema does not use the column "country".
    assert run_prepare(folder, tmp_path / "1", schema=schema) == first
    schema = parse_schema({"label": "click", "keys": ["user", "country"]})
    with pytest.raises(OtherPreparation, match=r"\(different: path_values\)"):
        run_prepare(folder, tmp_path / "2", schema=schema)


def test_files_of_killed_run_are_removed_and_other_files_kept(
    tmp_path, criteo_lines, run_prepare, digests
):
    path = tmp_path / "a.tsv"
    path.write_text("\n".join(criteo_lines(1_000)))
    run_prepare(path, tmp_path / "whole", shard_rows=300)
    folder = tmp_path / "out"
    calls = []

    def stop(*call):
        calls.append(call)
        if len(calls) == 3:
            raise Broken

    with pytest.raises(Broken):
        run_prepare(path, folder, shard_rows=300, progress=stop)
    # Leave behind a shard that the manifest does not name yet, and partial files.
    left = (
        "train/000007.parquet",
        "train/.000003.parquet.part",
        "prepared.json.x1",
        "counts.parquet",
    )
    for name in left:
        (folder / name).write_text("left")
    run_prepare(path, folder, shard_rows=300)
    assert digests(folder) == digests(tmp_path / "whole")
    (tmp_path / "mine" / "train").mkdir(parents=True)
    (tmp_path / "mine" / "train" / "000000.parquet").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(OtherPreparation, match="contains 'train', but no prepared data"):
            run_prepare(path, tmp_path / "mine", overwrite=overwrite)
    assert (tmp_path / "mine" / "train" / "000000.parquet").read_text() == "mine"


def test_incomplete_preparation_is_not_read(tmp_path, criteo_lines, run_prepare):
    path = tmp_path / "a.tsv"
    path.write_text("\n".join(criteo_lines(300)))

    def stop(*_):
        raise Broken

    with pytest.raises(Broken):
        run_prepare(path, tmp_path / "out", shard_rows=100, progress=stop)
    run_prepare(path, tmp_path / "out", shard_rows=100)
    manifest = json.loads((tmp_path / "out" / "prepared.json").read_text())
    manifest["is_complete"] = False
    (tmp_path / "out" / "prepared.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"is incomplete. Run slipstream-prepare again"):
        PreparedReader(tmp_path / "out", 10)


def test_strict_mode_names_first_bad_line(tmp_path, criteo_lines, run_prepare):
    path = tmp_path / "a.tsv"
    path.write_text("\n".join(criteo_lines(300, bad=(250, 260))))
    with pytest.raises(BadLineError, match=r"a\.tsv:251: the line has 2 columns"):
        run_prepare(path, tmp_path / "out", shard_rows=100, strict=True)
    run_prepare(path, tmp_path / "out", shard_rows=100)
    with pytest.raises(BadLineError, match=r"a\.tsv:251: the line has 2 columns"):
        run_prepare(path, tmp_path / "out", shard_rows=100, strict=True)


@pytest.mark.parametrize(
    ("label_of", "bad"),
    [
        (lambda i: 1 if i % 9 == 0 else -1, 2_666),  # Labels of -1 and 1.
        (lambda i: 1 + i % 5, 2_400),  # Ratings of 1 to 5.
        (lambda i: i, 2_998),  # A row number.
        (lambda i: i % 5 / 4, 1_800),  # Fractions.
    ],
)
def test_label_out_of_range_raises_with_counts_and_advice(tmp_path, run_prepare, label_of, bad):
    path = tmp_path / "a.csv"
    lines = [f"{label_of(i)},u{i % 7}" for i in range(3_000)]
    path.write_text("\n".join(["click,user", *lines]) + "\n")
    schema = parse_schema({"label": "click", "keys": ["user"]})
    with pytest.raises(TooManyBadLinesError) as raised:
        run_prepare(path, tmp_path / "out", schema=schema, shard_rows=500)
    text = str(raised.value)
    assert (
        f"{bad:,} of 3,000 lines ({bad / 3_000:.1%}) are malformed. Expected at most 10.0%" in text
    )
    reasons = [line for line in text.splitlines() if line.startswith("  ")]
    assert len(reasons) == 1
    assert reasons[0].startswith(f"  {bad:,} lines: click is malformed; expected 0, 1, true")
    assert f"The first is {path}:" in text and "`positive_from` for numbers" in text
    assert "If the column is not the label" in text and not raised.value.may_accept
    with pytest.raises(ValueError, match="is incomplete"):
        PreparedReader(tmp_path / "out", 10)
    # The corrected schema replaces the refused preparation.
    schema = parse_schema({"label": {"column": "click", "positive_from": 1}, "keys": ["user"]})
    assert run_prepare(path, tmp_path / "out", schema=schema, shard_rows=500)["bad_lines"] == 0


def test_positive_that_no_label_has_raises_with_the_labels(tmp_path, run_prepare):
    path = tmp_path / "a.csv"
    labels = ["view", "buy", "cart", "view"] * 250
    path.write_text("\n".join(["action,user", *(f"{v},u{i % 7}" for i, v in enumerate(labels))]))
    options = {"shard_rows": 300}

    def schema(*positive):
        label = {"column": "action", "positive": list(positive)}
        return parse_schema({"label": label, "keys": ["user"]})

    found = "'view' (500), 'buy' (250), 'cart' (250)."
    for _ in range(2):  # The same command raises the same error.
        with pytest.raises(ValueError, match="All labels would be 0") as raised:
            run_prepare(path, tmp_path / "out", schema=schema("purchase"), **options)
        assert "'action' is in `positive`, ['purchase']" in str(raised.value)
        assert str(raised.value).endswith(f"Expected one of its values: {found}")
    # The corrected schema replaces the refused preparation.
    statistics = run_prepare(path, tmp_path / "out", schema=schema("buy", "7"), **options)
    assert sum(statistics["clicks"].values()) == 250
    assert statistics["unused_positive"] == ["7"]
    assert (
        "Labels that become 1: 'buy' (250).\n"
        "Labels that become 0: 'view' (500), 'cart' (250).\n\n"
        "Warning: no label is '7', of `positive` in the schema.\n\n"
    ) in summary(statistics)
    path.write_text("action,user\n" + "gültig,a\n4.0,b\n" * 9, "latin-1")
    options["overwrite"] = True
    with pytest.raises(ValueError, match=r"'g\\\\xfcltig' \(9\).*not in UTF-8.*with iconv "):
        run_prepare(path, tmp_path / "out", schema=schema("gültig"), **options)
    statistics = run_prepare(path, tmp_path / "out", schema=schema("4", "4.0"), **options)
    assert "Warning: no label is '4', of `positive` in the schema. Set `positive_from`" in (
        summary(statistics)
    )


def test_reasons_of_bad_lines_are_counted_over_interruptions(tmp_path, monkeypatch, run_prepare):
    lines = [f"{i % 2},{i}" for i in range(1_000)]
    lines[::10] = [f"{i},x,y" for i in range(100)]
    lines[5::20] = [f"1,u{i}" for i in range(50)]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["click,user", *lines]) + "\n")
    key = {"column": "user", "as": "integer"}
    options = {"schema": parse_schema({"label": "click", "keys": [key]}), "shard_rows": 100}
    monkeypatch.setattr(preparation, "_EARLY_ROWS", 300)
    with pytest.raises(TooManyBadLinesError, match=r"45 of 300 lines \(15.0%\)") as raised:
        run_prepare(path, tmp_path / "out", **options)
    assert "Set the `delimiter`, `quoting` and `escape`" in str(raised.value)
    assert "Remove `as` from the key" in str(raised.value)
    statistics = run_prepare(path, tmp_path / "out", max_bad_fraction=0.15, **options)
    assert statistics["bad_lines"] == 150
    assert statistics["bad_reasons"] == {
        "the line has 3 columns; expected 2, separated by ','": 100,
        "user is malformed; expected an integer of int64 or uint64 or a missing value": 50,
    }
    with pytest.raises(TooManyBadLinesError, match="150 of 1,000 lines"):
        run_prepare(path, tmp_path / "out", **options)


def test_damaged_files_are_named_in_error(tmp_path, criteo_lines, run_prepare):
    path = tmp_path / "a.tsv.gz"
    whole = gzip.compress("\n".join(criteo_lines(3_000)).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a\.tsv\.gz: the file is damaged after line [0-9]+"):
        run_prepare(path, tmp_path / "out")
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match=r"a\.parquet: the file is damaged or not a Parquet file"):
        run_prepare(path, tmp_path / "out", schema=parse_schema({"label": "y", "keys": ["k"]}))


def test_input_without_rows_raises(tmp_path, criteo_lines, run_prepare):
    path = tmp_path / "a.csv"
    path.write_text("y,k\nx,1\n")
    schema = parse_schema({"label": "y", "keys": ["k"]})
    with pytest.raises(ValueError, match=r"(?s)no well-formed example\. .*a\.csv:2: y is 'x'"):
        run_prepare(path, tmp_path / "out", schema=schema)
    path.write_text("y,k\n")
    with pytest.raises(ValueError, match="have no rows"):
        run_prepare(path, tmp_path / "out2", schema=schema)
    path.write_text("y,k\n1,1\n")
    for folder in ("out", "out2"):
        assert run_prepare(path, tmp_path / folder, schema=schema)["inputs"]["train"] == 1


def test_empty_file_is_reported_as_empty(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("")
    for schema in (None, parse_schema({"label": "y", "keys": ["k"]})):
        with pytest.raises(ValueError, match=r"a\.csv.*the first line is empty"):
            open_source([str(path)], "auto", schema)


def test_unknown_file_formats_raise(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("y,k\n1,2\n")
    (tmp_path / "c").mkdir()
    schema = parse_schema({"label": "y", "keys": ["key"]})
    for error, named, arguments in (
        (ValueError, "first line 'y,k' is unknown", ([str(path)],)),
        (
            ValueError,
            r"a.csv:1: the column 'key' is missing.*has the columns",
            ([str(path)], "auto", schema),
        ),
        (ValueError, "'csv' requires a schema", ([str(path)], "csv")),
        (ValueError, "'criteo' does not accept a schema", ([str(path)], "criteo", schema)),
        (ValueError, "format", ([str(path)], "tsv")),
        (FileNotFoundError, "no such|no data file", ([str(tmp_path / "b")],)),
        (
            FileNotFoundError,
            r"contains no data files.*\.parquet, .*\.csv",
            ([str(tmp_path / "c")],),
        ),
    ):
        with pytest.raises(error, match=named):
            open_source(*arguments)


def test_shuffled_shards_yield_every_example_once(tmp_path, criteo_lines, run_prepare):
    path = tmp_path / "a.tsv"
    path.write_text("\n".join(criteo_lines(2_000)))
    run_prepare(path, tmp_path / "out", shard_rows=200)
    plain = rows_of(PreparedReader(tmp_path / "out", 90, part="train"))
    reader = PreparedReader(tmp_path / "out", 90, part="train", shuffle_seed=5)
    passes = [rows_of(reader) for _ in range(2)]
    again = PreparedReader(tmp_path / "out", 90, part="train", shuffle_seed=5)
    assert rows_of(again) == passes[0] != passes[1]
    for shuffled in passes:
        assert shuffled != plain and sorted(shuffled) == sorted(plain)
    both = rows_of(PreparedReader(tmp_path / "out", 90))
    assert both[: len(plain)] == plain and len(both) == 2_000
    assert sorted(both) == sorted(rows_of(CriteoReader(path, 90)))


def test_ranks_read_every_example_once(tmp_path, criteo_lines, run_prepare):
    path = tmp_path / "a.tsv"
    path.write_text("\n".join(criteo_lines(1_000)))
    run_prepare(path, tmp_path / "out", shard_rows=300)
    rows = []
    for rank in range(3):
        # Split the batches between ranks as slipstream-train does.
        reader = PreparedReader(tmp_path / "out", 32, part="train", shuffle_seed=1)
        own = reader.dataset().shard(3, rank)
        rows += [row for features, _ in own for row in features["keys"].numpy().tolist()]
    expected = collect(CriteoReader(path, 32, part="train"))["keys"].tolist()
    assert sorted(rows) == sorted(expected) and len(expected) == 900
