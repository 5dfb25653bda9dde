"""The benchmark programs run with tiny settings and write the documented results."""

from __future__ import annotations

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
from benchmark_programs import (
    BENCHMARKS,
    TINY,
    claims_of,
    load,
    needs_sources,
    rows_of,
    run_benchmark,
)

from slipstream_tf.cli import settings, train
from slipstream_tf.cli.defaults import DataFacts
from slipstream_tf.cli.program import run_program


@needs_sources
def test_mask_and_defer_compares_runs_and_reuses_finished_runs(
    warm: list[str], tmp_path: Path
) -> None:
    output, records = tmp_path / "results", tmp_path / "runs"
    flags = [
        "--data=generated:2500", "--seeds=3", "--runs=paper,defer_0.01_4", f"--output={output}",
        f"--records={records}", *(f"--train_flag={flag}" for flag in TINY),
    ]  # fmt: skip
    first = run_benchmark("mask_and_defer.py", *flags, warm=warm)
    assert first.returncode == 0, first.stderr
    runs = {run.pop("run"): run for run in rows_of(output, "mask_and_defer")}
    assert list(runs) == ["plain", "plain_rows", "plain_rows_4", "paper", "defer_0.01_4"]
    plain, rows, _, paper, defer = runs.values()
    assert plain["examples"] == rows["examples"] == [1] and plain["rows sent / plain"] is None
    assert rows["AUC"] == plain["AUC"] and rows["rows sent / plain"] == [1]
    assert paper["examples"][0] < 1.0 and 0.0 < paper["rows sent / plain"][0] < 1.0
    difference = paper["AUC"][0] - plain["AUC"][0]
    assert paper["AUC - plain"] == [pytest.approx(difference, abs=3e-6)]
    claim = claims_of(output, "mask_and_defer")["generated_paper_auc_minus_plain"]
    assert claim["value"] == pytest.approx(difference, abs=3e-6) and claim["interval"] is None
    plot = output / "frontier_generated.png"
    assert plot.exists() or "matplotlib is not installed" in first.stdout

    # Gradients that are deferred at the end count as sent.
    sent = {}
    for run in ("defer_0.01_4", "plain_rows_4"):
        record = json.loads((records / f"generated/seed3/{run}/metrics.json").read_text())
        own = sum(rows["sent"] for rows in record["gradient_rows"].values())
        if run.startswith("defer"):
            assert sum(rows["flushed"] for rows in record["gradient_rows"].values()) > 0
            warm_up = sum(window["is_warming_up"] for window in record["windows"])
        early = record["windows"][:warm_up]
        sent[run] = own - sum(table["rows"]["sent"] for w in early for table in w["tables"])
    fraction = sent["defer_0.01_4"] / sent["plain_rows_4"]
    assert defer["rows sent / plain"] == [pytest.approx(fraction, abs=1e-5)]

    written = {path: path.stat().st_mtime_ns for path in records.rglob("metrics.json")}
    again = run_benchmark("mask_and_defer.py", *flags, warm=warm)
    assert again.returncode == 0 and len(written) == 5
    assert {path: path.stat().st_mtime_ns for path in records.rglob("metrics.json")} == written
    other = run_benchmark("mask_and_defer.py", *flags, "--train_flag=dim=8", warm=warm)
    assert other.returncode != 0 and "was made with other flags" in other.stdout + other.stderr


@pytest.mark.slow
@needs_sources
def test_runs_pass_valid_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    mask_and_defer = load("mask_and_defer", monkeypatch)
    for name, runs in mask_and_defer.RUNS.items():
        assert len({run.name for run in runs}) == len(runs)
        for run in runs:
            if run.match is not None:
                assert run.match in {other.name for other in runs}
                continue
            given = mask_and_defer.flags_of(run, {"data": "x"}, 0, mask_and_defer.COMMON[name])
            texts = [f"--{flag}={value}" for flag, value in given.items()]
            values, names = train.make_flags().parse(texts)
            resolved = settings.resolve(
                values,
                names,
                lambda _, name=name: DataFacts(name=name, fields=26),
                train.make_flags(),
            )
            assert resolved.engine.get("max_auc_loss") == run.flags.get("max_auc_loss")
            baseline = mask_and_defer.mask_and_defer_report.baseline(run.ranks)
            assert baseline in {other.name for other in runs}


