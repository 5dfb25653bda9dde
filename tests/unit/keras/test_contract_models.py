"""Tests of docs/keras.md: `training` arguments and plain SavedModel calls."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
from contract_models import (
    FEATURES,
    BuiltDictionaryModel,
    DictionaryModel,
    assert_same,
    contents,
    data,
    differ,
    layer_of,
    make_layer,
    make_model,
)

from slipstream_tf import export

KEYS, LABELS = data()


class Plain(keras.Model):
    """Model with a `call` that has no `training` argument."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = make_layer()
        self.flatten, self.top = keras.layers.Flatten(), keras.layers.Dense(1)

    def call(self, keys):
        return self.top(self.flatten(self.embedding(keys)))


class ModelWithTrainingArgument(Plain):
    """Model with a `training` argument, which Keras passes on to the layers."""

    def call(self, keys, training=False):
        return super().call(keys)


class Trains(Plain):
    """Model that always looks up with training=True."""

    def call(self, keys):
        return self.top(self.flatten(self.embedding(keys, training=True)))


def fitted(kind, **kwargs):
    keras.utils.set_random_seed(3)
    model = kind(**kwargs)
    model.compile("sgd", "mse")
    model.fit(KEYS, LABELS, batch_size=16, verbose=0)
    return model


@pytest.mark.parametrize("eager", [False, True])
def test_fit_raises_if_training_argument_is_not_passed(eager):
    keras.utils.set_random_seed(3)
    model = Plain(name="mine")
    model.compile("sgd", "mse", run_eagerly=eager)
    with pytest.raises(
        ValueError, match=r"Invalid `training`: None for layer 'tables' in Plain 'mine'.*`training`"
    ):
        model.fit(KEYS, LABELS, batch_size=16, verbose=0)
    model.evaluate(KEYS, LABELS, verbose=0)
    model.predict(KEYS, verbose=0)
    assert model.embedding.store.size("user") == 0


def test_passing_training_argument_trains_rows():
    reported, trains = fitted(ModelWithTrainingArgument), fitted(Trains)
    assert int(reported.embedding.store.export_table("user")["steps"][0]) == 4
    assert_same(reported.embedding, contents(trains.embedding))


@pytest.mark.parametrize("kind", [Plain, ModelWithTrainingArgument])
def test_custom_train_step_requires_training_argument(kind, caplog):
    class Own(kind):
        tells: ClassVar = {}

        def train_step(self, batch):
            keys, labels = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(keys, **self.tells)[:, 0] - labels) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    if kind is Plain:
        with pytest.raises(ValueError, match=r"Invalid `training`: None.*Own"):
            fitted(Own)
        return
    with caplog.at_level("WARNING", "absl"):
        fitted(Own)  # `call` has the default training=False, which may be intended.
    assert "'tables' in Own 'own" in caplog.text
    assert "training=False under a gradient tape. Its rows are not trained" in caplog.text
    Own.tells = {"training": True}
    assert_same(fitted(Own).embedding, contents(fitted(ModelWithTrainingArgument).embedding))


def test_call_under_tape_requires_training_argument():
    layer = make_layer()
    with pytest.raises(ValueError, match=r"`training`: None for layer 'tables'"):  # noqa: SIM117
        with tf.GradientTape():
            layer(KEYS)
    with tf.GradientTape():
        layer(KEYS, training=False)
    layer(KEYS)
    assert layer.store.size("user") == 0
    layer.trainable = False
    with tf.GradientTape():
        layer(KEYS)


