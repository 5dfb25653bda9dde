"""Tests of `distributed.optimizer` and the tape: averages, saving and refused arguments."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.distributed import DistributedGradientTape, DistributedOptimizer, SingleProcess
from slipstream_tf.tables import VariableStore


def test_wrapper_is_saved_as_wrapped_optimizer(tmp_path):
    plain = keras.optimizers.Adam(0.02, beta_1=0.8)
    optimizer = DistributedOptimizer(plain, SingleProcess())
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert type(optimizer).__name__ == "Adam"
    assert optimizer.get_config() == plain.get_config()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert loaded.optimizer.get_config() == plain.get_config()
    for got, wanted in zip(loaded.optimizer.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(got.numpy(), wanted.numpy())


def test_dense_and_sparse_gradients_are_averaged(run_as_ranks):
    def program(comm):
        dense, rows = keras.Variable(np.zeros(2)), keras.Variable(np.zeros((4, 1)))
        unused = keras.Variable(np.zeros(1))
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), comm)
        slices = tf.IndexedSlices(
            tf.constant([[1.0], [2.0], [4.0]]), tf.constant([3, comm.rank, 3]), tf.constant([4, 1])
        )
        gradients = [tf.constant([comm.rank + 1.0, 0.0]), slices, None]
        optimizer.apply_gradients(zip(gradients, [dense, rows, unused], strict=True))
        return dense.numpy(), rows.numpy()[:, 0], optimizer.slipstream_comm is comm

    for dense, rows, has_comm in run_as_ranks(2, program):
        assert has_comm
        np.testing.assert_allclose(dense, [-1.5, 0.0])
        np.testing.assert_allclose(rows, [-1.0, -1.0, 0.0, -5.0])


def test_saturated_rows_are_masked_before_exchange(run_as_ranks):
    def program(comm):
        rows = tf.Variable(tf.zeros([4, 1]))
        store = VariableStore({"t": rows})
        store.set_saturated("t", [3])
        with DistributedGradientTape(tf.GradientTape(), store, comm) as tape:
            loss = tf.reduce_sum(tf.gather(rows, [3, comm.rank, 0]))
        gradient = tape.gradient(loss, rows)
        return gradient.indices.numpy().tolist(), gradient.values.numpy()[:, 0].tolist()

    assert run_as_ranks(2, program) == [([0, 1], [1.5, 0.5])] * 2


def test_tape_leaves_gradients_of_step_to_combined_optimizer(run_as_ranks):
    """The optimizer exchanges these gradients once, so their bits do not depend on the tape."""

    def program(comm):
        layer = slip.keras.EmbeddingCollection(
            [slip.Table("item", 1)], "sgd", comm=comm, apply="step", name="layer"
        )
        variables = layer.trainable_variables
        with DistributedGradientTape(tf.GradientTape(), comm=comm, wire_dtype="int8") as tape:
            rows = layer({"item": np.array([5, comm.rank, 5])}, training=True)["item"]
            loss = tf.reduce_sum(rows) * (comm.rank + 1.0)
        (gradient,) = tape.gradient(loss, variables)
        before = layer.table("item").read([5, 0, 1])
        optimizer = slip.keras.CombinedOptimizer(keras.optimizers.SGD(0.1))
        optimizer.apply([gradient], variables)
        return gradient, layer.table("item").read([5, 0, 1]) - before

    for rank, (gradient, moved) in enumerate(run_as_ranks(2, program)):
        own = dict(zip(gradient.indices.numpy(), gradient.values.numpy()[:, 0], strict=True))
        assert own == {5: rank + 1.0, rank: (rank + 1.0) / 2}
        # The default rate of the rows is 0.01.
        np.testing.assert_allclose(moved, [[-0.03], [-0.005], [-0.01]], rtol=1e-5)


def used_optimizer():
    optimizer = keras.optimizers.SGD()
    optimizer.build([keras.Variable(np.zeros(1))])
    return optimizer


@pytest.mark.parametrize(
    "optimizer, arguments, message",
    [
        (lambda: "adam", {}, "`optimizer`: 'str'.*a Keras 3 optimizer"),
        (used_optimizer, {}, "`optimizer`: 'a built SGD'.*without state"),
        (
            lambda: slip.keras.CombinedOptimizer("sgd"),
            {},
            r"'CombinedOptimizer'.*Use CombinedOptimizer\(DistributedOptimizer\(...\)\)",
        ),
        (keras.optimizers.SGD, {"store": 3}, "`store`: 'int'.*VariableStore"),
        (keras.optimizers.SGD, {"wire_dtype": "half"}, "`wire_dtype`: 'half'"),
    ],
)
def test_unsupported_optimizer_raises(optimizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        DistributedOptimizer(optimizer(), SingleProcess(), **arguments)


def test_tape_requires_store_or_ranks():
    with pytest.raises(ValueError, match=r"`store`: None.*if `comm` is None, too"):
        DistributedGradientTape(tf.GradientTape())


def test_backward_passes_per_step_use_gradient_accumulation():
    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(0.1), SingleProcess(), backward_passes_per_step=3
    )
    assert optimizer.gradient_accumulation_steps == 3
    same = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    made = DistributedOptimizer(same, SingleProcess(), backward_passes_per_step=3)
    assert made.gradient_accumulation_steps == 3
    with pytest.raises(ValueError, match=r"`gradient_accumulation_steps`: 3.*per_step=2"):
        DistributedOptimizer(same, SingleProcess(), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="`backward_passes_per_step`: 0"):
        DistributedOptimizer(keras.optimizers.SGD(0.1), SingleProcess(), backward_passes_per_step=0)
