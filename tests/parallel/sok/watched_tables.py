"""Checkpoints of a custom loop with variables that a SokStore watches.

Arguments: cases, each "optimizer,way". Optimizers "legacy.*" are the optimizers of Keras 2.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf._utils.agreement import gather_json
from slipstream_tf.distributed import CheckpointManager, ShardedStore, init
from slipstream_tf.tables import NativeStore, SokStore
from slipstream_tf.tables.sok import wrap_optimizer
from slipstream_tf.tables.sok.table import open_sok

DIM, KEYS, BATCH, STEPS, SAVED, ROWS = 4, 50, 24, 18, 10, 64
NATIVE = {
    "sok.SGD": slip.optimizers.SGD(0.1),
    "Adagrad": slip.optimizers.Adagrad(0.1, 0.1, 1e-12),
    "Adam": slip.optimizers.Adam(0.05),
    "legacy.Adagrad": slip.optimizers.Adagrad(0.1, 0.1),
    "legacy.Adam": slip.optimizers.Adam(0.05),
}
WAYS = {
    "mask": slip.MaskGradients(fraction=0.6),
    "interval": slip.DeferGradients(slip.Interval(7, fraction=0.6)),
    "movement": slip.DeferGradients(slip.Movement(0.05, max_age=9)),
}


def optimizer_of(name: str):
    first = tf.compat.v1.train
    if name == "sok.SGD":
        return open_sok().SGD(0.1)
    if name.startswith("legacy."):
        return wrap_optimizer(getattr(tf.keras.optimizers.legacy, name[7:])(0.1))
    made = {
        "Adagrad": lambda: first.AdagradOptimizer(0.1, 0.1),
        "Adam": lambda: first.AdamOptimizer(0.05),
        "Momentum": lambda: first.MomentumOptimizer(0.05, 0.5),
    }
    return wrap_optimizer(made[name]())


class Loop:
    """A custom training loop with the three calls of this package."""

    def __init__(self, comm, name: str, way: str, is_static: bool = False) -> None:
        sok = open_sok()
        if is_static:
            start = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
            self.variable = sok.Variable(start)
            self.updater = tf.compat.v1.train.GradientDescentOptimizer(0.05)
        else:
            self.variable = sok.DynamicVariable(
                dimension=DIM, initializer="0.25", var_type="hybrid", name="items",
                init_capacity=256, max_capacity=256,
            )  # fmt: skip
            self.updater = optimizer_of(name)
        self.comm = comm
        self.store = SokStore({"t": self.variable}, None if is_static else self.updater, comm)
        self.engine = slip.Slipstream(
            self.store,
            WAYS[way],
            window=slip.Window(4, warmup=0, seed=3),
            saturation=None if way == "movement" else slip.Saturation(metric="l2"),
        )

    def checkpoints(self, folder: Path) -> CheckpointManager:
        return CheckpointManager(
            folder, tf.train.Checkpoint(), self.comm, self.store, engine=self.engine,
            background=False,
        )  # fmt: skip

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            random = np.random.default_rng(step)
            keys = np.minimum(random.zipf(1.3, BATCH), KEYS)[self.comm.rank :: self.comm.size]
            keys = tf.constant(keys, tf.int64)
            self.engine.observe({"t": keys})
            with tf.GradientTape() as tape:
                rows = open_sok().all2all_dense_embedding(self.variable, keys)
                loss = tf.reduce_mean(tf.square(rows - tf.sin(float(step)))) / self.comm.size
            pairs = [(tape.gradient(loss, self.variable), self.variable)]
            self.updater.apply_gradients(self.store.filter_gradients(pairs))
            self.engine.step()

    def found(self) -> dict:
        tracker = self.engine.tracker
        return {
            **self.store.export_table("t"),
            **{f"held {n}": v for n, v in self.store.export_deferred("t").items()},
            **{f"accessed {n}": v for n, v in self.store.export_accesses("t").items()},
            "states": tracker.states["t"].states,
            "threshold": tracker._threshold,
        }


def same(one: dict, other: dict, names=None) -> None:
    for name in names or one:
        np.testing.assert_array_equal(one[name], other[name], name)


def go_on(comm, folder: Path, name: str, way: str, is_static: bool = False) -> dict:
    straight, stopped, resumed = (Loop(comm, name, way, is_static) for _ in range(3))
    straight.train(0, STEPS)
    stopped.train(0, SAVED)
    stopped.checkpoints(folder).save(SAVED)
    was = stopped.found()
    # A key of a first batch. Programs run such a batch to create their variables.
    first = tf.constant([0 if is_static else 999], tf.int64)
    open_sok().all2all_dense_embedding(resumed.variable, first)
    assert resumed.checkpoints(folder).restore().step == SAVED
    if is_static:
        same(was, resumed.found())
    resumed.train(SAVED, STEPS)
    one, other = straight.found(), resumed.found()
    is_known = other["keys"] != 999
    for part in ("keys", "rows", "slots", "counts"):
        other[part] = other[part][is_known]
    same(one, other)
    deferred = sum(gather_json(comm, int(was["held keys"].size), f"held.{name}.{way}"))
    assert (deferred > 0) == (way != "mask"), deferred
    return was


def in_native_tables(comm, folder: Path, name: str, way: str, was: dict) -> None:
    """Restores the checkpoint into native tables and back into SOK.

    Both are exact, because the rows in SOK are stored without an initial row.
    """

    def store(rule):
        table = [slip.Table("t", DIM)]
        return NativeStore(table, rule) if comm.size == 1 else ShardedStore(table, rule, comm)

    def saved(store, folder: Path) -> CheckpointManager:
        return CheckpointManager(folder, tf.train.Checkpoint(), comm, store, background=False)

    here = store(NATIVE[name])
    assert saved(here, folder).restore().placement == "spread"
    # Only without deferred sums, because applying them counts as an additional update.
    if "Adam" in name and way == "mask":
        assert here.export_table("t", flush=False)["steps"][0] == SAVED
    saved(here, folder / "native").save(1)
    back = Loop(comm, name, "mask")
    checkpoints = saved(back.store, folder / "native")
    assert checkpoints.restore().step == 1
    contents, now = here.export_table("t", flush=False), back.store.export_table("t")
    rows, slots = everyones(comm, f"native.{name}", contents)
    own_rows, own_slots = everyones(comm, f"sok.{name}", now)
    assert rows == own_rows and slots == own_slots
    if way == "mask" and comm.size == 1:
        same(was, now, ("keys", "rows", "slots"))


def everyones(comm, name: str, contents: dict) -> list[dict]:
    columns = [
        dict(zip(map(str, contents["keys"].tolist()), contents[n].tolist(), strict=True))
        for n in ("rows", "slots")
    ]
    found: list[dict] = [{}, {}]
    for part in gather_json(comm, columns, f"{name}.contents"):
        for merged, column in zip(found, part, strict=True):
            assert not set(merged) & set(column)
            merged |= column
    return found


def main() -> None:
    comm = init()
    for case in sys.argv[1:]:
        folder = Path(gather_json(comm, tempfile.mkdtemp(), f"folder.{case}")[0])
        name, way = case.split(",")
        was = go_on(comm, folder, name, way, is_static=name == "static")
        if name in NATIVE:
            in_native_tables(comm, folder, name, way, was)
        print(case)
    print("all checks passed")


if __name__ == "__main__":
    main()
