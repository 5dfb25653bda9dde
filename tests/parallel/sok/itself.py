"""SOK's Python code has the behavior that this package relies on.

Run with TF_USE_LEGACY_KERAS=1, because SOK's legacy optimizers are the optimizers of Keras 2.
"""

from __future__ import annotations

import tempfile

import horovod.tensorflow as hvd
import numpy as np
import sparse_operation_kit as sok
import tensorflow as tf
import tf_keras

DIM = 3
BATCHES = (  # Of rank 0, then of rank 1.
    np.array([[1, 2, 2**40, 2], [7, 1, 0, 3], [5, 5, 5, 2]]),
    np.array([[2, 2, 9, 4], [7, 7, 1, 2**40 + 1], [0, 3, 5, 8]]),
)


def table(initial: float = 0.5, capacity: int = 1024, kind: str = "hybrid"):
    settings = {"init_capacity": capacity, "max_capacity": capacity} if kind == "hybrid" else {}
    return sok.DynamicVariable(
        dimension=DIM, initializer=str(initial), var_type=kind, **settings
    )  # fmt: skip


def gradient_of(variable, keys, scale=1.0):
    with tf.GradientTape() as tape:
        rows = sok.all2all_dense_embedding(variable, tf.constant(keys, tf.int64))
        loss = scale * tf.reduce_sum(rows * tf.cast(keys % 5 + 1, tf.float32)[:, None])
    return rows, tape.gradient(loss, variable)


def expected_sums(step):
    """Returns key -> gradient, summed over ranks."""
    sums = {}
    for keys in BATCHES[: hvd.size()]:
        for key in keys[step]:
            sums[int(key)] = sums.get(int(key), 0.0) + float(key % 5 + 1)
    return sums


def check_gradients_are_summed_at_their_owner() -> None:
    variable = table()
    rows, gradient = gradient_of(variable, BATCHES[hvd.rank()][0])
    np.testing.assert_array_equal(rows, np.full((4, DIM), 0.5, np.float32))
    sums = {}
    for key, row in zip(gradient.indices.numpy(), gradient.values.numpy(), strict=True):
        assert key % hvd.size() == hvd.rank()
        sums[int(key)] = sums.get(int(key), 0.0) + row[0]
    own = {k: s for k, s in expected_sums(0).items() if k % hvd.size() == hvd.rank()}
    assert sums == own
    assert int(variable.size[0]) == len(own)


def check_an_optimizer(wrapped, update) -> None:
    """Compares an optimizer with an update function.

    Args:
        wrapped: The optimizer in SOK's wrapper.
        update: Function (row, gradient, state, step) -> new row. The state is a dictionary per key.
    """
    variable, rows, states = table(), {}, {}
    for step in range(3):
        _, gradient = gradient_of(variable, BATCHES[hvd.rank()][step])
        wrapped.apply_gradients([(gradient, variable)])
        for key, total in expected_sums(step).items():
            state = states.setdefault(key, {})
            rows[key] = update(rows.get(key, 0.5), total, state, step + 1)
    keys = sorted(rows)
    found = sok.all2all_dense_embedding(variable, tf.constant(keys, tf.int64)).numpy()
    np.testing.assert_allclose(found[:, 0], [rows[k] for k in keys], rtol=1e-5)
    np.testing.assert_array_equal(found[:, 0], found[:, -1])


def sgd(row, gradient, state, step):
    return row - 0.1 * gradient


def adagrad(row, gradient, state, step):
    state["sum"] = state.get("sum", 0.1) + gradient**2
    return row - 0.1 * gradient / np.sqrt(state["sum"])


def adam(row, gradient, state, step):
    state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * gradient
    state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * gradient**2
    rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    return row - rate * state["m"] / (np.sqrt(state["v"]) + 1e-7)


def check_lookup_sparse() -> None:
    dynamic, static = table(), sok.Variable(np.arange(30.0).reshape(10, DIM), dtype=tf.float32)
    bags = tf.RaggedTensor.from_row_lengths(tf.constant([1, 2, 3, 4, 4, 9], tf.int64), [2, 1, 3])
    bags = bags.with_row_splits_dtype(tf.int64)
    with tf.GradientTape() as tape:
        one, two = sok.lookup_sparse([dynamic, static], [bags, bags], combiners=["sum", "mean"])
        loss = tf.reduce_sum(one) + tf.reduce_sum(two)
    gradients = tape.gradient(loss, [dynamic, static])
    np.testing.assert_allclose(one[:, 0], [1.0, 0.5, 1.5])
    np.testing.assert_allclose(two[:, 0], [4.5, 9.0, 17.0])
    own = [k for k in (1, 2, 3, 4, 9) if k % hvd.size() == hvd.rank()]
    np.testing.assert_array_equal(gradients[0].indices, own)
    np.testing.assert_array_equal(gradients[1].indices, [k // hvd.size() for k in own])
    np.testing.assert_allclose(
        gradients[0].values[:, 0], [hvd.size() * (2.0 if k == 4 else 1.0) for k in own]
    )


def check_lookups_do_not_refresh() -> None:
    """Asserts that a lookup does not protect a key from eviction.

    A key that is looked up but never written is evicted first.
    """
    variable = table(capacity=4)
    read = variable.sparse_read(tf.constant([0, 1, 2, 3], tf.int64))
    variable.scatter_update(tf.IndexedSlices(read + 1.0, tf.constant([0, 1, 2, 3], tf.int64)))
    variable.sparse_read(tf.constant([0], tf.int64))
    variable.scatter_update(tf.IndexedSlices(read[:1], tf.constant([1], tf.int64)))
    variable.sparse_read(tf.constant([10], tf.int64))
    keys, _ = sok.export(variable)
    assert set(keys.numpy()) == {1, 2, 3, 10}


def check_dump_and_load(wrapped) -> None:
    variable = table()
    _, gradient = gradient_of(variable, BATCHES[hvd.rank()][0])
    wrapped.apply_gradients([(gradient, variable)])
    before = sok.all2all_dense_embedding(variable, tf.constant(BATCHES[0][0])).numpy()
    with tempfile.TemporaryDirectory() as own:
        folder = hvd.broadcast_object(own)
        sok.dump(folder, [variable], wrapped)
        _, gradient = gradient_of(variable, BATCHES[hvd.rank()][0])
        wrapped.apply_gradients([(gradient, variable)])
        sok.load(folder, [variable], wrapped)
    after = sok.all2all_dense_embedding(variable, tf.constant(BATCHES[0][0])).numpy()
    np.testing.assert_array_equal(before, after)


def main() -> None:
    hvd.init()
    sok.init()
    legacy, first = tf_keras.optimizers.legacy, tf.compat.v1.train
    check_gradients_are_summed_at_their_owner()
    check_an_optimizer(sok.SGD(0.1), sgd)
    check_an_optimizer(sok.OptimizerWrapper(legacy.SGD(0.1)), sgd)
    check_an_optimizer(sok.OptimizerWrapper(legacy.Adagrad(0.1)), adagrad)
    check_an_optimizer(sok.OptimizerWrapper(legacy.Adam(0.1)), adam)
    check_an_optimizer(sok.OptimizerWrapper(first.AdagradOptimizer(0.1)), adagrad)
    check_an_optimizer(sok.OptimizerWrapper(first.AdamOptimizer(0.1, epsilon=1e-7)), adam)
    check_lookup_sparse()
    check_lookups_do_not_refresh()
    check_dump_and_load(sok.OptimizerWrapper(legacy.Adam(0.1)))
    print("all checks passed")


if __name__ == "__main__":
    main()
