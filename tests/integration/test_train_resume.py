"""slipstream-train killed with SIGKILL and resumed ends like an uninterrupted run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from train_programs import prepared

from slipstream_tf.checkpoint.tables import SavedTable
from slipstream_tf.cli import train
from slipstream_tf.cli.program import run_program
from slipstream_tf.data import fingerprints

PROGRAM = Path(__file__).with_name("killed_train.py")
INPUTS = 1_600
SMALL = (
    "--batch_size=64", "--epochs=2", "--dim=4", "--mlp=8", "--bottom=8", "--dropout=0.2",
)  # fmt: skip
EVERY = 7
WAYS = {
    "none": (),
    "mask": (
        "--policies=mask_gradients", "--mask_fraction=0.6", "--rows_optimizer=adam",
    ),
    "defer": (
        "--policies=defer_gradients", "--capacity=70", "--eviction=lfu", "--evaluate_every=9",
    ),
    "inputs": (
        "--policies=skip_examples", "--skip_score=row_drift", "--skip_fraction=0.6",
        "--skip_keep_rate=0.2", "--skip_alpha=0.5",
    ),
    "predicted": ("--policies=skip_examples", "--skip_fraction=0.4"),
    "dry_run": ("--dry_run", "--skip_score=row_drift", "--skip_alpha=0.5"),
    "fae": ("--schedule=fae", "--hot_set_memory=10KiB"),
}  # fmt: skip
# Parts of the record that depend on the process or machine instead of the run.
TIMES = ("seconds", "wall_seconds", "seconds_per_step_after_warmup")
PLACES = ("flags", "resumed_at", "machine", "versions", "report")


@pytest.fixture(scope="module", name="data")
def fixture_data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns prepared data with three keys and 1,500 training examples.

    Few keys are popular. Two epochs have 47 batches. All but the last are full.
    """
    random = np.random.default_rng(0)
    keys = random.zipf(1.3, (INPUTS, 3)) % 300
    age = random.normal(size=INPUTS).astype(np.float32)
    chance = 1 / (1 + np.exp(1 - (keys % 5 - 2).sum(axis=1) - age))
    columns = dict(zip(("user", "item", "shop"), keys.T, strict=True))
    clicked = (random.random(INPUTS) < chance).astype(np.int64)
    folder = tmp_path_factory.mktemp("data")
    table = {"clicked": clicked, "age": age, **columns}
    return str(prepared(folder, table, ["user", "item", "shop"], ["age"]))


def flags_of(way: str, data: str) -> list[str]:
    window = () if way in ("none", "fae") else ("--window_steps=5",)
    return [f"--data={data}", *SMALL, *WAYS[way], *window, f"--checkpoint_every={EVERY}"]


def run(output: Path, *flags: str) -> dict[str, Any]:
    assert run_program(train.make_flags(), train.main, [*flags, f"--output={output}"]) == 0
    return json.loads((output / "metrics.json").read_text())


def kill(
    warm: list[str], step: int, output: Path, *flags: str, by: str = "SIGKILL"
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, *warm, str(PROGRAM), by, str(step), *flags, f"--output={output}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def without_times(value: Any) -> Any:
    """Returns the record without times and buffer sizes.

    These depend on the process.
    """
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if not k.endswith(("seconds", "deferred_bytes"))}
        return {name: without_times(part) for name, part in kept.items()}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def newest(output: Path) -> Path:
    return sorted((output / "checkpoints").glob("checkpoint-*"))[-1]


