"""cli.presets: windows of data of one's own fit its size."""

from __future__ import annotations

import pytest

from slipstream_tf.cli.presets import PRESETS, preset, window_steps


@pytest.mark.parametrize(
    ("planned_steps", "steps"),
    [(None, 1000), (100_000, 1000), (20_000, 1000), (880, 44), (100, 5), (88, 5), (1, 5)],
)
@pytest.mark.parametrize("name", ["table", "criteo", "avazu"])
def test_short_training_has_short_windows(name, planned_steps, steps):
    assert window_steps(name, planned_steps) == steps


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"criteo", "avazu"}))
def test_windows_that_were_chosen_stay(name):
    for planned_steps in (None, 10, 1_000_000):
        assert window_steps(name, planned_steps) == preset(name).snapshot_interval
