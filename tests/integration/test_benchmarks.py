"""The benchmark programs with tiny settings: they run through and write what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from absl.flags import FLAGS

from slipstream_tf.cli import settings, train
from slipstream_tf.cli.program import run_program

DEFER = "generated/unshaped/sharded_2/seed3/repeat0/defer/metrics.json"
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = ("batch_size=32", "dim=4", "mlp=8", "bottom=8", "epochs=1")
needs_sources = pytest.mark.skipif(not BENCHMARKS.is_dir(), reason="no benchmarks/ beside tests/")


def run_benchmark(
    name: str, *flags: str, warm: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs a program with the same package as here.

    Args:
        name: of its file.
        *flags: its own.
        warm: the fixture: it, and what it starts, need not import TensorFlow first. Not for a
            program that passes other descriptors than its output to what it starts.
    """
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    if warm:
        environment["WARM_PYTHON"] = str(Path(warm[-1]) / "python")
    command = [sys.executable, *warm, str(BENCHMARKS / name), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    # Programs have flags of the same names.
    FLAGS.remove_flag_values([flag.name for flag in FLAGS.get_flags_for_module(name)])
    return module


@needs_sources
def test_skipping_compares_runs_and_does_not_repeat_them(warm: list[str], tmp_path: Path) -> None:
    output, records = tmp_path / "results", tmp_path / "runs"
    flags = [
        "--data=generated:2500", "--seeds=3", "--runs=paper", f"--output={output}",
        f"--records={records}", *(f"--train_flag={flag}" for flag in TINY),
    ]  # fmt: skip
    first = run_benchmark("skipping.py", *flags, warm=warm)
    assert first.returncode == 0, first.stderr
    result = json.loads((output / "skipping_generated.json").read_text())
    assert list(result["runs"]) == ["plain", "plain_rows", "paper"]
    plain, rows, paper = (result["runs"][name]["3"] for name in result["runs"])
    assert plain["inputs_share"] == rows["inputs_share"] == 1.0 and plain["ranks"] is None
    assert rows["auc"] == plain["auc"] and rows["rows_share"] == 1.0
    assert paper["inputs_share"] < 1.0 and 0.0 < paper["rows_share"] < 1.0
    assert paper["auc_difference"] == pytest.approx(paper["auc"] - plain["auc"])
    assert paper["bytes_sent"] == paper["rows_sent"] * (8 + 4 * 4)
    table = (output / "skipping_generated.md").read_text()
    assert all(f"| {name} |" in table for name in result["runs"])
    plot = output / "frontier_generated.png"
    assert plot.exists() or "matplotlib is not installed" in first.stdout

    written = {path: path.stat().st_mtime_ns for path in records.rglob("metrics.json")}
    again = run_benchmark("skipping.py", *flags, warm=warm)
    assert again.returncode == 0 and len(written) == 3
    assert {path: path.stat().st_mtime_ns for path in records.rglob("metrics.json")} == written
    other = run_benchmark("skipping.py", *flags, "--train_flag=dim=8", warm=warm)
    assert other.returncode != 0 and "was made with other flags" in other.stdout + other.stderr


@needs_sources
def test_what_is_held_at_the_end_counts_as_sent(warm: list[str], tmp_path: Path) -> None:
    output, records = tmp_path / "results", tmp_path / "runs"
    done = run_benchmark(
        "skipping.py", "--data=generated:2500", "--seeds=3", "--runs=defer_0.01_4",
        f"--output={output}", f"--records={records}",
        *(f"--train_flag={flag}" for flag in TINY), warm=warm,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = json.loads((output / "skipping_generated.json").read_text())["runs"]["defer_0.01_4"]["3"]
    record = json.loads((records / "generated/seed3/defer_0.01_4/metrics.json").read_text())
    warming_up = [window for window in record["windows"] if window["is_warming_up"]]
    before = sum(table["rows"]["sent"] for window in warming_up for table in window["tables"])
    assert sum(rows["flushed"] for rows in record["gradient_rows"].values()) > 0
    sent = sum(rows["sent"] for rows in record["gradient_rows"].values())
    assert run["rows_sent"] == sent - before
    assert run["bytes_sent"] == run["rows_sent"] * (8 + 4 * 4)


@needs_sources
def test_every_run_has_flags_that_the_program_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    skipping = load("skipping", monkeypatch)
    for name, runs in skipping.RUNS.items():
        assert len({run.name for run in runs}) == len(runs)
        for run in runs:
            if run.match is not None:
                assert run.match in {other.name for other in runs}
                continue
            given = skipping.flags_of(run, "x", 0, skipping.COMMON[name])
            texts = [f"--{flag}={value}" for flag, value in given.items()]
            values, names = train.make_flags().parse(texts)
            resolved = settings.resolve(values, names, lambda _, name=name: name)
            ranks = run.flags.get("simulated_ranks", 1)
            assert resolved.engine.get("simulated_ranks", 1) == ranks
            assert skipping.skipping_report.baseline(ranks) in {other.name for other in runs}


@needs_sources
def test_network_compares_bytes_of_ranks_and_does_not_repeat_runs(
    warm: list[str], tmp_path: Path
) -> None:
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("no Horovod: run `make horovod`")
    output, records = tmp_path / "results", tmp_path / "runs"
    tiny = ("dim=4", "mlp=8", "bottom=8", "snapshot_interval=4")
    flags = [
        "--data=generated:2500", "--seeds=3", "--ranks=2", "--placements=sharded",
        "--global_batch=64", "--max_inputs=1600", "--runs=defer", f"--output={output}",
        f"--records={records}", *(f"--train_flag={flag}" for flag in tiny),
    ]  # fmt: skip
    first = run_benchmark("network.py", *flags, warm=warm)
    assert first.returncode == 0, first.stdout + first.stderr
    result = json.loads((output / "network_generated_unshaped.json").read_text())
    alone, plain, defer = result["runs"]
    assert [run["placement"] for run in result["runs"]] == ["alone", "sharded", "sharded"]
    assert alone["bytes_share"] is None and plain["bytes_share"] == 1.0
    assert plain["auc_difference_alone"] == pytest.approx(0.0, abs=0.002)
    assert defer["auc_difference_plain"] == pytest.approx(defer["auc"] - plain["auc"])
    assert plain["seconds_share"] == 1.0 and defer["seconds_share"] > 0.0

    # 25 steps. What is held at the end is sent then, and counts.
    record = json.loads((records / DEFER).read_text())
    warming_up = [window for window in record["windows"] if window["is_warming_up"]]
    assert defer["steps_after_warmup"] == 25 - warming_up[-1]["step"]
    for kind, total in record["ranks"]["bytes"].items():
        after = total - sum(window["traffic"][kind] for window in warming_up)
        assert defer["bytes_per_step"][kind] * defer["steps_after_warmup"] == pytest.approx(after)
    assert defer["bytes_per_step"]["deferred"] > 0
    rows = {table: counts["pending"] for table, counts in record["gradient_rows"].items()}
    assert not any(rows.values())
    table = (output / "network_generated_unshaped.md").read_text()
    assert table.count("| sharded | 2 | defer |") == 2
    plot = output / "network_generated_unshaped.png"
    assert plot.exists() or "matplotlib is not installed" in first.stdout

    written = {path: path.stat().st_mtime_ns for path in records.rglob("metrics.json")}
    # Beside these, runs of another call; of this seed's, those of this call.
    others = [{**run, "seed": seed, "auc": 0.25} for run in result["runs"] for seed in (3, 7)]
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({**result, "runs": others}))
    again = run_benchmark("network.py", *flags, f"--earlier={earlier}", warm=warm)
    assert again.returncode == 0 and len(written) == 3
    result = json.loads((output / "network_generated_unshaped.json").read_text())
    assert result["seeds"] == [3, 7] and [run["seed"] for run in result["runs"]] == [3, 7] * 3
    assert [run["auc"] == 0.25 for run in result["runs"]] == [False, True] * 3
    assert {path: path.stat().st_mtime_ns for path in records.rglob("metrics.json")} == written


@needs_sources
def test_every_network_run_has_flags_that_the_program_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = load("network", monkeypatch)
    monkeypatch.setenv("HOROVOD_RANK", "0")
    names = [*network.RUNS["sharded"], "defer_0.02_frozen_age500_bf16", "mask_frozen_0.1_25"]
    cases = network.plan(names, ["replicated", "sharded"], [2, 4])
    assert cases[0] == network.ALONE and len(cases) == len(set(cases))
    for case in cases[1:]:
        given = network.all_flags(case, "x", 0, 1024, {})
        assert given["batch_size"] * case.ranks == 1024
        values, found = train.make_flags().parse([f"--{k}={v}" for k, v in given.items()])
        resolved = settings.resolve(values, found, lambda _: "globo")
        assert resolved.placement == case.placement
        assert (resolved.wire_dtype == "bfloat16") == case.run.endswith("bf16")
        if case.run.startswith("plain"):
            assert resolved.track and resolved.snapshot_interval == 100
        elif case.placement == "sharded":
            assert (resolved.engine.get("freeze_drift") != 0) == ("frozen" in case.run)
    assert network.flags_of("defer_0.015", "replicated")["defer_movement"] == "0.015"
    frozen = network.flags_of("frozen_0.1_25", "sharded")
    assert (frozen["freeze_drift"], frozen["snapshot_interval"]) == ("0.1", "25")
    assert network.flags_of("unwatched", "sharded").get("track") is None
    assert network.flags_of("plain_packed", "sharded").get("wire_coding") is None
    assert network.flags_of("defer_unpacked", "sharded")["wire_coding"] == "plain"
    for name in ("plain_unpacked", "defer_packed", "unwatched_copies_0.1"):
        with pytest.raises(network.app.UsageError, match="--runs"):
            network.flags_of(name, "sharded")
    for name in ("deferred", "plain_frozen", "mask_age20", "defer_0.01_fp16"):
        with pytest.raises(network.app.UsageError, match="--runs"):
            network.flags_of(name, "sharded")


@needs_sources
def test_bytes_after_a_step_count_parts_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    network = load("network", monkeypatch)
    windows = [
        {"step": 10, "traffic": {"keys": 100}},
        {"step": 20, "traffic": {"keys": 50}},
    ]
    record = {"ranks": {"bytes": {"keys": 157}}, "windows": windows}
    sent = [network.network_report.sent_after(record, step)["keys"] for step in (0, 4, 10, 15, 20)]
    assert sent == [157, 117, 57, 32, 7]


@needs_sources
def test_plain_training_does_not_pay_for_its_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("network", monkeypatch).network_report
    # Of 25 steps 20 are timed; the window's end at step 4 comes before, the one at 25 after them.
    # The record may lack the last window.
    ends = ((4, 7.0), (8, 1.0), (12, 2.0), (16, 0.0), (20, 3.0), (24, 4.0), (25, 9.0))
    record: dict[str, Any] = {
        "inputs": {"trained": 1600},
        "settings": {"batch_size": 32, "snapshot_interval": 4, "copy_movement": None},
        "ranks": {"size": 2},
        "seconds_per_step_after_warmup": 1.5,
        "windows": [{"step": step, "seconds": seconds} for step, seconds in ends],
        "engine": {"skip": "none", "warmup_steps": 5},
    }
    assert report.seconds_per_step(record) == pytest.approx(1.0)
    record["windows"].pop()
    assert report.seconds_per_step(record) == pytest.approx(1.0)
    record["settings"]["copy_movement"] = 0.01
    assert report.seconds_per_step(record) == 1.5
    record["engine"]["skip"], record["settings"]["copy_movement"] = "defer", None
    assert report.seconds_per_step(record) == 1.5
    # A window that is longer than training.
    record["windows"] = [{"step": 25, "seconds": 9.0}]
    record["engine"]["skip"], record["settings"]["snapshot_interval"] = "none", 100
    assert report.seconds_per_step(record) == 1.5


@needs_sources
def test_watching_cost_writes_ratios_and_memory(warm: list[str], tmp_path: Path) -> None:
    done = run_benchmark(
        "watching_cost.py",
        "--quick",
        "--skips=gradients",
        "--metrics=signal",
        f"--output={tmp_path}",
        warm=warm,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "watching_cost.json").read_text())
    (result,) = record["results"]
    assert len(result["ratios"]) == record["settings"]["runs"] == result["windows"] == 2
    # Windows of 12 steps in turns of 5, 5 and 2.
    assert [len(run[side]) for run in result["turns"] for side in run] == [3, 3, 3, 3]
    for ratio, run in zip(result["ratios"], result["turns"], strict=True):
        assert ratio == pytest.approx(sum(run["watched"]) / sum(run["plain"]), rel=0.01)
    assert result["standard_error"] > 0 and len(result["window_end_milliseconds"]) == 2
    assert 0 < result["snapshot_bytes"] <= result["snapshot_budget_bytes"]
    assert 0 <= result["held_bytes"] <= result["held_budget_bytes"]
    assert result["within_budgets"] and result["asked"] == 1.02
    assert result["reached"] == (result["ratio_at_default_window"] <= 1.02)
    assert result["ratio"] in [pytest.approx(sum(result["ratios"]) / 2)]
    # Windows of 12 steps: an end costs less of a longer one, and more than nothing.
    assert result["ratio_without_ends"] < result["ratio_at_default_window"] < result["ratio"]
    assert "| gradients | signal |" in (tmp_path / "watching_cost.md").read_text()