def require_same_checkpoint(one: Path, other: Path) -> None:
    """Asserts that the newest checkpoints are bitwise equal.

    Compares rows, slots, counts, weights and the optimizer.
    """
    manifests = [json.loads((p / "manifest.json").read_text()) for p in (one, other)]
    assert manifests[0]["step"] == manifests[1]["step"]
    assert len(manifests[0]["tables"]) == len(manifests[1]["tables"]) == 3
    for index in range(3):
        tables = [
            SavedTable([path / "rank-0" / f"table-{index:03d}"], found["checkpoint"], entry)
            for path, found in zip((one, other), manifests, strict=True)
            for entry in found["tables"][index : index + 1]
        ]
        for read in (SavedTable.contents, lambda table: table.deferred(0, 1)):
            columns = [read(table) for table in tables]
            assert set(columns[0]) == set(columns[1]) >= {"keys"}
            for part, values in columns[0].items():
                np.testing.assert_array_equal(values, columns[1][part], err_msg=f"{index} {part}")
    states = [tf.train.load_checkpoint(str(path / "rank-0" / "state")) for path in (one, other)]
    names = states[0].get_variable_to_shape_map()
    assert set(names) == set(states[1].get_variable_to_shape_map()) and len(names) > 10
    for name in names:
        if name != "_CHECKPOINTABLE_OBJECT_GRAPH":
            values = [state.get_tensor(name) for state in states]
            np.testing.assert_array_equal(*values, err_msg=name)


@pytest.mark.parametrize(
    "way",
    # The other cases cover these as well.
    [pytest.param(w, marks=pytest.mark.slow) if w in ("none", "inputs") else w for w in WAYS],
)
def test_killed_run_resumes_identically(
    way: str, data: str, warm: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = flags_of(way, data)
    straight = run(tmp_path / "straight", *flags)
    killed = tmp_path / "killed"
    # The first kill is in the first epoch, the second in the second epoch.
    for step in (17, 27):
        done = kill(warm, step, killed, *flags, "--resume")
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
        assert not (killed / "metrics.json").exists()
        if step == 17:
            assert "training starts from scratch" in done.stdout
    resumed = run(killed, *flags, "--resume")
    # The newest checkpoint may be incomplete, then the run resumes from the one before. A start
    # without a later checkpoint is missing in the record of the next start.
    assert resumed["resumed_at"] in ([7, 14], [7, 21], [14, 21], [14])
    assert straight["resumed_at"] == []
    assert f"training continues from {killed}" in capsys.readouterr().out
    for name in straight:
        if name not in (*TIMES, *PLACES):
            assert without_times(resumed[name]) == without_times(straight[name]), name
    require_same_checkpoint(newest(tmp_path / "straight"), newest(killed))
    assert straight["examples"]["seen"] == 3_000
    if way in ("inputs", "predicted"):
        assert straight["examples"]["skipped"] > 200
    if way == "defer":
        assert set(straight["rows"].values()) <= set(range(71))
    # Times of all parts are added.
    seconds = [point["seconds"] for point in resumed["progress"]]
    assert seconds == sorted(seconds) and resumed["seconds"]["training"] > seconds[-1]
    assert resumed["wall_seconds"] > resumed["seconds"]["training"]


def test_sigterm_saves_checkpoint_after_current_step(
    data: str, warm: list[str], tmp_path: Path
) -> None:
    flags = [flag for flag in flags_of("defer", data) if not flag.startswith("--evaluate")]
    straight, output = run(tmp_path / "straight", *flags), tmp_path / "stopped"
    done = kill(warm, 17, output, *flags, by="SIGTERM")
    assert done.returncode == 143, done.stdout + done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "slipstream-train:" in line]
    assert "SIGTERM after step 17" in said and "--resume" in said and "Traceback" not in done.stderr
    assert json.loads((newest(output) / "manifest.json").read_text())["step"] == 17
    resumed = run(output, *flags, "--resume")
    assert resumed["resumed_at"] == [17]
    for name in ("test", "training", "progress", "windows"):
        assert without_times(resumed[name]) == without_times(straight[name]), name
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert run_program(train.make_flags(), train.main, flags) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "slipstream-train:" in line]
    assert len(lines) == 1
    return lines[0]


