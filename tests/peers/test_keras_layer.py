"""Runs Keras's checks of a layer, `run_layer_test`, on both embedding layers.

They check the configuration and its round trip, the symbolic and the eager call, shapes, dtypes,
masks, numbers of weights, a step of `fit` and a mixed precision policy. They cover neither text
keys, which Keras cannot generate, nor outputs that are dictionaries, which its loss cannot sum.
Therefore `Towers` converts tuples to
dictionaries.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src import testing

import slipstream_tf as slip

MATRIX = np.arange(20, dtype=np.float32).reshape(5, 4)
# The anchor of the tables is trainable, the token of the rows is not.
WEIGHTS = {
    "expected_num_trainable_weights": 1,
    "expected_num_non_trainable_weights": 1,
    "expected_num_seed_generators": 0,
    "expected_num_losses": 0,
}
# "mixed_float16" scales gradients, which rows accept only with apply="step".
BACKWARD = {"run_mixed_precision_check": False}
# The optimizer of Keras's step, "sgd", does not apply the gradients of rows.
STEP = {"run_training_check": False}


def names_of(settings: dict[str, Any]) -> str:
    """Returns the id of a case, equal in every process of pytest-xdist."""
    return "-".join(settings) or "defaults"


def check(cls: Any, settings: dict[str, Any], **expected: Any) -> None:
    """Runs the checks with a training call, unless `call_kwargs` are given."""
    expected = {"call_kwargs": {"training": True}, **WEIGHTS, **expected}
    expected |= STEP if settings.get("apply") == "step" else BACKWARD
    testing.TestCase().run_layer_test(cls, settings, **expected)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2,), "uint8"), ((2, 3), "int32"), ((2, 3), "uint64"), ((2, 3, 4), "int64")],
)
def test_embedding_accepts_integer_keys_of_any_shape(shape: tuple[int, ...], dtype: str) -> None:
    check(
        slip.keras.Embedding,
        {"input_dim": 4, "output_dim": 3},
        input_shape=shape,
        input_dtype=dtype,
        expected_output_shape=(*shape, 3),
        expected_output_dtype="float32",
        supports_masking=False,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"input_dim": None},
        {"name": "item"},
        {"table_name": "rows"},
        {"optimizer": slip.optimizers.SGD(0.1, clip_norm=1.0, weight_decay=0.1, decay="all")},
        {"embeddings_initializer": "zeros"},
        {"embeddings_initializer": slip.initializers.RandomNormal(0.5, 0.1, seed=3)},
        {"embeddings_initializer": keras.initializers.TruncatedNormal(seed=1)},
        {"embeddings_initializer": keras.initializers.GlorotUniform(seed=1)},
        {"apply": "step", "dtype": "mixed_float16"},
    ],
    ids=names_of,
)
def test_embedding_setting_survives_its_configuration(settings: dict[str, Any]) -> None:
    is_float16 = settings.get("dtype") == "mixed_float16"
    check(
        slip.keras.Embedding,
        {"input_dim": 4, "output_dim": 3, **settings},
        input_shape=(2, 3),
        input_dtype="int64",
        expected_output_shape=(2, 3, 3),
        expected_output_dtype="float16" if is_float16 else "float32",
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "mixed_bfloat16", "float64"])
def test_embedding_returns_rows_in_compute_dtype(dtype: str) -> None:
    check(
        slip.keras.Embedding,
        {"input_dim": 4, "output_dim": 3, "dtype": dtype},
        input_shape=(2, 3),
        input_dtype="int32",
        expected_output_dtype=dtype.removeprefix("mixed_"),
    )


def test_frozen_embedding_has_no_trainable_weight() -> None:
    frozen = {"expected_num_trainable_weights": 0, "expected_num_non_trainable_weights": 2}
    settings = {"input_dim": 4, "output_dim": 3, "trainable": False}
    check(slip.keras.Embedding, settings, input_shape=(2, 3), input_dtype="int64", **frozen)


@pytest.mark.parametrize("mask_zero", [False, True])
def test_embedding_returns_pretrained_rows(mask_zero: bool) -> None:
    keys = np.array([[1, 2, 0], [4, 0, 3]])
    rows = MATRIX[keys] * (keys != 0)[..., None] if mask_zero else MATRIX[keys]
    check(
        slip.keras.Embedding,
        {"input_dim": 5, "output_dim": 4, "embeddings_initializer": MATRIX, "mask_zero": mask_zero},
        input_data=tf.constant(keys),
        expected_output=tf.constant(rows),
        supports_masking=mask_zero,
        **({"expected_mask_shape": (2, 3)} if mask_zero else {}),
    )


@pytest.mark.parametrize("shape", [(2,), (2, 3, 4)])
def test_mask_of_embedding_has_shape_of_keys(shape: tuple[int, ...]) -> None:
    check(
        slip.keras.Embedding,
        {"input_dim": 4, "output_dim": 3, "mask_zero": True},
        input_shape=shape,
        input_dtype="int32",
        expected_output_shape=(*shape, 3),
        supports_masking=True,
        expected_mask_shape=shape,
    )


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_embedding_returns_ragged_rows_of_ragged_and_sparse_keys(kind: str) -> None:
    # Keras generates negative keys, too, which `input_dim` would refuse.
    check(
        slip.keras.Embedding,
        {"input_dim": None, "output_dim": 3},
        input_shape=(2, 3),
        input_dtype="int64",
        input_ragged=kind == "ragged",
        input_sparse=kind == "sparse",
        expected_output_ragged=True,
    )


COLLECTION = {"tables": [slip.Table("user", 3), slip.Table("item", 3), slip.Table("shop", 3)]}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"name": "rows", "optimizer": "adam"},
        {"features": {"a": "user", "b": "item", "c": "item"}},
        {"features": [slip.FeatureSpec(name, "shop", "mean", 0) for name in "abc"]},
        {"stacked": True},
        {"padding_key": None},
        {"padding_key": 1, "dtype": "mixed_bfloat16"},
        {"apply": "step", "expected_num_trainable_weights": 3},
    ],
    ids=names_of,
)
def test_collection_accepts_key_matrix(settings: dict[str, Any]) -> None:
    settings = dict(settings)
    name = "expected_num_trainable_weights"
    expected = {name: settings.pop(name)} if name in settings else {}
    check(
        slip.keras.EmbeddingCollection,
        {**COLLECTION, **settings},
        input_shape=(2, 3),
        input_dtype="int32",
        expected_output_shape=(2, 3, 3),
        expected_output_dtype=settings.get("dtype", "float32").removeprefix("mixed_"),
        supports_masking=True,
        **expected,
    )


@keras.saving.register_keras_serializable(package="slipstream_tf_tests")
class Towers(keras.layers.Layer):
    """Looks up a tuple of features in one collection and concatenates them.

    The tuple may be shorter than `combiners`. All features are looked up in `tables`, in order.
    """

    def __init__(
        self,
        combiners: list[str | None],
        tables: list[str],
        stacked: bool = False,
        apply: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.settings = {
            **{"combiners": combiners, "tables": tables, "stacked": stacked, "apply": apply}
        }
        features = [
            slip.FeatureSpec(f"feature_{i}", tables[i % len(tables)], combiner)
            for i, combiner in enumerate(combiners)
        ]
        self.names = [spec.name for spec in features]
        self.rows = slip.keras.EmbeddingCollection(
            [slip.Table(name, 3) for name in tables],
            slip.optimizers.SGD(0.1),
            features,
            stacked=stacked,
            apply=apply,
            dtype=self.dtype_policy,
        )

    def build(self, input_shape: Any) -> None:
        """Creates nothing, because the constructor creates the collection."""

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        rows = self.rows(dict(zip(self.names, inputs, strict=False)), training=training)
        return rows if self.rows.stacked else keras.ops.concatenate(list(rows.values()), -1)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.settings}


@pytest.mark.parametrize(
    ("combiners", "tables", "shapes", "output"),
    [
        (["sum", "mean", "sqrtn"], ["user"], ((2, 4), (2, 3), (2,)), (2, 9)),
        (["sum", "mean", "sqrtn"], ["user", "item", "shop"], ((2, 4), (2, 3), (2,)), (2, 9)),
        ([None, None], ["user"], ((2,), (2,)), (2, 6)),
        ([None, None], ["user", "item"], ((2, 4), (2, 4)), (2, 4, 6)),
        # Some of the features, as in a tower.
        (["sum", "mean", "sqrtn"], ["user", "item"], ((2, 4),), (2, 3)),
    ],
)
def test_collection_accepts_dictionary(
    combiners: list[str | None], tables: list[str], shapes: Any, output: tuple[int, ...]
) -> None:
    check(
        Towers,
        {"combiners": combiners, "tables": tables},
        input_shape=shapes,
        input_dtype=("int64",) * len(shapes),
        expected_output_shape=output,
        expected_output_dtype="float32",
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"stacked": True},
        {"apply": "step", "dtype": "mixed_float16"},
        {"dtype": "mixed_bfloat16"},
    ],
    ids=names_of,
)
def test_collection_setting_accepts_dictionary(settings: dict[str, Any]) -> None:
    dtype = settings.get("dtype", "float32").removeprefix("mixed_")
    check(
        Towers,
        {"combiners": ["sum", "mean"], "tables": ["user"], **settings},
        input_shape=((2, 4), (2, 3)),
        input_dtype=("int32", "int64"),
        expected_output_shape=(2, 2, 3) if settings.get("stacked") else (2, 6),
        expected_output_dtype=dtype,
    )


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_collection_pools_ragged_and_sparse_keys(kind: str) -> None:
    check(
        Towers,
        {"combiners": ["sum", "mean"], "tables": ["user"]},
        input_shape=((2, 4), (2, 3)),
        input_dtype=("int64", "int64"),
        input_ragged=kind == "ragged",
        input_sparse=kind == "sparse",
        expected_output_shape=(2, 6),
    )
