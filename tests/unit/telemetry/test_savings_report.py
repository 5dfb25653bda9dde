"""Tests of `telemetry.savings_report`: totals, columns, JSON lines, scalars and sentences."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from engine_settings import engine_settings

from slipstream_tf.engine.report import TableWindow, WindowReport
from slipstream_tf.ops.update_policy import UpdateCounts
from slipstream_tf.telemetry.dry_run import estimate_dry_run
from slipstream_tf.telemetry.savings_report import SavingsReport
from slipstream_tf.telemetry.tensorboard import log10_drift, scalars

STATES = {"warming": 0, "varying": 1, "saturated": 2, "probing": 0}


def table(name="user", dim=4, **rows):
    return TableWindow(name, dim, 3, STATES, UpdateCounts(**rows))


def report(window=0, is_warming_up=False, **values):
    return WindowReport(
        **{
            "window": window,
            "step": 10 * (window + 1),
            "is_warming_up": is_warming_up,
            "hot_keys": 20,
            "snapshot_bytes": 320,
            "evicted": 0,
            "anomalies": 0,
            "drift_quantiles": {0.5: 0.25},
            "threshold": 0.25,
            "is_threshold_capped": False,
            "is_skipping": True,
            "saturated_keys": 5,
            "examples_seen": 1000,
            "examples_skipped": 0,
            "hot_examples": 900,
            "next_hot_keys": 20,
            "hot_set_overlap": 1.0,
            "seconds": 0.5,
            **values,
        }
    )


def two_windows():
    return [
        report(0, is_warming_up=True, tables=(table(offered=100, sent=100), table("item", 1))),
        report(
            1,
            examples_skipped=250,
            examples_skippable=400,
            examples_kept=150,
            tables=(
                table(
                    offered=100,
                    sent=40,
                    deferred=60,
                    due_by_age=40,
                    deferred_now=7,
                    deferred_bytes=700,
                ),
                table(
                    "item",
                    1,
                    offered=50,
                    sent=50,
                    over_budget=50,
                    deferred_now=1,
                    deferred_bytes=68,
                ),
            ),
        ),
    ]


def test_totals_sum_windows():
    found = SavingsReport(two_windows())
    assert (found.examples_seen, found.examples_skipped) == (2000, 250)
    assert (found.examples_skippable, found.examples_kept, found.seconds) == (400, 150, 1.0)
    assert found.skipped_fraction == 0.125
    assert found.rows == UpdateCounts(
        offered=250,
        sent=190,
        deferred=60,
        due_by_age=40,
        over_budget=50,
        deferred_now=8,
        deferred_bytes=768,
    )
    # A row consists of an int64 key and float32 values.
    assert found.bytes_offered == 200 * (8 + 16) + 50 * (8 + 4)
    assert found.bytes_sent == 140 * 24 + 50 * 12
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["rows"]["sent"] == 190 and values["bytes_sent"] == found.bytes_sent
    assert values["windows"][1]["tables"][0]["bytes_sent"] == 40 * 24
    policies = engine_settings("skip_examples", "mask_gradients")
    last = dataclasses.replace(found, settings=policies).table().splitlines()[-1]
    assert last.split("; ") == [
        "250 of 2,000 examples skipped (12.5%)",
        "0 of 250 gradient rows masked (0.0%)",
        "2 window ends took 1.00 s",
    ]


@pytest.mark.parametrize(
    "policies, columns, reported",
    [
        ((), "examples, hot keys, saturated, T", "2 window ends took"),
        (
            ("skip_examples",),
            "examples, skipped, fraction, kept, hot keys, saturated, T",
            "skipped",
        ),
        (("mask_gradients",), "examples, rows, masked, fraction, hot keys, saturated, T", "masked"),
        (("defer_gradients",), "examples, rows, sent, fraction", "sent"),
    ],
    ids=str,
)
def test_columns_follow_policies(policies, columns, reported):
    lines = SavingsReport(two_windows(), engine_settings(*policies)).table().splitlines()
    assert ", ".join(lines[0].split()) == f"window, step, {columns}, seconds".replace(
        "hot keys", "hot, keys"
    )
    parts = lines[-1].split("; ")
    assert reported in parts[0] and len(parts) == 1 + bool(policies)


def test_report_without_windows_is_empty():
    found = SavingsReport([])
    assert found.rows == UpdateCounts() and found.bytes_offered == found.bytes_sent == 0
    assert found.skipped_fraction == 0.0 and found.to_dict()["windows"] == []


def test_json_lines_replace_file(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_text("old\n" * 9)
    SavingsReport(two_windows()).write_json_lines(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["window"] for line in lines] == [0, 1]
    assert lines[1]["examples_skipped"] == 250 and lines[1]["skipped_fraction"] == 0.25
    assert lines[1]["tables"][1]["rows"]["over_budget"] == 50
    SavingsReport([]).write_json_lines(path)
    assert path.read_text() == ""


def test_scalars_are_finite_and_omit_unknown_values():
    unknown = {"SkipExamples": {"loss_threshold": None}}
    for window in (*two_windows(), report(examples_seen=0, hot_keys=0, policies=unknown)):
        values = scalars(window)
        assert all(isinstance(v, float) and math.isfinite(v) for v in values.values())
        assert not {"progressive/auc", "progressive/log_loss", "policies/loss_threshold"} & set(
            values
        )
    assert "rows/sent_fraction" not in scalars(report()), "there was no row"
    full = scalars(
        report(
            log_loss=0.5, auc=0.75, policies={"SkipExamples": {"loss_threshold": 0.1}},
            target_fraction=0.3, examples_skipped=100,
            tables=(table(offered=10, sent=4, masked=6, deferred_now=2),),
        )
    )  # fmt: skip
    expected = {
        "progressive/log_loss": 0.5, "progressive/auc": 0.75, "policies/loss_threshold": 0.1,
        "threshold/target_fraction": 0.3, "examples/skipped_fraction": 0.1,
        "rows/sent_fraction": 0.4, "rows/masked": 6.0, "rows/deferred_now": 2.0,
        "keys/saturated": 5.0,
    }  # fmt: skip
    assert expected.items() <= full.items()
    states = {f"states/{name}_fraction": count / 3 for name, count in STATES.items()}
    assert states.items() <= full.items()


def test_drift_buckets_have_equal_width_on_log_axis():
    assert log10_drift(report()).shape == (0, 3)
    found = log10_drift(report(drift_histogram=((0.0, 1e-9, 5), (1.0, 10**0.25, 2))))
    np.testing.assert_allclose(found, [[-9.25, -9.0, 5], [0.0, 0.25, 2]], atol=1e-12)


def window(number=1, **values):
    """Returns a report on a window of ten steps and 1,000 examples.

    Window 0 is in the warm-up.
    """
    usual = {
        **{"window": number, "step": 10 * (number + 1), "is_warming_up": number == 0},
        **{"hot_keys": 20, "snapshot_bytes": 320, "evicted": 0, "anomalies": 0},
        **{"drift_quantiles": {}, "threshold": 0.25, "is_threshold_capped": False},
        **{"is_skipping": True, "saturated_keys": 5, "examples_seen": 1000, "examples_skipped": 0},
        **{"hot_examples": 900, "next_hot_keys": 20, "hot_set_overlap": 1.0, "seconds": 0.5},
    }
    return WindowReport(**{**usual, **values})


def rows(**counts):
    return {"tables": (TableWindow("user", 4, 3, {}, UpdateCounts(**counts)),)}


SAVED = window(
    1,
    **{"examples_skipped": 250, "examples_skippable": 400, "examples_kept": 150},
    **rows(offered=150, sent=90, deferred=60, due_by_age=40, over_budget=50, masked=30),
)


def report_of(settings, *windows, warmup_steps=10, steps=20):
    return SavingsReport(windows, settings, warmup_steps, steps)


@pytest.mark.parametrize(
    "policies, settings, parts, absent",
    [
        (["skip_examples"], {},
         ["250 examples (25.0%) have been skipped; 150 more were skippable"], "sent:"),
        ([], {"random_fractions": (0.25,)}, ["250 examples (25.0%) have been skipped"], "sent:"),
        (["mask_gradients"], {}, ["30 gradient rows (20.0%) have been masked"], "examples ("),
        (["defer_gradients"], {},
         ["90 gradient rows (60.0%) have been sent: 0 by movement, 40 by age"], "skipped"),
        (["skip_examples", "defer_gradients"], {},
         ["250 examples (25.0%)", "50 over budget. 0.0 MiB have been saved"], "masked"),
        (["skip_examples", "mask_gradients"], {}, ["250 examples (25.0%)", "30 gradient rows"],
         "sent:"),
        ([], {}, ["1,000 examples, 150 gradient rows"], "- "),
    ],
)  # fmt: skip
def test_report_states_savings_of_policies(policies, settings, parts, absent):
    report = report_of(engine_settings(*policies, **settings), window(0), SAVED)
    words = str(report)
    assert words.startswith("Windows after the warm-up: 1 of 2; 1,000 examples")
    for part in parts:
        assert part in words
    assert absent not in words
    assert words.endswith("Window ends took 1.00 s.") and report.no_savings_reason() == ""


def test_dry_run_report_states_hypothetical_savings():
    settings = engine_settings("skip_examples", "defer_gradients", dry_run=True)
    windows = [window(0), SAVED]
    report = SavingsReport(windows, settings, 10, 20, estimate_dry_run(settings, windows))
    words = str(report)
    assert "250 examples (25.0%) would have been skipped" in words
    assert "90 gradient rows (60.0%) would have been sent" in words
    assert (
        words.endswith(str(report.dry_run))
        and "After the warm-up, applying a policy would have saved" in words
    )
    assert len(report.to_dict()["dry_run"]["savings"]) == 2


def test_report_shows_max_auc_loss_anomalies_and_caps():
    settings = engine_settings("skip_examples")
    last = window(1, auc_loss_plan="Enough.", is_threshold_capped=True, anomalies=3)
    words = str(report_of(settings, window(0), last))
    for part in ("- max_auc_loss: Enough.", "3 drifts", "max_threshold limited"):
        assert part in words
    plain = str(report_of(settings, window(0), window(1)))
    assert not any(part in plain for part in ("max_auc_loss", "drifts", "max_threshold"))


NO_SCORE = {"examples_seen": 0, "saturated_keys": 0}
SEEN = {"examples_seen": 1000, "saturated_keys": 0}


@pytest.mark.parametrize(
    "policies, settings, windows, values, reason",
    [
        (["skip_examples"], {}, [window(0)], {"warmup_steps": None},
         "a fraction of the planned steps, and their number is unknown. Pass Window("),
        (["skip_examples"], {}, [window(0)], {"warmup_steps": 1_250},
         "the warm-up has 1,250 steps; only 20 were trained"),
        (["defer_gradients"], {}, [window(0)], {"steps": 19},
         "no window has ended after the warm-up of 10 steps (1 windows, 19 steps). Use shorter"),
        (["mask_gradients"], {}, [window(0), window(1, **NO_SCORE)], {},
         "no example passed through Slipstream.apply, so no threshold T was found"),
        (["skip_examples"], {}, [window(0), window(1, **SEEN, hot_keys=0)], {},
         "no key was hot. Pass a larger HotSet(memory=...)"),
        (["skip_examples"], {}, [window(0), window(1, **SEEN)], {},
         "no key was saturated in any window"),
        (["skip_examples"], {"max_auc_loss": 0.001},
         [window(0), window(1, auc_loss_plan="Too few.")], {}, "Too few."),
        (["defer_gradients"], {}, [window(0), window(1, **rows(offered=9, sent=9))], {},
         "no example was skippable, and no gradient was masked or deferred"),
    ],
)  # fmt: skip
def test_report_gives_reason_if_nothing_was_saved(policies, settings, windows, values, reason):
    report = report_of(engine_settings(*policies, **settings), *windows, **values)
    assert report.no_savings_reason().startswith("Nothing was saved: ")
    assert reason in report.no_savings_reason() and reason in str(report)
    assert report.to_dict()["no_savings_reason"] == report.no_savings_reason()


@pytest.mark.parametrize(
    "found",
    [
        {"examples_skipped": 1},
        {"examples_skippable": 1},
        rows(offered=9, sent=8),
    ],
)
def test_report_gives_no_reason_if_examples_were_saved(found):
    report = report_of(engine_settings("skip_examples"), window(0), window(1, **found))
    assert report.no_savings_reason() == ""


def test_report_without_policies_gives_no_reason():
    assert report_of(engine_settings(), window(0)).no_savings_reason() == ""
    assert report_of(engine_settings()).no_savings_reason() == "No window has ended yet."


def test_report_converts_to_json():
    report = report_of(engine_settings("skip_examples"), window(0), SAVED)
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (values["steps"], values["warmup_steps"], values["dry_run"]) == (20, 10, None)
    assert values["examples_skipped"] == 250 and len(values["windows"]) == 2
