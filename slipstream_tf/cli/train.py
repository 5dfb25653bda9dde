"""`slipstream-train`: one training run, with saturated inputs skipped or as a control.

In: flags. Out: a progress bar, metrics.json in the output folder, a short table.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slipstream_tf import launch
from slipstream_tf.cli import data, engine_flags, presets, switch_on
from slipstream_tf.cli.checkpoints import Saving, saving_of
from slipstream_tf.cli.flag_set import (
    Choice,
    FlagSet,
    Integer,
    Names,
    Number,
    Text,
    UsageError,
    Widths,
    run_program,
)
from slipstream_tf.cli.folders import make_output
from slipstream_tf.cli.quiet import import_tensorflow
from slipstream_tf.cli.ranks import agreed, run_rank
from slipstream_tf.cli.settings import Settings, read_record, resolve
from slipstream_tf.saturation_config import DRIFT_METRICS
from slipstream_tf.telemetry.run_record import RECORD, PhaseClock, write_json
from slipstream_tf.telemetry.table import format_table, number, seconds

if TYPE_CHECKING:
    from slipstream_tf.distributed import Communicator

_PRESET = {
    "model": (Choice(("dlrm", "dcn", "deepfm")), "the model: DLRM, DCN-v2 or DeepFM"),
    "dim": (Integer(1, 65536), "values per embedding row"),
    "bottom": (
        Widths(True),
        "units of the hidden layers of DLRM's bottom MLP (data with numbers only)",
    ),
    "mlp": (Widths(True), "units of the hidden layers of DLRM's top MLP, or the others' deep MLP"),
    "cross_layers": (Integer(1), "number of cross layers of DCN-v2"),
    "dropout": (Number(0, 1, open_maximum=True), "share of hidden units dropped in training"),
    "batch_size": (Integer(1, 1 << 24), "inputs per step, of each rank"),
    "epochs": (Integer(1), "passes over the training part"),
    "rows_optimizer": (
        Choice(("sgd", "adagrad", "rowwise_adagrad", "adam")),
        "update rule of the embedding rows; Adagrad's sums of squares start at 0",
    ),
    "rows_learning_rate": (Number(0), "learning rate of the rows, in their unit per step"),
    "rows_init": (Number(0), "rows start uniform between minus this and this, in their unit"),
    "learning_rate": (Number(0), "learning rate of Adam on the dense layers, per step"),
    "snapshot_interval": (
        Integer(1),
        "window length in steps; the default of 1000 becomes a 20th of the planned steps, but not "
        "less than 5, where that is shorter",
    ),
    "target_skip": (Number(0, 1), "share of the hot inputs to skip"),
    "alpha": (Number(0, 1, True), "share of an input's lookups that must be saturated"),
    "hot_budget_mb": (Number(0, open_minimum=True), "MiB of snapshots; bounds the hot set"),
}

# What `--help` lists: a screen of them.
_BASIC = (
    *("data", "max_inputs", "output", "model", "dim", "batch_size", "epochs"),
    *("seed", "skip", "target_skip", "warmup", "score", "defer_movement", "shadow", "control"),
    "match",
)


def make_flags() -> FlagSet:
    """Returns the program's flags."""
    flags = FlagSet(
        "slipstream-train",
        "Trains a click model plainly, with skipping (--skip), in shadow mode (--shadow), or as a "
        "control (--control). Ends with a table, and writes metrics.json. Under horovodrun or "
        "mpirun the ranks train one model; --batch_size is that of each rank.",
        (
            "slipstream-train --data=globo_clicks.npz --shadow",
            "slipstream-train --data=globo_clicks.npz --output=runs/plain",
            "slipstream-train --data=globo_clicks.npz --skip=inputs --output=runs/paper",
            "slipstream-train --control=random --match=runs/paper/metrics.json --output=runs/rnd",
            "horovodrun -np 2 slipstream-train --data=globo_clicks.npz --output=runs/ranks",
        ),
        basic=_BASIC,
    )

    def add_presets(*names: str) -> None:
        for name in names:
            parser, text = _PRESET[name]
            flags.add(name, parser, None, text, presets.describe(name))

    flags.group("Data and output")
    flags.add("data", Text(), None, data.DATA_HELP)
    flags.add("split", Choice(("random", "time")), None, "split of the globo task", "random")
    flags.add("label_column", Text(), None, "column of the label, of Parquet data")
    flags.add("key_columns", Names(), None, "columns of the keys, of Parquet data")
    flags.add("dense_columns", Names(), None, "columns of numbers, of Parquet data")
    text = "read the shards of slipstream-prepare in an order that --seed and the epoch give"
    flags.add_switch("shuffle_shards", text)
    flags.add(
        "max_inputs", Integer(1), None, "stop after this many inputs, over all epochs and ranks"
    )
    flags.add_switch("strict", "a line that cannot be read ends the run, instead of being counted")
    flags.add("output", Text(), None, "folder for metrics.json; without it nothing is written")
    text = "folder for a SavedModel of the trained model; it needs TensorFlow alone"
    flags.add("export", Text(), None, text)
    text = "folder for TensorBoard's curves and histograms of the windows"
    flags.add("tensorboard", Text(), None, text)
    text = "steps between measurements of the test part in training; their time is evaluation's"
    flags.add("evaluate_every", Integer(1), None, text, "at the end only")
    text = "steps of the job between checkpoints in OUTPUT/checkpoints; 0: none are saved"
    flags.add("checkpoint_every", Integer(0), 0, text)
    flags.add("keep_checkpoints", Integer(1), 3, "checkpoints that are kept, the newest ones")
    text = "go on from the newest checkpoint, of the same flags; without one, from the beginning"
    flags.add_switch("resume", text)
    flags.group("Model")
    add_presets("model", "dim", "bottom", "mlp", "cross_layers", "dropout")
    flags.add("store", Choice(("native",)), "native", "what holds the embedding rows")
    text = "most rows of each table, on each rank; not with replicated tables of several"
    flags.add("capacity", Integer(1), None, text, "no bound")
    text = "which row leaves a full table: the one not used for longest, or least often"
    flags.add("eviction", Choice(("lru", "lfu")), "lru", text)
    flags.group("Training")
    add_presets("batch_size", "epochs", "rows_optimizer", "rows_learning_rate", "rows_init")
    add_presets("learning_rate")
    flags.add("seed", Integer(0, (1 << 31) - 1), 0, "of rows, layers, data order and sampling")
    precisions = Choice(("float32", "mixed_bfloat16"))
    flags.add("precision", precisions, "float32", "of the dense layers; rows are float32")
    flags.add(
        "threads",
        Integer(1, 1024),
        None,
        "threads of TensorFlow and the data, of each rank",
        "all cores",
    )
    flags.group("Several ranks (under horovodrun or mpirun)")
    placements = Choice(("replicated", "sharded"))
    text = (
        "where embedding rows are held: all of them on every rank, or spread over the ranks by hash"
    )
    flags.add("placement", placements, "replicated", text)
    text = "in which embedding rows travel between ranks"
    flags.add("wire_dtype", Choice(("float32", "bfloat16")), "float32", text)
    text = "steps before rows are rounded to --wire_dtype: rounding disturbs the first ones most"
    flags.add("wire_warmup_steps", Integer(0), None, text, "the steps of --warmup")
    text = "with --placement=sharded: send the next batch's keys while this one trains"
    flags.add_switch("prefetch", text)
    text = "with --placement=sharded: read copies of hot rows until they have moved by this"
    flags.add("copy_movement", Number(0), None, text, "no copies")
    flags.group("Skipping")
    text = "inputs: leave skippable ones out; gradients: mask those of saturated keys; defer: hold "
    text += "gradients back and apply their sum; both: inputs and defer"
    flags.add("skip", Choice(engine_flags.SKIP_CHOICES), "none", text)
    add_presets("target_skip", "alpha")
    flags.add("metric", Choice(DRIFT_METRICS), "linf", "drift of a row from its snapshot")
    flags.add(
        "max_threshold", Number(0), None, "upper bound of the threshold T, in the unit of --metric"
    )
    add_presets("snapshot_interval", "hot_budget_mb")
    flags.add("warmup", Number(0, 1), 0.25, "share of the planned steps before any skipping")
    flags.add("warmup_steps", Integer(0), None, "the same in steps", "by --warmup")
    engine_flags.add_to(flags)
    flags.add_switch("track", "with --skip=none: find T and saturated keys all the same")
    flags.group("Controls")
    kinds = Choice(("none", "random", "stop"))
    flags.add(
        "control",
        kinds,
        "none",
        "random: leave out as many inputs as the matched run, whatever their keys; stop: train "
        "plainly until as many are trained",
    )
    flags.add(
        "match",
        Text(),
        None,
        "metrics.json of the run that the control repeats; settings not given come from it",
    )
    flags.add_switch(
        "segregate",
        "train on batches of hot and batches of cold inputs; hot keys, within --hot_budget_mb, are "
        "chosen in a pass over the data before training",
    )
    return flags


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """What is known before TensorFlow runs.

    Attributes:
        values: by flag.
        given: flags that stood on the command line.
        settings: of the run.
        saving: of checkpoints.
        clock: has the time that reading took so far.
        start: of the program, by `time.perf_counter`.
    """

    values: dict[str, Any]
    given: frozenset[str]
    settings: Settings
    saving: Saving
    clock: PhaseClock
    start: float


