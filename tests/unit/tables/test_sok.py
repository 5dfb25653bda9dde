"""Tests of SOK helpers: HKV settings, access counts and unchanged keys."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from slipstream_tf import Storage, Table
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.tables.replicas import EstimatedCounts, ExactCounts
from slipstream_tf.tables.sok import hkv
from slipstream_tf.tables.sok.embeddings import _settings_of
from slipstream_tf.tables.sok.store import UnchangedKeys

GOOD = {"init_capacity": 1 << 10, "max_capacity": 1 << 20, "max_hbm_for_vectors": 2}


def test_valid_settings_pass() -> None:
    hkv.require_settings(GOOD, "table 't'", are_capacities_needed=True)
    others = {"max_load_factor": 0.75, "max_bucket_size": 128, "block_size": 256, "io_by_cpu": True}
    hkv.require_settings({**GOOD, **others}, "table 't'", are_capacities_needed=True)
    hkv.require_settings({}, "table 't'", are_capacities_needed=False)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"max_capacity": 1000}, "`max_capacity`: 1000 .*power of two, such as 1,024"),
        ({"init_capacity": 0}, "`init_capacity`: 0 .*power of two"),
        ({"init_capacity": 1024.0}, "`init_capacity`: 1024.0 .*power of two"),
        ({"init_capacity": True}, "`init_capacity`: True"),
        ({"init_capacity": 1 << 21}, "<= max_capacity, which is 1,048,576"),
        ({"max_hbm": 3}, "`settings`: 'max_hbm' .*'max_hbm_for_vectors'"),
        ({"max_hbm_for_vectors": 0.5}, "`max_hbm_for_vectors`: 0.5 .*integer"),
        ({"evict_strategy": "kLfu"}, "`evict_strategy`.*reads the value of 'io_by_cpu'"),
        ({"device_id": 1}, "`device_id`.*reads the value of 'block_size'"),
        ({"max_load_factor": 1.5}, "`max_load_factor`: 1.5"),
        ({"max_bucket_size": 100}, "`max_bucket_size`: 100"),
        ({"io_by_cpu": 1}, "`io_by_cpu`: 1 .*True or False"),
    ],
)
def test_invalid_settings_are_named(changed: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named) as raised:
        hkv.require_settings({**GOOD, **changed}, "table 't'", are_capacities_needed=False)
    assert "table 't'" in str(raised.value)


@pytest.mark.parametrize("name", ["init_capacity", "max_capacity"])
def test_missing_required_capacities_raise(name: str) -> None:
    settings = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(ValueError, match=f"`{name}`: None .*67,108,864 rows"):
        hkv.require_settings(settings, "table 't'", are_capacities_needed=True)


def test_default_memory_includes_rows_and_keys() -> None:
    # 64Mi rows of 128 floats are 32 GiB, with 16 GiB on the GPU. Each key takes 17 bytes.
    taken = hkv.memory({}, 128)
    assert taken == ((16 << 30) + (64 << 20) * 17, 16 << 30)
    assert hkv.memory({}, 128, slots=2) == (3 * taken.gpu, 3 * taken.host)


@given(st.integers(0, 30), st.integers(1, 512), st.integers(0, 64), st.integers(0, 3))
def test_memory_covers_all_rows_and_keys(power: int, dim: int, gibibytes: int, slots: int) -> None:
    settings = {"max_capacity": 1 << power, "max_hbm_for_vectors": gibibytes}
    taken = hkv.memory(settings, dim, slots)
    assert sum(taken) == (1 + slots) * (1 << power) * (4 * dim + 17)
    assert taken.host == 0 or taken.gpu >= (1 + slots) * (gibibytes << 30)


@pytest.mark.parametrize("var_type", ["hybrid", "hbm"])
def test_storage_raises(var_type):
    table = Table("items", 8, storage=Storage("bfloat16"))
    with pytest.raises(ValueError, match=r"`storage`.*'items' in SOK.*max_hbm_for_vectors"):
        _settings_of(table, var_type, {})


COUNTED = 1 << 12


def pair():
    return ExactCounts(["a", "b"], COUNTED), EstimatedCounts({"a": "CPU:0", "b": "CPU:0"}, COUNTED)


def assert_equal(exact, estimated):
    for table in ("a", "b"):
        for k in (3, 1000):
            for one, other in zip(
                exact.hot_keys(table, k), estimated.hot_keys(table, k), strict=True
            ):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("is_graph", [False, True])
def test_counters_agree(is_graph):
    rng = np.random.default_rng(1)
    specs = [FeatureSpec("x", "a"), FeatureSpec("bag", "b"), FeatureSpec("ragged", "a")]
    counters = pair()
    for _ in range(6):  # After 6 decays the counts are still exact.
        lengths = rng.integers(0, 4, 20)
        inputs = {
            "x": tf.constant(rng.zipf(1.5, 20) % 50),
            "bag": tf.constant(rng.integers(-1, 9, (20, 3))),
            "ragged": tf.RaggedTensor.from_row_lengths(rng.integers(0, 60, lengths.sum()), lengths),
        }
        for counter in counters:

            def step(counter=counter, inputs=inputs):
                counter.count(pack(inputs, specs))

            (tf.function(step) if is_graph else step)()
        assert_equal(*counters)
        for counter in counters:
            counter.decay_counts(0.5)
    assert -1 not in counters[1].hot_keys("b", 100)[0]


def test_counters_accept_matrix_columns():
    specs = [FeatureSpec("x", "a"), FeatureSpec("y", "b"), FeatureSpec("z", "a")]
    counters = pair()
    matrix = tf.constant([[1, 2, 3], [1, 5, -1], [4, 5, 3]], tf.int64)
    for counter in counters:
        counter.count(pack(matrix, specs))
    assert_equal(*counters)
    keys, counts = counters[1].hot_keys("a", 5)
    assert keys.tolist() == [1, 3, 4] and counts.tolist() == [2.0, 2.0, 1.0]


def zipf_keys(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Returns keys from 1 to 10^6 with a probability that is proportional to key^-1.05."""
    low = 1e6**-0.05 - 1.0
    return ((1.0 + rng.random(shape) * low) ** -20.0).astype(np.int64)


