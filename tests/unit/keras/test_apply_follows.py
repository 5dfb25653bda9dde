"""Tests that `slip.keras.Model` chooses `apply` for layers without it."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf
from contract_models import TABLES, assert_same, contents, data, differ, layer_of, make_layer
from contract_models import make_model as plain_model_of

import slipstream_tf as slip
from slipstream_tf import distributed
from slipstream_tf.keras import CombinedOptimizer

KEYS, LABELS = data()
CLIPS = {"global_clipnorm": 0.02}


def make_model(optimizer, layer=None):
    """Returns the model of `contract_models` as a `slip.keras.Model`."""
    keras.utils.set_random_seed(3)
    keys = keras.Input((len(TABLES),), dtype="int64", name="keys")
    rows = keras.layers.Flatten()((layer or make_layer())(keys))
    outputs = keras.layers.Dense(1, activation="sigmoid", name="top")(rows)
    model = slip.keras.Model(keys, outputs)
    model.compile(optimizer, "binary_crossentropy")
    return model


def train(model, epochs=2):
    model.fit(KEYS, LABELS, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return model


def stepped(optimizer):
    """Returns a model trained with an explicit `CombinedOptimizer` and apply="step"."""
    return train(plain_model_of(CombinedOptimizer(optimizer), make_layer(apply="step")))


@pytest.mark.parametrize(
    "settings",
    [{"clipnorm": 0.02}, CLIPS, {"clipvalue": 0.002}, {"gradient_accumulation_steps": 4}],
    ids=str,
)
def test_optimizer_setting_over_all_gradients_switches_to_step(settings):
    model = train(make_model(keras.optimizers.Adam(**settings)))
    assert layer_of(model).apply == "step"
    assert_same(model, contents(stepped(keras.optimizers.Adam(**settings))))


def test_loss_scale_optimizer_switches_to_step():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    assert_same(train(make_model(optimizer)), contents(stepped("sgd")))


def test_plain_optimizer_keeps_backward():
    model = train(make_model("adam"))
    assert layer_of(model).apply == "backward"
    assert not isinstance(model.optimizer, type(CombinedOptimizer("adam")))
    assert_same(model, contents(train(plain_model_of("adam"))))


def test_combined_optimizer_switches_to_step():
    model = train(make_model(CombinedOptimizer("sgd")))
    assert layer_of(model).apply == "step"
    assert_same(model, contents(stepped("sgd")))


def test_recompiling_switches_apply():
    """Each compile switches the anchors, which are weights of the model."""
    model = make_model(keras.optimizers.SGD(**CLIPS))
    names = [weight.path.split("/")[-1] for weight in layer_of(model).trainable_weights]
    assert names == [f"{table}_anchor" for table in TABLES]
    model.compile("sgd", "binary_crossentropy")
    assert [w.path for w in layer_of(model).trainable_weights] == ["tables/update_anchor"]
    assert_same(train(model), contents(train(plain_model_of("sgd"))))
    model.compile(keras.optimizers.SGD(**CLIPS), "binary_crossentropy")
    train(model)


def test_user_optimizer_object_is_kept():
    """Changes of the user's learning rate reach the model.

    A second compile, for example after unfreezing layers, keeps the moments.
    """
    optimizer = keras.optimizers.Adam(0.01, **CLIPS)
    model = train(make_model(optimizer))
    assert model.optimizer is optimizer and isinstance(optimizer, keras.optimizers.Adam)
    assert int(optimizer.iterations) == 8
    model.compile(optimizer, "binary_crossentropy")
    assert (layer_of(model).apply, int(model.optimizer.iterations)) == ("step", 8)
    before = contents(model)
    optimizer.learning_rate = 0.0
    train(model, 1)
    # The rows follow the rate of 0, and only the sums of squares in the slots still grow.
    assert not {name for name in differ(before, contents(model)) if not name.endswith("slots")}


def test_attributes_outside_optimizer_config_are_kept():
    optimizer = keras.optimizers.SGD(lambda: 0.1, **CLIPS)
    optimizer.special = 7
    model = train(make_model(optimizer))
    assert (model.optimizer.special, layer_of(model).apply) == (7, "step")


@pytest.mark.parametrize("wraps", [False, True])
def test_apply_follows_optimizer_of_anchors_in_multi_optimizer(wraps):
    own = keras.optimizers.SGD(**CLIPS)
    own = CombinedOptimizer(own) if wraps else own
    other = keras.optimizers.SGD()
    both = keras.optimizers.MultiOptimizer(lambda v: own if "_anchor" in v.path else other)
    model = train(make_model(both))
    assert layer_of(model).apply == "step"


def test_optimizer_used_by_other_model_raises():
    optimizer = keras.optimizers.SGD(**CLIPS)
    optimizer.build([keras.Variable(0.0)])
    model = make_model(optimizer)
    with pytest.raises(ValueError, match=r"compile a slip.keras.Model .* with a new optimizer"):
        train(model)


def test_explicit_apply_of_layer_is_kept():
    model = make_model(keras.optimizers.SGD(**CLIPS), make_layer(apply="backward"))
    assert layer_of(model).apply == "backward"
    with pytest.raises(ValueError, match=r"Invalid `global_clipnorm`.*slip.keras.Model"):
        train(model)


def test_error_for_plain_model_names_slip_model():
    model = plain_model_of(keras.optimizers.SGD(**CLIPS), make_layer())
    with pytest.raises(ValueError, match=r"Invalid `global_clipnorm`.*compile a slip.keras.Model"):
        train(model)


@pytest.mark.parametrize("form", ["keras", "weights.h5", "checkpoint"])
def test_files_restore_apply_and_rows(form, tmp_path):
    model = train(make_model(keras.optimizers.Adam(0.01, **CLIPS)))
    path = str(tmp_path / f"model.{form}")
    if form == "keras":
        model.save(path)
        loaded = keras.models.load_model(path)
    else:
        loaded = train(make_model(keras.optimizers.Adam(0.01, **CLIPS)), 1)
        if form == "checkpoint":
            tf.train.Checkpoint(model=model).write(path)
            tf.train.Checkpoint(model=loaded).read(path).assert_consumed()
        else:
            model.save_weights(path)
            loaded.load_weights(path)
    assert layer_of(loaded).apply == "step"
    assert_same(loaded, contents(model))
    assert loaded.optimizer.global_clipnorm == 0.02
    if form != "weights.h5":  # A weights file contains no optimizer.
        assert_same(train(loaded), contents(train(model)))


def test_get_and_set_weights_restore_rows():
    model = train(make_model(keras.optimizers.SGD(**CLIPS)))
    weights, before = model.get_weights(), contents(model)
    train(model)
    model.set_weights(weights)
    assert_same(model, before)


def test_clones_follow_their_optimizer():
    model = train(make_model(keras.optimizers.SGD(**CLIPS)))
    copy = keras.models.clone_model(model)  # The clone is compiled like the model.
    assert layer_of(copy).apply == "step"
    train(copy)
    copy.compile("sgd", "binary_crossentropy")
    assert (layer_of(copy).apply, layer_of(model).apply) == ("backward", "step")
    train(copy)


def test_subclass_with_custom_compile_is_supported(tmp_path):
    @keras.saving.register_keras_serializable(package="tests", name="Compiles")
    class Compiles(slip.keras.Sequential):
        def compile(self, rate=0.1):
            super().compile(keras.optimizers.SGD(rate, **CLIPS), "binary_crossentropy")

    model = Compiles([make_layer(), keras.layers.Flatten(), keras.layers.Dense(1, "sigmoid")])
    model.compile()
    train(model)
    model.save(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="compile"):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert not hasattr(loaded, "optimizer")


def test_nested_models_follow_outer_optimizer():
    inner = make_model("sgd")
    keys = keras.Input((len(TABLES),), dtype="int64")
    outer = slip.keras.Model(keys, inner(keys))
    outer.compile(keras.optimizers.SGD(**CLIPS), "binary_crossentropy")
    assert_same(train(outer).layers[-1], contents(stepped(keras.optimizers.SGD(**CLIPS))))


def test_distributed_optimizer_is_wrapped():
    """A `DistributedOptimizer` is wrapped unchanged."""
    comm = distributed.SingleProcess()
    optimizer = distributed.DistributedOptimizer(keras.optimizers.SGD(**CLIPS), comm)
    model = train(make_model(optimizer))
    assert_same(model, contents(stepped(keras.optimizers.SGD(**CLIPS))))


def test_models_with_shared_layer_require_one_kind_of_optimizer():
    layer = make_layer()
    first = make_model(keras.optimizers.Adam(**CLIPS), layer)
    with pytest.raises(ValueError, match=r"Invalid `optimizer`: 'SGD' for model .* which shares"):
        make_model("sgd", layer)
    assert layer.apply == "step"
    train(first)


def test_model_is_compiled_again_with_other_kind_of_optimizer():
    model = make_model(keras.optimizers.Adam(**CLIPS))
    model.compile("sgd", "binary_crossentropy")
    assert layer_of(model).apply == "backward"
    train(model)