def main(values: dict[str, Any], given: frozenset[str], callbacks: Sequence[Any] = ()) -> None:
    """Runs the program as one process, with callbacks beside its own."""
    prepared = prepare(values, given)
    from slipstream_tf.distributed import SingleProcess

    carry_out(prepared, SingleProcess(), callbacks)


def prepare(values: dict[str, Any], given: frozenset[str]) -> _Prepared:
    """Resolves the settings, makes the output folder (rank 0 alone), and imports TensorFlow."""
    start = time.perf_counter()
    clock = PhaseClock()
    settings = resolve(values, given, lambda path: data.name_of(path, clock))
    saving = saving_of(values, given, start)
    if values["output"] is not None and not launch.rank():
        make_output(values["output"])
    if values["export"] is not None and not launch.rank():
        _require_free(values["export"])
    # It takes seconds: not for --help or a misspelt flag.
    import_tensorflow()
    _set_threads(settings.threads)
    return _Prepared(values, given, settings, saving, clock, start)


def carry_out(prepared: _Prepared, comm: Communicator, callbacks: Sequence[Any] = ()) -> None:
    """Runs, with callbacks beside; rank 0 writes the record and prints the table."""
    from slipstream_tf.cli import session

    values, given, settings = prepared.values, prepared.given, prepared.settings
    with agreed(comm, "data"):
        _require_matched_size(values["match"], comm.size)
        with prepared.clock.phase("reading"):
            parts = data.open_parts(settings, ids=settings.needs_ids)
        if "bottom" in given and not parts.train.spec.num_dense:
            raise UsageError(
                f"Flag --bottom does nothing here: {parts.train.spec.name} data has no numbers. "
                "Allowed: with data that has dense columns."
            )
    is_chosen = "snapshot_interval" in given or values["match"] is not None
    if settings.uses_engine and not is_chosen:
        steps = session.planned_steps_of(settings, parts, comm.size)
        windows = presets.window_steps(parts.train.spec.name, steps)
        settings = dataclasses.replace(settings, snapshot_interval=windows)
    record = session.run(
        settings, parts, prepared.clock, comm, values["export"], prepared.saving, callbacks
    )
    if comm.rank:
        return
    record["flags"] = {name: values[name] for name in sorted(given)}
    record["wall_seconds"] += time.perf_counter() - prepared.start
    if values["output"] is not None:
        write_json(os.path.join(values["output"], RECORD), record)
    print(summary(record, settings))
    if record["shadow"] is not None and record["shadow"]["savings"]:
        print(f"\n{switch_on.words(record['flags'], settings, comm.size)}")


