"""What a store can do is said by the fields of its class: nobody looks whether it has a method."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from all_rules import ALL_RULES, name_of

import slipstream_tf
from slipstream_tf import Table, optimizers
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.tables import NativeStore, VariableStore
from slipstream_tf.tables.base import SavedStore, TrackedStore

ASKING = ("hasattr", "getattr")


def questions(source: str) -> Iterator[str]:
    """Yields the calls that ask an object called a store what it has."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            requested = ast.unparse(node.args[0]).split(".")[-1]
            if node.func.id in ASKING and requested.lstrip("_").endswith("store"):
                yield ast.unparse(node)


def test_no_code_asks_what_a_store_has() -> None:
    root = Path(slipstream_tf.__file__).parent
    sources = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    found = {str(path): list(questions(source)) for path, source in sources.items()}
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source",
    ["hasattr(store, 'f')", "getattr(self._store, 'f', None)", "x = [hasattr(a.store, 'f')]"],
)
def test_questions_are_found(source: str) -> None:
    assert len(list(questions(source))) == 1


def test_others_may_be_asked() -> None:
    assert list(questions("hasattr(optimizer, 'f') or getattr(store.optimizer, 'f', 0)")) == []


def test_a_store_that_cannot_measure_in_one_pass_gathers() -> None:
    class Gathers(TrackedStore):
        tables = (Table("t", 2),)

        def gather(self, table: str, keys: np.ndarray) -> tuple[tf.Tensor, tf.Tensor]:
            rows = tf.stack([keys, 2 * keys], 1)
            return tf.cast(rows, tf.float32), tf.ones(keys.size, tf.bool)

    keys, snapshot = np.array([0, 3, 5]), tf.zeros([3, 2])
    rows, found, drift = Gathers().measure("t", keys, snapshot, "linf")
    assert np.asarray(found).all() and rows.numpy()[:, 1].tolist() == [0.0, 6.0, 10.0]
    assert drift.tolist() == [0.0, 6.0, 10.0]


def test_slots_follow_from_the_rule() -> None:
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
def test_new_rows_have_the_slots_that_the_rule_says(rule) -> None:
    store, specs = NativeStore([Table("t", 3)], rule), [FeatureSpec("f", "t")]
    store.lookup(pack({"f": [1]}, specs), specs, training=True)
    slots = store.export_table("t")["slots"]
    np.testing.assert_array_equal(slots, rule.initial_slots(3)[None])
    layouts = [other.layout for other in ALL_RULES if other.initial_slots(3).size != slots.size]
    assert rule.layout not in layouts


def test_variables_have_no_slots_of_ours() -> None:
    variables: SavedStore = VariableStore({"t": tf.Variable(tf.zeros([4, 3]))})
    assert variables.slot_layout("t").rule is None
    assert variables.num_keys("t") == 4 and variables.reserved_keys("t") == ()
    with pytest.raises(ValueError, match="table"):
        variables.slot_layout("other")
