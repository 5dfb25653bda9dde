"""benchmarks/network.py compares the bytes that ranks send, on tiny settings."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_programs import load, needs_sources, rows_of, run_benchmark
from train_programs import GENERATED

from slipstream_tf.cli import settings, train

DEFER = "generated/unshaped/sharded_2/seed3/repeat0/defer/metrics.json"


@needs_sources
def test_network_compares_rank_bytes_and_reuses_finished_runs(
    warm: list[str], tmp_path: Path
) -> None:
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("no Horovod: run `make horovod`")
    output, records = tmp_path / "results", tmp_path / "runs"
    tiny = ("dim=4", "mlp=8", "bottom=8", "window_steps=4")
    flags = [
        "--data=generated:2500", "--seeds=3", "--ranks=2", "--placements=sharded",
        "--global_batch=64", "--max_examples=1600", "--runs=defer", f"--output={output}",
        f"--records={records}", *(f"--train_flag={flag}" for flag in tiny),
    ]  # fmt: skip
    first = run_benchmark("network.py", *flags, warm=warm)
    assert first.returncode == 0, first.stdout + first.stderr
    alone, plain, defer = rows_of(output, "network")
    assert [run["run"] for run in (alone, plain, defer)] == ["single process", "plain", "defer"]
    assert alone["bytes / plain"] is None and plain["bytes / plain"] == 1
    assert abs(plain["AUC - single process"]) < 0.002 and plain["AUC - plain"] == 0
    assert plain["seconds / plain"] == 1 and defer["seconds / plain"] > 0

    # 25 steps. Gradients that are deferred at the end are sent then and count.
    record = json.loads((records / DEFER).read_text())
    early = [window for window in record["windows"] if window["is_warming_up"]]
    steps = 25 - early[-1]["step"]
    for kind, total in record["ranks"]["bytes"].items():
        after = total - sum(window["traffic"][kind] for window in early)
        assert defer[kind] == pytest.approx(after / steps / 1e3, abs=1e-3)
    assert defer["deferred"] > 0
    rows = {table: counts["deferred_now"] for table, counts in record["gradient_rows"].items()}
    assert not any(rows.values())

    written = {path: path.stat().st_mtime_ns for path in records.rglob("metrics.json")}
    again = run_benchmark("network.py", *flags, warm=warm)
    assert again.returncode == 0 and len(written) == 3
    assert {path: path.stat().st_mtime_ns for path in records.rglob("metrics.json")} == written


@needs_sources
def test_network_runs_pass_valid_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = load("network", monkeypatch)
    monkeypatch.setenv("HOROVOD_RANK", "0")
    names = [
        *network.RUNS["sharded"],
        "defer_0.02_age500_bf16",
        "plain_int8",
        "defer_auto_prefetch",
    ]
    cases = network.plan(names, ["replicated", "sharded"], [2, 4])
    assert cases[0] == network.ALONE and len(cases) == len(set(cases))
    for case in cases[1:]:
        given = network.all_flags(case, {"data": "x"}, 0, 1024, {})
        assert given["batch_size"] * case.ranks == 1024
        values, found = train.make_flags().parse([f"--{k}={v}" for k, v in given.items()])
        resolved = settings.resolve(values, found, lambda _: GENERATED, train.make_flags())
        assert resolved.placement == case.placement
        wires = {"bf16": "bfloat16", "int8": "int8", "auto": "auto"}
        wire = next((word for word in case.run.split("_") if word in wires), None)
        assert resolved.wire_dtype == wires.get(str(wire), "float32")
        if case.run.startswith("plain"):
            assert resolved.window_steps == 100 and resolved.watch
    assert network.flags_of("defer_0.015", "replicated")["defer_movement"] == "0.015"
    assert network.flags_of("unwatched", "sharded").get("watch") is None
    assert network.flags_of("hotline", "sharded")["schedule"] == "hotline"
    for name in (
        "deferred",
        "defer_packed",
        "plain_age20",
        "fae_age20",
        "defer_copies_0.01",
        "mask_age20",
        "defer_0.01_fp16",
    ):
        with pytest.raises(network.app.UsageError, match="--runs"):
            network.flags_of(name, "sharded")


@needs_sources
def test_bytes_after_step_include_partial_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    network = load("network", monkeypatch)
    windows = [
        {"step": 10, "traffic": {"keys": 100}},
        {"step": 20, "traffic": {"keys": 50}},
    ]
    record = {"ranks": {"bytes": {"keys": 157}}, "windows": windows}
    sent = [network.network_report.sent_after(record, step)["keys"] for step in (0, 4, 10, 15, 20)]
    assert sent == [157, 117, 57, 32, 7]


@needs_sources
def test_plain_step_time_excludes_window_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    report = load("network", monkeypatch).network_report
    # 20 of the 25 steps are timed. The window end at step 4 is before and the end at step 25 after
    # the timed steps. The record may lack the last window.
    ends = ((4, 7.0), (8, 1.0), (12, 2.0), (16, 0.0), (20, 3.0), (24, 4.0), (25, 9.0))
    record: dict[str, Any] = {
        "examples": {"trained": 1600},
        "settings": {"batch_size": 32, "window_steps": 4, "policies": []},
        "ranks": {"size": 2},
        "seconds_per_step_after_warmup": 1.5,
        "windows": [{"step": step, "seconds": seconds} for step, seconds in ends],
        "engine": {"window": {"config": {"warmup": 5}}},
    }
    assert report.seconds_per_step(record) == pytest.approx(1.0)
    record["windows"].pop()
    assert report.seconds_per_step(record) == pytest.approx(1.0)
    record["settings"]["policies"] = ["defer_gradients"]
    assert report.seconds_per_step(record) == 1.5
    # A window that is longer than the training.
    record["windows"] = [{"step": 25, "seconds": 9.0}]
    record["settings"].update(policies=[], window_steps=100)
    assert report.seconds_per_step(record) == 1.5