@needs_sources
def test_input_waits_writes_every_wait(warm: list[str], tmp_path: Path) -> None:
    flags = ["--lines=900", "--batch=32", "--steps=60", "--window=20", "--runs=2"]
    done = run_benchmark("input_waits.py", *flags, f"--output={tmp_path}", warm=warm)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "input_waits.json").read_text())
    results = {(result["source"], result["way"]): result for result in record["results"]}
    ways = ("ahead", "at the pull", "ready")
    assert list(results) == [(source, way) for source in ("text", "prepared") for way in ways]
    for (_, way), result in results.items():
        assert [len(waits) for waits in result["waits"]] == [60, 60]
        assert 0 < result["share_of_time"] < 1
        assert list(result["wait_quantiles"]) == ["50", "95", "99", "100"]
        assert result["skipped_share"] == 0 or way != "ready"
    # What is skipped does not depend on when batches are made.
    for source in ("text", "prepared"):
        ahead, pulled, _ = (results[source, way]["skipped_share"] for way in ways)
        assert ahead == pulled > 0
    assert "| text | at the pull |" in (tmp_path / "input_waits.md").read_text()


@needs_sources
def test_embedding_step_lets_libraries_take_turns(tmp_path: Path) -> None:
    flags = ["--shapes=2x50x4", "--batch=16", "--steps=3", "--runs=2", f"--output={tmp_path}"]
    done = run_benchmark("embedding_step.py", *flags, "--peers=fit,keras", "--rules=adagrad")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "embedding_step.json").read_text())["runs"]
    assert found["settings"]["rule"] == "adagrad" and found["settings"]["rows"] == 50
    assert list(found["milliseconds"]) == ["ops", "fit", "keras"]
    assert all(len(runs) == 2 and min(runs) > 0 for runs in found["milliseconds"].values())
    table = (tmp_path / "embedding_step.md").read_text()
    assert table.count("| 2x50x4 | adagrad |") == 3
    unknown = run_benchmark("embedding_step.py", *flags, "--peers=torch")
    assert unknown.returncode == 1 and "--peers: 'torch'" in unknown.stdout + unknown.stderr