def test_resume_with_incompatible_settings_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed_by, crc32 = [], fingerprints.crc32

    def recorded(path: str) -> int:
        hashed_by.append(threading.current_thread())
        return crc32(path)

    monkeypatch.setattr(fingerprints, "crc32", recorded)
    output = tmp_path / "run"
    small = ["--batch_size=128", "--epochs=2", "--dim=4", "--mlp=8", "--dropout=0.2"]
    data = tmp_path / "clicks.tsv"
    values = np.random.default_rng(0).integers(0, 9, (1100, 39))
    lines = ["\t".join(map(str, [i % 2, *row])) + "\n" for i, row in enumerate(values)]
    data.write_text("".join(lines))
    small += [f"--data={data}", f"--output={output}"]
    small += ["--policies=defer_gradients", "--window_steps=4"]
    record = run(output, *small, "--checkpoint_every=5", "--keep_checkpoints=1")
    assert os.listdir(output / "checkpoints") and record["resumed_at"] == []
    assert len(list((output / "checkpoints").glob("checkpoint-*"))) == 1
    said = refused(capsys, *small)
    assert f"--output={output}" in said and "--resume" in said and "checkpoint-" in said
    for flag, before, now in (
        ("seed", "0", "3"),
        ("dim", "4", "8"),
        ("policies", "defer_gradients", "mask_gradients"),
        ("rows_optimizer", "adagrad", "sgd"),
        ("defer_max_age", "no value", "7"),
        ("batch_size", "128", "64"),
        ("rows_l2", "0.0", "0.5"),
    ):
        said = refused(capsys, *small, f"--{flag}={now}", "--resume")
        assert f"--{flag}={now} with --resume: the run in {output} has {before}." in said
    # A flag of an older version.
    path = output / "checkpoints" / "run.json"
    saved = path.read_text()
    assert json.loads(saved)["data"]["crc32"] == zlib.crc32(data.read_bytes())
    # The first step does not wait for the hash.
    assert len(hashed_by) == 1 and hashed_by[0] is not threading.main_thread()
    older = json.loads(saved)
    older["settings"]["engine"]["cache_movement"] = 0.1
    path.write_text(json.dumps(older))
    said = refused(capsys, *small, "--resume")
    assert f"--cache_movement=no value with --resume: the run in {output} has 0.1." in said
    path.write_text(saved)
    data.write_text("".join([*lines, *lines]))
    said = refused(capsys, *small, "--resume")
    assert (
        f"--data={data} with --resume: the data set has changed" in said and "`bytes` was" in said
    )
    # Another file of the same size.
    data.write_text("".join([*lines[1:], lines[0]]))
    said = refused(capsys, *small, "--resume")
    assert "the data set has changed" in said and "the content of the file differs" in said
    data.write_text("".join(lines))
    assert run(output, *small, "--resume")["resumed_at"]
    (output / "checkpoints" / "run.json").write_text("{")
    assert "run.json cannot be read" in refused(capsys, *small, "--resume")
    for flags in (("--resume",), ("--checkpoint_every=4",)):
        assert "requires --output" in refused(capsys, f"--data={data}", *SMALL, *flags)
    assert "requires --checkpoint_every" in refused(
        capsys, f"--data={data}", *SMALL, "--keep_checkpoints=2", f"--output={tmp_path / 'other'}"
    )


def test_resume_on_data_that_was_prepared_again_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for name, shift in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        columns = {"clicked": [(i + shift) % 2 for i in range(1_000)], "user": list(range(1_000))}
        folders.append(prepared(tmp_path / name, columns, ["user"], []))
    output = tmp_path / "run"
    flags = ["--model=dcn", "--dim=4", "--mlp=4", f"--data={folders[0]}", f"--output={output}"]
    run(output, *flags, "--checkpoint_every=1", "--batch_size=500")
    shutil.rmtree(folders[0])
    folders[1].rename(folders[0])
    said = refused(capsys, *flags, "--batch_size=500", "--checkpoint_every=1", "--resume")
    assert f"--data={folders[0]} with --resume: the data set has changed" in said
    assert "`files` was" in said
