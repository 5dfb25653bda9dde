"""Tests that `data.fingerprints` detects changed content and accepts equal content."""

from __future__ import annotations

import os
import time
import zlib

import numpy as np
import pytest

from slipstream_tf.data import fingerprints
from slipstream_tf.data.preparation import OtherPreparation
from slipstream_tf.data.schema import parse_schema

SCHEMA = parse_schema({"label": "click", "keys": ["user"]})


@pytest.mark.parametrize("size", [0, 1, 4_096, 5_000, 200_000, 3_000_000])
def test_fingerprint_detects_any_change_with_new_time(tmp_path, size):
    rng = np.random.default_rng(size)
    path, content = tmp_path / "a", bytearray(rng.bytes(size))
    path.write_bytes(content)
    before = {**fingerprints.fingerprint(path), "crc32": fingerprints.crc32(path)}
    assert before["bytes"] == size and before["crc32"] == zlib.crc32(content)
    assert fingerprints.is_unchanged(path, before)
    os.utime(path, ns=(0, before["modified"] + 1))
    assert fingerprints.is_unchanged(path, before), "the same content at another time"
    assert not fingerprints.is_unchanged(path, {**before, "crc32": None})
    for position in rng.integers(0, size, 5) if size else ():
        content[position] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(0, before["modified"] + 1))
        assert not fingerprints.is_unchanged(path, before)
        content[position] ^= 1
    path.write_bytes(content + b"x")
    assert not fingerprints.is_unchanged(path, before)


@pytest.mark.parametrize("keeps_time", [False, True])
def test_changed_file_of_same_size_is_prepared_again(tmp_path, run_prepare, keeps_time):
    path = tmp_path / "a.csv"

    def write(residue):
        lines = [f"{int(i % 5 == residue)},u{i % 7}" for i in range(3_000)]
        path.write_text("\n".join(["click,user", *lines]) + "\n")
        return path.stat()

    first = write(0)
    run_prepare(path, tmp_path / "out", schema=SCHEMA, shard_rows=1_000)
    assert write(1).st_size == first.st_size
    if keeps_time:
        os.utime(path, ns=(first.st_mtime_ns, first.st_mtime_ns))
    with pytest.raises(OtherPreparation, match=r"\(different: content of .*a\.csv\)"):
        run_prepare(path, tmp_path / "out", schema=SCHEMA, shard_rows=1_000)
    calls = []
    run_prepare(
        path, tmp_path / "out", schema=SCHEMA, shard_rows=1_000, overwrite=True,
        progress=lambda *call: calls.append(call),
    )  # fmt: skip
    assert calls[-1][-1] and ("preparing", 3_000) in {(call[0], call[-1]) for call in calls}


def test_touched_file_is_not_prepared_again(tmp_path, monkeypatch, run_prepare):
    path = tmp_path / "a.csv"
    path.write_text("click,user\n1,a\n0,b\n" + "1,c\n" * 50)
    whole = run_prepare(path, tmp_path / "out", schema=SCHEMA)
    os.utime(path, ns=(5, 5))
    calls = []
    options = {"schema": SCHEMA, "progress": lambda *call: calls.append(call)}
    assert run_prepare(path, tmp_path / "out", **options) == whole and not calls
    # The new time is stored, so that the next run does not hash the whole file.
    monkeypatch.delattr(fingerprints, "crc32")
    assert run_prepare(path, tmp_path / "out", **options) == whole and not calls


def test_touched_file_continues_interrupted_preparation(tmp_path, run_prepare):
    path, options = tmp_path / "a.csv", {"schema": SCHEMA, "shard_rows": 500}
    path.write_text("click,user\n" + "1,a\n0,b\n" * 1_000)

    def interrupt(_name, done, total, rows):
        time.sleep(0.01)  # The file is hashed in the meantime.
        if rows > 1_500:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_prepare(path, tmp_path / "out", **options, progress=interrupt)
    os.utime(path, ns=(5, 5))
    run_prepare(path, tmp_path / "out", **options)
    run_prepare(path, tmp_path / "whole", **options)
    texts = [(tmp_path / name / "prepared.json").read_text() for name in ("out", "whole")]
    assert texts[0] == texts[1]


def test_file_that_changes_while_it_is_read_raises(tmp_path, run_prepare):
    path = tmp_path / "a.csv"
    path.write_text("click,user\n" + "1,a\n0,b\n" * 500)

    def change(*_):
        path.write_text("click,user\n" + "0,a\n1,b\n" * 500)

    with pytest.raises(ValueError, match=r"a\.csv changed while it was read"):
        run_prepare(path, tmp_path / "out", schema=SCHEMA, progress=change)
    with pytest.raises(OtherPreparation, match="content of"):
        run_prepare(path, tmp_path / "out", schema=SCHEMA)


def test_hash_of_manifest_ignores_time_and_folder_only(tmp_path, run_prepare):
    from slipstream_tf.data.readers.prepared import read_manifest

    hashes = []
    for name, label, modified in (("a", 1, 10), ("b", 1, 20), ("c", 0, 10)):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "data.csv"
        path.write_text("click,user\n" + f"{label},a\n1,b\n" * 20 + "x,c\n")
        os.utime(path, ns=(modified, modified))
        assert run_prepare(path, tmp_path / name / "out", schema=SCHEMA)["bad_lines"] == 1
        hashes.append(fingerprints.of_manifest(read_manifest(tmp_path / name / "out")))
    assert hashes[0] == hashes[1] != hashes[2]
