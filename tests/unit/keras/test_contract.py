"""Every line of the tables of docs/keras.md names tests, and they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[2] / "docs" / "keras.md"
VERDICTS = ("works", "works through", "refused")


def lines() -> list[str]:
    """Returns the lines of the tables, without their heads."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [row for row in rows if not row.startswith("| Keras | |")]


@pytest.mark.parametrize("line", lines(), ids=lambda line: line.split("|")[1].strip(" `"))
def test_a_line_has_a_verdict_and_tests(line):
    _, habit, verdict, *_ = (cell.strip() for cell in line.split("|"))
    assert habit
    assert verdict.startswith(VERDICTS)
    (comment,) = re.findall(r"<!-- (.*) -->", line)
    assert comment.split()
    for test in comment.split():
        module, name = test.split("::")
        assert f"\ndef {name}(" in (HERE / f"{module}.py").read_text(), test


def test_every_habit_that_touches_rows_has_a_line():
    """What Keras has, as the page's readers look for it."""
    text = "".join(line.split("|")[1] for line in lines())
    habits = """get_weights set_weights clone_model EarlyStopping ModelCheckpoint BackupAndRestore
        m.keras m.weights.h5 m.h5 export saved_model.save LearningRateScheduler ReduceLROnPlateau
        LearningRateSchedule clipnorm clipvalue global_clipnorm weight_decay use_ema SwapEMAWeights
        gradient_accumulation_steps MultiOptimizer class_weight sample_weight train_step training
        steps_per_execution run_eagerly jit_compile mixed_float16 summary count_params frozen"""
    assert [habit for habit in habits.split() if habit not in text] == []


def test_every_file_of_the_contract_is_on_the_page():
    named = set(re.findall(r"(test_contract_\w+)::", PAGE.read_text()))
    files = {path.stem for path in HERE.glob("test_contract_*.py")}
    assert named == files