@pytest.mark.slow
@needs_sources
def test_watching_cost_writes_ratios_and_memory(warm: list[str], tmp_path: Path) -> None:
    done = run_benchmark(
        "watching_cost.py",
        "--quick",
        "--policies=mask_gradients",
        "--metrics=l2",
        f"--output={tmp_path}",
        warm=warm,
    )
    assert done.returncode == 0, done.stderr
    (times,) = rows_of(tmp_path, "watching_cost", "Time of a step")
    (memory,) = rows_of(tmp_path, "watching_cost", "Memory, MiB")
    assert len(times["watched / plain"]) == len(times["window end, ms"]) == 2
    pairs = zip(times["watched / plain"], times["watched ms"], times["plain ms"], strict=True)
    for ratio, watched, plain in pairs:
        assert ratio == pytest.approx(watched / plain, rel=0.01)
    assert times["± of all windows"] > 0
    assert 0 < memory["snapshots"] <= memory["snapshot budget"]
    assert 0 <= memory["deferred gradients"] <= memory["deferral budget"]
    claims = claims_of(tmp_path, "watching_cost")
    claim = claims["mask_gradients_l2"]
    assert claim["target"] == 1.02 and claim["n"] == 2
    assert claims["mask_gradients_l2_fraction_of_budget"]["value"] < 1
    # Windows of 12 steps: the cost of a window's end is positive, and lower per step in longer
    # windows.
    whole, without = times["watched / plain"], times["without window ends"]
    assert sum(without) / 2 < claim["value"] < sum(whole) / 2


@pytest.mark.slow
@needs_sources
def test_program_rate_equals_examples_per_second(warm: list[str], tmp_path: Path) -> None:
    flags = ["--data=generated:2000:50:0.1", "--examples=4000", "--seconds=0.1"]
    done = run_benchmark("train_rate.py", *flags, f"--output={tmp_path}", warm=warm)
    assert done.returncode == 0, done.stderr
    ways = {row["variant"]: row for row in rows_of(tmp_path, "train_rate")}
    seconds = {
        row["phase"]: row["seconds"][0]
        for row in rows_of(tmp_path, "train_rate", "Seconds of slipstream-train")
    }
    (rate,) = ways["slipstream-train"]["examples/s"]
    assert rate == pytest.approx(4000 / seconds["whole process"], rel=0.01)
    assert len(ways["bare steps"]["examples/s"]) == 2
    fraction = rate / (sum(ways["bare steps"]["examples/s"]) / 2)
    claim = claims_of(tmp_path, "train_rate")["generated_fraction_of_bare_steps"]
    assert claim["value"] == pytest.approx(fraction, rel=0.01) and claim["target"] == 0.9


@pytest.mark.slow
@needs_sources
def test_input_waits_records_every_wait(warm: list[str], tmp_path: Path) -> None:
    flags = ["--lines=900", "--batch=32", "--steps=60", "--window=20", "--runs=2"]
    done = run_benchmark("input_waits.py", *flags, f"--output={tmp_path}", warm=warm)
    assert done.returncode == 0, done.stderr
    results = {(row["source"], row["variant"]): row for row in rows_of(tmp_path, "input_waits")}
    ways = ("ahead", "on request", "ready")
    assert list(results) == [(source, way) for source in ("text", "prepared") for way in ways]
    for (_, way), result in results.items():
        assert len(result["fraction of time waiting"]) == len(result["ms a step"]) == 2
        assert all(0 < fraction < 1 for fraction in result["fraction of time waiting"])
        assert result["wait ms, median"] <= result["wait ms, longest"]
        assert result["examples skipped"] == 0 or way != "ready"
    # The skipped examples do not depend on when batches are prepared.
    for source in ("text", "prepared"):
        ahead, pulled, _ = (results[source, way]["examples skipped"] for way in ways)
        assert ahead == pulled > 0


