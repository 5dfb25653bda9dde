"""cli.presets: windows that were chosen for a data set; others fit the training's size."""

from __future__ import annotations

import pytest

from slipstream_tf.cli.presets import OTHER, PRESETS, describe, preset


def test_windows_that_were_chosen_stay():
    chosen = {name: found.window_steps for name, found in PRESETS.items() if found.window_steps}
    assert chosen == {"generated": 20}


@pytest.mark.parametrize("name", ["table", "criteo", "avazu"])
def test_others_have_windows_by_their_planned_steps(name):
    # `Window` finds their length.
    assert preset(name).window_steps is None


def test_an_unknown_name_has_ordinary_defaults():
    assert preset("own") == OTHER
    assert describe("batch_size") == "1024; generated 512"