def test_sequential_model_trains_rows():
    """The keys must not be treated as features of a dense layer."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((2,), dtype="int64")
    model = keras.Sequential([inputs, make_layer(), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(KEYS, LABELS, batch_size=16, verbose=0)
    assert_same(layer_of(model), contents(fitted(ModelWithTrainingArgument).embedding))


def test_steps_per_execution_and_run_eagerly_give_same_rows():
    def rows(**kwargs):
        model = make_model(**kwargs)
        model.fit(KEYS, LABELS, batch_size=16, shuffle=False, verbose=0)
        return contents(model)

    plain = rows()
    assert differ(plain, rows(steps_per_execution=3)) == set()
    for name, array in rows(run_eagerly=True).items():
        np.testing.assert_allclose(array, plain[name], rtol=0, atol=1e-6)


def test_jit_compile_falls_back_in_keras_and_raises_in_xla():
    """Only Keras falls back to a graph without XLA."""
    with pytest.warns(UserWarning, match="jit_compile"):
        model = make_model(jit_compile=True)
        model.fit(KEYS, LABELS, batch_size=16, shuffle=False, verbose=0)
    plain = make_model()
    plain.fit(KEYS, LABELS, batch_size=16, shuffle=False, verbose=0)
    assert_same(model, contents(plain))
    layer = make_layer()
    with pytest.raises(tf.errors.InvalidArgumentError, match="Slipstream"):
        tf.function(lambda keys: layer(keys), jit_compile=True)(tf.constant(KEYS))


def test_sample_and_class_weights_scale_row_updates():
    """A weight of 0 leaves the rows of an example unchanged."""
    weights = np.where(KEYS[:, 0] < 10, 0.0, 1.0)
    model = make_model()
    before = layer_of(model).store.gather("user", np.arange(20))[0].numpy()
    model.fit(KEYS, LABELS, sample_weight=weights, batch_size=16, verbose=0)
    moved = np.abs(layer_of(model).store.gather("user", np.arange(20))[0].numpy() - before).max(1)
    assert (moved[:10] == 0).all()
    assert (moved[np.unique(KEYS[KEYS[:, 0] >= 10, 0])] > 0).all()
    one, other = make_model(), make_model()
    one.fit(KEYS, LABELS, class_weight={0: 3.0, 1: 0.5}, batch_size=16, shuffle=False, verbose=0)
    given = np.where(LABELS == 0, 3.0, 0.5)
    other.fit(KEYS, LABELS, sample_weight=given, batch_size=16, shuffle=False, verbose=0)
    assert_same(one, contents(other))


WRITERS = {
    "export": lambda model, path: model.export(path, verbose=False),
    "save": tf.saved_model.save,
}
MORE = np.concatenate([KEYS, KEYS + 1000])  # Includes keys without a row.


def served(path):
    loaded = tf.saved_model.load(path)
    signature = loaded.signatures["serving_default"]
    functions = signature.graph.as_graph_def().library.function
    ops = {node.op for function in functions for node in function.node_def}
    assert not {op for op in ops if op.startswith("Slipstream")}
    (outputs,) = signature(tf.constant(MORE)).values()
    return outputs.numpy()


@pytest.mark.parametrize("writer", WRITERS)
def test_keras_and_tensorflow_saved_models_have_current_rows(writer, tmp_path, caplog):
    model, path = make_model(), str(tmp_path / "model")
    for _ in range(2):  # The second export has the current rows.
        model.fit(KEYS, LABELS, batch_size=16, verbose=0)
        WRITERS[writer](model, path)
        np.testing.assert_allclose(served(path), model.predict(MORE, verbose=0), atol=1e-6)
    before = contents(model)
    model.fit(KEYS, LABELS, batch_size=16, verbose=0)
    assert differ(before, contents(model)) >= {"user rows"}
    assert "python values" not in caplog.text  # TensorFlow's warning about lost state.


def test_subclassed_model_exports_with_input_signature(tmp_path):
    model = fitted(ModelWithTrainingArgument)
    with pytest.raises(ValueError, match=r"'float32'.* pass `input_signature` to `export`"):
        model.export(tmp_path / "default", verbose=False)  # Keras declares float32 keys.
    spec = [tf.TensorSpec([None, 2], tf.int64)]
    model.export(tmp_path / "model", verbose=False, input_signature=spec)
    np.testing.assert_allclose(
        served(str(tmp_path / "model")), model.predict(MORE, verbose=0), atol=1e-6
    )


def test_custom_signature_in_saved_model_has_current_rows(tmp_path):
    """A later SavedModel reuses the trace with its current rows."""
    model = fitted(ModelWithTrainingArgument)
    spec = tf.TensorSpec([None, 2], tf.int64)
    serve = tf.function(lambda keys: {"outputs": model(keys)}, input_signature=[spec])
    for number in range(2):
        path = str(tmp_path / str(number))
        tf.saved_model.save(model, path, signatures={"serving_default": serve})
        np.testing.assert_allclose(served(path), model.predict(MORE, verbose=0), atol=1e-6)
        model.fit(KEYS, LABELS, batch_size=16, verbose=0)


def dictionary_models(kind, model_class=DictionaryModel):
    """Returns two equal models, with `keras.layers.Embedding` and with the given layers."""
    keras.utils.set_random_seed(3)
    reference, model = DictionaryModel("keras"), model_class(kind)
    for each in (reference, model):
        each(FEATURES)
        each.compile(keras.optimizers.SGD(0.1), "mse")
    model.copy_from(reference)
    return reference, model


def fit_dictionaries(model):
    """Trains one step and returns the predictions."""
    batch = tf.data.Dataset.from_tensors((FEATURES, tf.ones([4, 1])))
    model.fit(batch, verbose=0)
    return model(FEATURES).numpy()


def loaded_models(model, path):
    """Saves a model in each Keras format and loads it without a call."""
    model.save(path / "model.keras")
    yield keras.models.load_model(path / "model.keras")
    model.save_weights(path / "model.weights.h5")
    fresh = type(model)(model.kind)
    if isinstance(model, BuiltDictionaryModel):
        fresh.build({name: keys.shape for name, keys in FEATURES.items()})
    else:
        fresh(FEATURES)
    fresh.compile(keras.optimizers.SGD(0.1), "mse")
    fresh.load_weights(path / "model.weights.h5")
    yield fresh


@pytest.mark.filterwarnings("error:.*(unbuilt state|cannot be built)")
@pytest.mark.parametrize(
    ("kind", "model_class"),
    [
        ("embedding", DictionaryModel),
        ("embedding", BuiltDictionaryModel),
        ("collection", DictionaryModel),
    ],
)
def test_loaded_dictionary_models_equal_keras_embedding(kind, model_class, tmp_path):
    """Keras builds the models by shape before it loads their weights."""
    reference, model = dictionary_models(kind, model_class)
    expected = fit_dictionaries(reference)
    np.testing.assert_allclose(fit_dictionaries(model), expected, rtol=1e-5)
    after = fit_dictionaries(reference)
    for loaded in loaded_models(model, tmp_path):
        np.testing.assert_allclose(loaded(FEATURES), expected, rtol=1e-5)
        np.testing.assert_allclose(fit_dictionaries(loaded), after, rtol=1e-5)


@pytest.mark.parametrize("kind", ["embedding", "collection"])
def test_exported_dictionary_models_equal_keras_embedding(kind, tmp_path):
    reference, model = dictionary_models(kind)
    dense = {**FEATURES, "tags": FEATURES["seen"]}  # Keras exports no ragged inputs.
    specs = {name: tf.TensorSpec([None, *k.shape[1:]], k.dtype) for name, k in dense.items()}
    model.export(tmp_path / "export", verbose=False, input_signature=[specs])
    served = tf.saved_model.load(str(tmp_path / "export"))
    np.testing.assert_allclose(served.serve(dense), reference(dense), rtol=1e-5)

    def serve(user, seen, tags, country, row_splits):
        tags = tf.RaggedTensor.from_row_splits(tags, row_splits)
        return model({"user": user, "seen": seen, "tags": tags, "country": country})

    flat = {**FEATURES, "row_splits": FEATURES["tags"].row_splits}
    flat["tags"] = FEATURES["tags"].flat_values
    specs = [tf.TensorSpec([None, *k.shape[1:]], k.dtype, name) for name, k in flat.items()]
    signature = tf.function(serve, input_signature=specs)
    tf.saved_model.save(model, str(tmp_path / "signature"), signatures=signature)
    served = tf.saved_model.load(str(tmp_path / "signature")).signatures["serving_default"]
    (outputs,) = served(**flat).values()
    np.testing.assert_allclose(outputs, reference(FEATURES), rtol=1e-5)


def test_default_signature_accepts_exact_floats_only(tmp_path):
    """Keras declares float32 inputs if no signature is given."""
    model = fitted(ModelWithTrainingArgument)
    tf.saved_model.save(model, str(tmp_path))
    serve = tf.saved_model.load(str(tmp_path)).signatures["serving_default"]
    (outputs,) = serve(tf.constant(KEYS[:16], tf.float32)).values()
    np.testing.assert_allclose(outputs, model(KEYS[:16]), rtol=1e-5)
    for key in (1.5, 2.0**24, np.nan, np.inf):
        keys = np.full([16, 2], key, np.float32)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"Invalid `keys`.*Declare"):
            serve(tf.constant(keys))


def test_function_called_before_export_is_traced_again(tmp_path):
    model = fitted(ModelWithTrainingArgument)
    function = tf.function(
        lambda keys: {"outputs": model(keys)}, input_signature=[tf.TensorSpec([None, 2], tf.int64)]
    )
    expected = function(KEYS[:4])["outputs"]
    tf.saved_model.save(model, str(tmp_path), signatures=function)
    loaded = tf.saved_model.load(str(tmp_path))
    found = loaded.signatures["serving_default"](tf.constant(KEYS[:4]))["outputs"]
    np.testing.assert_array_equal(found, expected)


def test_concrete_function_is_refused_as_signature(tmp_path):
    """TensorFlow cannot trace it again with the exported rows."""
    model = fitted(ModelWithTrainingArgument)
    function = tf.function(lambda keys: {"outputs": model(keys)})
    traced = function.get_concrete_function(tf.TensorSpec([None, 2], tf.int64))
    with pytest.raises(ValueError, match=r"Slipstream.*a tf\.function with `input_signature`"):
        tf.saved_model.save(model, str(tmp_path), signatures=traced)


def test_package_export_works_after_keras_export(tmp_path):
    model = make_model()
    model.fit(KEYS, LABELS, batch_size=16, verbose=0)
    model.export(tmp_path / "plain", verbose=False)
    model.fit(KEYS, LABELS, batch_size=16, verbose=0)
    export.saved_model(model, tmp_path / "own")
    np.testing.assert_allclose(
        served(str(tmp_path / "own")), model.predict(MORE, verbose=0), atol=1e-6
    )


def test_ranks_export_collectively(run_as_ranks, tmp_path):
    def program(comm):
        layer = make_layer(comm=comm, placement="sharded")
        function = tf.function(layer, input_signature=[tf.TensorSpec([None, 2], tf.int64)])
        with pytest.raises(ValueError, match=r"slip\.export\.saved_model"):
            tf.saved_model.save(layer, str(tmp_path / str(comm.rank)), signatures=function)

    assert run_as_ranks(2, program) == [None, None]


HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[2] / "docs" / "keras.md"
VERDICTS = ("works", "works through", "refused")


def lines() -> list[str]:
    """Returns the table lines of the page without the header lines."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [row for row in rows if not row.startswith("| Keras | |")]


