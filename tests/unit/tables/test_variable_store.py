"""Tests of the store interface and of `VariableStore`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from all_rules import ALL_RULES, name_of
from hypothesis import given, settings
from hypothesis import strategies as st

import slipstream_tf
from slipstream_tf import Table, optimizers
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy
from slipstream_tf.tables import NativeStore, VariableStore
from slipstream_tf.tables.base import SavedStore, TrackedStore

ASKING = ("hasattr", "getattr")


def questions(source: str) -> Iterator[str]:
    """Yields calls of `hasattr` and `getattr` on an object named store."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            requested = ast.unparse(node.args[0]).split(".")[-1]
            if node.func.id in ASKING and requested.lstrip("_").endswith("store"):
                yield ast.unparse(node)


def test_no_code_checks_store_attributes() -> None:
    root = Path(slipstream_tf.__file__).parent
    sources = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    found = {str(path): list(questions(source)) for path, source in sources.items()}
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source",
    ["hasattr(store, 'f')", "getattr(self._store, 'f', None)", "x = [hasattr(a.store, 'f')]"],
)
def test_attribute_checks_are_detected(source: str) -> None:
    assert len(list(questions(source))) == 1


def test_attribute_checks_of_other_objects_are_allowed() -> None:
    assert list(questions("hasattr(optimizer, 'f') or getattr(store.optimizer, 'f', 0)")) == []


def test_store_without_one_pass_measure_gathers() -> None:
    class Gathers(TrackedStore):
        tables = (Table("t", 2),)

        def gather(self, table: str, keys: np.ndarray) -> tuple[tf.Tensor, tf.Tensor]:
            rows = tf.stack([keys, 2 * keys], 1)
            return tf.cast(rows, tf.float32), tf.ones(keys.size, tf.bool)

    keys, snapshot = np.array([0, 3, 5]), tf.zeros([3, 2])
    rows, found, drift = Gathers().measure("t", keys, snapshot, "linf")
    assert np.asarray(found).all() and rows.numpy()[:, 1].tolist() == [0.0, 6.0, 10.0]
    assert drift.tolist() == [0.0, 6.0, 10.0]


def test_slot_layout_follows_rule() -> None:
    table = Table("t", 3)
    for rule, slots in (
        (optimizers.SGD(), []),
        (optimizers.Adagrad(0.1, 0.5), [0.5, 0.5, 0.5]),
        (optimizers.RowWiseAdagrad(0.1, 0.5), [0.5]),
        (optimizers.Adam(), [0.0] * 6),
        (optimizers.Ftrl(0.1, -0.5, 0.5), [0.5] * 3 + [0.0] * 3),
    ):
        layout = NativeStore([table], rule).slot_layout("t")
        assert (layout.rule, layout.initial.tolist()) == (type(rule).__name__, slots)


@pytest.mark.parametrize("rule", ALL_RULES, ids=name_of)
def test_new_rows_have_initial_slots_of_rule(rule) -> None:
    store, specs = NativeStore([Table("t", 3)], rule), [FeatureSpec("f", "t")]
    store.lookup(pack({"f": [1]}, specs), training=True)
    slots = store.export_table("t")["slots"]
    np.testing.assert_array_equal(slots, rule.initial_slots(3)[None])
    layouts = [other.layout for other in ALL_RULES if other.initial_slots(3).size != slots.size]
    assert rule.layout not in layouts


def test_variable_store_has_no_slots() -> None:
    variables: SavedStore = VariableStore({"t": tf.Variable(tf.zeros([4, 3]))})
    assert variables.slot_layout("t").rule is None
    assert variables.num_keys("t") == 4 and variables.reserved_keys("t") == ()
    with pytest.raises(ValueError, match="table"):
        variables.slot_layout("other")


ROWS, DIM = 8, 3


def make(rows: int = ROWS, dim: int = DIM) -> tuple[VariableStore, tf.Variable]:
    variable = tf.Variable(np.arange(rows * dim).reshape(rows, dim).astype(np.float32))
    return VariableStore({"item": variable}), variable


def slices(indices, dim: int = DIM, dtype=tf.int64) -> tf.IndexedSlices:
    return tf.IndexedSlices(
        tf.ones([len(indices), dim]), tf.constant(indices, dtype), tf.constant([ROWS, dim])
    )