def test_large_batches_are_counted_exactly():
    rng, batch, hot = np.random.default_rng(0), 1 << 15, 10_000
    specs = [FeatureSpec("x", "a"), FeatureSpec("y", "a"), FeatureSpec("z", "b")]
    counter, exact = ExactCounts(["a", "b"], 1 << 18), np.zeros((2, 1_000_001), np.int64)
    for _ in range(4):
        keys = zipf_keys(rng, (batch, 3))
        counter.count(pack(tf.constant(keys), specs))
        for table, columns in enumerate((keys[:, :2], keys[:, 2])):
            exact[table] += np.bincount(columns.ravel(), minlength=exact.shape[1])
    for table, expected in zip(("a", "b"), exact, strict=True):
        hottest = np.argsort(-expected, kind="stable")[:hot]
        keys, counts = counter.hot_keys(table, hot)
        assert keys.tolist() == hottest.tolist()
        assert counts.tolist() == expected[hottest].tolist()


def of(*keys: int) -> np.ndarray:
    return np.array(keys, np.int64)


def test_kept_keys_keep_their_time() -> None:
    unchanged = UnchangedKeys()
    unchanged.replace(of(5, 3), 1.0)
    unchanged.replace(of(3, 7, 5), 2.0)
    assert sorted(unchanged.since(1.5)) == [3, 5]
    assert sorted(unchanged.since(2.0)) == [3, 5, 7]
    assert unchanged.since(0.5).size == 0
    # Key 5 may have been updated while it was missing.
    unchanged.replace(of(7), 3.0)
    unchanged.replace(of(7, 5), 4.0)
    assert unchanged.since(3.0).tolist() == [7]


def test_forgotten_keys_are_not_returned() -> None:
    unchanged = UnchangedKeys()
    assert unchanged.since(9.0).size == 0
    unchanged.replace(of(1), 1.0)
    unchanged.forget()
    assert unchanged.since(9.0).size == 0
    unchanged.replace(of(), 2.0)
    assert unchanged.since(9.0).dtype == np.int64
