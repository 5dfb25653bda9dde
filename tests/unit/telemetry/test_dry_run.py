"""Tests of `telemetry.dry_run`: estimated savings and the range of their cost."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from dry_run_windows import INPUTS, KEPT, SKIPPABLE, SLOPE, WARMUP, WINDOWS, reports
from engine_settings import engine_settings

from slipstream_tf.engine.steering import MODEL_MARGIN
from slipstream_tf.telemetry.dry_run import estimate_dry_run
from slipstream_tf.telemetry.savings_report import SavingsReport


def dry(*policies, **settings):
    return engine_settings(*policies, dry_run=True, **settings)


def only(settings, made):
    (saving,) = estimate_dry_run(settings, made).savings
    return saving


def test_example_cost_follows_learning_curve():
    saving = only(dry("skip_examples", skip_keep_rate=0.2), reports())
    total, missing = INPUTS * WINDOWS, (SKIPPABLE - KEPT) * (WINDOWS - WARMUP)
    assert (saving.what, saving.saved) == ("examples", missing)
    assert saving.offered == INPUTS * (WINDOWS - WARMUP) and saving.fraction == 0.4
    assert saving.min_cost == pytest.approx(SLOPE * math.log(total / (total - missing / 2)))
    worst = MODEL_MARGIN * SLOPE * math.log(total / (total - missing))
    assert saving.max_cost == pytest.approx(worst)
    assert "0.03 +- " in saving.basis and "0.50 of an average example" in saving.basis


def test_examples_of_higher_value_cost_more():
    saving = only(dry("skip_examples"), reports(value=2.0))
    assert saving.min_cost < saving.max_cost
    ratio = saving.max_cost / saving.min_cost
    assert ratio == pytest.approx(MODEL_MARGIN)


def test_masked_rows_cost_fraction_of_examples():
    saving = only(dry("mask_gradients"), reports(value=1.0, sent=150, masked=50))
    offered = 200 * (WINDOWS - WARMUP)
    assert (saving.saved, saving.offered) == (offered // 4, offered)
    # A row of three float32 values and a key has 20 bytes.
    assert (saving.bytes_saved, saving.bytes_offered) == (5 * offered, 20 * offered)
    total, missing = INPUTS * WINDOWS, INPUTS * (WINDOWS - WARMUP) / 4
    assert saving.min_cost == pytest.approx(SLOPE * math.log(total / (total - missing)))


def test_deferred_rows_cost_follows_policy():
    settings = dry("skip_examples", "defer_gradients")
    made = reports(sent=120, deferred=80)
    examples, rows = estimate_dry_run(settings, made, (0.0001, 0.0006)).savings
    assert (examples.what, rows.what, rows.fraction) == ("examples", "gradient rows", 0.4)
    assert (rows.min_cost, rows.max_cost) == (0.0001, 0.0006) and "Adagrad" in rows.basis
    text = str(estimate_dry_run(settings, made, (0.0001, 0.0006)))
    assert "0.0001 to 0.0006 AUC.\n" in text and " AUC or\n" in text
    assert max(map(len, text.splitlines())) <= 100
    unknown = only(dry("defer_gradients"), made)
    assert unknown.min_cost is None and unknown.basis.startswith("none, because")
    assert "), without an estimate of the cost" in str(unknown)


@pytest.mark.parametrize("made", [reports(auc=False), reports()[: WARMUP + 1]])
def test_estimate_is_missing_without_curve(made):
    saving = only(dry("skip_examples"), made)
    assert saving.saved > 0 and saving.max_cost is None and saving.basis.startswith("none, because")
    names_switch = "DryRun(estimates_cost=True)" in saving.basis
    assert names_switch == all(report.auc is None for report in made)


def test_equal_labels_are_named_as_reason():
    made = [dataclasses.replace(report, log_loss=0.1) for report in reports(auc=False)]
    saving = only(dry("skip_examples"), made)
    assert saving.max_cost is None
    assert saving.basis == "none, because all labels of a window are equal, in every window."


def test_refused_estimate_has_reason_only():
    settings, made = dry("skip_examples"), reports()
    estimate = estimate_dry_run(settings, made)
    assert estimate.refused("") is estimate and estimate.to_dict()["refusal"] == ""
    refused = estimate.refused("The model has not learned.")
    assert str(refused) == "Dry run: savings are not estimated. The model has not learned."
    assert refused.to_dict()["savings"] == []
    assert refused.to_dict()["refusal"] == "The model has not learned."
    assert str(SavingsReport(made, settings, dry_run=refused)) == str(refused)


def test_warmup_has_no_estimate():
    estimate = estimate_dry_run(dry("skip_examples"), reports()[:WARMUP])
    assert estimate.savings == () and "warm-up" in str(estimate)


def test_estimate_converts_to_json():
    estimate = estimate_dry_run(dry("skip_examples"), reports())
    (saving,) = json.loads(json.dumps(estimate.to_dict()))["savings"]
    assert saving["fraction"] == (SKIPPABLE) / INPUTS - KEPT / INPUTS
