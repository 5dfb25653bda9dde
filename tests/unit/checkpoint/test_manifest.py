"""Tests of manifests: valid and invalid values, and first-edition checkpoints.

Commit 2e6f060 wrote edition_1.tar.gz with ten steps of `thread_jobs.Job` in one process.
"""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from thread_jobs import Job

from slipstream_tf.checkpoint import CheckpointError, CheckpointMismatchError
from slipstream_tf.checkpoint.manifest import (
    Manifest,
    entry_of,
    read_manifest,
    require_named,
    require_whole,
    sealed,
)
from slipstream_tf.distributed import SingleProcess

TABLE = {"name": "t", "dim": 2, "dtype": "float32", "slots": 2, "rule": None, "rows": 3}


def manifest(folder: Path, **changes: Any) -> Path:
    """Writes a checkpoint of one file and applies `changes` to its manifest."""
    (folder / "rank-0").mkdir(parents=True, exist_ok=True)
    (folder / "rank-0" / "state.index").write_bytes(b"content")
    files = {"rank-0/state.index": entry_of(folder / "rank-0" / "state.index")}
    whole = Manifest("me", 7, 1, "replicated", [], files, [None], [None], None, {"tensorflow": "2"})
    whole.write(folder)
    path = folder / "manifest.json"
    values = json.loads(path.read_text())
    changed = {k: v for k, v in {**values, **changes}.items() if v != "drop"}
    path.write_text(json.dumps(sealed(changed)))
    return folder


def test_manifest_round_trip(tmp_path: Path) -> None:
    found = read_manifest(manifest(tmp_path, tables=[TABLE, {**TABLE, "rule": "Adagrad"}]))
    assert (found.step, found.world_size, found.versions) == (7, 1, {"tensorflow": "2"})
    require_whole(tmp_path, found, ["rank-0"])
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    "name",
    [
        "../other/state",
        "rank-0/../../etc/passwd",
        "/etc/passwd",
        "rank-0/..",
        "rank-0/",
        "rank-x/state",
        "rank-01/state",
        "rank-0/a/b",
        "rank-0/.hidden",
        "rank-0\\state",
        "rank-0/a\n",
        "",
        "rank-" + "9" * 5000 + "/engine",
        "rank-0/" + "a" * 201,
    ],
)
def test_path_outside_directory_raises(tmp_path: Path, name: str) -> None:
    manifest(tmp_path, files={name: {"bytes": 7}})
    with pytest.raises(CheckpointError, match=r"lists .*; expected files in folders rank-0"):
        read_manifest(tmp_path)


def test_symbolic_link_raises(tmp_path: Path) -> None:
    folder = manifest(tmp_path / "a")
    secret = tmp_path / "secret"
    secret.write_bytes(b"content")
    (folder / "rank-0" / "state.index").unlink()
    (folder / "rank-0" / "state.index").symlink_to(secret)
    with pytest.raises(CheckpointError, match="is a symbolic link"):
        require_whole(folder, read_manifest(folder), ["rank-0"])


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": "7"},
        {"world_size": 0},
        {"files": {"rank-0/a": 3}},
        {"files": {"rank-0/a": {}}},
        {"files": {"rank-0/a": {"bytes": 7, "sha257": "0"}}},
        {"files": {"rank-0/a": {"bytes": 7, "sha256": 0}}},
        {"tables": None},
        {"tables": [3]},
        {"tables": [{k: v for k, v in TABLE.items() if k != "dim"}]},
        {"tables": [{**TABLE, "rows": "3"}]},
        {"tables": [{**TABLE, "more": 1}]},
        {"positions": "drop"},
        {"saturation": "drop"},
        {"unknown": 1},
        {"step": True},
        {"world_size": 2},
        {"world_size": 2**60},
        {"positions": [None, None]},
        {"rng": []},
        {"placement": "anywhere"},
        {"files": {"rank-1/state.index": {"bytes": 7}}},
    ],
    ids=str,
)
def test_damaged_manifest_raises(tmp_path: Path, changes: dict[str, Any]) -> None:
    manifest(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=r"manifest\.json: the manifest has .*; expected "):
        read_manifest(tmp_path)


def test_other_version_is_named_in_error(tmp_path: Path) -> None:
    for version in (4, 6):
        manifest(tmp_path, format=version, versions={"slipstream_tf": "9.1"})
        with pytest.raises(
            CheckpointMismatchError,
            match=rf"format {version}; this version reads format 5\. .* wrote it \(9\.1\)\.",
        ):
            read_manifest(tmp_path)