@needs_sources
def test_growth_measures_sizes_and_growing_steps(warm: list[str], tmp_path: Path) -> None:
    tiny = ("--batch=16", "--features=4", "--dim=4", "--runs=3", "--steps=2", "--growths=2")
    flags = [*tiny, "--sizes=100,1000,2000000", "--max_keys=1000", "--new=1,0.5"]
    done = run_benchmark("growth.py", *flags, f"--output={tmp_path}", warm=warm)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "growth.json").read_text())
    assert [size["keys"] for size in record["sizes"]] == [100, 1000]
    for size in record["sizes"]:
        assert 0.0 < size["load"] <= 0.8
        for op in ("lookup", "update", "evaluation"):
            assert len(size["ratios"][op]) == 3 and min(size["nanoseconds"][op]) > 0
    # 64 keys a step, of which all or a half are new.
    assert [len(growth["milliseconds"]) for growth in record["growths"]] == [2, 2]
    steps = [growth["of_medians"]["steps"] for growth in record["growths"]]
    assert steps == [16, 32]
    assert sum(record["growths"][0]["of_medians"]["histogram"]) == 16
    # Three of times, two of bytes, two of each growth; memory is not judged below a million keys.
    asked = {target["what"]: target for target in record["targets"]}
    assert len(asked) == 9 and asked.pop("the same at the worst size of 1,000,000 keys or more")
    assert all(t["reached"] == (t["value"] <= t["most"]) for t in asked.values() if t["value"])
    table = (tmp_path / "growth.md").read_text()
    assert "| 1,000 | lookup (training) |" in table and "| 50% | each step's median | 32 |" in table
    plot = tmp_path / "growth.png"
    assert plot.exists() or "matplotlib is not installed" in done.stdout


