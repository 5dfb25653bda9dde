"""Bags that SOK pools have the rows of one native table of all the data.

Arguments: cases, each "mode,rule,kind".
"""

from __future__ import annotations

import importlib
import sys

import numpy as np
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.distributed import init
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.ops.update_policy import UpdatePolicy

KEYS, BATCH, STEPS, INTERVAL = 60, 16, 40, 8
TABLES = {"one": 4, "two": 3}
SPECS = [
    FeatureSpec("a", "one"),
    FeatureSpec("bag", "one", "mean"),
    FeatureSpec("padded", "two", "sqrtn"),
    FeatureSpec("weighted", "two", "mean"),
]
RULES = {
    "sgd": slip.optimizers.SGD(0.1),
    "adagrad": slip.optimizers.Adagrad(0.1, 0.1, 1e-12),
    "adam": slip.optimizers.Adam(0.05),
}
POLICIES = {
    "mask": slip.MaskGradients(share=0.5),
    "interval": slip.DeferGradients(slip.Interval(3, share=0.5)),
    "movement": slip.DeferGradients(slip.Movement(0.02)),
    "plain": (),
}
SIGNATURE = {
    "a": tf.TensorSpec([None], tf.int64),
    "bag": tf.RaggedTensorSpec([None, None], tf.int64, row_splits_dtype=tf.int64),
    "padded": tf.TensorSpec([None, 3], tf.int64),
    "weighted": tf.RaggedTensorSpec([None, None], tf.int64, row_splits_dtype=tf.int64),
}


def layer_on(store: str, rule: str, comm, kind: str = "hybrid"):
    settings = {"retention": slip.Retention(1 << 10, "lru")} if store != "native" else {}
    tables = [slip.Table(n, d, **settings) for n, d in TABLES.items()]
    if kind == "hbm" and store != "native":
        tables = [slip.Table(n, d) for n, d in TABLES.items()]
        store = slip.stores.SokPooledStore(tables, RULES[rule], comm, "hbm")
        comm = None
    return slip.keras.EmbeddingCollection(tables, RULES[rule], SPECS, store=store, comm=comm)


def batch_of(random, size: int = BATCH) -> dict:
    """A batch of one rank; rank by rank, so that all know it. Some of its bags are empty."""
    draw = lambda *shape: np.minimum(random.zipf(1.4, shape), KEYS).astype(np.int64)  # noqa: E731
    lengths = random.integers(0, 4, size)
    bags = tf.RaggedTensor.from_row_lengths(tf.constant(draw(lengths.sum())), lengths)
    padded = draw(size, 3)
    padded[np.arange(3) >= random.integers(0, 4, (size, 1))] = -1
    return {
        "a": tf.constant(draw(size)),
        "bag": bags,
        "padded": tf.constant(2**40 + padded - (2**40) * (padded < 0)),
        "weighted": bags,
    }


def weights_of(inputs: dict) -> dict:
    bags = inputs["weighted"]
    return {"weighted": bags.with_values(tf.cast(bags.values % 3 + 1, tf.float32) / 2)}


def whole(batches: list[dict]) -> dict:
    return {name: tf.concat([batch[name] for batch in batches], 0) for name in SIGNATURE}


def train(layer):
    """Returns a step, traced once, that trains the layer alone."""
    width = sum(TABLES[spec.table] for spec in SPECS)
    weights = tf.constant(np.random.default_rng(5).normal(size=width), tf.float32)

    @tf.function(input_signature=[SIGNATURE], autograph=False)
    def step(inputs):
        with tf.GradientTape() as tape:
            rows = layer(inputs, weights=weights_of(inputs), training=True)
            joined = tf.concat([rows[spec.name] for spec in SPECS], axis=1)
            # Gradients that shrink as it learns, so that some keys move less than others.
            loss = tf.reduce_mean(tf.square(joined - weights))
        gradient = tape.gradient(loss, layer.update_anchor.value)
        with tf.control_dependencies([gradient]):
            return tf.identity(loss)

    return step


def compare(comm, mode: str, rule: str, kind: str) -> None:
    random = np.random.default_rng(11)
    pooled = layer_on("sok_pooled", rule, comm, kind)
    native = layer_on("native", rule, None)
    engines = [
        slip.Slipstream(
            layer,
            POLICIES[mode],
            window=slip.Window(INTERVAL, warmup=0, seed=3),
            hot_set=slip.HotSet(memory="1MiB"),
            saturation=None if mode == "movement" else slip.Saturation(revisit_every=3),
        )
        for layer in (pooled, native)
    ]
    steps = [train(layer) for layer in (pooled, native)]
    withheld = 0
    for _ in range(STEPS):
        batches = [batch_of(random) for _ in range(comm.size)]
        losses, reports = [], []
        for engine, step, inputs in zip(
            engines, steps, (batches[comm.rank], whole(batches)), strict=True
        ):
            engine.observe(inputs)
            losses.append(float(step(inputs)))
            reports.append(engine.step())
        mean = float(comm.sum(tf.constant(losses[0]), "control", "loss")) / comm.size
        np.testing.assert_allclose(mean, losses[1], rtol=1e-4)
        found, expected = reports
        if found is not None:
            np.testing.assert_allclose(found.threshold, expected.threshold, rtol=1e-3)
            assert found.hot_keys == expected.hot_keys and found.read_only_keys == 0
            for mine, theirs in zip(found.tables, expected.tables, strict=True):
                for count in ("offered", "masked", "deferred", "due_by_age", "due_by_movement"):
                    assert getattr(mine.rows, count) == getattr(theirs.rows, count), count
                withheld += mine.rows.masked + mine.rows.deferred
    for layer in (pooled, native):
        layer.store.flush()
    assert (withheld > 0) == (mode != "plain")
    everything = np.arange(1, KEYS + 1)
    columns = tf.RaggedTensor.from_row_lengths(everything, np.ones_like(everything))
    padded = 2**40 + np.stack([everything, everything, everything], 1)
    keys = {"a": everything, "bag": columns, "padded": padded, "weighted": columns}
    rows = [layer(keys) for layer in (pooled, native)]
    for spec in SPECS:
        np.testing.assert_allclose(rows[0][spec.name], rows[1][spec.name], rtol=1e-4, atol=1e-6)
    print(mode, rule, kind, withheld, "rows withheld")


