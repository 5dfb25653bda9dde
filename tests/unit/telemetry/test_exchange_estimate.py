"""Tests of `telemetry.exchange_estimate`: exchange time per step and ways to reduce it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from dry_run_windows import WARMUP, reports
from engine_settings import engine_settings

from slipstream_tf._utils.comm import Link
from slipstream_tf.telemetry.dry_run import estimate_dry_run
from slipstream_tf.telemetry.exchange_estimate import ExchangeEstimate, estimate_exchange

LINK = Link(1e6, 1e-3, {"float32": 0.0, "bfloat16": 1e-9, "int8": 1e-8})
DRY_RUN = engine_settings("defer_gradients", dry_run=True)
STEPS_PER_WINDOW, OFFERED, DIM = 10, 200, 3


def test_replicated_rows_are_sent_to_all_ranks_in_one_message():
    estimate = ExchangeEstimate(LINK, rows=100, floats=16, ranks=3)
    assert estimate.seconds("float32") == pytest.approx(1e-3 + 100 * 2 * (8 + 64) / 1e6)
    assert estimate.seconds("bfloat16") == pytest.approx(1e-3 + 100 * 2 * (8 + 32) / 1e6, rel=1e-3)
    half = estimate.seconds("float32", sent_fraction=0.5)
    assert half == pytest.approx(1e-3 + 50 * 2 * (8 + 64) / 1e6)


def test_sharded_rows_are_pulled_and_pushed():
    estimate = ExchangeEstimate(LINK, rows=100, floats=16, ranks=2, is_spread=True)
    assert estimate.seconds("float32") == pytest.approx(3e-3 + 2 * 50 * (8 + 64) / 1e6)


def test_estimate_covers_steps_after_warmup():
    made = reports(sent=50)
    estimate = estimate_exchange(made, LINK, 2, is_spread=False)
    assert estimate is not None
    assert (estimate.rows, estimate.floats) == (OFFERED / STEPS_PER_WINDOW / 2, DIM)
    assert estimate.sent_fraction == 0.25
    assert estimate_exchange(made, None, 2, is_spread=False) is None
    assert estimate_exchange(made[:WARMUP], LINK, 2, is_spread=False) is None
    assert estimate_exchange([], LINK, 2, is_spread=False) is None


def test_deferring_saves_time_on_slow_link():
    slow = ExchangeEstimate(LINK, rows=10000, floats=16, ranks=2, sent_fraction=0.5, defers=True)
    assert "If 50% of the gradient rows are sent, int8 takes" in str(slow)
    assert "This saves " in str(slow) and " ms per step." in str(slow)
    fast = dataclasses.replace(slow, link=dataclasses.replace(LINK, bytes_per_second=1e10))
    assert "This saves no time." in str(fast)
    assert "This saves no time" not in str(dataclasses.replace(fast, sent_fraction=1.0))


def test_masking_adds_no_time():
    deferring = estimate_exchange(reports(sent=50), LINK, 2, is_spread=False)
    masking = estimate_exchange(reports(sent=50, masked=150), LINK, 2, is_spread=False)
    assert deferring is not None and deferring.defers and deferring.seconds_to_defer > 0
    assert masking is not None and not masking.defers and masking.seconds_to_defer == 0
    assert "to defer the" in str(deferring) and "to defer" not in str(masking)


def test_dry_run_contains_exchange_estimate():
    made = reports(sent=50)
    exchange = estimate_exchange(made, LINK, 2, is_spread=True)
    estimate = estimate_dry_run(DRY_RUN, made, None, exchange)
    words = " ".join(str(estimate).split())
    assert "on this link (1 MB/s from each rank, 1.00 ms a message):" in words
    reported = json.loads(json.dumps(estimate.to_dict()))["exchange"]
    assert reported["auto"] == exchange.auto and reported["seconds"].keys() == {
        "float32",
        "bfloat16",
        "int8",
    }
    assert estimate_dry_run(DRY_RUN, made).to_dict()["exchange"] is None