@pytest.mark.parametrize("line", lines(), ids=lambda line: line.split("|")[1].strip(" `"))
def test_every_contract_line_has_verdict_and_tests(line):
    _, habit, verdict, *_ = (cell.strip() for cell in line.split("|"))
    assert habit
    assert verdict.startswith(VERDICTS)
    (comment,) = re.findall(r"<!-- (.*) -->", line)
    assert comment.split()
    for test in comment.split():
        module, name = test.split("::")
        assert f"\ndef {name}(" in (HERE / f"{module}.py").read_text(), test


def test_every_keras_feature_that_touches_rows_has_line():
    """Looks for Keras features by the names that readers search for."""
    text = "".join(line.split("|")[1] for line in lines())
    habits = """get_weights set_weights clone_model EarlyStopping ModelCheckpoint BackupAndRestore
        m.keras m.weights.h5 m.h5 export saved_model.save LearningRateScheduler ReduceLROnPlateau
        LearningRateSchedule clipnorm clipvalue global_clipnorm weight_decay use_ema SwapEMAWeights
        gradient_accumulation_steps MultiOptimizer class_weight sample_weight train_step training
        steps_per_execution run_eagerly jit_compile mixed_float16 summary count_params frozen"""
    assert [habit for habit in habits.split() if habit not in text] == []


def test_every_contract_test_file_is_on_page():
    named = set(re.findall(r"(test_contract_\w+)::", PAGE.read_text()))
    files = {path.stem for path in HERE.glob("test_contract_*.py")}
    assert named == files
