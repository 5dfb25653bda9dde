"""Which features a layer gets from what the user says; no op library needed."""

from __future__ import annotations

import pytest

from slipstream_tf import Table
from slipstream_tf.keras.feature_layouts import resolve_features, resolve_tables
from slipstream_tf.ops.features import FeatureSpec

TABLES = (Table("user", 4), Table("item", 4, combiner="mean"))


def test_a_feature_per_table_by_default():
    assert resolve_features(None, TABLES) == (
        FeatureSpec("user", "user", "sum"),
        FeatureSpec("item", "item", "mean"),
    )


def test_a_dictionary_takes_the_tables_combiner():
    specs = resolve_features({"seen": "item", "bought": "item"}, TABLES)
    assert specs == (FeatureSpec("seen", "item", "mean"), FeatureSpec("bought", "item", "mean"))


def test_specs_keep_their_own_combiner():
    spec = FeatureSpec("seen", "item", "sqrtn")
    assert resolve_features([spec], TABLES) == (spec,)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"x": "shop"}, "Invalid `table`: 'shop' for feature 'x'. Allowed: one of the tables"),
        ([FeatureSpec("x", "shop")], "Invalid `table`: 'shop' for feature 'x'"),
        ([FeatureSpec("x", "user", "max")], "Invalid `combiner`: 'max' for feature 'x'"),
        ([FeatureSpec("x", "user"), FeatureSpec("x", "item")], "each feature once"),
        ([FeatureSpec("", "user")], "non-empty names"),
        (["user"], "Invalid `features`: \\['user'\\]"),
        ([], "Invalid `features`"),
        (7, "Invalid `features`: \\[7\\]"),
    ],
)
def test_features_that_cannot_be(features, message):
    with pytest.raises(ValueError, match=message):
        resolve_features(features, TABLES)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "Invalid `tables`: \\[\\]"),
        (None, "Invalid `tables`: \\[None\\]"),
        ([Table("a", 2), Table("a", 3)], "Invalid `tables`: \\['a'\\]"),
        (["a"], "Invalid `tables`: \\['a'\\]"),
    ],
)
def test_tables_that_cannot_be(tables, message):
    with pytest.raises(ValueError, match=message):
        resolve_tables(tables)


def test_one_table_needs_no_list():
    assert resolve_tables(TABLES[0]) == (TABLES[0],)
