"""`DistributedGradientTape` masks gradients of plain Keras models and variables."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.distributed import DistributedGradientTape
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.engine.tracker import SaturationTracker
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.tables import VariableStore

ROWS, DIM, BATCH = 40, 4, 12
MASKED = [0, 3, 4, 17, 39]
UNMASKED = np.setdiff1d(np.arange(ROWS), MASKED)
v1 = tf.compat.v1.train

# The docstring of DistributedGradientTape says that these leave masked rows and slots unchanged.
KERAS_OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "SGD clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.01),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adagrad global_clipnorm": lambda: keras.optimizers.Adagrad(0.1, global_clipnorm=0.01),
}
V1_OPTIMIZERS = {
    "GradientDescent": lambda: v1.GradientDescentOptimizer(0.1),
    "Momentum": lambda: v1.MomentumOptimizer(0.1, 0.9),
    "Nesterov": lambda: v1.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "Adagrad": lambda: v1.AdagradOptimizer(0.1),
    "RMSProp": lambda: v1.RMSPropOptimizer(0.1, momentum=0.9, centered=True),
    "Ftrl": lambda: v1.FtrlOptimizer(0.1),
    "Adadelta": lambda: v1.AdadeltaOptimizer(0.1),
    "ProximalAdagrad": lambda: v1.ProximalAdagradOptimizer(0.1),
    "ProximalGradientDescent": lambda: v1.ProximalGradientDescentOptimizer(0.1),
}
# The docstring says that these change masked rows.
DENSE_OPTIMIZERS = {
    "SGD momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.1),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "SGD weight_decay": lambda: keras.optimizers.SGD(0.1, weight_decay=0.1),
    "v1 Adam": lambda: v1.AdamOptimizer(0.1),
}


class Training:
    """A Keras model with an embedding layer and a custom training loop."""

    def __init__(self, optimizer, masks: bool = True, is_head_trained: bool = False):
        keras.utils.set_random_seed(1)
        self.embedding = keras.layers.Embedding(ROWS, DIM)
        head = keras.layers.Dense(1, trainable=is_head_trained)
        self.model = keras.Sequential([self.embedding, keras.layers.Flatten(), head])
        self.model.build((None, 1))
        self.store = VariableStore({"item": self.embedding.embeddings})
        self.optimizer = optimizer
        self.traces = 0
        self._masks = masks
        self._step = tf.function(self._step_of_one_batch, reduce_retracing=True)

    def _step_of_one_batch(self, keys, labels):
        self.traces += 1
        tape = tf.GradientTape()
        if self._masks:
            tape = DistributedGradientTape(tape, self.store)
        with tape:
            errors = self.model(keys[:, None])[:, 0] - labels
            # Use a sum, because with a mean the gradient of a row would depend on the batch.
            loss = tf.reduce_sum(errors * errors)
        variables = self.model.trainable_variables
        if isinstance(self.optimizer, v1.Optimizer):
            variables = [variable.value for variable in variables]
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def run(self, steps: int, seed: int = 0, has_duplicates: bool = False, keys=None) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            batch = rng.choice(ROWS if keys is None else keys, BATCH, replace=has_duplicates)
            labels = rng.normal(size=BATCH).astype(np.float32)
            self._step(tf.constant(batch, tf.int64), tf.constant(labels))

    def state(self) -> dict[str, np.ndarray]:
        """Returns the rows and slots, all [rows, dim]."""
        found = {"rows": self.embedding.embeddings.numpy()}
        if isinstance(self.optimizer, v1.Optimizer):
            variable = self.embedding.embeddings.value
            for name in self.optimizer.get_slot_names():
                found[name] = self.optimizer.get_slot(variable, name).numpy()
        else:
            for slot in self.optimizer.variables:
                if tuple(slot.shape) == (ROWS, DIM):
                    found[slot.path] = slot.numpy()
        return found


def optimizers(*groups):
    return [pytest.param(make, id=name) for group in groups for name, make in group.items()]


@pytest.mark.parametrize("has_history", [False, True])
@pytest.mark.parametrize("make_optimizer", optimizers(KERAS_OPTIMIZERS, V1_OPTIMIZERS))
def test_masked_rows_and_slots_are_bitwise_unchanged(make_optimizer, has_history):
    training = Training(make_optimizer())
    initial_rows = training.embedding.embeddings.numpy()
    training.run(3 if has_history else 1, keys=None if has_history else UNMASKED)
    before, traces = training.state(), training.traces
    training.store.set_saturated("item", MASKED)
    training.run(6, seed=1, has_duplicates=True)
    after = training.state()
    assert before.keys() == after.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(after[name][MASKED], values[MASKED], err_msg=name)
    if not has_history:
        np.testing.assert_array_equal(after["rows"][MASKED], initial_rows[MASKED])
    # Not every key is drawn.
    assert (after["rows"][UNMASKED] != before["rows"][UNMASKED]).any(axis=1).mean() > 0.5
    assert training.traces == traces, "a new set of keys retraces nothing"


@pytest.mark.parametrize("make_optimizer", optimizers(DENSE_OPTIMIZERS))
def test_documented_optimizers_move_masked_rows(make_optimizer):
    """Checks the documentation: these optimizers move masked rows.

    Note: if this test fails, an optimizer now skips masked rows. Correct the documentation then.
    """
    moved = []
    for has_history in (False, True):
        training = Training(make_optimizer())
        training.run(3 if has_history else 0)
        before = training.embedding.embeddings.numpy()
        training.store.set_saturated("item", MASKED)
        training.run(3, seed=1)
        moved.append((training.embedding.embeddings.numpy()[MASKED] != before[MASKED]).any())
    assert any(moved)


@pytest.mark.parametrize(
    "make_optimizer",
    optimizers(
        {name: make for name, make in KERAS_OPTIMIZERS.items() if "clip" not in name}, V1_OPTIMIZERS
    ),
)
def test_unmasked_rows_equal_training_without_tape(make_optimizer):
    plain, masking = Training(make_optimizer(), masks=False), Training(make_optimizer())
    masking.store.set_saturated("item", MASKED)
    plain.run(6)
    masking.run(6)
    expected, found = plain.state(), masking.state()
    for (name, values), other in zip(expected.items(), found.values(), strict=True):
        np.testing.assert_array_equal(other[UNMASKED], values[UNMASKED], err_msg=name)
    assert (expected["rows"][MASKED] != found["rows"][MASKED]).any()


def test_tape_changes_nothing_without_saturated_rows():
    runs = [Training(keras.optimizers.Adam(0.01), masks, True) for masks in (False, True)]
    for training in runs:
        training.run(6)
    for weight, other in zip(runs[0].model.weights, runs[1].model.weights, strict=True):
        np.testing.assert_array_equal(weight.numpy(), other.numpy())


@pytest.mark.parametrize("is_function", [False, True])
def test_gradient_has_signature_of_gradient_tape(is_function):
    table, other = tf.Variable(tf.ones([5, 2])), tf.Variable(tf.ones([5, 2]))
    scale, unused = tf.Variable(3.0), tf.Variable(1.0)
    store = VariableStore({"item": table})
    store.set_saturated("item", [1])

    def gradients():
        with DistributedGradientTape(tf.GradientTape(persistent=True), store) as tape:
            rows = tf.gather(table, [4, 1, 4]) + tf.gather(other, [4, 1, 4])
            target = rows * scale
        structure = {"table": table, "more": [other, (scale, unused)]}
        first = tape.gradient(target, structure, output_gradients=2.0 * tf.ones_like(target))
        return first, tape.gradient(target, other), tape.watched_variables()

    found, single, watched = (tf.function(gradients) if is_function else gradients)()
    np.testing.assert_array_equal(found["table"].indices, [4])
    np.testing.assert_array_equal(found["table"].values, [[12.0, 12.0]])
    np.testing.assert_array_equal(found["more"][0].indices, [4, 1, 4])
    assert float(found["more"][1][0]) == 24.0 and found["more"][1][1] is None
    np.testing.assert_array_equal(single.indices, [4, 1, 4])
    assert len(watched) == 3


def test_counts_accesses_and_rows():
    training = Training(keras.optimizers.SGD(0.1))
    training.store.set_saturated("item", [2])
    for keys in ([2, 2, 5], [5, 7, 5]):
        training._step(tf.constant(keys, tf.int64), tf.zeros([3]))
    keys, counts = training.store.hot_keys("item", 9)
    assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == {5: 3.0, 2: 2.0, 7: 1.0}
    assert int(training.store.offered_rows["item"]) == 4
    assert int(training.store.masked_rows["item"]) == 1


def test_batch_with_all_rows_masked_updates_nothing():
    for make in (*KERAS_OPTIMIZERS.values(), *V1_OPTIMIZERS.values()):
        training = Training(make())
        training.run(1)
        training.store.set_saturated("item", np.arange(ROWS))
        before = training.state()
        training.run(2)
        for name, values in training.state().items():
            np.testing.assert_array_equal(values, before[name], err_msg=name)


def test_regularizer_with_dense_gradient_raises():
    table = tf.Variable(tf.ones([5, 2]))
    store = VariableStore({"item": table})
    with DistributedGradientTape(tf.GradientTape(), store) as tape:
        loss = tf.reduce_sum(tf.gather(table, [1])) + tf.reduce_sum(table * table)
    with pytest.raises(TypeError, match=r"table 'item' is dense .*\(5, 2\).*regularizer"):
        tape.gradient(loss, [table])


def test_invalid_arguments_raise():
    store = VariableStore({"item": tf.Variable(tf.ones([5, 2]))})
    with pytest.raises(ValueError, match="Invalid `tape`: 'int'"):
        DistributedGradientTape(3, store)
    with pytest.raises(ValueError, match=r"Invalid `store`: 'str'.*a VariableStore"):
        DistributedGradientTape(tf.GradientTape(), "store")

    class Front:
        pass

    front = Front()
    front.store = store
    with slip.distributed.DistributedGradientTape(tf.GradientTape(), front):
        pass


def test_tracker_tracks_embedding_layer():
    """Checks hot set, snapshots and drift of an embedding layer.

    The keys to mask are set manually.
    """
    training = Training(keras.optimizers.Adagrad(0.1))
    settings = EngineSettings(
        window=slip.Window(4, warmup=0), hot_set=slip.HotSet(memory=10 * DIM * 4)
    )
    specs = [FeatureSpec("item", "item")]
    tracker = SaturationTracker(training.store, settings, specs)
    for seed in range(8):
        training.run(1, seed=seed, has_duplicates=True)
        tracker.step()
    first, second = tracker.reports
    assert first.next_hot_keys == second.hot_keys == 10
    assert second.anomalies == 0 and max(second.drift_quantiles) > 0.0
    hot, counts = training.store.hot_keys("item", 3)
    assert hot.size == 3 and (counts > 0.0).all()
    training.store.set_saturated("item", hot)
    before = training.state()
    training.run(4, has_duplicates=True)
    for name, values in training.state().items():
        np.testing.assert_array_equal(values[hot], before[name][hot])
    assert int(training.store.masked_rows["item"]) > 0