def test_tables_keep_order_and_variables():
    layer = keras.layers.Embedding(5, 2)
    layer.build()
    plain = tf.Variable(tf.zeros([7, 4]))
    store = VariableStore({"user": layer.embeddings, "item": plain})
    assert [(table.name, table.dim) for table in store.tables] == [("user", 2), ("item", 4)]
    assert (store.size("user"), store.size("item")) == (5, 7)
    assert store.table_of(layer.embeddings) == store.table_of(layer.embeddings.value) == "user"
    assert store.table_of(plain) == "item"
    for other in (tf.Variable(tf.zeros([7, 4])), tf.zeros([1]), None, 3, np.zeros(2)):
        assert store.table_of(other) is None


def test_gather_reads_current_rows():
    store, variable = make()
    variable.assign_add(tf.ones_like(variable))
    rows, found = store.gather("item", [7, -1, 0, 8, 2**62])
    np.testing.assert_array_equal(found, [True, False, True, False, False])
    expected = np.zeros((5, DIM), np.float32)
    expected[[0, 2]] = variable.numpy()[[7, 0]]
    np.testing.assert_array_equal(rows, expected)
    rows, found = store.gather("item", np.empty(0, np.int64))
    assert rows.shape == (0, DIM) and found.shape == (0,)
    assert store.hot_keys("item", 3)[0].size == 0, "reading is no access"


@settings(max_examples=30)
@given(
    steps=st.lists(st.lists(st.integers(0, ROWS - 1), max_size=20), max_size=4),
    k=st.integers(0, ROWS + 2),
)
def test_counts_and_hot_keys_equal_reference(steps, k):
    store, _ = make()
    store.set_saturated("item", [0, 3])
    expected = np.zeros(ROWS, np.float32)
    for dtype, indices in zip([tf.int32, tf.int64] * 2, steps, strict=False):
        store.filter_gradient("item", slices(indices, dtype=dtype))
        np.add.at(expected, np.array(indices, np.int64), 1)
    keys, counts = store.hot_keys("item", k)
    order = np.lexsort((np.arange(ROWS), -expected))
    order = order[expected[order] > 0][:k]
    assert keys.dtype == np.int64 and counts.dtype == np.float32
    np.testing.assert_array_equal(keys, order)
    np.testing.assert_array_equal(counts, expected[order])


def test_decay_scales_counts():
    store, _ = make()
    store.filter_gradient("item", slices([5, 2, 5]))
    store.decay_counts(0.5)
    keys, counts = store.hot_keys("item", 9)
    np.testing.assert_array_equal(keys, [5, 2])
    np.testing.assert_array_equal(counts, np.float32([1.0, 0.5]))
    store.decay_counts(0.0)
    assert store.hot_keys("item", 9)[0].size == 0
    for factor in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="Invalid `factor`"):
            store.decay_counts(factor)


def test_mask_deduplicates_and_counts_rows():
    store, _ = make()
    store.set_saturated("item", [2, 6])
    passed = store.filter_gradient("item", slices([5, 2, 5, 6, 2, 0]))
    np.testing.assert_array_equal(passed.indices, [0, 5])
    np.testing.assert_array_equal(passed.values, [[1.0] * DIM, [2.0] * DIM])
    np.testing.assert_array_equal(passed.dense_shape, [ROWS, DIM])
    assert (int(store.offered_rows["item"]), int(store.masked_rows["item"])) == (4, 2)
    store.filter_gradient("item", slices([]))
    store.filter_gradient("item", slices([2]))
    assert (int(store.offered_rows["item"]), int(store.masked_rows["item"])) == (5, 3)
    counts = store.update_counts("item")
    assert (counts.offered, counts.sent, counts.masked) == (5, 2, 3)
    assert store.offered_rows["item"].dtype == tf.int64


