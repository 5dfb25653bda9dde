"""Tests of the layers with Keras's layer checks, including dictionary inputs."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip

test_case = pytest.importorskip("keras.src.testing.test_case")


def tables(combiner="sum"):
    return [slip.Table(name, 4, combiner=combiner) for name in ("a", "b")]


class TestKerasLayerChecks(test_case.TestCase):
    """Runs Keras's layer checks.

    The mixed-precision check is off, because it needs loss scaling, which raises an error here.
    """

    def check(self, layer_cls, init_kwargs, keys, **expected):
        self.run_layer_test(
            layer_cls,
            init_kwargs=init_kwargs,
            input_data=keys,
            expected_output_dtype="float32",
            expected_num_seed_generators=0,
            expected_num_losses=0,
            run_mixed_precision_check=False,
            **expected,
        )

    def test_embedding_passes_keras_layer_test(self):
        for keys in (np.array([1, 2]), np.array([[1, 2], [3, 0]]), np.zeros((2, 3, 4), "int32")):
            for mask_zero in (False, True):
                self.check(
                    slip.keras.Embedding,
                    {"input_dim": 10, "output_dim": 4, "mask_zero": mask_zero},
                    tf.constant(keys),
                    expected_output_shape=(*keys.shape, 4),
                    supports_masking=mask_zero,
                )

    def test_embedding_of_ragged_keys_passes_keras_layer_test(self):
        self.check(
            slip.keras.Embedding,
            {"input_dim": 10, "output_dim": 4},
            tf.ragged.constant([[1, 2], [3]], dtype=tf.int64),
            input_ragged=True,
            expected_output_ragged=True,
            run_training_check=False,
        )

    def test_key_matrix_passes_keras_layer_test(self):
        self.check(
            slip.keras.EmbeddingCollection,
            {"tables": tables(), "optimizer": slip.optimizers.SGD(0.1)},
            tf.constant([[1, 2], [3, 1], [1, 1]], tf.int64),
            expected_output_shape=(3, 2, 4),
        )


INPUTS = {"a": tf.constant([[1, 2], [3, -1]]), "b": tf.constant([4, 4], tf.int64)}


@pytest.mark.parametrize("combiner", ["sum", None])
class TestDictionaryLayer:
    """Repeats the checks of `run_layer_test`.

    Note: `run_layer_test` would pass the entries of a dictionary as separate arguments.
    """

    def make(self, combiner):
        return slip.keras.EmbeddingCollection(tables(combiner), slip.optimizers.SGD(0.1))

    def shapes(self, combiner):
        return {"a": (2, 4) if combiner else (2, 2, 4), "b": (2, 4)}

    def test_dictionary_layer_serializes(self, combiner):
        layer = self.make(combiner)
        config = layer.get_config()
        again = type(layer).from_config(json.loads(json.dumps(config)))
        assert again.get_config() == config
        assert dir(again) == dir(layer)
        revived = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
        assert revived.get_config() == config
        assert len(again.weights) == len(layer.weights)

    def test_dictionary_layer_builds(self, combiner):
        layer = self.make(combiner)
        layer.build({name: keys.shape for name, keys in INPUTS.items()})
        assert layer.built and len(layer.trainable_weights) == 1

    def test_dictionary_layer_accepts_symbolic_call(self, combiner):
        inputs = {
            name: keras.KerasTensor(keys.shape, keys.dtype.name) for name, keys in INPUTS.items()
        }
        outputs = self.make(combiner)(inputs)
        assert {name: output.shape for name, output in outputs.items()} == self.shapes(combiner)
        assert {output.dtype for output in outputs.values()} == {"float32"}

    def test_dictionary_layer_accepts_eager_call(self, combiner):
        layer = self.make(combiner)
        outputs = layer(INPUTS)
        assert {name: tuple(o.shape) for name, o in outputs.items()} == self.shapes(combiner)
        assert {output.dtype for output in outputs.values()} == {tf.float32}
        assert not layer.losses and layer.supports_masking
        mask = getattr(outputs["a"], "_keras_mask", None)
        assert (mask is None) if combiner else mask.numpy().tolist() == [[1, 1], [1, 0]]

    def test_dictionary_layer_trains_compiled(self, combiner):
        class Model(keras.Model):
            def __init__(self, layer):
                super().__init__()
                self.layer = layer

            def call(self, inputs, training=False):
                outputs = self.layer(inputs, training=training)
                return tf.concat([tf.reshape(o, [2, -1]) for o in outputs.values()], axis=1)

        layer = self.make(combiner)
        model = Model(layer)
        model.compile("sgd", "mse", jit_compile="auto")
        model.fit(INPUTS, np.ones(model(INPUTS).shape), verbose=0)
        assert layer.store.size("a") == 3 and layer.store.size("b") == 1