def summary(record: dict[str, Any], settings: Settings) -> str:
    """Returns the table that ends a run."""
    inputs, phases = record["inputs"], record["seconds"]
    windows = [w for w in record["windows"] if w["hot_keys"]]
    test = record["test"]
    rows = [
        ("test AUC", number(test["auc"], 4)),
        ("test log loss", number(test["log_loss"], 4)),
        ("calibration", number(test["calibration"], 3)),
        ("inputs seen", f"{inputs['seen']:,}"),
        ("inputs trained", f"{inputs['trained']:,} ({_share(inputs['trained'], inputs['seen'])})"),
        ("inputs skipped", f"{inputs['skipped']:,} ({_share(inputs['skipped'], inputs['seen'])})"),
        ("lines left out", f"{inputs['bad_lines'] + record['test_bad_lines']:,}"),
    ]
    if windows and settings.control != "random":
        last = windows[-1]
        rows.append(("last threshold T", f"{last['threshold']:.3g}"))
        rows.append(("last saturated share", f"{last['saturated_share']:.1%} of the hot keys"))
    ranks = record["ranks"]
    if ranks["size"] > 1:
        rows.append(("ranks", f"{ranks['size']}"))
        rows.append(("MB between ranks", f"{sum(ranks['bytes'].values()) / 1e6:,.1f}"))
    rows += [(f"seconds, {name.replace('_', ' ')}", seconds(s)) for name, s in phases.items()]
    table = format_table((f"{record['data']}, {settings.model}", "value"), rows)
    return f"{table}\n\n{record['summary']}" if record["summary"] else table