@needs_sources
def test_growth_refuses_what_does_not_fit(
    warm: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth = load("growth", monkeypatch)
    payload, gib = 128, 2**30
    needed = growth.bytes_needed(50_000_000, payload)
    assert 50_000_000 * (payload + 24) < needed < 12 * gib
    growth.require_memory(50_000_000, payload, needed)
    growth.require_memory(50_000_000, payload, None)
    with pytest.raises(
        growth.app.UsageError, match=r"50,000,000 x \(128 \+ 24 \+ 16\).*4.0 GiB"
    ) as e:
        growth.require_memory(50_000_000, payload, 4 * gib)
    most = int(str(e.value).partition("--max_keys=")[2].partition(",")[0])
    growth.require_memory(most, payload, 4 * gib)
    assert most == growth.largest_that_fits(payload, 4 * gib) > 10_000_000
    keys = growth.hashed(np.arange(1000))
    assert keys.dtype == np.int64 and len(np.unique(keys)) == 1000 and keys.min() < 0 < keys.max()
    rng = np.random.default_rng(0)
    for of, count in ((10, 10), (50, 20), (1000, 20)):
        drawn = growth.distinct(rng, of, count)
        assert len(np.unique(drawn)) == count and 0 <= drawn.min() <= drawn.max() < of
    done = run_benchmark("growth.py", "--sizes=1e12", f"--output={tmp_path}", warm=warm)
    assert (
        done.returncode == 1 and "1,000,000,000,000 x (128 + 24 + 16)" in done.stdout + done.stderr
    )
    few = run_benchmark("growth.py", "--sizes=100", f"--output={tmp_path}", warm=warm)
    assert few.returncode == 1 and "above 53,248" in few.stdout + few.stderr


@needs_sources
def test_dlrm_step_lets_sides_learn_the_same_and_take_turns(tmp_path: Path) -> None:
    tiny = ("--tables=3", "--cardinalities=50,3,20", "--batch=32", "--steps=8", "--dim=4")
    flags = [*tiny, "--bottom=8", "--top=8", "--runs=2", "--checked=2", f"--output={tmp_path}"]
    # Beside itself: PyTorch is not installed for a test.
    done = run_benchmark("dlrm_step.py", *flags, "--ways=step,fit")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "dlrm_step.json").read_text())
    assert len(record["milliseconds"]) == len(record["learned"]) == 4
    assert all(len(runs) == 2 and min(runs) > 0 for runs in record["milliseconds"].values())
    step, fit = (
        record["learned"][f"slipstream_tf, {way}, float32"] for way in ("tf.function", "model.fit")
    )
    assert step["losses"] == pytest.approx(fit["losses"], abs=1e-5)
    assert fit["losses"][1] < fit["losses"][0]
    assert (tmp_path / "dlrm_step.md").read_text().count("| slipstream_tf, model.fit, ") == 2
    wrong = run_benchmark("dlrm_step.py", "--cardinalities=1,2", f"--output={tmp_path}")
    assert (
        wrong.returncode == 1 and "one for each of the --tables=26" in wrong.stdout + wrong.stderr
    )


