"""Tests of `engine.tracker`: masking, deferral, key states and dry runs."""

from __future__ import annotations

import collections
import json

import numpy as np
import pytest
from engine_on_rows import DIM, DRIFTS, ROW_BYTES, make, state_of, window

from slipstream_tf.engine.states import KeyState
from slipstream_tf.ops.update_policy import SATURATED, deferred_row_bytes


def test_masks_saturated_keys_after_the_warmup_only():
    store, tracker = make("mask_gradients", warmup=30, mask_decay_moments=True)
    for _ in range(2):
        report, (skippable, *_) = window(store, tracker)
        assert store.flags == {"user": {}, "item": {}} and not skippable.any()
        assert {policy.mode for policy in store.policies.values()} == {"apply"}
    assert report.saturated_keys == 3, "judged in the warm-up, but nothing comes of it"
    window(store, tracker)
    assert store.flags == {"user": {0: SATURATED, 1: SATURATED}, "item": {0: SATURATED}}
    assert all(policy.mode == "mask" for policy in store.policies.values())
    assert all(policy.decay_skipped for policy in store.policies.values())
    report, (skippable, _, weight) = window(store, tracker)
    np.testing.assert_array_equal(weight, np.ones(4))
    assert skippable.tolist() == [True, True, False, False], (
        "counted, for the estimate of their worth"
    )
    assert (report.examples_skipped, report.examples_skippable, report.is_skipping) == (0, 2, False)


def test_masked_key_is_classified_by_last_unmasked_drift():
    store, tracker = make("mask_gradients", threshold=0.25)
    for _ in range(2):
        window(store, tracker)
    for _ in range(3):  # Masked rows do not move, the others do.
        report, _ = window(store, tracker, {0: 0.0, 1: 0.0, 2: 0.3, 3: 0.4})
        assert report.saturated_keys == 3
        drift = tracker.states["user"].drift
        np.testing.assert_allclose(drift, [0.1, 0.2, 0.3, 0.4], rtol=1e-5)


def test_saturated_key_can_leave_in_warmup_and_dry_run():
    for settings in ({"warmup": 1000}, {"dry_run": True}):
        store, tracker = make("mask_gradients", threshold=0.25, **settings)
        for _ in range(2):
            window(store, tracker)
        report, _ = window(store, tracker, {**DRIFTS, 1: 0.9})
        assert state_of(tracker, "user", 1) == KeyState.VARYING, "it could move, and did"
        assert report.saturated_keys == 2


@pytest.mark.parametrize("skips", [False, True])
def test_deferring_stays_within_memory_after_warmup(skips):
    budget = 10 * deferred_row_bytes(DIM) + 3
    policies = ["defer_gradients", *["skip_examples"] * skips]
    settings = {"defer_memory": budget, "defer_movement": 0.5, "defer_max_age": 7}
    store, tracker = make(*policies, warmup=20, **settings)
    window(store, tracker)
    assert {policy.mode for policy in store.policies.values()} == {"apply"}
    window(store, tracker)
    policies = store.policies
    assert {p.mode for p in policies.values()} == {"defer"}
    assert {(p.trigger, p.movement, p.max_age) for p in policies.values()} == {("movement", 0.5, 7)}
    assert {name: p.max_rows for name, p in policies.items()} == {"user": 8, "item": 2}
    assert sum(p.max_rows for p in policies.values()) * deferred_row_bytes(DIM) <= budget
    assert store.flags == {"user": {}, "item": {}}, "movement holds any row"
    _, (skippable, _, weight) = window(store, tracker)
    assert skippable.tolist() == ([True, True, False, False] if skips else [False] * 4)
    np.testing.assert_array_equal(weight == 0.0, skippable)


def test_deferring_by_interval_flags_saturated_rows():
    store, tracker = make("defer_gradients", defer_until="interval", defer_steps=9)
    for _ in range(2):
        window(store, tracker)
    assert store.flags == {"user": {0: SATURATED, 1: SATURATED}, "item": {0: SATURATED}}
    assert store.policies["user"].max_age == 9


def test_key_stays_saturated_below_threshold():
    store, tracker = make("skip_examples", threshold=0.3)
    for _ in range(2):
        window(store, tracker)
    seen = []
    for drift in (0.25, 0.3, 0.35, 0.25, 0.1):
        _, (skippable, *_) = window(store, tracker, {**DRIFTS, 1: drift})
        seen.append(bool(skippable[1]))
    # A drift decides the state in the next window.
    assert seen == [True, True, False, False, True]