def test_every_changed_character_is_detected(tmp_path: Path) -> None:
    path = manifest(tmp_path, tables=[TABLE], positions=[{"batches": 12.5}]) / "manifest.json"
    whole = path.read_text()
    before = read_manifest(tmp_path)
    for place, character in enumerate(whole):
        for other in {"7", "x", chr(ord(character) ^ 1)} - {character}:
            path.write_text(whole[:place] + other + whole[place + 1 :])
            try:
                found = read_manifest(tmp_path)
            except (CheckpointError, CheckpointMismatchError) as error:
                assert "manifest.json" in str(error) and "estore" in str(error)
            else:
                # The change is JSON whitespace or an equivalent notation of the same value.
                assert found == before, (place, character, other)


def test_manifest_without_checksum_is_damaged(tmp_path: Path) -> None:
    path = manifest(tmp_path) / "manifest.json"
    values = json.loads(path.read_text())
    del values["checksum"]
    path.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="the manifest does not match its checksum"):
        read_manifest(tmp_path)


def test_path_that_is_not_file_raises(tmp_path: Path) -> None:
    """Reading a pipe would block, and some device files are endless."""
    folder = manifest(tmp_path)
    path = folder / "manifest.json"
    for put in (path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")):
        path.rmdir() if path.is_dir() else path.unlink()
        put()
        with pytest.raises(
            CheckpointError, match=r"manifest\.json: the path is not a regular file"
        ):
            read_manifest(folder)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(CheckpointError, match=r"manifest\.json: the path is not a regular file"):
        read_manifest(folder)
    with pytest.raises(CheckpointError, match=r"manifest\.json: the file is missing"):
        read_manifest(folder / "rank-0" / "state.index")


def test_deeply_nested_or_huge_manifest_raises(tmp_path: Path) -> None:
    path = manifest(tmp_path) / "manifest.json"
    whole = path.read_text()
    nested = "[" * 100_000 + "]" * 100_000
    path.write_text(whole.replace("[null]", nested, 1))
    with pytest.raises(CheckpointError, match=r"the manifest is damaged \(RecursionError"):
        read_manifest(tmp_path)
    with path.open("w") as file:
        file.truncate(65 << 20)
    with pytest.raises(CheckpointError, match="has 68157440 bytes; expected at most 67108864"):
        read_manifest(tmp_path)


INDEX, SHARD = {"bytes": 7, "sha256": "0"}, "rank-0/state.data-0000{}-of-0000{}"


@pytest.mark.parametrize(
    "files",
    [
        {"rank-0/own.index": INDEX},
        {"rank-0/state.index": INDEX},
        {SHARD.format(0, 1): INDEX},
        {"rank-0/state.index": INDEX, SHARD.format(0, 2): INDEX},
        {"rank-0/state.index": INDEX, SHARD.format(1, 1): INDEX},
        {"rank-0/state.index": {"bytes": 7}, SHARD.format(0, 1): INDEX},
        {"rank-0/state.index": INDEX, SHARD.format(0, 1): {"bytes": 7}},
    ],
    ids=str,
)
def test_files_read_by_tensorflow_require_checksums(tmp_path: Path, files: Any) -> None:
    found = read_manifest(manifest(tmp_path, files=files))
    with pytest.raises(
        CheckpointError, match=r"manifest\.json: the manifest (lists only|has no) .*rank-0/state"
    ):
        require_named(tmp_path, found, "rank-0/state")
    both = {"rank-0/state.index": INDEX, SHARD.format(1, 2): INDEX, SHARD.format(0, 2): INDEX}
    require_named(tmp_path, read_manifest(manifest(tmp_path, files=both)), "rank-0/state")


ARCHIVE = Path(__file__).parent / "data" / "edition_1.tar.gz"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Extracts the archive and returns the checkpoint folder."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    return tmp_path / "edition_1"


def test_checkpoint_of_first_edition_raises(written: Path) -> None:
    job = Job(SingleProcess(), "native", written / "checkpoints")
    with pytest.raises(CheckpointMismatchError, match=r"this version reads format 5\. Restore the"):
        job.checkpoints.restore()


def test_saved_model_of_first_edition_is_served(written: Path) -> None:
    model = tf.saved_model.load(str(written / "saved_model"))
    inputs = {"a": tf.range(20, dtype=tf.int64), "b": 3 * tf.range(20, dtype=tf.int64)}
    outputs = keras.tree.flatten(model.serve(inputs))
    with np.load(written / "expected.npz") as expected:
        assert len(outputs) == 2
        for place, output in enumerate(outputs):
            np.testing.assert_allclose(output, expected[f"output.{place}"], rtol=1e-6, atol=1e-6)