def test_set_saturated_replaces_keys_of_one_table_without_retracing():
    variables = {name: tf.Variable(tf.zeros([ROWS, DIM])) for name in ("user", "item")}
    store = VariableStore(variables)
    traces = []

    @tf.function
    def passed():
        traces.append(1)
        return [store.filter_gradient(name, slices([1, 2, 3])).indices for name in variables]

    for name, keys, user, item in (
        ("user", [1], [2, 3], [1, 2, 3]),
        ("item", np.array([3, 2]), [2, 3], [1]),
        ("user", np.array([2], np.int32), [1, 3], [1]),
        ("item", [], [1, 3], [1, 2, 3]),
    ):
        store.set_saturated(name, keys)
        found = passed()
        assert (list(found[0]), list(found[1])) == (user, item)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "at least one variable"),
        ({"item": tf.zeros([2, 2])}, "EagerTensor' for table 'item'. Expected a tf.Variable"),
        ({"item": keras.layers.Embedding(2, 2)}, "'Embedding' for table 'item'"),
        ({"item": tf.Variable(tf.zeros([2]))}, r"'float32 \(2,\)' for table 'item'"),
        ({"item": tf.Variable(tf.zeros([0, 2]))}, "with at least one row"),
        ({"item": tf.Variable(tf.zeros([2, 0]))}, "Invalid `dim`: 0 for table 'item'"),
        ({"item": tf.Variable(tf.zeros([2, 2], tf.float64))}, "float64"),
        ({"": tf.Variable(tf.zeros([2, 2]))}, "Invalid `name`"),
    ],
)
def test_invalid_variables_raise(variables, message):
    with pytest.raises(ValueError, match=message):
        VariableStore(variables)


def test_duplicate_variable_raises():
    layer = keras.layers.Embedding(2, 2)
    layer.build()
    with pytest.raises(
        ValueError, match=r"table 'b'. Expected .* another table. It is already table 'a'"
    ):
        VariableStore({"a": layer.embeddings, "b": layer.embeddings.value})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([8], r"Invalid `keys`: 8 for table 'item'. Expected an integer from 0 to 7"),
        ([1, -1], r"Invalid `keys`: -1"),
        ([[1]], r"int64 \[1, 1\].*integers of shape \[n\]"),
        ([0.5], r"float64 \[1\]"),
    ],
)
def test_invalid_saturated_keys_raise(keys, message):
    store, _ = make()
    store.set_saturated("item", [1])
    with pytest.raises(ValueError, match=message):
        store.set_saturated("item", keys)
    passed = store.filter_gradient("item", slices([0, 1]))
    assert list(passed.indices) == [0], "a rejected call changes nothing"


def test_unknown_table_and_invalid_k_raise():
    store, _ = make()
    for call in (
        lambda: store.size("shop"),
        lambda: store.gather("shop", [0]),
        lambda: store.hot_keys("shop", 1),
        lambda: store.set_saturated("shop", []),
        lambda: store.filter_gradient("shop", slices([])),
        lambda: store.set_row_flags("shop", [], []),
        lambda: store.policy_of("shop"),
    ):
        with pytest.raises(ValueError, match=r"Invalid `table`: 'shop'.*one of 'item'"):
            call()
    with pytest.raises(ValueError, match="Invalid `k`: -1"):
        store.hot_keys("item", -1)


def test_indices_out_of_range_and_dense_gradients_raise():
    store, _ = make()
    with tf.device("CPU:0"), pytest.raises(tf.errors.InvalidArgumentError, match="8"):
        store.filter_gradient("item", slices([8]))
    with pytest.raises(TypeError, match=r"Expected a tf.IndexedSlices"):
        store.filter_gradient("item", tf.zeros([ROWS, DIM]))


def test_policy_decides_whether_flagged_rows_are_masked():
    store, _ = make()
    store.set_row_flags("item", [1, 2], np.array([SATURATED, 0], np.uint8))
    passed = {}
    for name, policy in (
        ("apply", UpdatePolicy()),
        ("mask", UpdatePolicy("mask")),
        ("shadow", UpdatePolicy("mask", is_shadow=True)),
    ):
        store.set_update_policy("item", policy)
        passed[name] = list(store.filter_gradient("item", slices([2, 1])).indices)
    assert passed == {"apply": [1, 2], "mask": [2], "shadow": [1, 2]}
    assert store.update_counts("item").masked == 2  # A dry run counts the rows that it would mask.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda s: s.set_update_policy("item", UpdatePolicy("mask", decay_skipped=True)),
            "`decay_moments`",
        ),
        (lambda s: s.set_update_policy("item", UpdatePolicy(ranks=2)), "`ranks`: 2"),
    ],
)
def test_unsupported_calls_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call(make()[0])
