"""Trains with every policy in turn, for test_resume_exact.py.

    resuming_exactly.py DIRECTORY RESULTS WHAT

DIRECTORY receives the checkpoints, with a folder per policy. RESULTS receives a file per policy
with the complete final state. WHAT is one of

- "straight": train 2k steps,
- "killed": save after k steps, continue, and be killed with SIGKILL during the next checkpoint,
- "resumed": continue from the saved checkpoints.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf._utils import disk

HALF, BATCH, FIELDS, WINDOW = 45, 32, 3, 8
# HALF is not a multiple of the window length, so that checkpoints are taken within a window.
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "mask": {
        "policies": slip.MaskGradients(fraction=0.6),
        "saturation": slip.Saturation(metric="l2", revisit_every=3),
    },
    "defer": {"policies": slip.DeferGradients(slip.Movement(0.05, max_age=20))},
    "inputs": {
        "policies": slip.SkipExamples(slip.RowDrift(), fraction=0.5, keep_rate=0.3),
    },
    "predicted": {
        "policies": slip.SkipExamples(slip.PredictedLoss("linear", memory=1 << 11), fraction=0.4),
    },
    "both": {
        "policies": [
            slip.SkipExamples(slip.RowDrift(), fraction=0.4, keep_rate=0.2),
            slip.DeferGradients(slip.Movement(0.05)),
        ]
    },
    "random": {"policies": slip.baselines.SkipAtRandom((0.1, 0.5, 0.3))},
}
RULES = {
    "mask": slip.optimizers.Adam(0.05),
    "none": slip.optimizers.RowWiseAdagrad(0.1, 0.0, 1e-8),
}


def dataset() -> tf.data.Dataset:
    """Returns shuffled batches of Zipf-distributed keys, repeated forever."""
    random = np.random.default_rng(7)
    inputs = 2 * HALF * BATCH
    keys = (random.zipf(1.3, (inputs, FIELDS)) % 60).astype(np.int64)
    features = {"keys": keys, "dense": random.normal(size=(inputs, 2)).astype(np.float32)}
    labels = (random.random((inputs, 1)) < 0.2 + 0.1 * (keys[:, :1] % 5)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((features, labels))
    return data.shuffle(200, seed=5, reshuffle_each_iteration=True).repeat().batch(BATCH, True)


def run(way: str, directory: Path, results: Path, what: str) -> None:
    """Trains with one policy."""
    keras.utils.set_random_seed(3)
    tables = [
        slip.Table(
            f"f{i}",
            dim=4,
            retention=slip.Retention(40, "lru") if i == 0 else None,
            initializer=slip.initializers.RandomUniform(seed=i),
        )
        for i in range(FIELDS)
    ]
    rule = RULES.get(way, slip.optimizers.Adagrad(0.1, 0.0, 1e-8))
    embeddings = slip.keras.EmbeddingCollection(tables, rule)
    model = slip.models.DCNv2(embeddings, 2, 1, deep=[8])
    slipstream = slip.Slipstream(
        embeddings,
        window=slip.Window(WINDOW, warmup=0),
        hot_set=slip.HotSet(memory=1 << 12),
        **WAYS[way],
    )
    data = dataset()
    first = next(iter(data))[0]
    model({name: first[name] for name in ("keys", "dense")}, training=False)
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    @tf.function
    def train_step(features: Any, labels: Any, weights: Any) -> tf.Tensor:
        inputs = {name: features[name] for name in ("keys", "dense")}
        with tf.GradientTape() as tape:
            predicted = model(inputs, training=True)
            losses = keras.losses.binary_crossentropy(labels, predicted)
            loss = tf.reduce_mean(losses * weights)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        if slipstream.settings.needs_losses:
            slipstream.record_losses(features, losses, labels[:, 0], weights=weights)
        return loss

    inputs = iter(slipstream.apply(data, BATCH))
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    saved = slip.distributed.CheckpointManager(
        directory / way,
        checkpoint,
        slip.distributed.SingleProcess(),
        embeddings.store,
        engine=slipstream,
        rank_checkpoint=tf.train.Checkpoint(inputs=inputs),
    )
    step = 0
    losses: list[float] = []
    if what == "resumed":
        last = saved.restore()
        assert last is not None and last.step == HALF and last.path.name == "checkpoint-000001"
        assert last.position == {"batches": HALF}
        step, losses = last.step, last.rng
    end = HALF + 3 if what == "killed" else 2 * HALF
    while step < end:
        element = next(inputs)
        weights = element[2] if len(element) > 2 else tf.ones(tf.shape(element[1])[0])
        losses.append(float(train_step(element[0], element[1], weights)))
        slipstream.step()
        step += 1
        if step == HALF and what != "resumed":
            saved.save(step, position={"batches": step}, rng=losses)
    saved.wait()
    if what == "killed":
        return
    # The state of the classifier is read below. A batch in preparation would change it.
    slipstream.wait_until_idle()
    state = {"losses": np.array(losses)}
    state |= {f"weight_{i}": w.numpy() for i, w in enumerate(model.trainable_variables)}
    state |= {f"optimizer_{i}": v.numpy() for i, v in enumerate(optimizer.variables)}
    for table in tables:
        deferred = embeddings.store.export_deferred(table.name)
        state |= {f"{table.name}_held_{n}": values for n, values in deferred.items()}
        contents = embeddings.store.export_table(table.name, flush=False)
        state |= {f"{table.name}_{n}": values for n, values in contents.items()}
        states = slipstream.tracker.states[table.name]
        for name in ("keys", "states", "drift"):
            state[f"{table.name}_states_{name}"] = getattr(states, name)
    classifier = slipstream.tracker.classifier
    for name, values in {**classifier.export_pilot(), **classifier.export_window()}.items():
        state[f"classifier_{name}"] = values
    np.savez(results / f"{way}.npz", **state)
    reports = [report.to_dict() for report in slipstream.tracker.reports]
    for report in reports:
        del report["seconds"]
        for table in report["tables"]:
            # Remove the buffer size because it depends on the earlier peak of the process.
            del table["rows"]["deferred_bytes"]
    (results / f"{way}.json").write_text(json.dumps(reports, indent=1))


def main() -> None:
    """Trains with all policies.

    In the mode "killed", the last run ends within a checkpoint.
    """
    directory, results, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    for way in WAYS:
        run(way, directory, results, what)
        print(way, flush=True)
    if what == "killed":
        # Start a second checkpoint of the last policy. The process is killed when it is half
        # written.
        disk.sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)
        variable = tf.Variable(0.0)
        slip.distributed.CheckpointManager(
            directory / list(WAYS)[-1],
            tf.train.Checkpoint(variable=variable),
            slip.distributed.SingleProcess(),
            None,
        ).save(HALF + 3)


if __name__ == "__main__":
    main()
