"""A rank of test_programs.py: `fit` with apply="step" trains as with apply="backward".

And what Keras does to gradients it does alike on all ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

sys.path.append(str(Path(__file__).resolve().parents[1]))
from contract_models import TABLES, contents, data, differ, make_layer, make_model

from slipstream_tf import distributed
from slipstream_tf.keras import RanksCallback, StepOptimizer

SETTINGS: list[dict[str, Any]] = [{}, {"global_clipnorm": 0.02}, {"gradient_accumulation_steps": 2}]
KEYS, LABELS = data()


def fitted(
    comm: Any,
    apply: str,
    settings: dict[str, Any],
    placement: str = "replicated",
    passes: int = 1,
) -> dict[str, np.ndarray]:
    """Trains two epochs on this rank's part of each batch; returns rows, slots and weights."""
    layer = make_layer(apply=apply, comm=comm, placement=placement)
    optimizer = distributed.DistributedOptimizer(
        keras.optimizers.SGD(**settings), comm, backward_passes_per_step=passes
    )
    model = make_model(StepOptimizer(optimizer) if apply == "step" else optimizer, layer)
    batches = tf.data.Dataset.from_tensor_slices((KEYS, LABELS)).batch(16)
    own = batches.map(lambda *batch: tuple(part[comm.rank :: comm.size] for part in batch))
    model.fit(own, epochs=2, verbose=0, callbacks=[RanksCallback(comm, layer.store)])
    return contents(model)


def main() -> None:
    """Compares places and ranks."""
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
    # Gradients of the weights are exchanged once for two passes.
    before = comm.traffic().bytes["dense"]
    once = fitted(comm, "step", {})
    between = comm.traffic().bytes["dense"]
    added_up = fitted(comm, "step", {}, passes=2)
    after = comm.traffic().bytes["dense"]
    assert differ(fitted(comm, "step", {"gradient_accumulation_steps": 2}), added_up) == set()
    assert differ(once, added_up) != set()
    # Rank 0 gives its weights to all, too.
    assert after - between < 0.7 * (between - before)
    print(f"rank {comm.rank} of {comm.size}: steps as they should be", flush=True)


if __name__ == "__main__":
    main()
