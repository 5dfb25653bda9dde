"""Tests of `cli.build`: the parts that a run consists of."""

from __future__ import annotations

import pytest

from slipstream_tf.cli.build import steps_per_execution
from slipstream_tf.cli.settings import resolve
from slipstream_tf.cli.train_flags import make_flags


@pytest.mark.parametrize(
    ("flags", "ends", "steps"),
    [
        ("", (), 16),
        ("", (0, None), 16),
        # A run without an engine has no windows.
        ("--evaluate_every=30", (), 15),
        ("--evaluate_every=30", (20,), 10),
        ("--policies=skip_examples --window_steps=100", (), 10),
        ("--policies=skip_examples --window_steps=100 --evaluate_every=12", (), 4),
        ("--policies=skip_examples --window_steps=100", (48, 251), 1),
    ],
)
def test_steps_per_execution_divides_event_steps(
    flags: str, ends: tuple[int | None, ...], steps: int
) -> None:
    known = make_flags()
    values, given = known.parse(["--data=generated", *flags.split()])
    settings = resolve(values, given, lambda _: "generated", known)
    assert steps_per_execution(settings, *ends) == steps