@needs_sources
def test_embedding_step_alternates_between_libraries(
    warm: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding_step = load("embedding_step", monkeypatch)
    flags = ["--shapes=2x50x4", "--batch=16", "--steps=3", "--runs=2", f"--output={tmp_path}"]
    done = run_benchmark(
        "embedding_step.py", *flags, "--peers=fit,keras", "--rules=adagrad", warm=warm
    )
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path, "embedding_step")
    assert [row["rule"] for row in rows] == ["adagrad"] * 3 and "ops" in rows[0]["library"]
    assert all(len(row["ms a step"]) == 2 and min(row["ms a step"]) > 0 for row in rows)
    assert claims_of(tmp_path, "embedding_step")["adagrad_over_keras_d4"]["target"] == 30
    rules = "--rules=rowwise_adam,adagrad_clip_norm"
    done = run_benchmark("embedding_step.py", *flags, "--peers=alone,copy", rules, warm=warm)
    assert done.returncode == 0, done.stderr
    claims = claims_of(tmp_path, "embedding_step")
    assert claims["adagrad_clip_norm_over_alone_d4"]["better"] == "lower"
    assert claims["rowwise_adam_fraction_of_copy_d4"]["value"] > 0
    with pytest.raises(embedding_step.app.UsageError, match="--peers: 'torch'"):
        embedding_step.choose(["torch"], ["adagrad"])


def test_step_bytes_equal_expected_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "embedding_peers"))
    copying = load("embedding_peers/copying", monkeypatch)
    keys = np.array([[[1, 5], [1, 6], [2, 7]], [[1, 5], [1, 5], [1, 5]]])
    # 5 and 2 distinct keys in two tables, 6 outputs and 6 gradients.
    moved = copying.bytes_that_must_move({"dim": 4, "slots": 1}, keys)
    assert moved == 4 * 2 * (3.5 * (4 + 1) + 6 * 4)


@needs_sources
def test_growth_measures_table_sizes_and_growth_steps(warm: list[str], tmp_path: Path) -> None:
    tiny = ("--batch=16", "--features=4", "--dim=4", "--runs=3", "--steps=2", "--growths=2")
    flags = [*tiny, "--sizes=100,1000,2000000", "--max_keys=1000", "--new=1,0.5"]
    done = run_benchmark("growth.py", *flags, f"--output={tmp_path}", warm=warm)
    assert done.returncode == 0, done.stderr
    sizes = rows_of(tmp_path, "growth", "Bytes per row beyond the payload")
    assert [size["keys"] for size in sizes] == [100, 1000]
    assert all(0.0 < size["index load"] <= 0.8 for size in sizes)
    for row in rows_of(tmp_path, "growth", "Time per key"):
        assert len(row["time ratio"]) == 3 and min(row["ns"]) > 0
    # 64 keys per step. All or half of them are new.
    steps = rows_of(tmp_path, "growth", "Steps while the table grows from empty")
    assert [row["steps"] for row in steps] == [16] * 3 + [32] * 3
    assert [row["growth"] for row in steps[:3]] == ["1", "2", "median of each step"]
    assert sum(n for name, n in steps[2].items() if name.startswith(("to ", "over "))) == 16
    # Three claims about times, one about bytes (no table has the worst size for few keys), and two
    # for each growth.
    claims = claims_of(tmp_path, "growth")
    assert len(claims) == 8 and {c["target"] for c in claims.values()} == {4, 24, 10}


