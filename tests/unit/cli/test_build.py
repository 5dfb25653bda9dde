"""Tests of `cli.build`: the parts that a run consists of."""

from __future__ import annotations

import dataclasses
import math

import pytest
from train_programs import GENERATED

from slipstream_tf.cli.build import build_embeddings, build_model, steps_per_execution
from slipstream_tf.cli.settings import resolve
from slipstream_tf.cli.train_flags import make_flags
from slipstream_tf.distributed import SingleProcess


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
    settings = resolve(values, given, lambda _: GENERATED, known)
    assert steps_per_execution(settings, *ends) == steps


@pytest.mark.parametrize(("rate", "bias"), [(0.02, math.log(0.02 / 0.98)), (1.0, 0.0), (None, 0.0)])
def test_output_starts_at_click_rate(rate: float | None, bias: float) -> None:
    known = make_flags()
    values, given = known.parse(["--data=generated", "--dim=2", "--mlp=4"])
    facts = dataclasses.replace(GENERATED, click_rate=rate)
    settings = resolve(values, given, lambda _: facts, known)
    comm = SingleProcess()
    model = build_model(
        settings, build_embeddings(settings, {"user": "user", "item": "item"}, comm), 0, comm
    )
    assert model.output_layer.bias.numpy() == pytest.approx([bias])
