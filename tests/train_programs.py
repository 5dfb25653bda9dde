"""slipstream-train in a test's own process."""

from __future__ import annotations

import pytest

from slipstream_tf.cli import train
from slipstream_tf.cli.program import run_program

SMALL = ("--data=generated:18000", "--batch_size=256", "--dim=4", "--mlp=8", "--bottom=8")


def refused(capsys: pytest.CaptureFixture[str], *flags: str, code: int = 2) -> str:
    """Runs slipstream-train with flags that it must refuse; returns its one line."""
    assert run_program(train.make_flags(), train.main, flags) == code
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("slipstream-train:")]
    assert len(lines) == 1 and "Traceback" not in captured.err
    return lines[0]