@needs_sources
def test_dlrm_step_compares_within_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    dlrm_step = load("dlrm_step", monkeypatch)
    ours, mixed, theirs = dlrm_step.choose(["step"], ["float32", "mixed_bfloat16"]) + (
        dlrm_step.choose(["torch"], ["float32"])
    )
    found = {ours: [10.0, 20.0, 10.0], mixed: [5.0, 4.0, 8.0], theirs: [11.0, 40.0, 12.0]}
    first, second = dlrm_step.comparisons(found)
    assert first["ratios"] == [1.1, 2.0, 1.2] and first["ratio"] == 1.2
    assert (first["asked"], first["reached"]) == (1.15, True)
    assert (second["ratio"], second["asked"], second["reached"]) == (2.2, 2.0, True)
    table = dlrm_step.markdown(found, [first, second], 2048)
    assert "| PyTorch + FBGEMM, float32 | 1.20 | 1.15 | yes | 1.10 2.00 1.20 |" in table
    assert "| slipstream_tf, tf.function, float32 | 204,800 | 10.00 |" in table
    dlrm_step.sides_agree({ours: [0.7, 0.5], theirs: [0.7, 0.5005]})
    with pytest.raises(SystemExit, match="do not train the same model"):
        dlrm_step.sides_agree({ours: [0.7, 0.5], theirs: [0.7, 0.6]})
    with pytest.raises(SystemExit, match="does not learn"):
        dlrm_step.sides_agree({ours: [0.7, 0.7]})
    with pytest.raises(dlrm_step.app.UsageError, match="--dtypes: 'float16'"):
        dlrm_step.choose(["step"], ["float16"])


