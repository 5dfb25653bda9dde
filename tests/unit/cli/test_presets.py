"""Tests of `cli.train_flags.PRESETS`: defaults that depend on the data set."""

from __future__ import annotations

import pytest

from slipstream_tf.cli.settings import resolve
from slipstream_tf.cli.train_flags import PRESETS, make_flags


@pytest.fixture
def settled():
    """Returns a function that resolves settings for a data set."""

    def settle(name, *arguments):
        flags = make_flags()
        values, given = flags.parse(["--data=x", *arguments])
        return resolve(values, given, lambda _: name, flags)

    return settle


def test_given_window_steps_are_kept(settled):
    assert [name for name, found in PRESETS.items() if "window_steps" in found] == ["generated"]
    assert settled("generated", "--watch").window_steps == 20


@pytest.mark.parametrize("name", ["table", "criteo", "avazu"])
def test_window_steps_default_to_planned_steps(name, settled):
    # `Window` computes their length.
    assert settled(name, "--watch").window_steps is None


def test_presets_replace_defaults(settled):
    assert settled("criteo").bottom == (256, 64) and settled("avazu").mlp == (256, 128)
    generated = settled("generated")
    assert (generated.batch_size, generated.skip_alpha, generated.mlp) == (512, 0.8, (64,))


def test_unknown_data_has_ordinary_defaults(settled):
    own = settled("own")
    assert (own.batch_size, own.mlp, own.bottom, own.skip_alpha) == (1024, (64,), (64,), 1.0)
    assert "default: 1024; generated 512" in make_flags().described("batch_size")
    assert "default: 64; criteo 256-64" in make_flags().described("bottom")


def test_command_line_overrides_presets(settled):
    assert settled("generated", "--batch_size=64").batch_size == 64
