"""Tests of `telemetry.ledger`: totals, columns, JSON lines and scalars."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from engine_settings import engine_settings

from slipstream_tf.engine.report import TableWindow, WindowReport
from slipstream_tf.ops.update_policy import UpdateCounts
from slipstream_tf.telemetry.ledger import Ledger
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


def test_totals():
    ledger = Ledger(two_windows())
    assert (ledger.examples_seen, ledger.examples_skipped) == (2000, 250)
    assert (ledger.examples_skippable, ledger.examples_kept, ledger.seconds) == (400, 150, 1.0)
    assert ledger.skipped_share == 0.125
    assert ledger.rows == UpdateCounts(
        offered=250,
        sent=190,
        deferred=60,
        due_by_age=40,
        over_budget=50,
        deferred_now=8,
        deferred_bytes=768,
    )
    # A row consists of an int64 key and float32 values.
    assert ledger.bytes_offered == 200 * (8 + 16) + 50 * (8 + 4)
    assert ledger.bytes_sent == 140 * 24 + 50 * 12
    values = json.loads(json.dumps(ledger.to_dict(), allow_nan=False))
    assert values["rows"]["sent"] == 190 and values["bytes_sent"] == ledger.bytes_sent
    assert values["windows"][1]["tables"][0]["bytes_sent"] == 40 * 24
    text = str(ledger)
    assert "190 of 250 gradient rows sent (76.0%); 2 windows, whose ends took 1.00 s" in text
    assert "250 of 2,000 examples skipped (12.5%)" in text


@pytest.mark.parametrize(
    "policies, columns, told",
    [
        ((), "examples, hot keys, saturated, T", "2 windows"),
        (("skip_examples",), "examples, skipped, share, kept, hot keys, saturated, T", "skipped"),
        (("mask_gradients",), "examples, rows, masked, share, hot keys, saturated, T", "masked"),
        (("defer_gradients",), "examples, rows, sent, share", "sent"),
    ],
    ids=str,
)
def test_columns_are_those_of_the_policies(policies, columns, told):
    lines = str(Ledger(two_windows(), engine_settings(*policies))).splitlines()
    assert ", ".join(lines[0].split()) == f"window, step, {columns}, seconds".replace(
        "hot keys", "hot, keys"
    )
    parts = lines[-1].split("; ")
    assert told in parts[0] and len(parts) == 1 + bool(policies)


def test_an_empty_ledger():
    ledger = Ledger([])
    assert ledger.rows == UpdateCounts() and ledger.bytes_offered == ledger.bytes_sent == 0
    assert ledger.skipped_share == 0.0 and ledger.to_dict()["windows"] == []


def test_json_lines_replace_the_file(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_text("old\n" * 9)
    Ledger(two_windows()).write_json_lines(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["window"] for line in lines] == [0, 1]
    assert lines[1]["examples_skipped"] == 250 and lines[1]["skipped_share"] == 0.25
    assert lines[1]["tables"][1]["rows"]["over_budget"] == 50
    Ledger([]).write_json_lines(path)
    assert path.read_text() == ""


def test_scalars_are_finite_and_leave_out_what_is_not_known():
    unknown = {"SkipExamples": {"loss_threshold": None}}
    for window in (*two_windows(), report(examples_seen=0, hot_keys=0, policies=unknown)):
        values = scalars(window)
        assert all(isinstance(v, float) and math.isfinite(v) for v in values.values())
        assert not {"progressive/auc", "progressive/log_loss", "policies/loss_threshold"} & set(
            values
        )
    assert "rows/sent_share" not in scalars(report()), "there was no row"
    full = scalars(
        report(
            log_loss=0.5, auc=0.75, policies={"SkipExamples": {"loss_threshold": 0.1}},
            target_share=0.3, examples_skipped=100,
            tables=(table(offered=10, sent=4, masked=6, deferred_now=2),),
        )
    )  # fmt: skip
    expected = {
        "progressive/log_loss": 0.5, "progressive/auc": 0.75, "policies/loss_threshold": 0.1,
        "threshold/target_share": 0.3, "examples/skipped_share": 0.1, "rows/sent_share": 0.4,
        "rows/masked": 6.0, "rows/deferred_now": 2.0, "keys/saturated": 5.0,
    }  # fmt: skip
    assert expected.items() <= full.items()
    states = {f"states/{name}_share": count / 3 for name, count in STATES.items()}
    assert states.items() <= full.items()


def test_drift_buckets_are_as_wide_on_a_logarithmic_axis():
    assert log10_drift(report()).shape == (0, 3)
    found = log10_drift(report(drift_histogram=((0.0, 1e-9, 5), (1.0, 10**0.25, 2))))
    np.testing.assert_allclose(found, [[-9.25, -9.0, 5], [0.0, 0.25, 2]], atol=1e-12)
