"""slipstream-train on two ranks writes one record and matches a single process."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream_tf.cli import prepare, tracing, train
from slipstream_tf.cli.program import run_program

# 31 batches of 128 examples. Rank 1 has one batch less than rank 0, whose last batch is partial.
INPUTS, BATCH = 3_900, 128
SMALL = (
    f"--data=generated:{INPUTS}", "--dim=4", "--mlp=8", "--bottom=8", "--epochs=1",
    "--rows_learning_rate=0.05",
)  # fmt: skip
SKIPPING = (
    "--policies=skip_examples", "--skip_score=row_drift", "--skip_alpha=0.5", "--skip_fraction=0.6",
    "--window_steps=3",
)  # fmt: skip


@pytest.fixture(scope="module", name="alone")
def fixture_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the record of one process with batches of twice the size."""
    output = tmp_path_factory.mktemp("alone")
    flags = [*SMALL, f"--batch_size={2 * BATCH}", f"--output={output}"]
    assert run_program(train.make_flags(), train.main, flags) == 0
    return json.loads((output / "metrics.json").read_text())


def train_on_two(
    run_ranks: Any, output: Path, *flags: str, controller: str = "gloo", is_cold: bool = False
) -> tuple[dict[str, Any], Any]:
    """Returns the record and the finished job."""
    arguments = [*SMALL, f"--batch_size={BATCH}", f"--output={output}", "--threads=1", *flags]
    done = run_ranks("train_rank.py", 2, *arguments, controller=controller, is_cold=is_cold)
    assert done.returncode == 0, done.stdout + done.stderr
    assert os.listdir(output) == ["metrics.json"]
    return json.loads((output / "metrics.json").read_text()), done


@pytest.mark.parametrize("controller", ["gloo", pytest.param("mpi", marks=pytest.mark.slow)])
def test_two_ranks_equal_single_process(
    run_ranks: Any, alone: dict[str, Any], controller: str, tmp_path: Path
) -> None:
    record, done = train_on_two(run_ranks, tmp_path / "run", controller=controller, is_cold=True)
    assert record["examples"] == alone["examples"]
    assert record["examples"]["seen"] == record["examples"]["trained"] == INPUTS
    assert record["test"]["examples"] == alone["test"]["examples"]
    assert record["test"]["clicks"] == alone["test"]["clicks"]
    for name in ("auc", "log_loss", "calibration"):
        assert record["test"][name] == pytest.approx(alone["test"][name], abs=0.002)
    for name in ("loss", "auc"):
        assert record["training"][name] == pytest.approx(alone["training"][name], abs=0.002)
    assert record["rows"] == alone["rows"] and record["row_lookups"] == alone["row_lookups"]

    ranks = record["ranks"]
    assert ranks["size"] == 2 == len(ranks["bytes_by_rank"])
    for kind, count in ranks["bytes"].items():
        assert count == sum(of_rank[kind] for of_rank in ranks["bytes_by_rank"])
    assert ranks["bytes"]["gradients"] > 0 < ranks["bytes"]["dense"]
    # Each row sent to the other rank consists of a key and four float32 values.
    offered = sum(counts["offered"] for counts in record["gradient_rows"].values())
    assert ranks["bytes"]["keys"] == 8 * offered
    assert ranks["bytes"]["gradients"] == 4 * 4 * offered
    assert alone["ranks"]["size"] == 1 and not any(alone["ranks"]["bytes"].values())

    # Only rank 0 prints. horovodrun adds the rank at the start of each line.
    assert done.stdout.count("test AUC") == 1 and "[1]" not in done.stdout
    assert "rank 0 of 2" in done.stderr and "rank 1 of 2" not in done.stderr