@needs_sources
def test_dlrm_quality_compares_precisions(warm: list[str], tmp_path: Path) -> None:
    flags = ["--quality", "--data=generated:2500", "--seeds=3,4", f"--output={tmp_path}"]
    flags += [f"--records={tmp_path / 'runs'}", *(f"--train_flag={flag}" for flag in TINY)]
    done = run_benchmark("dlrm_step.py", *flags, warm=warm)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "dlrm_quality.json").read_text())
    settings_of = [
        json.loads((tmp_path / f"runs/seed3/{dtype}/metrics.json").read_text())["settings"]
        for dtype in ("float32", "mixed_bfloat16")
    ]
    assert [found["precision"] for found in settings_of] == ["float32", "mixed_bfloat16"]
    aucs = [record["quality"][dtype]["4"]["auc"] for dtype in ("float32", "mixed_bfloat16")]
    assert record["differences"][1] == pytest.approx(aucs[1] - aucs[0])
    assert abs(record["difference"]) < 0.02 and aucs[0] != aucs[1]
    assert "| 4 |" in (tmp_path / "dlrm_quality.md").read_text()


@needs_sources
def test_stream_compares_predictions_made_before_training(warm: list[str], tmp_path: Path) -> None:
    columns = ("user", "article", "environment", "device", "os", "country", "region", "referrer")
    clicks, generator = 3000, np.random.default_rng(0)
    arrays = {name: generator.integers(0, 50, clicks).astype(np.int32) for name in columns}
    arrays["click_ts"] = np.arange(clicks, dtype=np.int64) * 60
    arrays["session_size"] = generator.integers(2, 9, clicks).astype(np.int32)
    np.savez(tmp_path / "globo_clicks.npz", **arrays)
    flags = (f"--data={tmp_path / 'globo_clicks.npz'}", f"--output={tmp_path}", "--seeds=0")
    done = run_benchmark("stream.py", *flags, "--runs=inputs,mask", "--train_flag=batch_size=64",
                         "--train_flag=snapshot_interval=10", warm=warm)  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "stream.json").read_text())["runs"]
    plain, inputs, mask = (runs[name]["0"] for name in ("plain", "inputs", "mask"))
    assert plain["inputs_trained"] == plain["inputs_predicted"] == mask["inputs_trained"] == 5400
    assert inputs["inputs_trained"] < inputs["inputs_predicted"] == 5400
    assert plain["rows_sent"] == plain["rows_offered"] > mask["rows_sent"]
    assert "| mask |" in (tmp_path / "stream.md").read_text()


