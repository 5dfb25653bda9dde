"""Tests of settings: refused values, error messages, and round trips of configurations."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from slipstream_tf import initializers, optimizers
from slipstream_tf._utils.serialization import deserialize, serialize
from slipstream_tf.config import (
    DryRun,
    HotSet,
    Retention,
    Saturation,
    Storage,
    Table,
    Window,
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, r"`dim`: 0 for table 'user'. Expected an integer >= 1"),
        ({"dim": 4.0}, r"`dim`: 4.0"),
        ({"dim": True}, r"`dim`: True"),
        ({"retention": 5}, r"`retention`: 5 for table 'user'"),
        ({"storage": "bfloat16"}, r"`storage`: 'bfloat16' for table 'user'.*Storage\("),
        ({"combiner": "max"}, r"`combiner`: 'max'.*'sum', 'mean', 'sqrtn'"),
        ({"initializer": "glorot"}, r"RandomUniform"),
        ({"name": ""}, r"`name`"),
    ],
)
def test_invalid_tables_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        Table(**{"name": "user", "dim": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, r"`capacity`: 0 for Retention"),
        ({"capacity": None}, r"`capacity`: None for Retention"),
        ({"capacity": 1, "eviction": "fifo"}, r"`eviction`: 'fifo'"),
    ],
)
def test_invalid_retentions_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        Retention(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, r"`dtype`: 'int8' for Storage.*'float32', 'bfloat16', 'float16'"),
        ({"slot_dtype": "float16"}, r"`slot_dtype`: 'float16' for Storage.*'float32', 'bfloat16'"),
    ],
)
def test_invalid_storages_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        Storage(**arguments)


@pytest.mark.parametrize(
    ("storage", "nbytes"),
    [(Storage(), 128), (Storage("float16"), 96), (Storage("bfloat16", "bfloat16"), 64)],
)
def test_row_bytes_follow_dtypes(storage, nbytes):
    assert storage.row_bytes(16, 16) == nbytes
    assert storage.row_bytes(15, 15) <= nbytes


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Window(0), "`steps`: 0 for Window"),
        (lambda: Window(2.5), "`steps`: 2.5 for Window"),
        (lambda: Window(True), "`steps`: True for Window"),
        (lambda: Window(warmup=1.5), "`warmup`: 1.5 for Window.*>= 0 and <= 1"),
        (lambda: Window(warmup=-1), "`warmup`: -1 for Window.*an integer >= 0"),
        (lambda: Window(warmup=True), "`warmup`: True for Window"),
        (lambda: Window(warmup=None), "`warmup`: None for Window"),
        (lambda: Window(planned_steps=-1), "`planned_steps`: -1 for Window"),
        (lambda: Window(sample=0), "`sample`: 0 for Window"),
        (lambda: Window(sample=None), "`sample`: None for Window"),
        (lambda: Window(sample=(1 << 24) + 1), "`sample`: 16777217 for Window"),
        (lambda: Window(seed=-1), "`seed`: -1 for Window"),
        (lambda: HotSet(0), "`memory`: 0 for HotSet.*>= 1"),
        (lambda: HotSet("a lot"), '`memory`: \'a lot\' for HotSet.*"256MB" or "1.5GiB"'),
        (lambda: HotSet("-1MB"), "`memory`: '-1MB' for HotSet"),
        (
            lambda: HotSet(1.5),
            '`memory`: 1.5 for HotSet.*an integer number of bytes >= 1, or .*"1.5Gi',
        ),
        (lambda: HotSet("0.4"), "`memory`: '0.4' for HotSet.*an integer number of bytes >= 1"),
        (lambda: HotSet(None), "`memory`: None for HotSet"),
        (lambda: HotSet(table_memory=5), "`table_memory`: 5 for HotSet.*a dictionary"),
        (lambda: HotSet(table_memory={"t": -1}), r"`table_memory\['t'\]`: -1 for HotSet"),
        (lambda: HotSet(exclude="user"), r"`exclude`: 'user' for HotSet.*\('user',\)"),
        (lambda: HotSet(count_decay=1.1), "`count_decay`: 1.1 for HotSet"),
        (lambda: Saturation("cosine"), "`metric`: 'cosine' for Saturation.*'linf', 'l2'"),
        (lambda: Saturation(threshold=-0.5), "`threshold`: -0.5 for Saturation"),
        (lambda: Saturation(max_threshold=-0.5), "`max_threshold`: -0.5 for Saturation"),
        (lambda: Saturation(threshold=float("nan")), "`threshold`: nan for Saturation"),
        (
            lambda: Saturation(threshold=0.1, max_threshold=0.2),
            r"`max_threshold`: 0.2 for Saturation\(threshold=0.1\)",
        ),
        (lambda: Saturation(revisit_every=-1), "`revisit_every`: -1 for Saturation"),
        (lambda: DryRun("yes"), "`estimates_cost`: 'yes' for DryRun.*True or False"),
    ],
)
def test_invalid_settings_raise(build, message):
    with pytest.raises(ValueError, match=f"Invalid {message}"):
        build()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("256MB", 256_000_000),
        ("256MiB", 256 << 20),
        ("1.5GiB", 3 << 29),
        ("64 kb", 64_000),
        ("2TB", 2 * 10**12),
        ("10", 10),
        ("10B", 10),
        ("1g", 10**9),
        (np.int64(7), 7),
    ],
)
def test_sizes_are_numbers_or_strings(text, nbytes):
    assert HotSet(text).memory_bytes == nbytes
    assert HotSet(table_memory={"user": text}).table_bytes == {"user": nbytes}


def test_table_can_have_zero_memory():
    assert HotSet(table_memory={"user": 0}).table_bytes == {"user": 0}


@pytest.mark.parametrize(
    ("planned_steps", "steps"),
    [
        (None, 200), (100_000, 1000), (20_000, 1000), (8788, 430), (2000, 100), (880, 44),
        (391, 19), (88, 5), (1, 5),
    ],
)  # fmt: skip
def test_short_training_has_short_windows(planned_steps, steps):
    assert Window().length(planned_steps) == steps
    assert Window(7).length(planned_steps) == 7
    assert Window(planned_steps=880).length(planned_steps) == 44


@pytest.mark.parametrize(
    ("warmup", "planned_steps", "steps"),
    [
        (0.25, 400, 100),
        (0.25, None, None),
        (0.0, None, 0),
        (30, None, 30),
        (np.int64(30), 400, 30),
        (1, 400, 1),
        (1.0, 400, 400),
    ],
)
def test_warmup_is_fraction_or_steps(warmup, planned_steps, steps):
    assert Window(warmup=warmup).warmup_steps(planned_steps) == steps


def test_planned_steps_of_window_have_priority():
    assert Window(planned_steps=100).warmup_steps(400) == 25


@pytest.mark.parametrize(
    "build",
    [
        lambda: optimizers.SGD(-1.0),
        lambda: optimizers.Adagrad(epsilon=0.0),
        lambda: optimizers.Adam(beta_1=1.0),
        lambda: initializers.RandomUniform(1.0, 0.0),
        lambda: initializers.RandomNormal(stddev=float("inf")),
    ],
)
def test_invalid_rules_and_initializers_raise(build):
    with pytest.raises(ValueError, match="Expected"):
        build()


def test_table_json_round_trip():
    start = initializers.RandomNormal(0.1, 0.2)
    storage = Storage("float16", "bfloat16")
    config = Table("user", 4, initializer=start, retention=Retention(7), storage=storage)
    described = json.loads(json.dumps(config.get_config()))
    assert Table.from_config(described) == config
    del described["storage"]
    assert Table.from_config(described) == dataclasses.replace(config, storage=Storage())


@pytest.mark.parametrize(
    "part",
    [
        Window(7, warmup=30, planned_steps=100, sample=5, seed=3),
        Window(),
        HotSet("64MB", {"user": 10, "item": "1MiB"}, exclude=["shop"], count_decay=0.25),
        Saturation("l2", max_threshold=0.5, revisit_every=3),
    ],
    ids=str,
)
def test_engine_settings_json_round_trip(part):
    described = json.loads(json.dumps(serialize(part)))
    assert deserialize("part", described, (type(part),), "config") == part


@pytest.mark.parametrize(
    "rule", [optimizers.SGD(), optimizers.Adam(0.2), optimizers.RowWiseAdagrad()]
)
def test_optimizers_serialization_round_trip(rule):
    assert optimizers.get(json.loads(json.dumps(optimizers.serialize(rule)))) == rule
