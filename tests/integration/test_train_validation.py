"""slipstream-train with a validation part: early stopping, lower rates, best weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream_tf.cli import data, train
from slipstream_tf.cli.program import run_program

# Few examples and high learning rates, so that the model overfits at once.
FLAGS = (
    *("--data=generated:6000:200", "--batch_size=500", "--dim=8", "--mlp=32", "--bottom=8"),
    *("--epochs=12", "--rows_learning_rate=0.3", "--learning_rate=0.02"),
)
Train = Callable[..., dict[str, Any]]


@pytest.fixture(name="run_train")
def fixture_run_train(tmp_path: Path) -> Train:
    """Returns a function that runs slipstream-train here and returns its record."""

    def run(*flags: str, name: str = "run") -> dict[str, Any]:
        arguments = [*flags, f"--output={tmp_path / name}"]
        assert run_program(train.make_flags(), train.main, arguments) == 0
        return json.loads((tmp_path / name / "metrics.json").read_text())

    return run


def test_early_stopping_restores_best_model(run_train: Train, capsys: Any) -> None:
    record = run_train(*FLAGS, "--early_stopping=2", "--evaluate_on=valid")
    measured = record["validation"]
    assert [one["step"] for one in measured] == list(range(12, 12 * len(measured) + 1, 12))
    aucs = [one["auc"] for one in measured]
    best = aucs.index(max(aucs))
    assert len(measured) == best + 1 + 2 < 12
    assert record["best_step"] == measured[best]["step"]
    assert record["evaluated_on"] == "valid"
    quality = {name: measured[best][name] for name in record["test"]}
    assert record["test"] == pytest.approx(quality, rel=1e-6)
    examples = record["examples"]
    assert examples["trained"] == examples["seen"] == 6000 * len(measured)
    assert record["test"]["auc"] < record["best_auc"] < 0.95
    shown = capsys.readouterr().out
    assert "validation AUC" in shown and "best reachable AUC" in shown and "test AUC" not in shown
    assert f"{record['best_step']} of {measured[-1]['step']}" in shown


def test_test_part_is_evaluated_with_best_model(run_train: Train) -> None:
    stopped = run_train(*FLAGS, "--early_stopping=1")
    steps = stopped["best_step"] // 12
    # The same number of epochs with the same seed, without validation.
    plain = run_train(*FLAGS[:-3], f"--epochs={steps}", *FLAGS[-2:], name="plain")
    assert stopped["test"] == pytest.approx(plain["test"], rel=1e-5)
    assert stopped["evaluated_on"] == "test" and "validation" not in plain


def test_learning_rates_fall_without_improvement(run_train: Train) -> None:
    flags = ("--early_stopping=4", "--plateau_factor=0.5", "--evaluate_every=6")
    measured = run_train(*FLAGS, *flags)["validation"]
    assert [one["step"] for one in measured] == list(range(6, 6 * len(measured) + 1, 6))
    best, rate = 0.0, 0.02
    for one in measured:
        assert one["learning_rate"] == pytest.approx(rate)
        if one["auc"] > best:
            best = one["auc"]
        else:
            rate *= 0.5
    assert rate < 0.02


def test_validation_examples_are_not_trained_and_test_part_is_not_read(
    run_train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened = []
    real = data._open

    def watched(settings: Any, part: str) -> Any:
        opened.append(part)
        return real(settings, part)

    monkeypatch.setattr(data, "_open", watched)
    lines = [f"{i % 2}\t" + "\t".join(["1"] * 13 + [f"{i:x}"] * 26) for i in range(3000)]
    (tmp_path / "a.tsv").write_text("\n".join(lines) + "\n")
    text = (f"--data={tmp_path / 'a.tsv'}", "--batch_size=300", "--dim=4", "--mlp=8", "--bottom=8")
    whole = run_train(*text)
    assert opened == ["train", "test"] and whole["examples"]["trained"] == 2700
    opened.clear()
    record = run_train(*text, "--evaluate_on=valid", name="valid")
    assert opened == ["train", "valid"] and record["test"]["examples"] == 300
    assert record["examples"]["trained"] == 2400
    # Each line has its own key.
    assert set(record["rows"].values()) == {2400}
    opened.clear()
    record = run_train(*text, "--early_stopping=1", "--epochs=2", name="both")
    assert opened == ["train", "valid", "test"] and record["examples"]["planned"] == 4800


def test_early_stopping_that_cannot_stop_is_refused(
    run_train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    once = [*FLAGS, "--epochs=1", "--early_stopping=2"]
    assert run_program(train.make_flags(), train.main, once) == 2
    assert "the run has 12 steps and evaluates every 12" in capsys.readouterr().err
    # None of the 50 validation examples is a click.
    rare = ("--data=generated:500:100:0.0001", "--batch_size=100", "--dim=4", "--epochs=3")
    assert run_program(train.make_flags(), train.main, [*rare, "--early_stopping=1"]) == 1
    assert "validation part has 0 clicks in 50 examples" in capsys.readouterr().err
    run_train(*FLAGS, "--early_stopping=1", "--policies=skip_examples", "--window_steps=4")
    match = ("--control=stop", f"--match={tmp_path / 'run' / 'metrics.json'}")
    assert run_program(train.make_flags(), train.main, match) == 2
    assert "so the control would stop early, too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        (("--plateau_factor=0.5",), "--plateau_factor in this run. It requires --early_stopping"),
        (("--rows_decay=all",), "--rows_decay in this run. It requires --rows_l2"),
        (
            ("--early_stopping=2", "--checkpoint_every=5", "--output={folder}"),
            "Invalid flag --checkpoint_every with --early_stopping=2",
        ),
        (("--evaluate_on=train",), "--evaluate_on=train"),
    ],
)
def test_invalid_validation_flags_are_refused(
    flags: tuple[str, ...], reported: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = [*FLAGS, *(flag.format(folder=tmp_path / "run") for flag in flags)]
    assert run_program(train.make_flags(), train.main, arguments) == 2
    assert reported in capsys.readouterr().err


def test_unknown_epoch_length_requires_evaluate_every(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import gzip

    line = "1\t" + "\t".join(["1"] * 13 + ["a"] * 26) + "\n"
    with gzip.open(tmp_path / "a.tsv.gz", "wt") as file:
        file.write(line * 2000)
    arguments = [f"--data={tmp_path / 'a.tsv.gz'}", "--early_stopping=1"]
    assert run_program(train.make_flags(), train.main, arguments) == 2
    assert (
        "the number of steps in an epoch is unknown. Expected --evaluate_every"
        in capsys.readouterr().err
    )