def test_probing_key_is_neither_flagged_nor_skipped():
    period = 4
    store, tracker = make(
        *("skip_examples", "mask_gradients"),
        **{"threshold": 0.35, "revisit_every": period, "exclude_tables": ("item",)},
    )
    for _ in range(2):
        window(store, tracker)
    probed = collections.Counter()
    for _ in range(2 * period):
        states = tracker.states["user"]
        probing = set(states.keys[states.states == KeyState.PROBING].tolist())
        saturated = set(states.keys[states.states == KeyState.SATURATED].tolist())
        probed.update(probing)
        assert set(store.flags["user"]) == saturated and saturated | probing == {0, 1, 2}
        _, (skippable, *_) = window(store, tracker)
        assert {key for key in range(4) if skippable[key]} == saturated
    assert probed == {0: 2, 1: 2, 2: 2}, "each key once a period"


def test_newly_hot_key_warms_up_for_one_window():
    store, tracker = make("skip_examples", threshold=0.25)
    for _ in range(3):
        window(store, tracker)
    seen = []
    for _ in range(3):
        _, (skippable, *_) = window(store, tracker, {**DRIFTS, 9: 0.0})
        assert skippable[0], "the others are saturated"
        seen.append(bool(skippable[4]))
    # Cold in the first window, warming in the second, skippable in the third.
    assert seen == [False, False, True]


def test_excluded_tables_are_not_tracked_or_counted():
    store, tracker = make("skip_examples", exclude_tables=("item",))
    assert tracker.classifier.tables == ("user",) and set(tracker.states) == {"user"}
    for _ in range(3):
        store.train("item", {0: 100.0})
        report, (skippable, score, _) = window(store, tracker)
    assert skippable.tolist() == [True, True, False, False]
    assert np.isfinite(score).all()
    assert report.hot_keys == 4 and [table.table for table in report.tables] == ["user"]
    assert set(store.policies) == {"user"} == set(store.flags)


@pytest.mark.parametrize("rows", [0, 2])
def test_table_has_separate_memory_budget(rows):
    store, tracker = make(table_memory={"user": rows * ROW_BYTES + ROW_BYTES - 1})
    report, _ = window(store, tracker)
    assert report.next_hot_keys == rows + 1
    assert tracker.states["user"].keys.tolist() == list(range(rows))
    assert tracker.states["item"].keys.tolist() == [0]


@pytest.mark.parametrize(
    "policies, settings, message",
    [
        ([], {"exclude_tables": ("shop",)}, r"Invalid `exclude`: 'shop' for HotSet.*item, user"),
        ([], {"table_memory": {"shop": 1}}, r"Invalid `table_memory`: 'shop' for HotSet"),
        ([], {"exclude_tables": ("user", "item")}, r"Invalid `exclude`.*at least one used table"),
        (
            ["defer_gradients"],
            {"defer_memory": deferred_row_bytes(DIM) - 1},
            r"Invalid `memory`: 87 for DeferGradients.*at least 88",
        ),
        ([], {"hot_set_memory": ROW_BYTES - 1}, r"Invalid `memory`: 7 for HotSet.*at least 8"),
    ],
)
def test_settings_that_do_not_match_tables_raise(policies, settings, message):
    with pytest.raises(ValueError, match=message):
        make(*policies, **settings)


def test_absolute_threshold_is_used():
    store, tracker = make("skip_examples", threshold=0.35)
    for _ in range(3):
        report, (skippable, *_) = window(store, tracker)
    assert report.threshold == pytest.approx(0.35) and not report.is_threshold_capped
    assert skippable.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    "settings, planned, warmup",
    [
        ({"planned_steps": 60}, None, 30),
        ({"planned_steps": 60}, 1000, 30),
        ({}, 60, 30),
        ({}, None, None),
        ({"warmup": 30}, 1000, 30),
    ],
)
def test_warmup_fraction_depends_on_planned_steps(settings, planned, warmup):
    store, tracker = make("skip_examples", **{"warmup": 0.5, **settings})
    if planned is not None:
        tracker.plan(planned)
    assert tracker.warmup_steps == warmup
    for index in range(6):
        report, (skippable, *_) = window(store, tracker)
        is_over = warmup is not None and index >= 3
        assert skippable.any() == is_over
        assert report.is_warming_up == (not is_over)
    assert report.threshold > 0, "known, if not used"