# A compiler that makes, whatever it is given, a program that prints and ends as the test says.
FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "release 13.0, V13.0.88"; exit; fi
for target; do :; done
printf '#!/bin/sh\\ncat %s\\necho "%s" >&2\\nexit %s\\n' "$RECORDS" "$PROBLEM" "$CODE" > "$target"
chmod +x "$target"
"""
GPU_RECORDS: list[dict[str, Any]] = [
    {"record": "device", "name": "a GPU", "cuda_runtime": "13.0"},
    {"record": "launcher", "name": "drift", "shape": "8 x 16", "counted": "rows", "bytes": 8e9,
     "has_target": True, "seconds": [2.0, 4.0, 3.0], "copy_seconds": [2.0, 2.0, 1.5]},
    {"record": "launcher", "name": "mask", "shape": "8 x 16", "counted": "rows", "bytes": 8e9,
     "has_target": True, "seconds": [2.5], "copy_seconds": [2.0]},
    {"record": "launcher", "name": "top", "shape": "8 keys", "counted": "keys", "bytes": 8e9,
     "has_target": False, "seconds": [8.0], "copy_seconds": [2.0]},
    *(
        {"record": "probe", "keys_in_table": 1024, "hits_percent": 50, "batch": 500_000_000,
         "calls": 6, "name": name, "seconds": [seconds]}
        for name, seconds in (("state lookup", 1.0), ("HierarchicalKV find, addresses", 2.0),
                              ("HierarchicalKV find, rows", 3.0))
    ),
]  # fmt: skip


@pytest.fixture
def on_a_fake_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Gives a function that runs gpu_launchers.py where a GPU's program ends with a code."""
    home = tmp_path / "cuda"
    for file in ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart_static.a"):
        (home / file).parent.mkdir(parents=True)
        (home / file).write_text(FAKE_COMPILER)
        (home / file).chmod(0o755)
    records = tmp_path / "records.json"
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("CXX", str(home / "bin" / "nvcc"))
    monkeypatch.setenv("RECORDS", str(records))

    def run(lines: Sequence[dict[str, Any]], code: int, problem: str) -> Any:
        records.write_text("".join(json.dumps(line) + "\n" for line in lines))
        monkeypatch.setenv("CODE", str(code))
        monkeypatch.setenv("PROBLEM", problem)
        return run_benchmark("gpu_launchers.py", "--nohkv", f"--build={tmp_path / 'build'}",
                             f"--output={tmp_path / 'results'}")  # fmt: skip

    return run


@needs_sources
def test_gpu_launchers_tell_shares_of_a_copy(
    on_a_fake_gpu: Callable[..., Any], tmp_path: Path
) -> None:
    done = on_a_fake_gpu(GPU_RECORDS, 0, "")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "results" / "gpu_launchers.json").read_text())
    assert record["device"]["name"] == "a GPU" and record["nvcc"] == "release 13.0, V13.0.88"
    shares = [(run["share_of_copy"], run["reaches_target"]) for run in record["launchers"]]
    assert shares == [(pytest.approx(2 / 3), False), (0.8, True), (0.25, None)]
    assert [run["keys_per_second"] for run in record["probes"]] == [[3e9], [1.5e9], [1e9]]
    table = (tmp_path / "results" / "gpu_launchers.md").read_text()
    assert "| drift | 8 x 16 | 8,000: rows | 67% | **no** | 3 | 4 | 4 2 3 | 4 4 5 |" in table
    assert "| 1,024 | 50% | 500,000,000 | state lookup | 3.00 | 2.00 | 3.00 | 3.00 |" in table


