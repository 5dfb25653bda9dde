"""Tests that all lookups of a backward pass, or of an `optimizer.apply`, are one update."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from all_rules import ALL_RULES, name_of

import slipstream_tf as slip
from slipstream_tf import Table, optimizers

KEYS, DIM, STEPS = 12, 4, 4
RANDOM = np.random.default_rng(0)
PARTS = RANDOM.integers(0, KEYS, (STEPS, 3, 8))
UPSTREAM = RANDOM.normal(size=(STEPS, 3, 8, DIM)).astype(np.float32)
SCHEDULE = keras.optimizers.schedules.CosineDecay(0.1, STEPS)
RULES = {
    **{name_of(rule): rule for rule in ALL_RULES},
    "AdamW": optimizers.AdamW(0.01, weight_decay=0.1),
    "clip_norm": optimizers.SGD(0.1, clip_norm=0.05),
    "l2": optimizers.SGD(0.1, l2=0.1),
    "decay_of_all_rows": optimizers.SGD(0.1, l2=0.1, decay="all"),
    "max_norm": optimizers.SGD(0.1, max_norm=0.1),
    "schedule": optimizers.SGD(SCHEDULE),
}
ADVICE = "Expected one update per lookup"


def make_layer(rule="sgd", apply="backward", **kwargs):
    return slip.keras.EmbeddingCollection([Table("item", DIM)], rule, apply=apply, **kwargs)


def make_optimizer(apply):
    dense = keras.optimizers.SGD(0.1)
    return slip.keras.CombinedOptimizer(dense) if apply == "step" else dense


def rows_of(layer):
    exported = layer.store.export_table("item")
    return {name: exported[name] for name in ("keys", "rows", "slots", "counts", "steps")}


def loss_of(rows, upstream):
    return tf.reduce_sum(rows["item"] * upstream)


def one_call(layer, keys, upstream):
    flat = {"item": tf.reshape(keys, [-1])}
    return loss_of(layer(flat, training=True), tf.reshape(upstream, [-1, DIM]))


def calls(layer, keys, upstream):
    parts = zip(tf.unstack(keys), tf.unstack(upstream), strict=True)
    return tf.add_n([loss_of(layer({"item": k}, training=True), g) for k, g in parts])


def calls_in_loop(layer, keys, upstream):
    def body(i, loss):
        return i + 1, loss + loss_of(layer({"item": keys[i]}, training=True), upstream[i])

    return tf.while_loop(lambda i, _: i < len(keys), body, [0, 0.0])[1]


def calls_in_map(layer, keys, upstream):
    def one(part):
        return loss_of(layer({"item": part[0]}, training=True), part[1])

    return tf.reduce_sum(tf.map_fn(one, (keys, upstream), fn_output_signature=tf.float32))


def call_in_branch(layer, keys, upstream):
    first = one_call(layer, keys[:1], upstream[:1])
    return first + tf.cond(
        tf.reduce_sum(keys) >= 0,
        lambda: one_call(layer, keys[1:], upstream[1:]),
        lambda: tf.constant(0.0),
    )


def call_in_function(layer, keys, upstream):
    return tf.function(lambda k, g: calls(layer, k, g))(keys, upstream)


PATTERNS = {
    function.__name__: function
    for function in (calls, calls_in_loop, calls_in_map, call_in_branch, call_in_function)
}


def train(pattern, rule="sgd", apply="backward", as_function=False, layer=None):
    """Trains a layer with a pattern of calls and returns its rows."""
    layer = layer or make_layer(rule, apply)
    optimizer = make_optimizer(apply)

    def step(keys, upstream):
        with tf.GradientTape() as tape:
            loss = pattern(layer, keys, upstream)
        variables = layer.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    step = tf.function(step) if as_function else step
    for keys, upstream in zip(PARTS, UPSTREAM, strict=True):
        step(tf.constant(keys), tf.constant(upstream))
    return rows_of(layer)


def assert_equal_rows(got, want, apply):
    start = make_layer().table("item").read(want["keys"])
    for name, value in want.items():
        if apply == "step" and name in ("rows", "slots"):
            moved = np.abs(want["rows"] - start).mean()
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5 * moved)
        elif name != "steps":
            np.testing.assert_array_equal(got[name], value)
    assert got["steps"].tolist() == [STEPS, STEPS]


@pytest.mark.parametrize("apply", ["backward", "step"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_calls_equal_one_call(rule, apply):
    want = train(one_call, rule)
    for as_function in (False, True):
        assert_equal_rows(train(calls, rule, apply, as_function), want, apply)


@pytest.mark.parametrize("apply", ["backward", "step"])
@pytest.mark.parametrize("as_function", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_patterns_equal_one_call(pattern, as_function, apply):
    got = train(pattern, "adagrad", apply, as_function)
    assert_equal_rows(got, train(one_call, "adagrad"), apply)


class Calls(keras.Model):
    """Calls its layer once per row of keys."""

    def __init__(self, apply, at_once):
        super().__init__()
        self.embed, self.at_once = make_layer("adam", apply), at_once

    def call(self, inputs, training=False):
        if self.at_once:
            rows = self.embed({"item": tf.reshape(inputs, [-1])}, training=training)["item"]
            return tf.reshape(rows, [3, -1])
        parts = tf.unstack(inputs, num=3)
        rows = [self.embed({"item": keys}, training=training)["item"] for keys in parts]
        return tf.reshape(tf.stack(rows), [3, -1])


@pytest.mark.parametrize("apply", ["backward", "step"])
def test_fit_with_calls_equals_one_call(apply):
    trained = []
    for mode, at_once in (("backward", True), (apply, False)):
        model = Calls(mode, at_once)
        model.compile(make_optimizer(mode), loss=lambda y, rows: tf.reduce_sum(rows * y))
        model.fit(
            PARTS.reshape(-1, 8),
            np.ones([3 * STEPS, 1], np.float32),
            batch_size=3,
            shuffle=False,
            verbose=0,
        )
        trained.append(rows_of(model.embed))
    assert_equal_rows(trained[1], trained[0], apply)


@pytest.mark.parametrize("apply", ["backward", "step"])
def test_layers_with_one_store_make_one_update(apply):
    layer = make_layer("adam", apply)
    other = make_layer(None, apply, store=layer.store, name="other")

    def both(first, keys, upstream):
        return one_call(first, keys[:1], upstream[:1]) + one_call(other, keys[1:], upstream[1:])

    optimizer = make_optimizer(apply)
    for keys, upstream in zip(PARTS, UPSTREAM, strict=True):
        with tf.GradientTape() as tape:
            loss = both(layer, keys, upstream)
        variables = layer.trainable_variables + other.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
    assert_equal_rows(rows_of(layer), train(one_call, "adam"), apply)


def test_layers_with_one_store_require_one_mode():
    layer = make_layer(apply="step")
    other = make_layer(None, "backward", store=layer.store, name="other")
    with tf.GradientTape():
        layer({"item": PARTS[0, 0]}, training=True)
        with pytest.raises(ValueError, match=r"Invalid `apply`: 'backward'.*Expected 'step'"):
            other({"item": PARTS[0, 0]}, training=True)


@pytest.mark.parametrize("apply", ["backward", "step"])
def test_ignored_lookup_changes_no_row(apply):
    def with_ignored(layer, keys, upstream):
        layer({"item": tf.reshape(keys, [-1])}, training=True)
        return one_call(layer, keys, upstream)

    got, want = train(with_ignored, "adam", apply), train(one_call, "adam")
    np.testing.assert_array_equal(got.pop("counts"), 2 * want.pop("counts"))
    assert_equal_rows(got, want, apply)


@pytest.mark.parametrize("apply", ["backward", "step"])
def test_two_tapes_in_sequence_make_two_updates(apply):
    """The generator and the discriminator of a GAN may share a layer."""
    layer, alone = make_layer("adagrad", apply), make_layer("adagrad", apply)
    optimizer, variables = make_optimizer(apply), layer.trainable_variables

    @tf.function
    def step(keys, upstream):
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = calls(layer, keys, upstream)
            optimizer.apply(tape.gradient(loss, variables), variables)

    step(tf.constant(PARTS[0]), tf.constant(UPSTREAM[0]))
    own = make_optimizer(apply)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = one_call(alone, PARTS[0], UPSTREAM[0])
        own.apply(tape.gradient(loss, alone.trainable_variables), alone.trainable_variables)
    got, want = rows_of(layer), rows_of(alone)
    np.testing.assert_allclose(got["rows"], want["rows"], rtol=1e-6)
    assert got["steps"].tolist() == [2, 2]


@pytest.mark.parametrize("apply", ["backward", "step"])
def test_gradient_penalty_on_output_makes_one_update(apply):
    """The inner tape must not update rows, and the outer one updates them once."""

    def with_penalty(layer, keys, upstream):
        rows = layer({"item": tf.reshape(keys, [-1])}, training=True)["item"]
        with tf.GradientTape() as inner:
            inner.watch(rows)
            score = tf.reduce_sum(rows * rows * tf.reshape(upstream, [-1, DIM]))
        return tf.reduce_sum(inner.gradient(score, rows) ** 2)

    def by_hand(layer, keys, upstream):
        rows = layer({"item": tf.reshape(keys, [-1])}, training=True)["item"]
        return tf.reduce_sum((2.0 * rows * tf.reshape(upstream, [-1, DIM])) ** 2)

    got, want = train(with_penalty, "sgd", apply), train(by_hand, "sgd", apply)
    assert got["steps"].tolist() == [STEPS, STEPS]
    np.testing.assert_allclose(got["rows"], want["rows"], rtol=1e-5, atol=1e-7)


def second_update(case, layer):
    """Makes a second call of `tape.gradient` for a lookup, and returns both gradients."""
    keys, upstream, variables = PARTS[0], UPSTREAM[0], layer.trainable_variables
    if case == "persistent":
        with tf.GradientTape(persistent=True) as tape:
            loss = one_call(layer, keys, upstream)
        return tape.gradient(loss, variables), tape.gradient(loss, variables)
    if case == "two tapes":
        with tf.GradientTape() as first, tf.GradientTape() as second:
            loss = one_call(layer, keys, upstream)
        return first.gradient(loss, variables), second.gradient(loss, variables)
    forward = [tf.function(lambda k, g: one_call(layer, k, g)) for _ in range(2)]
    with tf.GradientTape() as tape:
        loss = forward[0](keys[:1], upstream[:1]) + forward[1](keys[1:], upstream[1:])
    return (tape.gradient(loss, variables),)


@pytest.mark.parametrize("case", ["persistent", "two tapes", "two functions"])
def test_second_update_of_lookup_is_refused(case):
    layer = make_layer()
    with pytest.raises(tf.errors.InvalidArgumentError, match=ADVICE) as error:
        second_update(case, layer)
    assert "apply='step'" in str(error.value)


@pytest.mark.parametrize("case", ["persistent", "two tapes"])
def test_step_computes_gradients_repeatedly(case):
    first, second = second_update(case, make_layer(apply="step"))
    np.testing.assert_array_equal(first[0].values, second[0].values)


def test_step_applies_lookups_of_two_functions_once():
    layer = make_layer("adam", "step")
    (gradients,) = second_update("two functions", layer)
    make_optimizer("step").apply(gradients, layer.trainable_variables)
    want = make_layer("adam")
    with tf.GradientTape() as tape:
        loss = one_call(want, PARTS[0], UPSTREAM[0])
    tape.gradient(loss, want.trainable_variables)
    np.testing.assert_allclose(rows_of(layer)["rows"], rows_of(want)["rows"], rtol=1e-5, atol=1e-7)


def test_masked_gradients_are_collected_once_per_lookup():
    layer = make_layer(apply="step")
    policy = slip.ops.update_policy.UpdatePolicy(mode="mask")
    layer.store.set_update_policy("item", policy)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"one call of tape\.gradient per lookup"
    ):
        second_update("persistent", layer)


@pytest.mark.parametrize("as_function", [False, True], ids=["eager", "graph"])
def test_micro_batches_before_one_apply_are_refused(as_function):
    layer, optimizer = make_layer(), make_optimizer("backward")
    variables = layer.trainable_variables

    def step():
        sums = [tf.zeros([])]
        for keys, upstream in zip(PARTS[:2], UPSTREAM[:2], strict=True):
            with tf.GradientTape() as tape:
                loss = one_call(layer, keys, upstream)
            sums[0] += tape.gradient(loss, variables)[0]
        optimizer.apply(sums, variables)

    message = "(?s)multiple backward passes.*gradient_accumulation_steps"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        (tf.function(step) if as_function else step)()


class Tower(keras.layers.Layer):
    """Adds a product to the rows of a layer, or contains the layer."""

    def __init__(self, layer):
        super().__init__()
        self.embed = layer

    def call(self, keys, training=False):
        return self.embed({"item": keys}, training=training)["item"]


def test_recomputed_blocks_are_refused_around_a_layer():
    tower = Tower(make_layer())
    recomputed = tf.recompute_grad(lambda keys: tower(keys, training=True))
    with (
        tf.GradientTape(),
        pytest.raises(ValueError, match=r"Invalid `training`: True.*tf\.recompute_grad"),
    ):
        recomputed(tf.constant(PARTS[0, 0]))


@pytest.mark.skipif(not hasattr(keras, "RematScope"), reason="Keras before 3.9 has no RematScope")
def test_layer_in_remat_scopes_is_looked_up_once():
    layers = []
    for name in "ab":
        with keras.RematScope(mode="full"):
            layers.append(make_layer("adam", name=name))

    def in_scopes(layer, keys, upstream):
        with keras.RematScope(mode="full"):
            first = one_call(layer, keys[:1], upstream[:1])
        with keras.RematScope(mode="full"):
            return first + one_call(layer, keys[1:], upstream[1:])

    want = train(one_call, "adam")
    assert_equal_rows(train(in_scopes, layer=layers[0]), want, "backward")
    assert_equal_rows(train(one_call, layer=layers[1]), want, "backward")


def test_masked_and_counted_rows_count_once_per_step():
    layer = make_layer("adagrad")
    layer.store.set_update_policy("item", slip.ops.update_policy.UpdatePolicy(mode="mask"))
    train(calls, layer=layer)
    distinct = sum(len(np.unique(keys)) for keys in PARTS)
    assert layer.store.update_counts("item").offered == distinct


@pytest.mark.parametrize("apply", ["backward", "step"])
def test_rows_expire_by_steps(apply):
    retention = slip.Retention(expire_after=3)
    layer = slip.keras.EmbeddingCollection([Table("item", DIM, retention=retention)], apply=apply)
    optimizer, variables = make_optimizer(apply), layer.trainable_variables
    sizes = []
    for step in range(8):
        with tf.GradientTape() as tape:
            keys = [0 if step == 0 else 1, 1, 1]
            loss = sum(one_call(layer, np.full((1, 8), k), UPSTREAM[0, :1]) for k in keys)
        optimizer.apply(tape.gradient(loss, variables), variables)
        sizes.append(bool(layer.table("item").has([0])[0]))
    assert sizes == [True] * 4 + [False] * 4


def test_step_after_refused_update_trains():
    """An update that raises an error does not count as a backward pass."""
    layer, optimizer = make_layer(), make_optimizer("backward")

    @tf.function
    def step(upstream):
        with tf.GradientTape() as tape:
            loss = one_call(layer, PARTS[0], upstream)
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply(gradients, layer.trainable_variables)

    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="finite"):
            step(tf.fill(UPSTREAM[0].shape, np.inf))
    step(tf.constant(UPSTREAM[0]))
    assert rows_of(layer)["steps"].tolist() == [1, 1]


def test_layers_with_equal_names_and_one_store_receive_gradients():
    layer = make_layer(name="same")
    other = make_layer(None, store=layer.store, name="same")
    with tf.GradientTape() as tape:
        loss = one_call(layer, PARTS[0], UPSTREAM[0]) + one_call(other, PARTS[1], UPSTREAM[1])
    variables = layer.trainable_variables + other.trainable_variables
    assert [float(gradient) for gradient in tape.gradient(loss, variables)] == [0.0, 0.0]


def test_training_continues_after_a_pass_without_apply():
    layer, optimizer = make_layer(), make_optimizer("backward")
    variables = layer.trainable_variables

    def gradients():
        with tf.GradientTape() as tape:
            loss = one_call(layer, PARTS[0], UPSTREAM[0])
        return tape.gradient(loss, variables)

    gradients()
    with pytest.raises(tf.errors.InvalidArgumentError, match="multiple backward passes"):
        optimizer.apply(gradients(), variables)
    optimizer.apply(gradients(), variables)


def test_step_adds_gradients_of_layers_with_one_store():
    layer = make_layer(apply="step")
    other = make_layer(None, "step", store=layer.store, name="other")
    optimizer = make_optimizer("step")
    forward = [tf.function(lambda k, e=e: e({"item": k}, training=True)) for e in (layer, other)]
    variables = layer.trainable_variables + other.trainable_variables
    start = rows_of(make_layer())
    before = np.asarray(make_layer().table("item").read([1, 2]))
    with tf.GradientTape() as tape:
        parts = [f(tf.constant([key]))["item"] for f, key in zip(forward, (1, 2), strict=True)]
        loss = tf.add_n([tf.reduce_sum(rows) for rows in parts])
    optimizer.apply(tape.gradient(loss, variables), variables)
    after = np.asarray(layer.table("item").read([1, 2]))
    assert start["keys"].size == 0
    np.testing.assert_allclose(after - before, np.full((2, DIM), -0.01), rtol=1e-4)


def test_inner_tape_over_a_lookup_is_refused():
    layer = make_layer()
    with tf.GradientTape(), tf.GradientTape() as inner:
        loss = one_call(layer, PARTS[0], UPSTREAM[0])
        with pytest.raises(ValueError, match=r"Invalid `apply`: 'backward'.*inner tape"):
            inner.gradient(loss, layer.trainable_variables)


@pytest.mark.parametrize("apply", ["backward", "step"])
@pytest.mark.parametrize("as_function", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("outer", ["one", "two", "three", "persistent"])
@pytest.mark.parametrize("which", ["inner", "outer"])
def test_each_nested_tape_updates_the_rows_of_its_lookups(which, outer, as_function, apply):
    layer, optimizer = make_layer(apply=apply), make_optimizer(apply)
    variables, start = layer.trainable_variables, make_layer().table("item").read([1, 2, 3])
    optimizer.build(variables)
    ones = np.ones((1, 2, DIM), np.float32)

    def step():
        count = {"two": 2, "three": 3}.get(outer, 1)
        with contextlib.ExitStack() as stack:
            outside = [
                stack.enter_context(tf.GradientTape(persistent=outer == "persistent"))
                for _ in range(count)
            ]
            first = one_call(layer, tf.constant([[1, 2]]), ones)
            with tf.GradientTape() as inner:
                second = one_call(layer, tf.constant([[2, 3]]), ones)
            total = first + second + one_call(layer, tf.constant([[3, 3]]), ones)
        tape, loss = (inner, second) if which == "inner" else (outside[0], total)
        optimizer.apply(tape.gradient(loss, variables), variables)

    (tf.function(step) if as_function else step)()
    moved = (np.asarray(start) - np.asarray(layer.table("item").read([1, 2, 3])))[:, 0]
    want = [0, 1, 1] if which == "inner" else [1, 2, 3]
    np.testing.assert_allclose(moved, 0.01 * np.array(want), rtol=1e-4, atol=1e-7)
    assert rows_of(layer)["steps"].tolist() == [1, 1]


def test_rows_of_a_step_stay_in_a_bounded_table():
    retention = slip.Retention(capacity=8, eviction="lfu")
    tables = [Table("item", DIM, retention=retention, initializer=slip.initializers.Zeros())]
    layer = slip.keras.EmbeddingCollection(tables, "sgd")
    optimizer, variables = make_optimizer("backward"), layer.trainable_variables
    for step, keys in enumerate([range(101, 109), range(101, 109), range(1, 9)]):
        with tf.GradientTape() as tape:
            parts = np.split(np.array(keys), 2 if step == 2 else 1)
            outputs = [layer({"item": part}, training=True)["item"] for part in parts]
            loss = tf.add_n([tf.reduce_sum(rows) for rows in outputs])
        optimizer.apply(tape.gradient(loss, variables), variables)
    rows = np.asarray(layer.table("item").read(np.arange(1, 9)))
    np.testing.assert_allclose(rows, np.full((8, DIM), rows[-1, -1]))
    assert rows[-1, -1] < 0