@needs_sources
def test_growth_refuses_table_larger_than_memory(
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
    maximum = int(str(e.value).partition("--max_keys <= ")[2].rstrip("."))
    growth.require_memory(maximum, payload, 4 * gib)
    assert maximum == growth.largest_that_fits(payload, 4 * gib) > 10_000_000
    keys = growth.hashed(np.arange(1000))
    assert keys.dtype == np.int64 and len(np.unique(keys)) == 1000 and keys.min() < 0 < keys.max()
    rng = np.random.default_rng(0)
    for of, count in ((10, 10), (50, 20), (1000, 20)):
        drawn = growth.distinct(rng, of, count)
        assert len(np.unique(drawn)) == count and 0 <= drawn.min() <= drawn.max() < of
    few = run_benchmark("growth.py", "--sizes=100", f"--output={tmp_path}", warm=warm)
    assert few.returncode == 1 and "above 53,248" in few.stdout + few.stderr


@needs_sources
def test_dlrm_step_trains_equal_models_in_alternation(
    warm: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dlrm_step = load("dlrm_step", monkeypatch)
    tiny = ("--tables=3", "--cardinalities=50,3,20", "--batch=32", "--steps=8", "--dim=4")
    flags = [*tiny, "--bottom=8", "--top=8", "--runs=2", "--checked=2", f"--output={tmp_path}"]
    # The package is compared with itself because PyTorch is not installed for tests.
    flags += ["--ways=step,fit,clipped", "--dtypes=float32"]
    done = run_benchmark("dlrm_step.py", *flags, warm=warm)
    assert done.returncode == 0, done.stdout + done.stderr
    step, fit, _ = rows_of(tmp_path, "dlrm_step", "Libraries")
    assert all(len(side["ms a step"]) == 2 and min(side["ms a step"]) > 0 for side in (step, fit))
    assert fit["library"] == "slipstream_tf, model.fit, float32"
    reported = [line for line in done.stdout.splitlines() if ": losses " in line]
    (first, last), *others = (
        [float(loss) for loss in line.partition(": losses ")[2].split()] for line in reported
    )
    assert last < first and len(others) == 2
    assert all(losses == pytest.approx([first, last], abs=2e-5) for losses in others)
    with pytest.raises(dlrm_step.app.UsageError, match="Expected 1 or 26 integers >= 1"):
        dlrm_step.cardinalities_of(["1", "2"], 26)


@needs_sources
def test_dlrm_step_compares_within_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    dlrm_step = load("dlrm_step", monkeypatch)
    ours, mixed, theirs = dlrm_step.choose(["step"], ["float32", "mixed_bfloat16"]) + (
        dlrm_step.choose(["torch"], ["float32"])
    )
    found = {ours: [10.0, 20.0, 10.0], mixed: [5.0, 4.0, 8.0], theirs: [11.0, 40.0, 12.0]}
    assert dlrm_step.comparisons(found) == {
        (ours, theirs): [1.1, 2.0, 1.2],
        (mixed, theirs): [2.2, 10.0, 1.5],
    }
    claims = dlrm_step.claims_of(found)
    assert list(claims) == ["float32_over_torch", "bfloat16_over_torch"]
    wanted = {"value": 2.2, "target": 2.0, "n": 3, "interval": [1.5, 10], "better": "higher"}
    assert claims["bfloat16_over_torch"] == wanted and claims["float32_over_torch"]["value"] == 1.2
    libraries = dlrm_step.tables_of(found, 2048)["Libraries"]
    assert libraries[1]["values"][0] == [204_800, 102_400, 204_800]
    dlrm_step.sides_agree({ours: [0.7, 0.5], theirs: [0.7, 0.5005]})
    with pytest.raises(SystemExit, match="do not train the same model"):
        dlrm_step.sides_agree({ours: [0.7, 0.5], theirs: [0.7, 0.6]})
    with pytest.raises(SystemExit, match="does not learn"):
        dlrm_step.sides_agree({ours: [0.7, 0.7]})
    with pytest.raises(dlrm_step.app.UsageError, match="--dtypes: 'float16'"):
        dlrm_step.choose(["step"], ["float16"])


@pytest.mark.slow
@needs_sources
def test_dlrm_quality_compares_precisions(warm: list[str], tmp_path: Path) -> None:
    flags = ["--quality", "--data=generated:2500", "--seeds=3", f"--output={tmp_path}"]
    flags += [f"--records={tmp_path / 'runs'}", *(f"--train_flag={flag}" for flag in TINY)]
    done = run_benchmark("dlrm_step.py", *flags, warm=warm)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = rows_of(tmp_path, "dlrm_step")
    for dtype in ("float32", "mixed_bfloat16"):
        record = json.loads((tmp_path / f"runs/seed3/{dtype}/metrics.json").read_text())
        assert record["settings"]["precision"] == dtype
        assert row[dtype] == pytest.approx(record["test"]["auc"], abs=1e-6)
    assert row["difference"] == pytest.approx(row["mixed_bfloat16"] - row["float32"], abs=2e-6)
    assert row["seed"] == "3" and 0 < abs(row["difference"]) < 0.02


SESSION = str(BENCHMARKS / "gpu" / "session.sh")
# A fake compiler. Its output is a program with the output and exit code that the test sets. A
# command that contains $UNCOMPILED fails.
GPU_TESTS = sorted((BENCHMARKS.parent / "cc_ops" / "core").rglob("*_gpu_test.cc"))
FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "release 13.0, V13.0.88"; exit; fi
case "$*" in *"$UNCOMPILED"*) exit 1;; esac
for target; do :; done
printf '#!/bin/sh\\ncat %s\\necho "%s" >&2\\nexit %s\\n' "$RECORDS" "$PROBLEM" "$CODE" > "$target"
chmod +x "$target"
"""
GPU_RECORDS: list[dict[str, Any]] = [
    {"record": "device", "name": "a GPU", "cuda_runtime": "13.0", "empty_seconds": 1e-6},
    {"record": "launcher", "name": "drift", "shape": "8 x 16", "counted": "rows", "bytes": 8e9,
     "has_target": True, "seconds": [2.0, 4.0, 3.0], "copy_seconds": [2.0, 2.0, 1.5]},
    {"record": "launcher", "name": "mask", "shape": "8 x 16", "counted": "rows", "bytes": 8e9,
     "has_target": True, "seconds": [2.5], "copy_seconds": [2.0]},
    {"record": "launcher", "name": "top", "shape": "8 keys", "counted": "keys", "bytes": 8e9,
     "has_target": False, "seconds": [8.0], "copy_seconds": [2.0]},
]  # fmt: skip


@pytest.fixture
def on_a_fake_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns a function that runs gpu_launchers.py or gpu/session.sh with fake programs.

    Every compiled program prints the given records and ends with the given exit code.
    """
    home = tmp_path / "cuda"
    for file in ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart_static.a"):
        (home / file).parent.mkdir(parents=True)
        (home / file).write_text(FAKE_COMPILER)
        (home / file).chmod(0o755)
    sanitizer, printed = home / "bin" / "compute-sanitizer", tmp_path / "records.json"
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("CXX", str(home / "bin" / "nvcc"))
    monkeypatch.setenv("RECORDS", str(printed))

    def run(
        records: Sequence[dict[str, Any]], code: int = 0, problem: str = "", *, tested: str = "OK",
        errors: int = 0, checked: str = 'echo "========= ERROR SUMMARY: $ERRORS errors"',
        uncompiled: str = "no such file", flags: Sequence[str] = (), is_session: bool = False,
    ) -> Any:  # fmt: skip
        if checked:
            sanitizer.write_text(f"#!/bin/sh\n{checked}\n")
            sanitizer.chmod(0o755)
        lines = [*map(json.dumps, records), f"[{tested:>9} ] A.Test/Gpu (0 ms)"]
        printed.write_text("".join(f"{line}\n" for line in lines))
        monkeypatch.setenv("CODE", str(code))
        monkeypatch.setenv("PROBLEM", problem)
        monkeypatch.setenv("ERRORS", str(errors))
        monkeypatch.setenv("UNCOMPILED", uncompiled)
        build, results = str(tmp_path / "build"), str(tmp_path / "results")
        if is_session:
            monkeypatch.setenv("SLIPSTREAM_GPU_BUILD", build)
            # The compiler of a rehearsal is $CXX, and its time limits suit a busy machine.
            command = [SESSION, results, "--rehearsal"]
            return subprocess.run(command, capture_output=True, text=True, check=False)
        return run_benchmark(
            "gpu_launchers.py", "--gtest=", f"--build={build}", f"--output={results}", *flags
        )

    return run


@needs_sources
def test_gpu_launchers_report_fraction_of_copy_bandwidth(
    on_a_fake_gpu: Callable[..., Any], tmp_path: Path
) -> None:
    done = on_a_fake_gpu(GPU_RECORDS)
    assert done.returncode == 0, done.stdout + done.stderr
    results = tmp_path / "results"
    launchers = rows_of(results, "gpu_launchers", "Launchers compared with a copy")
    assert [row["fraction of copy"] for row in launchers] == [[1, 0.5, 0.5], [0.8], [0.25]]
    assert [row["80%?"] for row in launchers] == [False, True, None]
    tests = rows_of(results, "gpu_launchers", "GPU tests")
    assert {row["program"] for row in tests} >= {"drift_gpu_test", "row_compaction_gpu_test"}
    assert all(row["passed"] == 1 and row["synccheck errors"] == 0 for row in tests)
    claims = claims_of(results, "gpu_launchers")
    values = {name: (claim["value"], claim["target"]) for name, claim in claims.items()}
    assert values == {
        "tests_not_passed": (0, 0), "sanitizer_errors": (0, 0), "failed_cases": (0, 0),
        "drift_fraction_of_copy": (0.5, 0.8),
        "mask_fraction_of_copy": (0.8, 0.8),
    }  # fmt: skip
    page = (results / "gpu_launchers.md").read_text()
    assert "nvcc release 13.0, V13.0.88" in page
    assert "| drift | 8 x 16 | 8,000 | rows | 50% (100% 50% 50%) | **no** | 3 | 4 |" in page


@needs_sources
def test_gpu_launchers_write_nothing_without_a_gpu(
    on_a_fake_gpu: Callable[..., Any], tmp_path: Path
) -> None:
    done = on_a_fake_gpu([], 3, "no device")
    assert done.returncode == 1 and not (tmp_path / "results").exists()
    assert "No GPU is available (no device). The programs were compiled" in done.stderr


@needs_sources
@pytest.mark.parametrize(
    ("ending", "claim", "reported"),
    [
        (
            {"code": 1, "problem": "mask: wrong"},
            "failed_cases",
            "mask: wrong\nexit code 1",
        ),
        ({"tested": "FAILED"}, "tests_not_passed", "drift_gpu_test: exit code 0"),
        ({"tested": "SKIPPED"}, "tests_not_passed", "drift_gpu_test: exit code 0"),
        ({"tested": ""}, "tests_not_passed", "drift_gpu_test: exit code 0"),
        ({"errors": 2}, "sanitizer_errors", "racecheck drift_gpu_test: exit code 0"),
        ({"checked": ""}, "sanitizer_errors", "compute-sanitizer is not next to nvcc or on PATH"),
    ],
)
def test_gpu_launchers_report_failures(
    ending: dict[str, Any],
    claim: str,
    reported: str,
    on_a_fake_gpu: Callable[..., Any],
    tmp_path: Path,
) -> None:
    done = on_a_fake_gpu(GPU_RECORDS[:3], **ending)
    assert done.returncode == 1 and reported in done.stdout, done.stdout + done.stderr
    summary = json.loads((tmp_path / "results" / "gpu_launchers.json").read_text())
    assert summary["claims"][claim]["value"] == max(1, ending.get("errors", 0))
    (part,) = summary["parts"].values()
    # A failed case does not discard the results of the others.
    assert "Launchers compared with a copy" in part["tables"]
    assert ("Failed cases" in part["tables"]) == ("code" in ending)


@needs_sources
def test_unfinished_sanitizer_counts_as_failed(
    on_a_fake_gpu: Callable[..., Any], tmp_path: Path
) -> None:
    results = tmp_path / "results.jsonl"
    flags = ["--parts=sanitizers", "--tools=memcheck", "--part_seconds=1", f"--results={results}"]
    done = on_a_fake_gpu([], checked="exec sleep 60", flags=flags)
    assert done.returncode == 1, done.stdout + done.stderr
    records = [json.loads(line) for line in results.read_text().splitlines()]
    names = {f"memcheck {path.stem}" for path in GPU_TESTS}
    assert {record["name"]: record["errors"] for record in records} == dict.fromkeys(names)


@needs_sources
def test_gpu_launchers_name_missing_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    done = run_benchmark("gpu_launchers.py", "--compile_only", f"--build={tmp_path / 'build'}")
    assert done.returncode == 1 and not (tmp_path / "build").exists()
    assert "No CUDA toolkit (nvcc, cuda_runtime.h, libcudart_static.a)" in done.stderr
    assert f"CUDA_HOME={tmp_path / 'cuda'}" in done.stderr


@pytest.mark.slow
@needs_sources
def test_gpu_launchers_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = subprocess.run(
        [sys.executable, str(BENCHMARKS.parent / "build_support" / "find_cuda.py")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    if not found.stdout:
        pytest.skip("no CUDA toolkit (CUDA_HOME, /usr/local/cuda, nvcc on PATH or from PyPI)")
    # Isolated Python, as below, does not find packages from PyPI.
    toolkit = dict(line.split("=", 1) for line in found.stdout.splitlines())
    monkeypatch.setenv("CUDA_HOME", toolkit["home"])
    flags = [f"--build={tmp_path / 'build'}"]
    # Compiling for one architecture is faster.
    flags += [] if shutil.which("nvidia-smi") else ["--architectures=90"]
    # Like a minimal machine: plain Python with only the standard library.
    program = str(BENCHMARKS / "gpu_launchers.py")
    done = subprocess.run(
        [sys.executable, "-I", "-S", program, *flags, "--compile_only"],
        env={name: os.environ[name] for name in ("PATH", "CUDA_HOME")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = tmp_path / "build" / "gpu_launchers"
    assert made.exists() and f"Compiled {made} and {len(GPU_TESTS)} tests" in done.stdout
    again = run_benchmark("gpu_launchers.py", *flags, "--quick", f"--output={tmp_path}")
    assert "Compiling" not in again.stdout
    if "No GPU is available" in again.stderr:
        assert again.returncode == 1 and not (tmp_path / "gpu_launchers.json").exists()
    else:
        assert again.returncode == 0, again.stdout + again.stderr
        assert rows_of(tmp_path, "gpu_launchers", "Launchers compared with a copy")


@needs_sources
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["-h"], 0),
        ([], 2),
        ([""], 2),
        (["--rehersal"], 2),
        (["--rehearsal", "out"], 2),
        (["out", "--quik"], 2),
        (["out", "--quick", "out"], 2),
        (["old"], 2),
    ],
)
def test_gpu_session_checks_arguments(arguments: list[str], code: int, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "results.jsonl").touch()
    done = subprocess.run(
        [SESSION, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    usage = "usage: benchmarks/gpu/session.sh OUTPUT [--quick | --rehearsal]\n"
    refusal = (
        "Invalid OUTPUT: old contains results.jsonl. Expected a folder without results. Pass "
        "another folder.\n"
    )
    assert done.returncode == code
    assert done.stdout == ("" if code else usage)
    assert done.stderr == ("" if not code else refusal if arguments == ["old"] else usage)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@needs_sources
def test_gpu_session_skips_programs_that_were_not_compiled(
    on_a_fake_gpu: Callable[..., Any], tmp_path: Path
) -> None:
    def steps(uncompiled: str) -> dict[str, Any]:
        done = on_a_fake_gpu(GPU_RECORDS, uncompiled=uncompiled, is_session=True)
        assert done.returncode == 1, done.stdout + done.stderr
        (path,) = (tmp_path / "results").glob("results.jsonl")
        lines = path.read_text().splitlines()
        # The fake core_threads also prints the line of a test.
        records = [json.loads(line) for line in lines if line.startswith("{")]
        path.unlink()
        tests = {r["name"]: r["failed"] for r in records if r["record"] == "test"}
        assert tests == {
            path.stem: int(path.stem == "drift_gpu_test") for path in GPU_TESTS if tests
        }
        steps = (record for record in records if record["record"] == "step")
        return {r["name"]: r.get("skipped", r.get("exit_code")) for r in steps}

    # One test does not compile: the programs without it run. The fake library cannot be loaded.
    found = steps("drift_gpu_test.cc")
    sanitizers = "compute-sanitizer needs a GPU"
    assert found == {
        "compile": 1, "tests": 1, "dlrm": 1, "cases": 0, "peers": 1, "sanitizers": sanitizers,
        "threads": 0,
    }  # fmt: skip
    # A launcher does not compile. Programs of the session before must not run.
    library = "libslipstream_gpu.so"
    needed = {"tests": "*_gpu_test", "dlrm": library, "cases": "gpu_launchers", "peers": library,
              "threads": "core_threads"}  # fmt: skip
    skipped = {name: f"{program} was not compiled" for name, program in needed.items()}
    assert steps("drift.cu.cc") == {"compile": 1, "sanitizers": sanitizers, **skipped}


@pytest.mark.slow
@needs_sources
def test_gpu_session_runs_on_emulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is checked except the comparison with PyTorch, which may not be installed."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLIPSTREAM_GPU_BUILD", str(tmp_path / "build"))
    output = tmp_path / "output"
    subprocess.run([SESSION, str(output), "--rehearsal"], check=False)
    records = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    steps = {r["name"]: r.get("exit_code") for r in records if r["record"] == "step"}
    del steps["peers"]
    names = ("compile", "tests", "dlrm", "cases", "sanitizers", "threads")
    expected = {**dict.fromkeys(names, 0), "sanitizers": None}
    assert steps == expected, (output / "log.txt").read_text()
    assert all(r["equals_definition"] for r in records if r["record"] == "dlrm")
    passed = {r["name"]: r["passed"] for r in records if r["record"] == "test"}
    assert set(passed) == {path.stem for path in GPU_TESTS} and min(passed.values()) > 0


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (
            ("--schedule=fae", "--policies=skip_examples"),
            "without --policies and without --control",
        ),
        (("--window_steps=5",), "or --watch"),
        (("--watch", "--dry_run"), "without --policies"),
        (("--schedule=fae", "--hot_set_memory=0"), "bytes above 0"),
        (("--schedule=hotline", "--early_stopping=2"), "--early_stopping with --schedule=hotline"),
    ],
)
def test_baselines_refuse_flags_without_effect(
    flags: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data=generated:200", *(f"--{flag}" for flag in TINY), *flags]
    assert run_program(train.make_flags(), train.main, arguments) == 2
    assert part in capsys.readouterr().err


@needs_sources
def test_prepare_rate_reports_lines_per_second(tmp_path: Path) -> None:
    flags = ("--lines=2000", "--shard_rows=700", "--threads=1", "--runs=2", f"--output={tmp_path}")
    process = run_benchmark("prepare_rate.py", *flags)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("2,000 lines, ") and "load" in process.stdout
    rates = [row["lines/s"] for row in rows_of(tmp_path, "prepare_rate")]
    assert len(rates) == 3 and all(len(run) == 2 for run in rates) and rates[0][0] > rates[2][0] > 0