def test_trace_contains_operations_and_messages_of_all_ranks(
    run_ranks: Any, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    flags = (f"--trace={path}", "--batch_size=12")
    train_on_two(run_ranks, tmp_path / "run", *flags)
    events = json.loads(path.read_text())["traceEvents"]
    for rank in range(2):
        names = [event["name"] for event in events if event["pid"] == rank]
        # One operation per step, except for the steps in which the trace begins and ends.
        for name in ("SlipstreamLookup", "SlipstreamApplyRows"):
            assert abs(names.count(name) - tracing.STEPS) <= 2
        assert "slipstream steps" in names
    processes = [event for event in events if event.get("name") == "process_name"]
    exchanges = [e["args"]["name"] for e in processes if e["pid"] >= 1000]
    assert {"exchange of slipstream.replicated.gradients"} < set(exchanges)


@pytest.mark.parametrize("placement", ["replicated", "sharded"])
def test_ranks_stop_early_together_with_best_model(
    run_ranks: Any, placement: str, tmp_path: Path
) -> None:
    flags = ("--epochs=20", "--early_stopping=2", "--evaluate_on=valid", f"--placement={placement}")
    rates = ("--rows_learning_rate=0.5", "--learning_rate=0.03", "--plateau_factor=0.5")
    record, _ = train_on_two(run_ranks, tmp_path / "run", *flags, *rates)
    measured = record["validation"]
    aucs = [one["auc"] for one in measured]
    best = aucs.index(max(aucs))
    assert len(measured) == best + 3 < 20 and record["best_step"] == measured[best]["step"]
    # On all ranks the learning rate falls after an epoch without improvement.
    maximum, rate = 0.0, 0.03
    for one in measured:
        assert one["learning_rate"] == pytest.approx(rate)
        maximum, rate = (one["auc"], rate) if one["auc"] > maximum else (maximum, rate * 0.5)
    assert rate < 0.03 / 2
    quality = {name: measured[best][name] for name in record["test"]}
    assert record["test"] == pytest.approx(quality, rel=1e-6)


@pytest.mark.parametrize(
    "flags",
    [
        # Skipping is not included, because the skipped examples depend on how far batches are read
        # ahead of a window's end.
        ("--policies=defer_gradients", "--window_steps=3"),
        ("--placement=sharded",),
    ],
    ids=["replicated", "sharded"],
)
def test_evaluation_during_training_uses_all_ranks_and_adds_no_traffic(
    run_ranks: Any, flags: tuple[str, ...], tmp_path: Path
) -> None:
    without, _ = train_on_two(run_ranks, tmp_path / "without", *flags)
    record, _ = train_on_two(run_ranks, tmp_path / "run", *flags, "--evaluate_every=4")
    for name in ("test", "examples", "gradient_rows"):
        assert record[name] == without[name]
    sent, sent_without = record["ranks"]["bytes"], without["ranks"]["bytes"]
    # Ranks compare their settings. The text of the settings is longer with these flags.
    assert sent.pop("control") == pytest.approx(sent_without.pop("control"), abs=100)
    assert sent == sent_without
    by_window, by_window_without = (
        [window["traffic"] for window in of["windows"]] for of in (record, without)
    )
    assert by_window[1:] == by_window_without[1:]
    assert [e["step"] for e in record["evaluations"][:-1]] == list(
        range(4, record["evaluations"][-1]["step"], 4)
    )
    assert all(e["examples"] == record["test"]["examples"] for e in record["evaluations"])
    # Full batches on both ranks.
    assert record["evaluations"][0]["examples_trained"] == 4 * 2 * BATCH
    assert record["progress"][-1]["examples_trained"] == record["examples"]["trained"]
    assert record["progress"][-1]["loss"] == pytest.approx(record["training"]["loss"], abs=1e-5)


def test_skipped_examples_are_counted_over_both_ranks(run_ranks: Any, tmp_path: Path) -> None:
    record, done = train_on_two(run_ranks, tmp_path / "run", *SKIPPING)
    inputs, windows = record["examples"], record["windows"]
    assert inputs["seen"] == INPUTS == inputs["trained"] + inputs["skipped"]
    assert inputs["skipped"] == sum(w["examples_skipped"] for w in windows) > 100
    assert sum(w["examples_seen"] for w in windows) == INPUTS
    # A quarter of the steps: 3,900 examples / (128 * 2 per step) / 4.
    assert record["engine"]["window"]["config"]["warmup"] == 4
    assert "examples (" in record["report"] and "examples (" in done.stdout


def test_deferring_sends_sums_in_half_of_bytes(run_ranks: Any, tmp_path: Path) -> None:
    flags = ("--policies=defer_gradients", "--defer_movement=0.01", "--window_steps=5")
    wire = ("--wire_dtype=bfloat16", "--warmup_steps=0", "--placement=replicated")
    record, _ = train_on_two(run_ranks, tmp_path / "run", *flags, *wire, controller="mpi")
    assert record["examples"]["trained"] == record["examples"]["seen"] == INPUTS
    assert record["settings"]["wire_dtype"] == "bfloat16"
    rows, sent = record["gradient_rows"], record["ranks"]["bytes"]
    total = sum(counts["sent"] for counts in rows.values())
    assert total < sum(counts["offered"] for counts in rows.values())
    assert all(counts["deferred_now"] == 0 for counts in rows.values())
    assert sent["keys"] == 8 * total
    assert sent["gradients"] + sent["deferred"] == 2 * 4 * total and sent["deferred"] > 0


@pytest.mark.parametrize("skips", [False, True], ids=["plain", "skipping"])
def test_prefetch_changes_skipping_only(run_ranks: Any, skips: bool, tmp_path: Path) -> None:
    """Prefetching changes no result except skipping.

    Thresholds for skipping apply a batch later.
    """
    flags = ["--placement=sharded"]
    if skips:
        flags += SKIPPING
    ahead, _ = train_on_two(run_ranks, tmp_path / "ahead", *flags, "--prefetch")
    inputs = ahead["examples"]
    assert ahead["settings"]["prefetch"] is True
    assert inputs["seen"] == INPUTS == inputs["trained"] + inputs["skipped"]
    assert (inputs["skipped"] > 100) == skips
    if not skips:
        at_once, _ = train_on_two(run_ranks, tmp_path / "at_once", *flags)
        for name in ("test", "training", "rows", "gradient_rows"):
            assert ahead[name] == at_once[name]
        for kind in ("keys", "rows", "gradients"):
            assert ahead["ranks"]["bytes"][kind] == at_once["ranks"]["bytes"][kind] > 0


def test_invalid_flag_and_other_data_are_reported_once_and_write_no_files(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "schema.json").write_text('{"label": "click", "keys": ["user"]}')
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.chdir(tmp_path / str(rank))
        # A single value of the file differs.
        Path("clicks.csv").write_text("click,user\n" + "1,7\n0,8\n" * 60 + f"1,{rank}\n")
        arguments = ["clicks.csv", "--schema=../schema.json", "--output=clicks"]
        assert run_program(prepare.make_flags(), prepare.main, arguments) == 0
    output = tmp_path / "run"
    first = ("own-data", str(tmp_path))
    done = run_ranks("train_rank.py", 2, *first, *SMALL, "--epoch=1", f"--output={output}")
    assert done.returncode != 0 and not output.exists()
    lines = [line for line in done.stderr.splitlines() if "slipstream-train:" in line]
    assert len(lines) == 2 and "'epoch'" in lines[1] and "epochs" in lines[1]
    expected = (
        r"on rank 1: `files\[0\]` of --data=clicks is 'clicks\.csv, CRC-32 \d+', but it is "
        r"'clicks\.csv, CRC-32 \d+' on rank 0\."
    )
    assert re.search(expected, lines[0])
    assert "test AUC" not in done.stdout


def test_replicated_tables_refuse_prefetch(run_ranks: Any) -> None:
    done = run_ranks("train_rank.py", 2, *SMALL, "--prefetch")
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "slipstream-train:" in line]
    assert len(lines) == 1 and "--prefetch" in lines[0] and "--placement=sharded" in lines[0]


