"""A job on tables of any kind with engine and checkpoints.

Imported by moving.py and going_on.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import by_interval
import numpy as np
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.distributed import CheckpointManager

KEYS, GLOBAL_BATCH = 60, 24
DIMS = {"one": 4, "two": 3}
FEATURES = {"a": "one", "bag": "one", "b": "two"}
RULES = {
    "sgd": slip.optimizers.SGD(0.1),
    "adagrad": slip.optimizers.Adagrad(0.1, 0.1, 1e-12),
    "adam": slip.optimizers.Adam(0.05),
}
BY_KEYS = slip.Saturation(metric="l2", revisit_every=3)
# Policy, and the rule that makes a key saturated.
WAYS: dict[str, tuple[Any, slip.Saturation | None]] = {
    "mask": (slip.MaskGradients(fraction=0.6), BY_KEYS),
    "interval": (by_interval.DeferGradients(slip.Interval(7, fraction=0.6)), BY_KEYS),
    "movement": (slip.DeferGradients(slip.Movement(0.05, max_age=9)), None),
}


class Job:
    """The layer, dense weight, engine and checkpoints of one rank."""

    def __init__(
        self, comm: Any, store: str, rule: str, way: str, seed: int = 2, is_traced: bool = True
    ) -> None:
        """Creates a job with empty tables.

        Args:
            comm: Communicator of the ranks.
            store: "native", "sharded", "replicated" or "sok".
            rule: A name in `RULES`.
            way: A name in `WAYS`.
            seed: Seed of the initial rows of table "two".
            is_traced: Whether steps run in a `tf.function`. For few steps, tracing takes longer
                than the steps.
        """
        self.comm, self.is_in_sok = comm, store == "sok"
        retention = slip.Retention(1 << 10, "lru") if self.is_in_sok else None
        tables = [
            slip.Table(
                name,
                dim,
                combiner="mean",
                retention=retention,
                initializer=slip.initializers.RandomUniform(seed=seed if name == "two" else 1),
            )
            for name, dim in DIMS.items()
        ]
        placement = {"placement": store} if store in ("sharded", "replicated") else {}
        self.layer = slip.keras.EmbeddingCollection(
            tables, RULES[rule], FEATURES, store=store if self.is_in_sok else "native", comm=comm,
            **placement,
        )  # fmt: skip
        self.store, self.tables = self.layer.store, tables
        policy, saturation = WAYS[way]
        self.engine = slip.Slipstream(
            self.layer,
            policy,
            window=slip.Window(4, warmup=0, seed=3),
            hot_set=slip.HotSet(memory="1MiB"),
            saturation=saturation,
        )
        self.head = tf.Variable(tf.ones([sum(DIMS[t] for t in FEATURES.values())]))
        self._step = tf.function(self._train, autograph=False) if is_traced else self._train

    def checkpoints(self, folder: Path) -> CheckpointManager:
        state = tf.train.Checkpoint(layer=self.layer, head=self.head)
        return CheckpointManager(
            folder, state, self.comm, self.store, engine=self.engine, background=False
        )

    def _train(self, inputs: Any, step: Any) -> Any:
        with tf.GradientTape() as tape:
            rows = self.layer(inputs, training=True)
            joined = tf.concat([rows[name] for name in FEATURES], axis=1)
            wanted = tf.cast(tf.range(self.head.shape[0]), tf.float32) / 7.0 - 0.01 * step
            loss = tf.reduce_mean(tf.square(joined * self.head - wanted))
        gradient, anchor = tape.gradient(loss, [self.head, self.layer.update_anchor.value])
        everyones = self.comm.sum(gradient, "dense", "head") / self.comm.size
        with tf.control_dependencies([anchor]):
            return self.head.assign_sub(0.02 * everyones)

    def train(self, begin: int, end: int) -> None:
        """Trains the steps from `begin` to `end`.

        Each rank trains its part of the global batch.
        """
        for step in range(begin, end):
            random = np.random.default_rng(step)
            keys = np.minimum(random.zipf(1.3, (GLOBAL_BATCH, 4)), KEYS).astype(np.int64)
            mine = keys[self.comm.rank :: self.comm.size]
            inputs = {
                "a": tf.constant(mine[:, 0]),
                "bag": tf.constant(mine[:, 1:3]),
                "b": tf.constant(mine[:, 3] + 2**40),
            }
            self.engine.observe(inputs)
            self._step(inputs, tf.constant(float(step)))
            self.engine.step()

    def found(self) -> dict[str, Any]:
        """Returns the complete state of this rank as arrays by name."""
        tracker = self.engine.tracker
        found: dict[str, Any] = {
            "head": self.head.numpy(),
            "threshold": tracker._threshold,
            "reports": len(tracker.reports),
        }
        for name in DIMS:
            contents = self.store.export_table(name, flush=False)
            accesses = {n: contents[n] for n in ("keys", "counts")}
            if self.is_in_sok:
                accesses = self.store.export_accesses(name)
            of_table = {
                **{part: contents[part] for part in contents if part != "counts"},
                **{f"accessed {part}": values for part, values in accesses.items()},
                **{f"held {p}": v for p, v in self.store.export_deferred(name).items()},
                **{
                    f"states {field.name}": getattr(tracker.states[name], field.name)
                    for field in dataclasses.fields(tracker.states[name])
                },
            }
            found |= {f"{name} {part}": values for part, values in of_table.items()}
        return found