def _require_matched_size(match: str | None, size: int) -> None:
    """A control on other ranks would train with batches of another size."""
    if match is None:
        return
    before = read_record(match, "match").get("ranks", {}).get("size", 1)
    if before != size:
        raise UsageError(
            f"Invalid flag --match={match} on {size} rank(s): the matched run had {before}. "
            "Allowed: as many ranks."
        )


def _require_free(path: str) -> None:
    """Refuses a folder that has something in it before the run, not after hours of training."""
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise UsageError(
            f"Invalid flag --export={path}: something is there. Allowed: a folder that is not "
            "there yet, or is empty."
        )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "n/a"


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    import tensorflow as tf

    config = tf.config.threading
    for get, put in (
        (config.get_intra_op_parallelism_threads, config.set_intra_op_parallelism_threads),
        (config.get_inter_op_parallelism_threads, config.set_inter_op_parallelism_threads),
    ):
        if get() != threads:
            try:
                put(threads)
            except RuntimeError:
                raise UsageError(
                    f"Invalid flag --threads={threads}: TensorFlow runs in this process already. "
                    "Allowed: in a process of its own."
                ) from None


def entry_point(arguments: Sequence[str] | None = None, callbacks: Sequence[Any] = ()) -> None:
    """Runs the program, alone or as a rank, and ends the process with its exit code.

    Args:
        arguments: of the command line; default: those of this process.
        callbacks: Keras callbacks of the steps, beside the program's own.
    """
    if launch.rank() is None:
        sys.exit(run_program(make_flags(), functools.partial(main, callbacks=callbacks), arguments))
    run = functools.partial(carry_out, callbacks=callbacks)
    sys.exit(run_rank(make_flags(), prepare, run, arguments))


if __name__ == "__main__":
    entry_point()
