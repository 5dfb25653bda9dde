"""Masking, deferring and dropping on a changing stream, by prediction before training.

In a click log in time order, the keys change: articles appear and lose popularity. A test part at
the end is not representative, because almost half of its articles are new. Therefore every example
is predicted before the model trains on it, including dropped examples. The AUC of these predictions
is compared.

    python benchmarks/stream.py --task=globo_1 --seeds=0,1,2
    python benchmarks/stream.py --task=globo_49 --seeds=0,1,2,3,4
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common
import numpy as np
import summary
from absl import app, flags

from slipstream_tf.cli import train
from slipstream_tf.cli.data import facts_of, open_parts
from slipstream_tf.cli.program import import_tensorflow
from slipstream_tf.cli.settings import Settings, resolve
from slipstream_tf.telemetry.run_record import write_json

if TYPE_CHECKING:
    import tensorflow as tf

_DATA = flags.DEFINE_string(
    "data",
    None,
    "Folder of data prepared by datasets/globo.py --split=time. By default, it is prepared first.",
)
_TASK = flags.DEFINE_string("task", None, "Name of the task, such as globo_1.", required=True)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of the runs.")
_RUNS = flags.DEFINE_list(
    "runs", [], "Names of the runs in addition to plain. The default is all runs."
)
_RECORDS = flags.DEFINE_string("records", "runs/stream", "Folder of the run records.")
_EXTRA = flags.DEFINE_multi_string(
    "train_flag", [], "Flag name=value of slipstream-train for all runs."
)

_UNPROBED = {"revisit_every": 0}
_MASK = {"policies": "mask_gradients"}
_INPUTS = {"policies": "skip_examples", "skip_score": "row_drift"}
_DEFER = {"policies": "defer_gradients"}
_BUDGET = {"max_auc_loss": 0.0005}
# The plain run is watched to count its gradient rows.
_WATCHED = {"watch": True}
_SUBSAMPLED = common.subsampled(0.85, batch_size=1024, **common.rates(0.0028))
# Kinds of controls. They do not use the engine.
RANDOM, STOP = "random", "stop"


@dataclasses.dataclass(frozen=True)
class Control:
    """A plain run that trains on as many examples as another run.

    Attributes:
        match: The other run, which is listed earlier.
        way: RANDOM drops examples at random after the warm-up of the other run. STOP stops
            training, and only predicts the rest of the stream.
    """

    match: str
    way: str


@dataclasses.dataclass(frozen=True)
class Task:
    """A stream and its runs.

    Attributes:
        options: Options of datasets/globo.py, without --split.
        flags: Flags of slipstream-train for all runs.
        runs: Flags by name of the run. The others are compared with "plain".
    """

    options: Mapping[str, Any]
    flags: Mapping[str, Any]
    runs: Mapping[str, Mapping[str, Any] | Control]


TASKS: Mapping[str, Task] = {
    "globo_1": Task(
        {},
        common.by_hand("globo"),
        {
            "plain": _WATCHED,
            "inputs": _INPUTS,
            "mask": _MASK,
            "mask_unprobed": {**_MASK, **_UNPROBED},
            "mask_budget": {**_MASK, **_BUDGET},
            "mask_budget_unprobed": {**_MASK, **_BUDGET, **_UNPROBED},
            "defer_0.005": {**_DEFER, "defer_movement": 0.005},
            "defer_0.01": {**_DEFER, "defer_movement": 0.01},
        },
    ),
    "globo_49": Task(
        {"negatives": 49, "clicks": 100_000},
        common.GLOBO_49,
        {
            # The same warm-up as the other runs, because predictions during the warm-up are not
            # counted.
            "plain": {**_WATCHED, "warmup": 0.05, "batch_size": 1024, **common.rates(0.0014)},
            "fm": {**_SUBSAMPLED, "pilot": "fm"},
            "uniform": {**_SUBSAMPLED, "pilot": "label"},
            "linear": {**_SUBSAMPLED, "pilot": "linear"},
            "random": Control("fm", RANDOM),
            "stop": Control("fm", STOP),
        },
    ),
}


def settings_of(data: Mapping[str, str], seed: int, flag_values: Mapping[str, Any]) -> Settings:
    """Returns the settings of slipstream-train for these flags."""
    given = common.explicit({**data, "shuffle": "none", "seed": seed, **flag_values})
    arguments = [f"--{name}={value}" for name, value in given.items()]
    flag_set = train.make_flags()
    values, names = flag_set.parse(arguments)
    return resolve(values, names, facts_of, flag_set)


def run(settings: Settings, way: str = "", trains: int = 0) -> dict[str, Any]:
    """Trains one pass over the stream; returns quality after warm-up and counts.

    Args:
        settings: The settings of the run.
        way: The kind of control. "" if the run is not a control.
        trains: The number of examples that a control trains on.
    """
    import keras
    import tensorflow as tf

    from slipstream_tf.cli.build import build_embeddings, build_engine, build_model
    from slipstream_tf.distributed import SingleProcess
    from slipstream_tf.keras.loss_feedback import binary_cross_entropy
    from slipstream_tf.telemetry.metrics import click_metrics

    keras.utils.set_random_seed(settings.seed)
    reader = open_parts(settings).train
    dataset, planned = reader.dataset(), reader.spec.num_examples
    assert planned is not None
    comm = SingleProcess()
    embeddings = build_embeddings(settings, reader.spec.features, comm)
    model = build_model(settings, embeddings, reader.spec.num_dense, comm)
    slipstream = build_engine(settings, embeddings, math.ceil(planned / settings.batch_size))
    assert slipstream is not None
    skips_examples = slipstream.settings.skips_examples or way == RANDOM
    predict = tf.function(lambda keys: model({"keys": keys}, training=False)[:, 0])
    logits: list[np.ndarray] = []
    labels: list[np.ndarray] = []

    def note(logit: Any, label: Any) -> None:
        logits.append(np.ravel(logit))
        labels.append(np.ravel(label))

    def predicted(features: Any, label: Any) -> Any:
        # Predict before the engine decides, with the rows as they are when the example arrives.
        done = tf.py_function(
            lambda keys, label: note(predict(keys), label), [features["keys"], label], []
        )
        with tf.control_dependencies([done]):
            return {**features, "keys": tf.identity(features["keys"])}, label

    @tf.function(reduce_retracing=True)
    def train_step(features: Any, label: Any, weight: Any) -> Any:
        label = tf.reshape(tf.cast(label, tf.float32), [-1])
        with tf.GradientTape() as tape:
            logit = model(features, training=True)[:, 0]
            losses = tf.nn.sigmoid_cross_entropy_with_logits(label, logit)
            loss = tf.reduce_mean(losses if weight is None else losses * weight)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        if slipstream.settings.needs_losses:
            losses = binary_cross_entropy(label, logit, True)
            slipstream.record_losses(None, losses, label, features["skippable"], weight)
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return logit

    # A lookup for prediction flushes deferred gradients and would disable deferring. If every
    # example is trained on, use the predictions of the training step, which precede the update.
    if skips_examples:
        dataset = dataset.map(predicted)
    if way == RANDOM:
        dataset = _subsampled(dataset, settings, planned, trains)
    trained, start = 0, time.perf_counter()
    # The upstream dataset predicts when it is read, so it must not be read ahead.
    kept = slipstream.apply(dataset, batch_size=settings.batch_size, ahead=False)
    for features, label, *weight in kept:
        if way == STOP and trained >= trains:
            note(predict(features["keys"]), label)
            continue
        logit = train_step(features, label, weight[0] if weight else None)
        if not skips_examples:
            note(logit, label)
        trained += int(label.shape[0])
        slipstream.step()
    seconds = time.perf_counter() - start
    slipstream.end_window()
    begin = min(slipstream.tracker.warmup_steps or 0, len(logits) - 1)
    # All batches are full, therefore the same number of examples is excluded in every run.
    quality = click_metrics(np.concatenate(labels[begin:]), np.concatenate(logits[begin:]))
    reports = [report for report in slipstream.tracker.reports if report.examples_seen]
    active = [table.rows for r in reports if not r.is_warming_up for table in r.tables]
    return {
        **quality.to_dict(),
        "examples_trained": trained,
        "inputs_predicted": sum(len(part) for part in labels),
        "rows_offered": sum(rows.offered for rows in active),
        "rows_sent": sum(rows.sent for rows in active),
        "seconds": seconds,
    }


def _subsampled(
    dataset: tf.data.Dataset, settings: Settings, planned: int, trains: int
) -> tf.data.Dataset:
    """Drops examples at random after the warm-up, until `trains` remain."""
    import tensorflow as tf

    from slipstream_tf.sampling.batches import chosen_rows

    warmup = math.ceil(planned / settings.batch_size * 0.05)
    first = warmup * settings.batch_size
    fraction = (trains - first) / (planned - first)
    random = tf.random.Generator.from_seed(settings.seed)

    def subsample(index: tf.Tensor, batch: Any) -> Any:
        drawn = random.uniform(tf.shape(batch[1])[:1])
        return chosen_rows(batch, (drawn < fraction) | (index < warmup))

    return dataset.enumerate().map(subsample).rebatch(settings.batch_size)


def results_of(
    task: str, figures: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> tuple[Any, Any]:
    """Returns the table and the claims by run and seed."""
    plain = figures["plain"]
    differences = [
        None if name == "plain" else [run["auc"] - plain[seed]["auc"] for seed, run in runs.items()]
        for name, runs in figures.items()
    ]

    def of(name: str, figure: str, form: str, is_share: bool = False) -> dict[str, Any]:
        found = [
            [run[figure] / (plain[seed][figure] if is_share else 1) for seed, run in runs.items()]
            for runs in figures.values()
        ]
        return summary.column(name, found, form, "mean")

    columns = [
        summary.column("run", list(figures)),
        of("AUC", "auc", "{:.4f}"),
        summary.column("AUC - plain", differences, "{:+.4f}", "mean each"),
        of("log loss", "log_loss", "{:.4f}"),
        of("examples", "examples_trained", "{:.1%}", True),
        of("rows sent / plain", "rows_sent", "{:.1%}", True),
    ]
    claims = {
        f"{task}_{name}_auc_minus_plain": summary.claim(
            values, -_BUDGET["max_auc_loss"] if "budget" in name else None,
            "higher", statistics.fmean,
        )
        for name, values in zip(figures, differences, strict=True)
        if values is not None
    }  # fmt: skip
    return {"": columns}, claims


def main(arguments: Sequence[str]) -> None:
    """Runs missing runs; prints and writes the comparison."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    if _TASK.value not in TASKS:
        raise app.UsageError(f"Invalid --task={_TASK.value}. Expected {', '.join(TASKS)}.")
    task = TASKS[_TASK.value]
    for name in _RUNS.value:
        if name not in task.runs:
            raise app.UsageError(f"Invalid --runs: {name!r}. Expected {', '.join(task.runs)}.")
    for seed in _SEEDS.value:
        if not seed.isdecimal():
            raise app.UsageError(f"Invalid --seeds: {seed}. Expected integers >= 0.")
    import_tensorflow()
    own = {"data": _DATA.value, "settings": str(Path(__file__).parent / "datasets/globo.json")}
    extra = common.extra_flags(_EXTRA.value)
    wanted = {"plain", *(_RUNS.value or task.runs)}
    controls = [task.runs[name] for name in wanted]
    wanted |= {control.match for control in controls if isinstance(control, Control)}
    chosen = [name for name in task.runs if name in wanted]
    figures: dict[str, dict[str, Any]] = {name: {} for name in chosen}
    for seed in _SEEDS.value:
        options = {"split": "time", **task.options}
        data = own if _DATA.value else common.opened("globo", int(seed), **options)
        for name in chosen:
            found, control = task.runs[name], Control("plain", "")
            if isinstance(found, Control):
                control, found = found, task.runs["plain"]
            assert isinstance(found, Mapping)
            folder = Path(_RECORDS.value) / _TASK.value / f"seed{seed}" / name
            given = {**task.flags, **found, **extra}
            reported = {**given, **dataclasses.asdict(control)}
            record = common.finished(folder, reported)
            if record is None:
                print(f"seed {seed}: {name}", flush=True)
                trains = figures[control.match][seed]["examples_trained"] if control.way else 0
                record = run(settings_of(data, int(seed), given), control.way, trains)
                write_json(str(folder / common.FLAGS), reported)
                write_json(str(folder / common.RECORD), record)
            figures[name][seed] = record
    part = f"{_TASK.value} in time order, {len(_SEEDS.value)} seeds"
    print(summary.write("stream", part, *results_of(_TASK.value, figures)))


if __name__ == "__main__":
    app.run(main)