def test_settings_refused_by_model_are_reported_once(run_ranks: Any) -> None:
    flags = (*SMALL, "--policies=defer_gradients", "--wire_dtype=bfloat16,int8")
    done = run_ranks("train_rank.py", 2, *flags, controller="mpi")
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "slipstream-train:" in line]
    assert len(lines) == 1
    assert (
        "Invalid flag --wire_dtype: 'bfloat16,int8'" in lines[0] and "replicated tables" in lines[0]
    )


def test_failing_rank_ends_job_with_reason(run_ranks: Any, tmp_path: Path) -> None:
    output = tmp_path / "run"
    flags = (*SMALL, f"--batch_size={BATCH}", f"--output={output}")
    done = run_ranks("train_rank.py", 2, "fail-on-1", *flags)
    assert done.returncode != 0 and os.listdir(output) == []
    assert "slipstream-train: rank 1: Training failed: the third batch is damaged" in done.stderr
    assert "test AUC" not in done.stdout


def test_baselines_equal_plain_training(
    run_ranks: Any, alone: dict[str, Any], tmp_path: Path
) -> None:
    flags = ("--placement=sharded", "--hot_set_memory=100KB")
    records = {
        schedule: train_on_two(run_ranks, tmp_path / schedule, f"--schedule={schedule}", *given)[0]
        for schedule, given in {"plain": flags[:1], "fae": flags, "hotline": flags}.items()
    }
    plain = records.pop("plain")
    for record in records.values():
        assert record["examples"] == alone["examples"] and record["rows"] == alone["rows"]
        # Hot rows are local, so that only a few rows come from the other rank.
        assert record["ranks"]["bytes"]["rows"] < plain["ranks"]["bytes"]["rows"] / 2
        sent = sum(counts["sent"] for counts in record["gradient_rows"].values())
        assert 0 < sent <= sum(counts["offered"] for counts in record["gradient_rows"].values())
    # A step of Hotline trains the whole batch. Steps of FAE have other examples.
    for name in ("auc", "log_loss"):
        assert records["hotline"]["test"][name] == pytest.approx(plain["test"][name], abs=1e-4)
    assert records["fae"]["test"]["auc"] == pytest.approx(plain["test"]["auc"], abs=0.02)
