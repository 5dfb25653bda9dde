"""An engine over several layers: as over one that has all tables."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip

RULE = slip.optimizers.SGD(0.1)
EXAMPLES, BATCH = 1024, 32


def layer(*names, **kwargs):
    return slip.keras.EmbeddingCollection([slip.Table(name, 4) for name in names], RULE, **kwargs)


def data():
    random = np.random.default_rng(0)
    keys = {name: random.zipf(1.5, EXAMPLES) % 50 for name in ("a", "b")}
    labels = (keys["a"] + keys["b"]) % 2
    return tf.data.Dataset.from_tensor_slices((keys, np.float32(labels))).batch(BATCH, True)


def train(layers, **settings):
    """Trains; returns the engine and the tables' rows by key."""
    keras.utils.set_random_seed(0)
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("a", "b")}
    rows = {}
    for one in layers:
        rows.update(one({spec.name: inputs[spec.name] for spec in one.specs}))
    joined = keras.layers.Concatenate()([rows["a"], rows["b"]])
    model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(joined))
    model.compile("sgd", "binary_crossentropy")
    given = layers[0] if len(layers) == 1 else layers
    settings = {"window": slip.Window(steps=4, warmup=4), **settings}
    slipstream = slip.Slipstream(given, **settings)
    model.fit(slipstream.apply(data()), callbacks=[slipstream.callback()], verbose=0)
    tables = {t.name: one.store.export_table(t.name) for one in layers for t in one.tables}
    return slipstream, tables


@pytest.mark.parametrize(
    "policies",
    [
        [slip.SkipExamples(slip.RowDrift())],
        [slip.DeferGradients(slip.Movement(0.05))],
        [slip.MaskGradients(share=0.5)],
    ],
    ids=lambda policies: type(policies[0]).__name__,
)
def test_two_layers_train_as_one(policies):
    (one, of_one), (two, of_two) = (
        train(layers, policies=policies) for layers in ([layer("a", "b")], [layer("a"), layer("b")])
    )
    assert one.tracker.reports[-1].step == two.tracker.reports[-1].step
    for before, after in zip(one.tracker.reports, two.tracker.reports, strict=True):
        assert before.threshold == after.threshold
        assert [t.rows for t in before.tables] == [t.rows for t in after.tables]
        assert before.examples_skipped == after.examples_skipped
    assert not two.report().why_nothing()
    for name, contents in of_one.items():
        for part in ("keys", "rows"):
            np.testing.assert_array_equal(contents[part], of_two[name][part])


def test_its_checkpoint_goes_on(tmp_path):
    layers = [layer("a"), layer("b")]
    slipstream, _ = train(layers, policies=slip.SkipExamples(slip.RowDrift()))
    path = tf.train.Checkpoint(layers=layers, slipstream=slipstream).save(tmp_path / "c")
    again = [layer("a"), layer("b")]
    other = slip.Slipstream(
        again,
        policies=slip.SkipExamples(slip.RowDrift()),
        window=slip.Window(steps=4, warmup=4),
    )
    tf.train.Checkpoint(layers=again, slipstream=other).restore(path).assert_consumed()
    assert other.tracker.state()["loop"] == slipstream.tracker.state()["loop"]
    assert len(other.tracker.reports) == len(slipstream.tracker.reports)


def test_a_joined_store_has_all_tables():
    layers = [layer("a"), layer("b")]
    store = slip.Slipstream(layers).store
    assert [table.name for table in store.tables] == ["a", "b"]
    assert store.parts == tuple(one.store for one in layers)
    with pytest.raises(ValueError, match="`table`: 'c'"):
        store.size("c")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            lambda: [layer("a", features={"x": "a"}), layer("b", features={"x": "b"})],
            r"`embeddings`: \['x'\].*features differ in name",
        ),
        (
            lambda: [layer("a"), layer("a", features={"b": "a"})],
            r"`embeddings`: \['a'\].*tables differ in name",
        ),
        (lambda: [layer("a"), keras.layers.Dense(1)], r"`embeddings`"),
        (list, r"`embeddings`: \[\]"),
    ],
)
def test_layers_that_do_not_go_together_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        slip.Slipstream(layers())
