"""Compares training with prefetched keys bit for bit with training without.

A program of test_programs.py. The argument is a name in `POLICIES`.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from fit_equals_one import DIM, FIELDS, Batch, batches_of, dataset_of, of_all_ranks

import slipstream_tf as slip

EPOCHS = 2
POLICIES = {
    "plain": [],
    "mask": [slip.MaskGradients()],
    "defer": [slip.DeferGradients(slip.Movement(0.5))],
}


def make_embeddings(comm: Any, **options: Any) -> slip.keras.EmbeddingCollection:
    keras.utils.set_random_seed(3)
    tables = [
        slip.Table(f"f{i}", dim=DIM, initializer=slip.initializers.RandomUniform(seed=i))
        for i in range(FIELDS)
    ]
    options = {"placement": "sharded", **options}
    return slip.keras.EmbeddingCollection(
        tables, slip.optimizers.Adagrad(0.1), comm=comm, **options
    )


def make_model(comm: Any, embeddings: Any) -> slip.models.DCNv2:
    model = slip.models.DCNv2(embeddings, 2, 1, deep=[8])
    optimizer = slip.distributed.DistributedOptimizer(keras.optimizers.SGD(0.1), comm)
    model.compile(optimizer, "binary_crossentropy")
    return model


def state_of(comm: Any, embeddings: Any, variables: Any) -> list[np.ndarray]:
    """Returns the weights, and the rows and slots of all ranks."""
    state = [weights.numpy() for weights in variables]
    for table in embeddings.tables:
        contents = embeddings.store.export_table(table.name)
        state += of_all_ranks(comm, [contents[n] for n in ("keys", "rows", "slots", "counts")])
    return state


def fit(batches: list[Batch], comm: Any, way: str, prefetch: bool) -> list[np.ndarray]:
    """Trains epochs of `model.fit` with validation, and returns the final state."""
    embeddings = make_embeddings(comm, prefetch=prefetch)
    model = make_model(comm, embeddings)
    # Most keys are saturated at this threshold.
    slipstream = slip.Slipstream(
        embeddings,
        POLICIES[way],
        window=slip.Window(3, warmup=0),
        saturation=slip.Saturation(threshold=1.0) if way == "mask" else None,
    )
    data = slip.distributed.pad_to_equal_steps(dataset_of(batches), comm)
    fitted = model.fit(
        slip.distributed.prefetch_keys(data) if prefetch else data,
        validation_data=slip.distributed.pad_to_equal_steps(dataset_of(batches[:2]), comm),
        epochs=EPOCHS,
        verbose=0,
        shuffle=False,
        callbacks=[slipstream.callback()],
    )
    rows = slipstream.report().rows
    assert (rows.sent < rows.offered) == (way != "plain"), rows
    losses = [np.array(fitted.history[name]) for name in ("loss", "val_loss")]
    return [*state_of(comm, embeddings, model.trainable_variables), *losses]


def loop(batches: list[Batch], comm: Any, is_traced: bool, prefetch: bool) -> list[np.ndarray]:
    """Trains epochs in a custom loop with a dictionary of keys."""
    embeddings = make_embeddings(comm, prefetch=prefetch)
    weights = tf.Variable(tf.ones([FIELDS * DIM, 1]))

    def as_features(keys: Any) -> dict[str, Any]:
        return {f"f{i}": keys[:, i] for i in range(FIELDS)}

    def step(x: Any, y: Any) -> Any:
        ahead = as_features(x["next_keys"]) if prefetch else None
        with tf.GradientTape() as tape:
            vectors = embeddings(as_features(x["keys"]), training=True, next_inputs=ahead)
            logits = (tf.concat(list(vectors.values()), 1) @ weights)[:, 0]
            losses = tf.nn.sigmoid_cross_entropy_with_logits(y, logits)
            loss = slip.distributed.scale_loss(tf.reduce_mean(losses), tf.shape(y)[0], comm)
        variables = [weights, *embeddings.trainable_variables]
        gradients = tape.gradient(loss, [tensor_of(variable) for variable in variables])
        weights.assign_sub(0.1 * comm.sum(gradients[0], "dense", "test.weights"))
        return loss

    step = tf.function(step) if is_traced else step
    data = slip.distributed.pad_to_equal_steps(dataset_of(batches), comm)
    if prefetch:
        data = slip.distributed.prefetch_keys(data)
    losses = []
    for _ in range(EPOCHS):
        losses += [step(x, y) for x, y in data]
        if prefetch:
            embeddings.store.discard_prefetched()
    return [*state_of(comm, embeddings, [weights]), np.array(losses)]


def tensor_of(variable: Any) -> Any:
    return variable if isinstance(variable, tf.Variable) else variable.value


def refuses(comm: Any) -> None:
    """Asserts that unsupported settings raise errors before training starts."""
    for options, text in (
        ({"placement": "replicated", "prefetch": True}, "'sharded'"),
        ({"placement": "replicated"}, None),
    ):
        try:
            make_embeddings(comm, **options)
        except ValueError as error:
            assert text is not None and text in str(error), str(error)
        else:
            assert text is None, options
    data = slip.distributed.pad_to_equal_steps(dataset_of(batches_of(0, True)), comm)
    embeddings = make_embeddings(comm, prefetch=True)
    try:
        make_model(comm, embeddings).fit(
            data, verbose=0, callbacks=[slip.keras.RanksCallback(comm, embeddings.store)]
        )
    except ValueError as error:
        assert "prefetch_keys" in str(error), str(error)
    else:
        raise AssertionError("training without next_keys raised no error")
    keys = tf.zeros([2, FIELDS], tf.int64)
    try:
        make_embeddings(comm)(keys, training=True, next_inputs=keys)
    except ValueError as error:
        assert "prefetch=True" in str(error), str(error)
    else:
        raise AssertionError("next_keys without prefetch=True raised no error")


def main() -> None:
    """Compares training with and without prefetching."""
    way = sys.argv[1]
    comm = slip.distributed.init()
    # Frequent keys are saturated only after some windows.
    is_long = way == "mask"
    batches = batches_of(comm.rank, is_long)
    if comm.rank + 1 == comm.size and not is_long:
        batches = []  # This rank never has an example.
    pairs = [[fit(batches, comm, way, prefetch) for prefetch in (False, True)]]
    if way == "plain":
        refuses(comm)
        for is_traced in (False, True):
            pairs.append([loop(batches, comm, is_traced, prefetch) for prefetch in (False, True)])
    for at_once, ahead in pairs:
        for got, wanted in zip(ahead, at_once, strict=True):
            np.testing.assert_array_equal(got, wanted)
    print(f"rank {comm.rank} of {comm.size}: equal", flush=True)


if __name__ == "__main__":
    main()