def test_late_plan_applies_from_next_window_end():
    store, tracker = make("skip_examples", warmup=0.5)
    for _ in range(3):
        window(store, tracker)
    tracker.plan(20)
    assert not window(store, tracker)[1][0].any()
    assert window(store, tracker)[1][0].any()
    with pytest.raises(ValueError, match="Invalid `steps`"):
        tracker.plan(-1)


@pytest.mark.parametrize(
    "policies",
    [
        ("skip_examples",),
        ("skip_examples", "defer_gradients"),
        ("skip_examples", "mask_gradients"),
        ("mask_gradients",),
        ("defer_gradients",),
    ],
    ids="+".join,
)
def test_dry_run_counts_savings_without_applying_them(policies):
    store, tracker = make(*policies, dry_run=True)
    for _ in range(3):
        report, (skippable, _, weight) = window(store, tracker)
    np.testing.assert_array_equal(weight, np.ones(4))
    assert (report.examples_skipped, report.examples_kept, report.is_skipping) == (0, 0, False)
    if policies != ("defer_gradients",):
        assert report.examples_skippable == skippable.sum() == 2
    if policies != ("skip_examples",):
        assert all(policy.is_shadow for policy in store.policies.values())
    else:
        assert {policy.mode for policy in store.policies.values()} == {"apply"}


def test_keep_rate_keeps_weighted_subsample():
    store, tracker = make("skip_examples", skip_keep_rate=0.5, threshold=10.0)
    for _ in range(2):
        window(store, tracker)
    users = {key: 0.1 for key in range(4)} | {key: 0.0 for key in range(100, 500)}
    for _ in range(3):
        report, (skippable, _, weight) = window(store, tracker, users)
    assert skippable.all() and set(weight) == {0.0, 2.0}
    assert report.examples_kept == (weight > 0).sum() and report.examples_skippable == 404
    assert report.examples_skipped + report.examples_kept == 404


def strict_json(report):
    return json.loads(json.dumps(report.to_dict(), allow_nan=False))


def test_all_nan_rows_are_anomalies():
    store, tracker = make("skip_examples", "mask_gradients")
    window(store, tracker)
    report, _ = window(store, tracker, dict.fromkeys(range(4), np.nan))
    assert report.anomalies == 4 and report.saturated_keys == 0 and report.threshold == 0.0
    assert strict_json(report)["anomalies"] == 4
    report, (skippable, *_) = window(store, tracker)
    assert not skippable.any() and report.hot_examples == 0


def test_empty_hot_set_accepts_windows_without_lookups():
    store, tracker = make(
        *("skip_examples", "defer_gradients"),
        **{"skip_keep_rate": 0.1, "max_auc_loss": 0.1, "planned_steps": 100},
        table_memory={"user": 0, "item": 0},
    )
    for shows_inputs in (False, True, True, False):
        if shows_inputs:
            report, (skippable, *_) = window(store, tracker)
            assert not skippable.any()
        else:
            report = tracker.end_window()
        assert (report.hot_keys, report.threshold, report.hot_set_overlap) == (0, 0.0, 0.0)
        assert report.examples_seen == (4 if shows_inputs else 0)
        assert report.log_loss is None and report.auc is None
        assert strict_json(report)["skipped_fraction"] == 0.0


def test_window_without_lookups_pauses_skipping():
    store, tracker = make("skip_examples")
    for _ in range(2):
        window(store, tracker)
    report = tracker.step(10)
    assert report.threshold == 0.0 and not report.is_skipping, "no input to find a fraction of"
    assert not window(store, tracker)[1][0].any()
    assert window(store, tracker)[1][0].any(), "and on it goes"


def test_threshold_is_capped():
    store, tracker = make("mask_gradients", max_threshold=0.15)
    for _ in range(2):
        report, _ = window(store, tracker)
    assert report.is_threshold_capped and 0.1 < report.threshold <= 0.15
    assert store.flags["user"] == {0: SATURATED}


def test_gradients_without_examples_warn_once(caplog):
    store, tracker = make("mask_gradients")
    for _ in range(3):
        store.train("user", DRIFTS)
        store.offered += 4
        tracker.step(10)
    assert (
        sum("no example passed through Slipstream.apply" in r.message for r in caplog.records) == 1
    )
