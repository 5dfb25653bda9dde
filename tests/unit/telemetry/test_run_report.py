"""Tests of `telemetry.run_report`: savings in words, and reasons for missing savings."""

from __future__ import annotations

import json

import pytest
from engine_settings import engine_settings

from slipstream_tf.engine.report import TableWindow, WindowReport
from slipstream_tf.ops.update_policy import UpdateCounts
from slipstream_tf.telemetry.dry_run import estimate_dry_run
from slipstream_tf.telemetry.ledger import Ledger
from slipstream_tf.telemetry.run_report import RunReport


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
    return RunReport(settings, Ledger(windows, settings), warmup_steps, steps)


@pytest.mark.parametrize(
    "policies, settings, parts, absent",
    [
        (["skip_examples"], {}, ["250 examples (25.0%) have been skipped; thinning kept 150"],
         "sent:"),
        ([], {"random_shares": (0.25,)}, ["250 examples (25.0%) have been skipped"], "sent:"),
        (["mask_gradients"], {}, ["30 gradient rows (20.0%) have been masked"], "examples ("),
        (["defer_gradients"], {},
         ["90 gradient rows (60.0%) have been sent: 0 by movement, 40 by age"], "skipped"),
        (["skip_examples", "defer_gradients"], {},
         ["250 examples (25.0%)", "50 over budget. 0.0 MiB saved"], "masked"),
        (["skip_examples", "mask_gradients"], {}, ["250 examples (25.0%)", "30 gradient rows"],
         "sent:"),
        ([], {}, ["1,000 examples, 150 gradient rows"], "- "),
    ],
)  # fmt: skip
def test_a_report_says_what_its_policies_saved(policies, settings, parts, absent):
    report = report_of(engine_settings(*policies, **settings), window(0), SAVED)
    words = str(report)
    assert words.startswith("Windows after the warm-up: 1 of 2; 1,000 examples")
    for part in parts:
        assert part in words
    assert absent not in words
    assert words.endswith("Window ends took 1.00 s.") and report.why_nothing() == ""


def test_a_dry_run_tells_what_would_have_been():
    settings = engine_settings("skip_examples", "defer_gradients", dry_run=True)
    windows = [window(0), SAVED]
    report = RunReport(settings, Ledger(windows), 10, 20, estimate_dry_run(settings, windows))
    words = str(report)
    assert "250 examples (25.0%) would have been skipped" in words
    assert "90 gradient rows (60.0%) would have been sent" in words
    assert words.endswith(str(report.dry_run)) and "You would have saved" in words
    assert len(report.to_dict()["dry_run"]["savings"]) == 2


def test_a_report_shows_max_auc_loss_anomalies_and_caps():
    settings = engine_settings("skip_examples")
    last = window(1, auc_loss_plan="Enough.", is_threshold_capped=True, anomalies=3)
    words = str(report_of(settings, window(0), last))
    for part in ("- max_auc_loss: Enough.", "3 drifts", "max_threshold lowered"):
        assert part in words
    plain = str(report_of(settings, window(0), window(1)))
    assert not any(part in plain for part in ("max_auc_loss", "drifts", "max_threshold"))


NO_SCORE = {"examples_seen": 0, "saturated_keys": 0}
SEEN = {"examples_seen": 1000, "saturated_keys": 0}


@pytest.mark.parametrize(
    "policies, settings, windows, values, reason",
    [
        (["skip_examples"], {}, [window(0)], {"warmup_steps": None},
         "a share of the planned steps, which are not known. Give Window(planned_steps=)"),
        (["skip_examples"], {}, [window(0)], {"warmup_steps": 1_250},
         "the warm-up takes 1,250 steps, and 20 were trained"),
        (["defer_gradients"], {}, [window(0)], {"steps": 19},
         "no window has ended after the warm-up of 10 steps (1 windows, 19 steps). Take shorter"),
        (["mask_gradients"], {}, [window(0), window(1, **NO_SCORE)], {},
         "no example went through Slipstream.apply, so that no T was found"),
        (["skip_examples"], {}, [window(0), window(1, **SEEN, hot_keys=0)], {},
         "no key was hot. Give HotSet more memory"),
        (["skip_examples"], {}, [window(0), window(1, **SEEN)], {},
         "no key was saturated in any window"),
        (["skip_examples"], {"max_auc_loss": 0.001},
         [window(0), window(1, auc_loss_plan="Too few.")], {}, "Too few."),
        (["defer_gradients"], {}, [window(0), window(1, **rows(offered=9, sent=9))], {},
         "no example was skippable, and no gradient could wait"),
    ],
)  # fmt: skip
def test_it_says_why_nothing_was_saved(policies, settings, windows, values, reason):
    report = report_of(engine_settings(*policies, **settings), *windows, **values)
    assert report.why_nothing().startswith("Nothing was saved: ")
    assert reason in report.why_nothing() and reason in str(report)
    assert report.to_dict()["why_nothing"] == report.why_nothing()


@pytest.mark.parametrize(
    "found",
    [
        {"examples_skipped": 1},
        {"examples_skippable": 1},
        rows(offered=9, sent=8),
    ],
)
def test_where_something_was_saved_no_reason_is_given(found):
    report = report_of(engine_settings("skip_examples"), window(0), window(1, **found))
    assert report.why_nothing() == ""


def test_who_only_watches_saves_nothing_and_needs_no_reason():
    assert report_of(engine_settings(), window(0)).why_nothing() == ""
    assert report_of(engine_settings()).why_nothing() == "No window has ended yet."


def test_a_report_can_be_had_as_json():
    report = report_of(engine_settings("skip_examples"), window(0), SAVED)
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert (values["steps"], values["warmup_steps"], values["dry_run"]) == (20, 10, None)
    assert values["examples_skipped"] == 250 and len(values["windows"]) == 2
