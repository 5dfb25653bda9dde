"""Tests of docs/keras.md: custom loops, frozen parts, non-finite losses, loss scaling."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from contract_models import TABLES, assert_same, contents, data, differ, layer_of, make_layer
from contract_models import make_model as model_of

from slipstream_tf import (
    DeferGradients,
    MaskGradients,
    Movement,
    Retention,
    Slipstream,
    Table,
    Window,
    optimizers,
)
from slipstream_tf.keras import CombinedOptimizer, EmbeddingCollection
from slipstream_tf.ops.update_policy import SATURATED, UpdatePolicy

KEYS, LABELS = data()
RATE = 0.5


def make_model(optimizer, apply="step", **kwargs):
    return model_of(optimizer, make_layer(apply=apply), **kwargs)


def train(model, epochs=2, labels=LABELS):
    model.fit(KEYS, labels, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return model


def loop(layer, head, optimizer, wrap, variables=None, clip=False):
    """Trains two steps in a custom loop with two lookups per step."""

    def step(keys):
        with tf.GradientTape() as tape:
            rows = layer(keys, training=True) + layer(keys[::-1], training=True)
            loss = tf.reduce_mean(head(tf.reshape(rows, [-1, 8])) ** 2)
        own = variables or [*layer.trainable_variables, *head.trainable_variables]
        gradients = tape.gradient(loss, own)
        if clip:
            gradients, _ = tf.clip_by_global_norm(gradients, 0.01)
        optimizer.apply_gradients(zip(gradients, own, strict=True))

    optimizer.build(variables or [*layer.trainable_variables, *head.trainable_variables])
    step = wrap(step)
    for _ in range(2):
        step(tf.constant(KEYS))


def make_head():
    keras.utils.set_random_seed(1)
    head = keras.layers.Dense(1)
    head.build((None, 8))
    return head


WRAPS = {"eager": lambda step: step, "graph": tf.function}


@pytest.mark.parametrize("wrap", WRAPS)
def test_custom_loops_clip_and_apply_once(wrap):
    """Two lookups cause one update, with the gradients that the loop clipped."""
    clipped = make_layer(optimizers.SGD(RATE), apply="step")
    loop(clipped, make_head(), CombinedOptimizer("sgd"), WRAPS[wrap], clip=True)
    assert int(clipped.store.export_table("user")["steps"][0]) == 2
    free = make_layer(optimizers.SGD(RATE), apply="step")
    loop(free, make_head(), CombinedOptimizer("sgd"), WRAPS[wrap])
    assert differ(contents(clipped), contents(free)) >= {"user rows", "item rows"}


@pytest.mark.parametrize("wrap", WRAPS)
def test_lookup_in_separate_function_trains_rows(wrap):
    plain, inner = (make_layer(optimizers.SGD(RATE), apply="step") for _ in range(2))
    loop(plain, make_head(), CombinedOptimizer("sgd"), WRAPS[wrap])
    inner.call = tf.function(inner.call)
    loop(inner, make_head(), CombinedOptimizer("sgd"), WRAPS[wrap])
    # The gradients of the two calls of the function are summed per call first.
    got = contents(inner)
    for name, array in contents(plain).items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("wrap", WRAPS)
def test_rows_stay_if_only_head_is_trained(wrap):
    """Rows are not trained if their gradients are not applied."""
    layer, head = make_layer(apply="step"), make_head()
    layer(KEYS, training=True)
    before, kernel = contents(layer), np.array(head.kernel)
    loop(layer, head, CombinedOptimizer("sgd"), WRAPS[wrap], head.trainable_variables)
    assert_same(layer, before)
    assert np.abs(np.array(head.kernel) - kernel).max() > 0


@pytest.mark.parametrize("apply", ["backward", "step"])
def test_frozen_layer_keeps_its_rows(apply):
    model = make_model(CombinedOptimizer("sgd") if apply == "step" else "sgd", apply)
    train(model, 1)
    before = contents(model)
    layer_of(model).trainable = False
    model.compile(CombinedOptimizer("sgd") if apply == "step" else "sgd", "binary_crossentropy")
    train(model, 1)
    assert differ(before, contents(model)) == {"top/kernel", "top/bias"}


@pytest.mark.parametrize("table", TABLES)
def test_frozen_anchor_keeps_rows_of_its_table(table):
    model = make_model(CombinedOptimizer("sgd"))
    train(model, 1)
    before = contents(model)
    (anchor,) = (w for w in layer_of(model).weights if w.path.endswith(f"{table}_anchor"))
    anchor.trainable = False
    model.compile(CombinedOptimizer("sgd"), "binary_crossentropy")
    train(model, 1)
    changed = differ(before, contents(model))
    assert "top/kernel" in changed
    assert {name.split()[0] for name in changed if " " in name} == set(TABLES) - {table}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("settings", [{}, {"global_clipnorm": 1.0}], ids=str)
def test_nan_loss_changes_nothing(eager, settings):
    optimizer = CombinedOptimizer(keras.optimizers.Adam(**settings))
    model = train(make_model(optimizer, run_eagerly=eager), 1)
    before = contents(model)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"table 'user'.*expected (finite values|a finite number)",
    ):
        train(model, 1, np.full_like(LABELS, np.nan))
    assert_same(model, before)
    train(model, 1)


def test_nan_loss_in_backward_pass_changes_no_row():
    model = train(make_model("adam", "backward"), 1)
    before = contents(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"table 'user'"):
        train(model, 1, np.full_like(LABELS, np.nan))
    assert not {name for name in differ(before, contents(model)) if "rows" in name}


@pytest.mark.parametrize("apply", ["backward", "step"])
@pytest.mark.parametrize(
    ("weight", "upstream", "cause"),
    [
        (np.nan, 0.0, "weight of the key in feature 0, example 0, .* is nan"),
        (np.inf, 1.0, "weight of the key in feature 0, example 0, .* is inf"),
        (1e30, 1e10, "times the gradient .* overflows"),
        (1.0, 3e38, "sum of the gradients of its 2 uses"),
        (1.0, 1e20, "optimizer slot 0 becomes inf"),
    ],
)
def test_update_that_overflows_raises_with_its_cause(apply, weight, upstream, cause):
    layer = make_layer(apply=apply)
    optimizer = CombinedOptimizer("sgd") if apply == "step" else keras.optimizers.SGD()
    optimizer.build(layer.trainable_variables)
    keys = {table: tf.constant([[1, 2], [1, 2]]) for table in TABLES}
    weights = {"user": tf.constant([[weight, 1.0], [1.0, 1.0]]), "item": tf.ones([2, 2])}

    def step(factor):
        with tf.GradientTape() as tape:
            rows = layer(keys, weights=weights, training=True)
        upstreams = {table: tf.fill(rows[table].shape, factor) for table in TABLES}
        variables = layer.trainable_variables
        gradients = tape.gradient(rows, variables, output_gradients=upstreams)
        optimizer.apply(gradients, variables)

    layer(keys, weights=weights, training=True)
    before = contents(layer)
    match = f"key 1 of table 'user' .*{cause}"
    with pytest.raises(tf.errors.InvalidArgumentError, match=match) as error:
        step(upstream)
    assert "rank" not in str(error.value) and "received" not in str(error.value)
    assert_same(layer, before)
    weights["user"] = tf.ones([2, 2])
    step(1.0)
    assert differ(before, contents(layer)) >= {"user rows", "item rows"}


def scaled():
    return CombinedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))


@pytest.mark.parametrize("eager", [False, True])
def test_loss_scaling_gives_same_rows(eager):
    model = train(make_model(scaled(), run_eagerly=eager))
    plain = train(make_model(CombinedOptimizer("sgd"), run_eagerly=eager))
    assert_same(model, contents(plain))  # The loss scale is a power of two.
    scale = float(model.optimizer.dynamic_scale)
    train(model, 1, np.full_like(LABELS, np.nan))
    assert_same(model, contents(plain))
    assert float(model.optimizer.dynamic_scale) == scale / 16  # Halved in each of 4 steps.


def test_loss_scaling_requires_combined_optimizer_inside():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match=r"Invalid `optimizer`: 'LossScaleOptimizer'.*'step'"):
        train(make_model(optimizer, "backward"))
    wrong = keras.optimizers.LossScaleOptimizer(CombinedOptimizer("sgd"))
    with pytest.raises(ValueError, match=r"CombinedOptimizer\(keras.optimizers.LossScaleOptimizer"):
        train(make_model(wrong, "step"))


def test_loss_scaling_is_saved_and_loaded(tmp_path):
    model = train(make_model(scaled()))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_same(train(loaded), contents(train(model)))


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def test_mixed_float16_trains_with_loss_scaling(mixed_float16):
    model = make_model(scaled())
    before = contents(train(model, 1))
    assert layer_of(model).dtype_policy.compute_dtype == "float16"
    train(model, 1)
    changed = differ(before, contents(model))
    assert changed >= {"user rows", "top/kernel"}
    with pytest.raises(ValueError, match=r"`dtype policy`: 'mixed_float16'.*apply='step'"):
        make_layer()
    with pytest.raises(ValueError, match="LossScaleOptimizer"):
        train(make_model(CombinedOptimizer("sgd")))


@pytest.mark.parametrize("mode", ["mask", "defer"])
def test_policies_act_before_optimizer_step(mode):
    policy = UpdatePolicy(mode, trigger="interval", max_age=3, max_rows=100)
    results = []
    for apply in ("backward", "step"):
        model = make_model(CombinedOptimizer("sgd") if apply == "step" else "sgd", apply)
        store = layer_of(model).store
        train(model, 1)
        store.set_update_policy("user", policy)
        store.set_row_flags("user", np.arange(5), np.full(5, SATURATED))
        results.append((train(model, 1), store.update_counts("user")))
    (plain, counts), (stepped, stepped_counts) = results
    assert counts == stepped_counts
    assert counts.masked + counts.deferred > 0
    assert_same(stepped, contents(plain))


@pytest.mark.parametrize("apply", ["backward", "step"])
def test_bounded_tables_evict_and_give_same_rows(apply):
    tables = [Table(name, 4, retention=Retention(16, "lru")) for name in TABLES]
    layer = EmbeddingCollection(tables, optimizers.Adagrad(RATE), name="tables", apply=apply)
    model = model_of(CombinedOptimizer("sgd") if apply == "step" else "sgd", layer)
    model.fit(KEYS, LABELS, batch_size=8, shuffle=False, verbose=0)
    other = EmbeddingCollection(tables, optimizers.Adagrad(RATE), name="tables")
    plain = model_of("sgd", other)
    plain.fit(KEYS, LABELS, batch_size=8, shuffle=False, verbose=0)
    assert layer.store.statistics("user").evicted_rows > 0
    assert_same(model, contents(plain))


def of_own_optimizers(apply):
    tables = [
        Table("user", 4, optimizer=optimizers.Adam(0.1)),
        Table("item", 4, optimizer=optimizers.SGD(RATE), combiner=None),
    ]
    layer = EmbeddingCollection(tables, name="tables", apply=apply)
    inputs = {"user": keras.Input((), dtype="int64"), "item": keras.Input((3,), dtype="int64")}
    rows = layer(inputs)
    flat = keras.layers.Concatenate()([rows["user"], keras.layers.Flatten()(rows["item"])])
    model = keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="ones")(flat))
    model.compile(CombinedOptimizer("sgd") if apply == "step" else "sgd", "mse")
    keys = {"user": KEYS[:, 0], "item": np.stack([KEYS[:, 1], KEYS[:, 0], KEYS[:, 1]], 1)}
    model.fit(keys, LABELS, batch_size=16, shuffle=False, verbose=0)
    return contents(layer)


def test_tables_with_different_optimizers_give_same_rows():
    """Includes an unpooled feature with repeated keys."""
    assert differ(of_own_optimizers("backward"), of_own_optimizers("step")) == set()


@pytest.mark.parametrize(
    "policy",
    [MaskGradients(), DeferGradients(until=Movement(0.05))],
    ids=lambda p: type(p).__name__,
)
def test_engine_works_with_backward_and_step(policy):
    def rows(apply, optimizer):
        layer = make_layer(apply=apply)
        model = model_of(optimizer, layer)
        slipstream = Slipstream(layer, policies=[policy], window=Window(steps=2))
        batches = tf.data.Dataset.from_tensor_slices((KEYS, LABELS)).batch(8)
        model.fit(batches, epochs=2, verbose=0, callbacks=[slipstream.callback()])
        return contents(model)

    plain = rows("backward", "sgd")
    assert differ(plain, rows("step", CombinedOptimizer("sgd"))) == set()
    if isinstance(policy, DeferGradients):
        with pytest.raises(ValueError, match=r"Invalid `policies`.*and loss scaling.*scaled grad"):
            rows("step", scaled())
    else:
        assert differ(plain, rows("step", scaled())) == set()
    with pytest.raises(ValueError, match="Invalid `optimizer`: 'LossScaleOptimizer'"):
        rows("backward", keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
