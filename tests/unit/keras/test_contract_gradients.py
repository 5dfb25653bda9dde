"""Tests of docs/keras.md: gradient settings reach the rows or are refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from contract_models import TABLES, assert_same, contents, data, differ, layer_of, make_layer
from contract_models import make_model as model_of

from slipstream_tf import distributed, optimizers
from slipstream_tf.keras import CombinedOptimizer

KEYS, LABELS = data()
RATE = 0.5


def make_model(optimizer, apply="step", rule=None, **kwargs):
    return model_of(optimizer, make_layer(rule, apply=apply), **kwargs)


def train(model, epochs=2, labels=LABELS):
    model.fit(KEYS, labels, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return model


RULES = [
    optimizers.SGD(RATE),
    optimizers.Adagrad(RATE),
    optimizers.RowWiseAdagrad(RATE),
    optimizers.Adam(0.1),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.rule)
@pytest.mark.parametrize("how", [{}, {"run_eagerly": True}, {"steps_per_execution": 3}], ids=str)
def test_backward_and_step_give_same_rows(rule, how):
    plain = train(make_model("adam", "backward", rule, **how))
    assert_same(train(make_model(CombinedOptimizer("adam"), "step", rule, **how)), contents(plain))
    assert int(layer_of(plain).store.export_table("user")["steps"][0]) == 8


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "RMSprop", "Ftrl", "Lion", "Lamb", "Nadam"])
def test_rows_are_updated_with_any_dense_optimizer(name):
    """Note: TensorFlow prunes an update without dependents from the graph."""
    optimizer = getattr(keras.optimizers, name)(0.01)
    model = train(make_model(CombinedOptimizer(optimizer)))
    assert int(layer_of(model).store.export_table("user")["steps"][0]) == 8
    assert all(float(weight) == 0.0 for weight in layer_of(model).trainable_weights)


class OneHot(keras.layers.Layer):
    """Embedding tables as dense weights, the reference for gradient processing in Keras."""

    def __init__(self, layer, vocabulary=20):
        super().__init__()
        self.tables = []
        for table in TABLES:
            rows, _ = layer.store.gather(table, np.arange(vocabulary))
            weight = self.add_weight(name=table, shape=rows.shape)
            weight.assign(rows)
            self.tables.append(weight)

    def call(self, keys):
        return tf.stack(
            [
                tf.matmul(tf.one_hot(keys[:, column], table.shape[0]), table)
                for column, table in enumerate(self.tables)
            ],
            axis=1,
        )


SETTINGS = [
    {},
    {"clipnorm": 0.02},
    {"global_clipnorm": 0.02},
    {"clipvalue": 0.002},
    {"gradient_accumulation_steps": 4},
    {"gradient_accumulation_steps": 3, "global_clipnorm": 0.02},
    {"loss_scale_factor": 8.0, "clipnorm": 0.02},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("eager", [False, True])
def test_optimizer_settings_act_on_rows_like_dense_tables(settings, eager):
    expect_rows_of_dense_tables(lambda: keras.optimizers.SGD(RATE, **settings), eager)


@pytest.mark.parametrize("steps", [None, 3])
def test_rows_follow_schedule_at_steps_of_accumulation(steps):
    """Keras evaluates schedules at the number of all steps, not of updates."""
    schedule = keras.optimizers.schedules.InverseTimeDecay(RATE, 1, 1.0)
    expect_rows_of_dense_tables(
        lambda: keras.optimizers.SGD(schedule, gradient_accumulation_steps=steps)
    )


def expect_rows_of_dense_tables(make_optimizer, eager=False):
    """Trains rows and equal dense tables with an optimizer, and compares them."""
    rule = optimizers.SGD(RATE)
    theirs = OneHot(make_layer(rule))
    dense = model_of(make_optimizer(), theirs, run_eagerly=eager)
    start = [np.array(table) for table in theirs.tables]
    train(dense)
    ours = make_model(CombinedOptimizer(make_optimizer()), rule=rule, run_eagerly=eager)
    train(ours)
    for before, table, weight in zip(start, TABLES, theirs.tables, strict=True):
        rows, _ = layer_of(ours).store.gather(table, np.arange(20))
        assert np.abs(rows - before).max() > 1e-4
        np.testing.assert_allclose(rows, np.array(weight), rtol=0, atol=2e-6)
    top = ours.get_layer("top").get_weights()
    np.testing.assert_allclose(top[0], dense.get_layer("top").get_weights()[0], rtol=0, atol=2e-6)


def operations(model):
    """Returns the op types of a training step, including its functions."""
    data = iter(tf.data.Dataset.from_tensors((KEYS[:16], LABELS[:16])))
    step = tf.function(lambda batches: model.train_step(next(batches)))
    graph = step.get_concrete_function(data).graph.as_graph_def()
    bodies = [graph.node, *(function.node_def for function in graph.library.function)]
    return [node.op for body in bodies for node in body]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_collected_rows_are_not_merged_twice(settings):
    """Collected keys are unique and have norms, therefore another merge is unnecessary."""
    found = operations(make_model(CombinedOptimizer(keras.optimizers.SGD(RATE, **settings))))
    assert found.count("SlipstreamApplyRows") == 1
    are_changed = settings.keys() & {"gradient_accumulation_steps", "loss_scale_factor"}
    assert found.count("SlipstreamMergeRows") == (1 if are_changed else 0)


def test_accumulated_gradients_survive_an_epoch():
    """The first epoch has 4 of the 8 steps of an update."""
    model = make_model(CombinedOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=8)))
    train(model, 1)
    before = contents(model)
    assert int(layer_of(model).store.export_table("user")["steps"][0]) == 0
    train(model, 1)
    assert differ(before, contents(model)) >= {"user rows", "top/kernel"}
    assert int(layer_of(model).store.export_table("user")["steps"][0]) == 1


@pytest.mark.parametrize("settings", SETTINGS[1:5], ids=str)
def test_optimizer_settings_that_would_miss_rows_raise(settings):
    (name, value), *_ = settings.items()
    model = make_model(keras.optimizers.SGD(**settings), "backward")
    with pytest.raises(ValueError, match=f"Invalid `{name}`: {value}.*CombinedOptimizer"):
        train(model)
    assert layer_of(model).store.size("user") == 0


@pytest.mark.parametrize("apply", ["backward", "step"])
def test_weight_decay_requires_excluding_anchors(apply):
    def optimizer(excludes):
        made = keras.optimizers.AdamW(weight_decay=0.5)
        if excludes:
            made.exclude_from_weight_decay(var_names=["_anchor"])
        made = distributed.DistributedOptimizer(made, distributed.SingleProcess())
        return CombinedOptimizer(made) if apply == "step" else made

    with pytest.raises(ValueError, match=r"Invalid `weight_decay`: 0.5.*exclude_from_weight_decay"):
        train(make_model(optimizer(False), apply))
    plain = "adam" if apply == "backward" else CombinedOptimizer("adam")
    decayed, other = train(make_model(optimizer(True), apply)), train(make_model(plain, apply))
    assert "top/kernel" in differ(contents(decayed), contents(other))


@pytest.mark.parametrize("apply", ["backward", "step"])
def test_use_ema_raises(apply):
    optimizer = keras.optimizers.SGD(use_ema=True)
    model = make_model(CombinedOptimizer(optimizer) if apply == "step" else optimizer, apply)
    with pytest.raises(ValueError, match=r"Invalid `use_ema`: True.*rows have no moving average"):
        train(model)


def test_swap_ema_weights():
    """The callback requires `use_ema`."""
    for optimizer in (keras.optimizers.SGD(), keras.optimizers.SGD(use_ema=True)):
        model, swap = make_model(optimizer, "backward"), keras.callbacks.SwapEMAWeights()
        with pytest.raises(ValueError, match="use_ema"):
            model.fit(KEYS, LABELS, verbose=0, callbacks=[swap], validation_data=(KEYS, LABELS))


def test_mismatched_layer_and_optimizer_raise():
    with pytest.raises(
        ValueError, match=r"Invalid `optimizer`: 'Adam'.*slip.keras.CombinedOptimizer"
    ):
        train(make_model("adam", "step"))
    with pytest.raises(ValueError, match=r"Invalid `apply`: 'backward'.*CombinedOptimizer.*'step'"):
        train(make_model(CombinedOptimizer("adam"), "backward"))
    layer = make_layer(apply="backward")
    with pytest.raises(ValueError, match=r"Invalid `apply`: 'backward'.*layer 'tables'"):
        CombinedOptimizer("sgd").build(layer.trainable_variables)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop", "Ftrl", "Lion"])
def test_plain_optimizer_in_custom_loop_raises(name):
    layer = make_layer(apply="step")
    optimizer = keras.optimizers.get(name)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(KEYS, training=True) ** 2)
    gradients = tape.gradient(loss, layer.trainable_variables)
    with pytest.raises(Exception, match=r"."):
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gradient descent", "'gradient descent' for CombinedOptimizer"),
        (optimizers.SGD(0.1), "SGD.* for CombinedOptimizer"),
        (None, "None for CombinedOptimizer"),
    ],
    ids=str,
)
def test_invalid_optimizers_raise(given, message):
    with pytest.raises(ValueError, match=f"Invalid `optimizer`: .*{message}"):
        CombinedOptimizer(given)


def test_built_optimizer_raises():
    optimizer = keras.optimizers.SGD()
    optimizer.build([keras.Variable(0.0)])
    with pytest.raises(ValueError, match=r"`optimizer`: 'built SGD'.*not been built"):
        CombinedOptimizer(optimizer)


def test_invalid_apply_raises():
    with pytest.raises(ValueError, match=r"Invalid `apply`: 'later' for layer 'tables'"):
        make_layer(apply="later")


def steps_of(comm, apply, settings, head, **placed):
    """Trains three steps from a given head, the same on all ranks."""
    ranks = None if comm.size == 1 else comm
    layer = make_layer(optimizers.Adagrad(RATE), apply=apply, comm=ranks, **placed)
    weight = keras.Variable(head, name=f"head_{comm.rank}")
    optimizer = distributed.DistributedOptimizer(keras.optimizers.SGD(0.1, **settings), comm)
    optimizer = CombinedOptimizer(optimizer) if apply == "step" else optimizer
    variables = [*layer.trainable_variables, weight]
    optimizer.build(variables)
    for batch in range(3):
        keys = KEYS[batch * 16 : (batch + 1) * 16][comm.rank :: comm.size]
        with tf.GradientTape() as tape:
            rows = layer(tf.constant(keys), training=True)
            loss = tf.reduce_mean((tf.reshape(rows, [-1, 8]) @ weight.value - 1.0) ** 2)
        gradients = tape.gradient(loss, [v.value for v in variables])
        optimizer.apply(gradients, variables)
    return {
        **contents(layer),
        "head": weight.numpy(),
        "updates": layer.store.export_table("user")["steps"][0],
    }


@pytest.mark.parametrize("settings", [{}, {"global_clipnorm": 0.02}], ids=str)
def test_replicated_ranks_equal_single_process(run_as_ranks, settings):
    """The ranks clip the same average as a single process."""
    head = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
    one, other = run_as_ranks(2, lambda comm: steps_of(comm, "step", settings, head))
    assert not isinstance(one, Exception), one
    assert differ(one, other) == set()
    alone = steps_of(distributed.SingleProcess(), "step", settings, head)
    for name, array in alone.items():
        np.testing.assert_allclose(one[name], array, rtol=0, atol=2e-6, err_msg=name)
    if not settings:
        plain, _ = run_as_ranks(2, lambda comm: steps_of(comm, "backward", settings, head))
        assert differ(plain, one) == set()


def rows_of(ranks):
    """Merges the rows of all ranks, which must have different keys."""
    together = {"head": ranks[0]["head"]}
    for table in TABLES:
        keys = np.concatenate([rank[f"{table} keys"] for rank in ranks])
        assert np.unique(keys).size == keys.size
        for part in ("keys", "rows", "slots"):
            values = np.concatenate([rank[f"{table} {part}"] for rank in ranks])
            together[f"{table} {part}"] = values[np.argsort(keys)]
    return together


CLIPPED = [*SETTINGS[:4], {"gradient_accumulation_steps": 2, "global_clipnorm": 0.02}]


@pytest.mark.parametrize("settings", CLIPPED, ids=str)
def test_sharded_ranks_equal_single_process(run_as_ranks, settings):
    """Clipping uses the norm of the rows on all ranks."""
    head = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]

    def train(apply):
        ran = run_as_ranks(
            2, lambda comm: steps_of(comm, apply, settings, head, placement="sharded")
        )
        assert not [error for error in ran if isinstance(error, Exception)], ran
        np.testing.assert_array_equal(ran[0]["head"], ran[1]["head"])
        return rows_of(ran)

    together = train("step")
    alone = rows_of([steps_of(distributed.SingleProcess(), "step", settings, head)])
    for name, array in alone.items():
        np.testing.assert_allclose(together[name], array, rtol=0, atol=2e-6, err_msg=name)
    if settings:
        free = rows_of([steps_of(distributed.SingleProcess(), "step", {}, head)])
        assert np.abs(free["user rows"] - alone["user rows"]).max() > 1e-4
    else:
        assert differ(train("backward"), together) == set()


def test_nonfinite_loss_on_one_rank_stops_all_ranks(run_as_ranks):
    """Only the loss of rank 1 is NaN, but both ranks stop."""
    owned = distributed.sharded.owner_of(np.arange(100), 2)

    def program(comm):
        layer = make_layer(apply="step", comm=comm, placement="sharded")
        keys = np.arange(100)[owned == comm.rank][:4, None].repeat(2, 1)
        optimizer = CombinedOptimizer("sgd")
        optimizer.build(layer.trainable_variables)
        with tf.GradientTape() as tape:
            factor = np.nan if comm.rank else 1.0
            loss = tf.reduce_sum(layer(tf.constant(keys), training=True)) * factor
        anchors = [v.value for v in layer.trainable_variables]
        gradients = tape.gradient(loss, anchors)
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"not finite|expected a finite number"
        ):
            optimizer.apply(gradients, layer.trainable_variables)
        return int(layer.store.export_table("user")["steps"][0])

    assert run_as_ranks(2, program) == [0, 0]


def test_combined_optimizer_is_saved_and_loaded(tmp_path):
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.02)
    model = train(make_model(CombinedOptimizer(optimizer)))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, keras.optimizers.Adam)
    assert loaded.optimizer.global_clipnorm == 0.02
    assert layer_of(loaded).apply == "step"
    assert_same(train(loaded), contents(train(model)))


def test_multi_optimizer_updates_rows():
    def routed(anchors, others):
        return keras.optimizers.MultiOptimizer(
            lambda variable: anchors if "_anchor" in variable.path else others
        )

    reference = train(make_model(CombinedOptimizer(keras.optimizers.SGD(0.1))))
    both = routed(CombinedOptimizer("sgd"), keras.optimizers.SGD(0.1))
    assert_same(train(make_model(both)), contents(reference))
    others = keras.optimizers.SGD(0.1, clipnorm=1.0)  # Clips only the dense weights, as requested.
    train(make_model(routed(keras.optimizers.SGD(), others), "backward"))
    with pytest.raises(ValueError, match="Invalid `clipnorm`"):
        train(make_model(routed(others, keras.optimizers.SGD()), "backward"))
    with pytest.raises(ValueError, match="Invalid `optimizer`: 'MultiOptimizer'"):
        CombinedOptimizer(both)


def test_distributed_optimizer_of_one_rank_updates_rows():
    wrapped = distributed.DistributedOptimizer(keras.optimizers.SGD(), distributed.SingleProcess())
    model = train(make_model(CombinedOptimizer(wrapped)))
    assert_same(model, contents(train(make_model(CombinedOptimizer("sgd")))))


@pytest.mark.parametrize("clips", [{"clipnorm": 1.0}, {"global_clipnorm": 1.0}], ids=str)
def test_norm_with_underflowing_square_is_clipped(clips):
    """Such gradients are neither clipped nor lost."""
    layer = make_layer(optimizers.SGD(1e25), apply="step")
    optimizer = CombinedOptimizer(keras.optimizers.SGD(0.1, **clips))
    optimizer.build(layer.trainable_variables)
    keys = tf.constant(KEYS[:16])
    with tf.GradientTape() as tape:
        before = layer(keys, training=True)
        loss = tf.reduce_sum(before) * 1e-25
    variables = layer.trainable_variables
    optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
    assert np.all(np.abs(layer(keys, training=False).numpy() - before.numpy()) > 0.5)
