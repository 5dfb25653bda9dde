"""Tests of `Standardization` alone, in every model, and in saved and exported models."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from slipstream_tf import FeatureSpec, Table, export
from slipstream_tf.data import DenseScale
from slipstream_tf.keras import EmbeddingCollection
from slipstream_tf.models import DIN, DLRM, TBSM, DCNv2, DeepFM, FinalMLP, Standardization

DIM = 4
SCALES = [DenseScale(2000.0, 5.0), DenseScale(1e9, 1e8, has_missing=True), DenseScale()]


def standardized(dense):
    """Returns the expected output for `SCALES`: three columns and the mask of the second."""
    scaled = (dense - [2000, 1e9, 0]) / [5, 1e8, 1]
    is_missing = np.isnan(dense)
    return np.concatenate([np.where(is_missing, 0, scaled), is_missing[..., 1:2]], axis=-1)


def make_dense(*shape):
    random = np.random.default_rng(0)
    columns = [
        random.integers(1990, 2011, shape),
        np.where(random.random(shape) < 0.3, np.nan, 1e9 + 1e8 * random.normal(size=shape)),
        random.normal(size=shape),
    ]
    return np.stack(columns, axis=-1).astype(np.float32)


def test_output_equals_numpy():
    dense = make_dense(40, 2)
    dense[0, 0] = np.nan  # Columns without missing numbers in training may have them later.
    layer = Standardization(SCALES)
    np.testing.assert_allclose(layer(dense), standardized(dense), rtol=1e-5, atol=1e-5)
    assert layer.compute_output_shape((None, 3)) == (None, layer.width) == (None, 4)
    same = Standardization.from_config(json.loads(json.dumps(layer.get_config())))
    np.testing.assert_array_equal(same(dense), layer(dense))
    identity = Standardization([DenseScale()])
    np.testing.assert_array_equal(identity(dense[1:, :, 2:]), dense[1:, :, 2:])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Standardization([]), r"Invalid `scales`: \[\]"),
        (lambda: Standardization([1.0]), "Invalid `scales`: 1.0"),
        (lambda: Standardization([DenseScale(std=0.0)]), "Invalid `std`: 0.0"),
        (lambda: Standardization([DenseScale(mean=np.nan)]), "Invalid `mean`: nan"),
        (lambda: Standardization(SCALES)(np.zeros((2, 2), "float32")), r"\(2, 2\).*3 columns"),
        (lambda: make_model("dcn", scales=SCALES[:2]), "Invalid `standardization`"),
    ],
)
def test_invalid_arguments_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def make_model(name, scales=SCALES, **kwargs):
    combiner = None if name == "tbsm" else "sum"
    tables = [Table(table, DIM, combiner=combiner) for table in ("a", "b")]
    specs = None
    if name == "din":
        past = FeatureSpec("past", "a", None, padding_key=-1)
        specs = [FeatureSpec("a", "a", "sum"), FeatureSpec("b", "b", "sum"), past]
    layer = EmbeddingCollection(tables, "adagrad", specs)
    kinds = {
        "dlrm": (DLRM, {"bottom": [8, DIM], "top": [8, 1]}),
        "dcn": (DCNv2, {"deep": [8]}),
        "deepfm": (DeepFM, {"deep": [8]}),
        "final_mlp": (FinalMLP, {"first": [8], "second": [8], "heads": 2, "gate": 5}),
        "din": (DIN, {"history": {"past": "a"}, "attention": [6], "deep": [8]}),
        "tbsm": (TBSM, {"bottom": [DIM], "step": [8, 6], "top": [8, 1]}),
    }
    kind, options = kinds[name]
    standardization = None if scales is None else Standardization(scales)
    return kind(layer, 3, **options, standardization=standardization, **kwargs)


def make_inputs(name):
    random = np.random.default_rng(1)
    shape = (32, 5) if name == "tbsm" else (32,)
    keys = {table: random.integers(0, 9, shape) for table in ("a", "b")}
    if name == "din":
        keys["past"] = random.integers(0, 9, (32, 5))
    return {"keys": keys, "dense": make_dense(*shape)}


MODELS = ("dlrm", "dcn", "deepfm", "final_mlp", "din", "tbsm")


@pytest.mark.parametrize("name", MODELS)
def test_model_with_standardization_trains_saves_and_exports(name, tmp_path):
    keras.utils.set_random_seed(0)
    model, inputs = make_model(name), make_inputs(name)
    model.compile("adam", "binary_crossentropy")
    losses = model.fit(inputs, np.arange(32) % 2, verbose=0, epochs=2).history["loss"]
    assert max(losses) < 2  # Raw numbers of 1e9 give losses of millions.
    outputs = model(inputs).numpy()
    model.save(tmp_path / "x.keras")
    loaded = keras.models.load_model(tmp_path / "x.keras")
    np.testing.assert_allclose(loaded(inputs), outputs, rtol=1e-5)
    export.saved_model(model, tmp_path / "served", signature=inputs)
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(served.serve(inputs), outputs, rtol=1e-5, atol=1e-6)


def test_numbers_are_standardized_in_float32():
    model, inputs = make_model("dcn", dtype="mixed_bfloat16"), make_inputs("dcn")
    received = []
    logits = model.logits
    model.logits = lambda dense, *args: received.append(dense) or logits(dense, *args)
    model(inputs)
    assert received[0].dtype == tf.bfloat16
    # bfloat16 rounds the year 2001 to 2000.
    expected = standardized(inputs["dense"])
    np.testing.assert_allclose(tf.cast(received[0], tf.float32), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_missing_numbers_without_standardization_raise(name):
    model, inputs = make_model(name, scales=None), make_inputs(name)
    with pytest.raises(tf.errors.InvalidArgumentError, match="missing or infinite number"):
        model(inputs)


def test_missing_numbers_without_standardization_raise_in_fit():
    model, inputs = make_model("dlrm", scales=None), make_inputs("dlrm")
    model.compile("adam", "binary_crossentropy")
    with pytest.raises(tf.errors.InvalidArgumentError, match="Pass standardization="):
        model.fit(inputs, np.zeros(32), verbose=0)


def test_default_scales_keep_finite_numbers_bit_for_bit():
    inputs = make_inputs("dlrm")
    inputs["dense"] = np.nan_to_num(inputs["dense"] / 1e9)
    keras.utils.set_random_seed(0)
    plain = make_model("dlrm", scales=None)
    keras.utils.set_random_seed(0)
    same = make_model("dlrm", scales=[DenseScale()] * 3)
    np.testing.assert_array_equal(same(inputs), plain(inputs))
