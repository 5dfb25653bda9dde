"""Tests that `cli.self_test` accepts correct stores and names the first wrong result."""

from __future__ import annotations

import pytest

from slipstream_tf.cli import self_test
from slipstream_tf.cli.flag_set import RunError
from slipstream_tf.tables import NativeStore, VariableStore


@pytest.mark.parametrize("function", [self_test.native_store, self_test.variable_store])
def test_correct_stores_pass(function):
    function()


def test_lost_update_is_detected(monkeypatch):
    monkeypatch.setattr(NativeStore, "apply_gradients", lambda *_: None)
    with pytest.raises(RunError, match=r"rows after the update: \[\[0\.5.*Expected \[\[0\.0, -0"):
        self_test.native_store()


def test_lost_mask_is_detected(monkeypatch):
    monkeypatch.setattr(VariableStore, "set_saturated", lambda *_: None)
    with pytest.raises(RunError, match=r"not masked: \[0, 2, 3\]\. Expected \[0, 3\]"):
        self_test.variable_store()