def look_up_batches_of_other_sizes(comm) -> None:
    """The last rank has no inputs, none has any, and one tensor comes out of a matrix."""
    layer = layer_on("sok_pooled", "sgd", comm)
    native = layer_on("native", "sgd", None)
    random = np.random.default_rng(3)
    for size in (BATCH, 0):
        sizes = [size - size * (rank > 0) for rank in range(comm.size)]
        batches = [batch_of(random, size) for size in sizes]
        inputs = batches[comm.rank]
        train(layer)(inputs)
        gathered = native(inputs, weights=weights_of(inputs))
        for name, rows in layer(inputs, weights=weights_of(inputs)).items():
            assert rows.shape == gathered[name].shape
            assert np.isfinite(rows.numpy()).all()

    tables = [slip.Table("t", 2, retention=slip.Retention(64, eviction="lru"))]
    specs = {"x": "t", "y": "t"}
    both = [
        slip.keras.EmbeddingCollection(tables, RULES["sgd"], specs, store=store, comm=of)
        for store, of in (("sok_pooled", comm), ("native", None))
    ]
    matrix = tf.constant([[1, 2], [3, 1], [1, 1]], tf.int64)
    for layer in both:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(matrix, training=True)))
        tape.gradient(loss, layer.update_anchor.value)
    np.testing.assert_allclose(both[0](matrix), both[1](matrix), rtol=1e-6)
    assert both[0].get_config()["store"] == "sok_pooled"
    counted = [layer.store.hot_keys("t", 2) for layer in both]
    np.testing.assert_array_equal(counted[0], counted[1])


def refuse_what_would_go_wrong(comm) -> None:
    table = slip.Table("t", 300, retention=slip.Retention(64, eviction="lru"))
    rule = RULES["sgd"]
    layer = slip.keras.EmbeddingCollection([table], rule, store="sok_pooled", comm=comm)
    keys, weights = tf.constant([[1, 2]], tf.int64), tf.constant([[1.0, 2.0]])
    assert layer({"t": keys})["t"].shape == (1, 300)
    try:
        layer({"t": keys}, weights={"t": weights})
    except ValueError as error:
        assert "here 300" in str(error), error
    else:
        raise AssertionError("not refused")
    try:
        slip.Slipstream(layer, slip.CacheRows())
    except ValueError as error:
        assert "without CacheRows" in str(error) and comm.size > 1, error
    else:
        assert comm.size == 1, "not refused"
    for rows, bad in ((tf.constant([[-3]], tf.int64), 1.0), (keys, np.nan)):
        try:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer({"t": rows}, training=True)["t"]) * bad
            tape.gradient(loss, layer.update_anchor.value)
        except tf.errors.InvalidArgumentError as error:
            found = "Invalid key -3" if bad == 1.0 else "bags that SOK pools"
            assert found in str(error), error
        else:
            raise AssertionError("not refused")


def flush_before_the_first_update(comm, kind: type) -> None:
    """Deferred gradients of another job's variables: they move rows as a first update does."""
    table, rule = (
        slip.Table("t", 2, initializer=slip.initializers.RandomUniform(seed=3)),
        RULES["adam"],
    )
    store, native = kind([table], rule, comm, "hbm"), slip.stores.NativeStore([table], rule)
    keys = np.arange(6)
    own = keys[store.owners("t", keys) == comm.rank]
    policy = UpdatePolicy("defer", "interval", max_age=99, max_rows=99)
    store.set_update_policy("t", policy)
    sums = np.stack([own + 1.0, -0.5 * own], 1).astype(np.float32)
    deferred = {"keys": own, "ages": np.zeros_like(own), "ranks": np.zeros(own.size, np.int32)}
    store.import_deferred("t", {**deferred, "sums": sums, "learning_rate": np.float32(0.0)})
    store.flush()
    specs = [FeatureSpec("t", "t")]
    _, plan = native.lookup(pack({"t": tf.constant(own)}, specs), specs, training=True)
    native.apply_gradients(plan, [tf.constant(sums)])
    rows, _ = store.gather("t", own)
    np.testing.assert_allclose(rows, native.gather("t", own)[0], rtol=1e-5)


def refuse_pythons_without_find_loader(comm) -> None:
    find_loader = importlib.find_loader
    del importlib.find_loader
    try:
        layer_on("sok_pooled", "sgd", comm)
    except RuntimeError as error:
        assert "store='sok'" in str(error), error
    else:
        raise AssertionError("not refused")
    finally:
        importlib.find_loader = find_loader


def main() -> None:
    comm = init()
    refuse_pythons_without_find_loader(comm)
    refuse_what_would_go_wrong(comm)
    look_up_batches_of_other_sizes(comm)
    for kind in (slip.stores.SokPooledStore, slip.stores.SokEmbeddingStore):
        flush_before_the_first_update(comm, kind)
    for case in sys.argv[1:]:
        compare(comm, *case.split(","))
    print("all is well")


if __name__ == "__main__":
    main()