@needs_sources
@pytest.mark.parametrize(
    ("lines", "code", "problem", "told"),
    [
        ([], 3, "no device", "No GPU here (no device): compiled, but nothing measured"),
        (GPU_RECORDS[:3], 1, "mask: wrong result", "mask: wrong result\nNothing is written"),
    ],
)
def test_gpu_launchers_write_only_what_was_measured(
    lines: list[dict[str, Any]], code: int, problem: str, told: str,
    on_a_fake_gpu: Callable[..., Any], tmp_path: Path,
) -> None:  # fmt: skip
    done = on_a_fake_gpu(lines, code, problem)
    assert done.returncode == 1 and told in done.stderr
    assert not (tmp_path / "results").exists()


@needs_sources
def test_gpu_launchers_name_the_toolkit_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    done = run_benchmark("gpu_launchers.py", "--compile_only", f"--build={tmp_path / 'build'}")
    assert done.returncode == 1 and not (tmp_path / "build").exists()
    assert "No CUDA toolkit (nvcc, cuda_runtime.h, libcudart_static.a)" in done.stderr
    assert f"CUDA_HOME={tmp_path / 'cuda'}" in done.stderr


@needs_sources
def test_gpu_launchers_compile(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, str(BENCHMARKS.parent / "build_support" / "find_cuda.py")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    if not found.stdout:
        pytest.skip("no CUDA toolkit (CUDA_HOME, /usr/local/cuda, nvcc on PATH)")
    # SOK's source package where tests/parallel/sok keep it.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    sok = os.environ.get("SLIPSTREAM_SOK_CACHE") or str(cache / "slipstream_tf" / "sok")
    has_gpu = shutil.which("nvidia-smi") is not None
    # Without HierarchicalKV, which takes longer to compile than all the rest.
    flags = [f"--cache={sok}", f"--build={tmp_path / 'build'}", "--nohkv"]
    flags += [] if has_gpu else ["--architectures=90"]  # One compiles in less time.
    done = run_benchmark("gpu_launchers.py", *flags, "--compile_only")
    assert done.returncode == 0, done.stderr
    (program,) = (tmp_path / "build").iterdir()
    assert f"Compiled {program}; not run." in done.stdout
    again = run_benchmark("gpu_launchers.py", *flags, "--quick", f"--output={tmp_path}")
    assert "Compiling" not in again.stdout
    if "No GPU here" in again.stderr:
        assert again.returncode == 1 and not (tmp_path / "gpu_launchers.json").exists()
    else:
        assert again.returncode == 0, again.stderr
        record = json.loads((tmp_path / "gpu_launchers.json").read_text())
        assert record["launchers"] and record["probes"]


def test_segregated_training_trains_every_input_once(tmp_path: Path) -> None:
    arguments = ["--data=generated:3000", *(f"--{flag}" for flag in TINY), "--segregate"]
    arguments += ["--hot_budget_mb=0.05", f"--output={tmp_path}"]
    assert run_program(train.make_flags(), train.main, arguments) == 0
    record = json.loads((tmp_path / "metrics.json").read_text())
    assert record["inputs"]["trained"] == record["inputs"]["seen"] == 3000
    assert record["settings"]["segregate"] and record["settings"]["hot_budget_mb"] == 0.05


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--segregate", "--skip=inputs"), "--skip=none and --control=none"),
        (("--simulated_ranks=2",), "or --track"),
        (("--track", "--shadow"), "with --skip=none"),
        (("--segregate", "--hot_budget_mb=1e-7"), "`budget_bytes`: 0"),
    ],
)
def test_flags_of_the_baselines_that_do_nothing_are_refused(
    flags: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data=generated:200", *(f"--{flag}" for flag in TINY), *flags]
    assert run_program(train.make_flags(), train.main, arguments) == 2
    assert part in capsys.readouterr().err


@needs_sources
def test_prepare_rate_prints_lines_per_second() -> None:
    process = run_benchmark("prepare_rate.py", "--lines=2000", "--shard_rows=700", "--threads=1")
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("2,000 lines, ") and "load" in process.stdout
    assert process.stdout.count("lines/s of wall time") == 3
