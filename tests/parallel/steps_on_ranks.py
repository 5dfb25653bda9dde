"""Compares `fit` with apply="step" and apply="backward", for test_programs.py.

Also checks that Keras's changes to gradients, for example clipping, are equal on all ranks.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

sys.path.append(str(Path(__file__).resolve().parents[1]))
from contract_models import TABLES, contents, data, differ, make_layer, make_model

from slipstream_tf import distributed
from slipstream_tf.keras import CombinedOptimizer, RanksCallback

SETTINGS: list[dict[str, Any]] = [{}, {"global_clipnorm": 0.02}, {"gradient_accumulation_steps": 2}]
KEYS, LABELS = data()


def fitted(
    comm: Any,
    apply: str,
    settings: dict[str, Any],
    placement: str = "replicated",
    passes: int = 1,
) -> dict[str, np.ndarray]:
    """Trains two epochs on this rank's part of each batch.

    Returns:
        Rows, slots and weights by name.
    """
    layer = make_layer(apply=apply, comm=comm, placement=placement)
    optimizer = distributed.DistributedOptimizer(
        keras.optimizers.SGD(**settings), comm, backward_passes_per_step=passes
    )
    model = make_model(CombinedOptimizer(optimizer) if apply == "step" else optimizer, layer)
    batches = tf.data.Dataset.from_tensor_slices((KEYS, LABELS)).batch(16)
    own = batches.map(lambda *batch: tuple(part[comm.rank :: comm.size] for part in batch))
    model.fit(own, epochs=2, verbose=0, callbacks=[RanksCallback(comm, layer.store)])
    return contents(model)


def exchange_once_for_two_passes(comm: Any, placement: str) -> None:
    """Asserts that two backward passes per step are exchanged once.

    Compares the bytes of gradients for weights and for rows.
    """
    sent = [comm.traffic().bytes]
    once = fitted(comm, "step", {}, placement)
    sent.append(comm.traffic().bytes)
    added_up = fitted(comm, "step", {}, placement, passes=2)
    sent.append(comm.traffic().bytes)
    steps = {"gradient_accumulation_steps": 2}
    assert differ(fitted(comm, "step", steps, placement), added_up) == set()
    assert differ(once, added_up) != set()
    for kind in ("dense", "gradients"):
        plain, late = (b[kind] - a[kind] for a, b in itertools.pairwise(sent))
        # Rank 0 also broadcasts its weights, and few keys are in both batches of a step.
        assert 0 < late < (0.7 if kind == "dense" else 0.95) * plain, (kind, late, plain)


def looking_up_twice(optimizer: Any, layer: Any) -> keras.Model:
    """Returns a model that looks up its tables twice."""
    keras.utils.set_random_seed(3)
    keys = keras.Input((len(TABLES),), dtype="int64", name="keys")
    rows = keras.layers.Concatenate()([keras.layers.Flatten()(layer(keys)) for _ in range(2)])
    model = keras.Model(keys, keras.layers.Dense(1, activation="sigmoid", name="top")(rows))
    model.compile(optimizer, "binary_crossentropy")
    return model


def leave_out_what_is_not_finite(comm: Any, placement: str, make: Any) -> None:
    """Asserts that all ranks skip a step with a non-finite gradient.

    The gradient is not finite on one rank only.
    """
    layer = make_layer(apply="step", comm=comm, placement=placement)
    inner = distributed.DistributedOptimizer(keras.optimizers.SGD(0.1), comm)
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    model = make(CombinedOptimizer(scaled), layer)
    own = slice(comm.rank, 16, comm.size)
    before = None
    for step in range(4):
        labels = LABELS[own].astype(np.float32)
        if step == 2 and comm.rank == 1:
            labels = labels * np.inf
        model.train_on_batch(KEYS[own], labels)
        if step == 2:
            assert differ(before, contents(model)) == set(), (
                "a step that all ranks skip must not change weights"
            )
        before = contents(model)
    scales = comm.gather(
        tf.reshape(model.optimizer.dynamic_scale.value, [1]), "control", "scales"
    ).numpy()
    assert (scales == 2.0).all(), scales


def main() -> None:
    """Compares `apply` settings and ranks."""
    comm = distributed.init()
    plain = fitted(comm, "backward", {})
    for number, settings in enumerate(SETTINGS):
        rows = fitted(comm, "step", settings)
        assert (differ(plain, rows) == set()) == (not settings), settings
        flat = np.concatenate([rows[name].ravel().astype(np.float64) for name in sorted(rows)])
        both = comm.gather(tf.constant(flat[None]), "control", f"rows.{number}").numpy()
        assert (both == both[0]).all(), settings
        sharded = fitted(comm, "step", settings, "sharded")
        for table in TABLES:
            own = np.isin(rows[f"{table} keys"], sharded[f"{table} keys"])
            assert 0 < own.sum() < own.size, settings
            mine = np.argsort(sharded[f"{table} keys"])
            theirs = np.flatnonzero(own)[np.argsort(rows[f"{table} keys"][own])]
            for part in ("keys", "rows", "slots"):
                np.testing.assert_allclose(
                    sharded[f"{table} {part}"][mine],
                    rows[f"{table} {part}"][theirs],
                    rtol=0,
                    atol=2e-6,
                    err_msg=f"{table} {part} with {settings}",
                )
    for placement in ("replicated", "sharded"):
        exchange_once_for_two_passes(comm, placement)
        for make in (make_model, looking_up_twice):
            leave_out_what_is_not_finite(comm, placement, make)
    print(f"rank {comm.rank} of {comm.size}: all steps are correct", flush=True)


if __name__ == "__main__":
    main()
