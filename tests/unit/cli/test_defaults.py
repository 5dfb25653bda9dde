"""Tests of `cli.defaults`: settings that are chosen by properties of the data."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from train_programs import prepared

from slipstream_tf.cli.data import facts_of
from slipstream_tf.cli.defaults import DataFacts, choose
from slipstream_tf.cli.settings import resolve
from slipstream_tf.cli.train import choices
from slipstream_tf.cli.train_flags import make_flags
from slipstream_tf.optimizers import NAMES

SMALL = DataFacts(name="table", fields=8, num_examples=80_000, click_rate=0.1)
LARGE = DataFacts(name="table", fields=26, num_dense=13, num_examples=40_000_000)


@pytest.fixture
def settled():
    """Returns a function that resolves settings for the properties of a data set."""

    def settle(facts, *arguments):
        flags = make_flags()
        values, given = flags.parse(["--data=x", *arguments])
        return resolve(values, given, lambda _: facts, flags)

    return settle


def test_narrow_data_uses_cross_layers(settled):
    assert settled(SMALL, "--dim=128").model == "dcn"
    assert settled(SMALL, "--dim=129").model == "dlrm"
    unknown = dataclasses.replace(SMALL, num_examples=None)
    for large in (unknown, dataclasses.replace(SMALL, num_examples=2_000_001)):
        assert settled(large, "--dim=32").model == "dcn"
        assert settled(large, "--dim=33").model == "dlrm"
    assert settled(LARGE).model == "dlrm" and settled(LARGE, "--model=deepfm").model == "deepfm"


def test_given_layers_select_their_model(settled):
    assert settled(SMALL, "--bottom=8").model == "dlrm"
    assert settled(LARGE, "--cross_layers=2").model == "dcn"


def test_small_data_is_trained_in_passes_with_early_stopping(settled):
    small, large = settled(SMALL), settled(LARGE)
    assert small.epochs == 10 and small.early_stopping == 1 and small.batch_size == 128
    assert (large.epochs, large.early_stopping, large.batch_size) == (1, 0, 1024)
    own = dataclasses.replace(SMALL, rarer_in_valid=900)
    assert "  563 steps in a pass" in choices(small)
    assert "  625 steps in a pass" in choices(settled(own))
    assert "  625 steps in a pass" in choices(settled(SMALL, "--early_stopping=0"))
    tiny = settled(dataclasses.replace(SMALL, num_examples=900))
    assert tiny.epochs > 1 and tiny.early_stopping == 0 and tiny.batch_size == 64
    rare = settled(dataclasses.replace(SMALL, click_rate=0.001))
    assert rare.epochs == tiny.epochs and rare.early_stopping == 0
    for rarer, stops in ((99, 0), (100, 1)):
        divided = settled(dataclasses.replace(SMALL, rarer_in_valid=rarer))
        assert divided.early_stopping == stops
    unknown = settled(dataclasses.replace(SMALL, num_examples=None))
    assert (unknown.epochs, unknown.early_stopping, unknown.batch_size) == (1, 0, 1024)
    assert settled(dataclasses.replace(SMALL, click_rate=None)).epochs == 1


@pytest.mark.parametrize(
    "flags",
    [
        "--policies=defer_gradients", "--dry_run", "--watch", "--schedule=fae",
        "--evaluate_every=9", "--max_examples=999", "--checkpoint_every=5",
    ],
)  # fmt: skip
def test_compared_and_limited_runs_have_one_pass(flags, settled):
    settings = settled(SMALL, flags)
    assert (settings.epochs, settings.early_stopping) == (1, 0)
    assert settled(SMALL, flags, "--epochs=4").epochs == 4


def test_given_passes_have_no_early_stopping_by_default(settled):
    settings = settled(SMALL, "--epochs=4")
    assert (settings.epochs, settings.early_stopping) == (4, 0)
    assert settled(SMALL, "--epochs=4", "--early_stopping=2").early_stopping == 2
    assert settled(SMALL, "--early_stopping=0").epochs == 1
    assert settled(SMALL, "--early_stopping=2").epochs == 10


@pytest.mark.parametrize("optimizer", NAMES)
def test_rate_of_rows_suits_given_optimizer(optimizer, settled):
    rate = settled(SMALL, f"--rows_optimizer={optimizer}").rows_learning_rate
    assert rate < 0.01 if "adam" in optimizer else rate > 0.01


def test_rate_of_adagrad_is_lower_with_few_examples(settled):
    rates = {SMALL: 0.05, LARGE: 0.1, dataclasses.replace(SMALL, num_examples=None): 0.1}
    assert {facts: settled(facts).rows_learning_rate for facts in rates} == rates
    assert settled(LARGE, "--max_examples=50000").rows_learning_rate == 0.05
    assert "  adagrad, at most 100,000 examples" in choices(settled(SMALL))


def test_data_that_fits_into_memory_is_shuffled(settled):
    shuffled = dataclasses.replace(SMALL, num_bytes=1 << 30)
    assert settled(SMALL).shuffle == "none"
    assert settled(shuffled).shuffle == settled(shuffled, "--dry_run").shuffle == "examples"
    assert settled(shuffled, "--shuffle=none").shuffle == "none"
    larger = dataclasses.replace(SMALL, num_bytes=(1 << 30) + 1)
    assert settled(larger).shuffle == "none"


def test_limit_of_examples_reduces_batches(settled):
    assert settled(LARGE, "--max_examples=50000").batch_size == 64


def test_ranks_share_the_batch(settled, monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    assert settled(LARGE).batch_size == 256 and settled(SMALL).batch_size == 32
    assert "--batch_size=32  " in choices(settled(SMALL))
    assert "563 steps in a pass; 128 examples in a step of 4 ranks" in choices(settled(SMALL))
    assert settled(SMALL, "--elastic", "--resume", "--output=x").batch_size == 128


def test_reasons_are_recorded_and_printed(settled):
    settings = settled(SMALL, "--model=deepfm", "--batch_size=64")
    assert {"data", "epochs", "rows_learning_rate"} <= set(settings.reasons)
    assert not {"model", "batch_size"} & set(settings.reasons)
    text = choices(settings)
    assert text.startswith("Data: 80,000 examples, 0.1 of them clicked, 8 key columns, no numbers.")
    assert (
        "  --epochs=10 " in text and "--batch_size" not in text and "  --early_stopping=1 " in text
    )
    assert text.endswith("in up to 10 passes; a tenth of the training examples is for validation")
    divided = settled(dataclasses.replace(SMALL, rarer_in_valid=5_000))
    assert choices(divided).endswith("in up to 10 passes")
    assert json.dumps(settings.to_dict()["reasons"])


@drawn(
    st.builds(
        DataFacts,
        name=st.just("table"),
        fields=st.integers(1, 500),
        num_dense=st.integers(0, 500),
        bags=st.integers(0, 1),
        num_examples=st.none() | st.integers(1, 10**12),
        click_rate=st.none() | st.floats(0, 1),
        num_bytes=st.none() | st.integers(1, 10**12),
    ),
    st.booleans(),
)
def test_choices_are_valid_flags(facts, may_stop_early):
    found = choose(facts, {}, may_stop_early)
    values, _ = make_flags().parse([f"--{name}={value}" for name, (value, _) in found.items()])
    assert {name: values[name] for name in found} == {n: value for n, (value, _) in found.items()}
    assert all(reason for _, reason in found.values()) and str(facts)


def test_facts_of_generated_data():
    facts = facts_of("generated:5000:100:0.03")
    assert facts == DataFacts(
        name="generated", fields=26, num_dense=13, num_examples=5000, click_rate=0.03
    )


@pytest.mark.parametrize("bags", [0, 1])
def test_facts_of_prepared_folder(bags, tmp_path):
    rows = range(2_000)
    lists = {"b": [[i % 3, i % 5] for i in rows]} if bags else {"b": [i % 3 for i in rows]}
    table = {"clicked": [i % 4 == 0 for i in rows], "a": [i % 7 for i in rows], **lists}
    data = prepared(tmp_path, {**table, "n": [float(i % 9) for i in rows]}, ["a", "b"], ["n"])
    assert facts_of(str(data)) == DataFacts(
        name="table",
        fields=2,
        num_dense=1,
        bags=bags,
        num_examples=1_800,
        click_rate=0.25,
        # float32 label and number, int64 keys; the bag also has int32 offsets.
        num_bytes=1_800 * (8 + 8 + 8 + (12 if bags else 0)),
    )
