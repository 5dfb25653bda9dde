"""`slipstream-train`: trains a click model, optionally with policies.

The program shows a progress bar, writes metrics.json to the output folder and prints a table of
results. After a dry run it also prints the commands that switch the policies on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slipstream_tf._utils import agent
from slipstream_tf.cli import data
from slipstream_tf.cli.checkpoints import CheckpointSettings, checkpoint_settings, window_steps_of
from slipstream_tf.cli.flag_set import FROM_FILE, SETTINGS, UsageError, raised_as
from slipstream_tf.cli.program import agreed, import_tensorflow, make_output, run_program, run_rank
from slipstream_tf.cli.settings import Settings, idle_because, read_record, resolve
from slipstream_tf.cli.train_flags import has_pilot, make_flags
from slipstream_tf.config import Window
from slipstream_tf.telemetry.run_record import RECORD, PhaseClock, write_json
from slipstream_tf.telemetry.table import format_table, number, seconds

if TYPE_CHECKING:
    from slipstream_tf.distributed import Communicator
    from slipstream_tf.distributed.elastic import ElasticJob


_SAVES = {"skip_examples": "examples", "defer_gradients": "gradient rows"}


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """The state of the program before TensorFlow runs.

    Attributes:
        values: Flag values by flag name.
        given: Names of the flags on the command line.
        settings: The resolved settings of the run.
        saving: The checkpoint settings.
        clock: Wall clock and time per phase, started when the program starts.
    """

    values: dict[str, Any]
    given: frozenset[str]
    settings: Settings
    saving: CheckpointSettings
    clock: PhaseClock


def main(values: dict[str, Any], given: frozenset[str], callbacks: Sequence[Any] = ()) -> None:
    """Runs the program as a single process, with additional Keras callbacks."""
    prepared = prepare(values, given)
    from slipstream_tf.distributed import SingleProcess

    carry_out(prepared, SingleProcess(), callbacks)


def prepare(values: dict[str, Any], given: frozenset[str]) -> _Prepared:
    """Resolves settings, creates the output folder (on rank 0) and imports TensorFlow.

    Raises:
        UsageError: If flags are invalid or contradict each other.
    """
    clock = PhaseClock()
    settings = resolve(values, given, data.facts_of, make_flags())
    saving = checkpoint_settings(values, given)
    if agent.is_elastic() and not saving.is_elastic:
        raise UsageError(
            "Missing flag --elastic: horovodrun uses host discovery, so ranks may join and leave. "
            "Expected --elastic, or horovodrun without --host-discovery-script."
        )
    if settings.early_stopping and settings.prefetch:
        raise UsageError(
            f"Invalid flag --prefetch with --early_stopping={settings.early_stopping}: keys that "
            "were sent before an evaluation would be sent again after it. Expected --noprefetch or "
            "--early_stopping=0."
        )
    if has_pilot("model")(settings) and settings.prefetch:
        raise UsageError(
            "Invalid flag --prefetch with --pilot=model: the kept examples of the next batch are "
            "unknown when its rows are requested. Expected --noprefetch, or another --pilot."
        )
    if settings.schedule == "hotline" or (settings.schedule == "fae" and agent.rank() is not None):
        _require_fresh_run(settings, saving, values)
    if settings.early_stopping and saving.is_used:
        raise UsageError(
            f"Invalid flag --{saving.flag} with --early_stopping={settings.early_stopping}: "
            "checkpoints do not contain the best weights and rows. Expected --early_stopping=0, or "
            f"no --{saving.flag}."
        )
    if not agent.rank():
        # A long run must not fail when it writes its results.
        for flag in ("output", "tensorboard", "trace"):
            # TensorFlow also writes to URLs, such as gs://bucket/logs.
            is_url = flag == "tensorboard" and "://" in (values[flag] or "")
            if values[flag] is not None and not is_url:
                make_output(values[flag], flag, is_file=flag == "trace")
        if values["export"] is not None:
            _require_free(values["export"])
    if settings.trace is not None:
        # Horovod reads this variable in its initialization. DYNAMIC leaves the timeline off until
        # `TraceCallback` starts it.
        os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")
    # Check the flags before this import, because it takes seconds.
    import_tensorflow()
    _set_threads(settings.threads)
    return _Prepared(values, given, settings, saving, clock)


def _require_fresh_run(
    settings: Settings, saving: CheckpointSettings, values: dict[str, Any]
) -> None:
    """Raises `UsageError` for flags that a baseline's schedule does not support.

    The baselines store the rows of hot keys on all ranks and shard the other rows.
    """
    found = {
        saving.flag: saving.is_used,
        "early_stopping": settings.early_stopping,
        "export": values["export"] is not None,
        "prefetch": settings.prefetch,
        "wire_dtype": settings.wire_dtype != "float32",
        "placement": settings.placement != "sharded" and agent.rank() is not None,
    }
    for name, is_given in found.items():
        if is_given:
            allowed = "--placement=sharded" if name == "placement" else f"no --{name}"
            raise UsageError(
                f"Invalid flag --{name} with --schedule={settings.schedule}: the rows of hot keys "
                f"are replicated and the other rows are sharded. Expected {allowed}."
            )


def carry_out(
    prepared: _Prepared,
    comm: Communicator,
    callbacks: Sequence[Any] = (),
    job: ElasticJob | None = None,
) -> None:
    """Trains and evaluates. Rank 0 writes metrics.json and prints the results.

    Args:
        prepared: The result of `prepare`.
        comm: The communicator of the job.
        callbacks: Additional Keras callbacks, called after the callbacks of the program.
        job: The elastic job. None if the ranks of the job do not change.

    Raises:
        UsageError: If the data cannot be opened or a flag does not fit the data.
        RunError: If training or the export fails. A failed export keeps metrics.json.
    """
    from slipstream_tf.cli.build import planned_steps
    from slipstream_tf.cli.session import Trainer, export_inputs

    values, given, settings = prepared.values, prepared.given, prepared.settings
    with agreed(comm, "data"):
        _require_matched_size(values["match"], comm.size)
        with prepared.clock.phase("reading"):
            parts = data.open_parts(settings)
        if "bottom" in given and not parts.train.spec.num_dense:
            raise UsageError(
                f"Invalid flag --bottom: {parts.train.spec.name} data has no numeric columns. "
                "Expected data with numeric columns, or no --bottom."
            )
        if values["export"] is not None:
            with raised_as(UsageError, f"Invalid flag --export for {settings.data}: "):
                export_inputs(settings.data)
    if settings.uses_engine and settings.window_steps is None:
        # An elastic job keeps its window length, because the number of planned steps changes with
        # the number of ranks.
        length = window_steps_of(prepared.saving) if prepared.saving.is_elastic else None
        if length is None:
            length = Window().length(planned_steps(settings, parts.num_examples, comm.size))
        settings = dataclasses.replace(settings, window_steps=length)
    if not comm.rank:
        print(f"{choices(settings)}\n", flush=True)
    train_part = parts.train.in_batches_of(settings.block_size)
    parts = dataclasses.replace(parts, train=train_part)
    trainer = Trainer(settings, parts, prepared.clock, comm, prepared.saving, job)
    trainer.open()
    trainer.build()
    trainer.fit(callbacks)
    trainer.evaluate()
    record = trainer.record()
    if not comm.rank:
        in_force = given | values.get(FROM_FILE, frozenset())
        record["flags"] = {name: values[name] for name in sorted(in_force - {SETTINGS})}
        record["wall_seconds"] = prepared.clock.wall_seconds
        if values["output"] is not None:
            write_json(os.path.join(values["output"], RECORD), record)
        print(summary(record, settings))
        if record["dry_run"] is not None and record["dry_run"]["savings"]:
            print(f"\n{how_to_switch_on(record['flags'], settings, comm.size)}")
    # A failed export loses neither the record nor the table.
    if values["export"] is not None:
        if not comm.rank:
            print(f"\nExporting the model to {os.path.abspath(values['export'])} ...", flush=True)
        inputs = trainer.export(values["export"])
        if not comm.rank:
            print(inputs)


def choices(settings: Settings) -> str:
    """Returns the settings that were chosen by the data, one per line, with the reasons."""
    reasons = dict(settings.reasons)
    lines = [f"Data: {reasons.pop('data')}."]
    if reasons:
        lines.append("Chosen by the data, unless given as flags:")
        flags = {name: _flag(name, getattr(settings, name)) for name in reasons}
        width = max(map(len, flags.values()))
        lines += [f"  {flag:<{width}}  {reasons[name]}" for name, flag in flags.items()]
    return "\n".join(lines)


def summary(record: dict[str, Any], settings: Settings) -> str:
    """Returns the table of results, followed by the engine's report.

    Args:
        record: The content of metrics.json.
        settings: The settings of the run.
    """
    inputs, phases = record["examples"], record["seconds"]
    windows = [w for w in record["windows"] if w["hot_keys"]]
    test = record["test"]
    part = {"valid": "validation"}.get(settings.evaluate_on, settings.evaluate_on)
    rows = [
        (f"{part} AUC", number(test["auc"], 4)),
        (f"{part} log loss", number(test["log_loss"], 4)),
        ("calibration", number(test["calibration"], 3)),
        ("examples seen", f"{inputs['seen']:,}"),
        *(
            (f"examples {what}", f"{inputs[what]:,} ({_fraction(inputs[what], inputs['seen'])})")
            for what in ("trained", "skipped")
        ),
        ("malformed lines", f"{inputs['bad_lines'] + record['test_bad_lines']:,}"),
    ]
    if "best_auc" in record:
        rows.insert(1, ("best reachable AUC", number(record["best_auc"], 4)))
    if "best_step" in record:
        last = record["validation"][-1]["step"]
        rows.append(("best step, by validation", f"{record['best_step']:,} of {last:,}"))
    if windows and settings.control != "random":
        last = windows[-1]
        rows.append(("last threshold T", f"{last['threshold']:.3g}"))
        rows.append(
            ("last saturated fraction", f"{last['saturated_fraction']:.1%} of the hot keys")
        )
    ranks = record["ranks"]
    if ranks["size"] > 1:
        rows.append(("ranks", f"{ranks['size']}"))
        rows.append(("MB between ranks", f"{sum(ranks['bytes'].values()) / 1e6:,.1f}"))
    rows += [(f"seconds, {name.replace('_', ' ')}", seconds(s)) for name, s in phases.items()]
    table = format_table((f"{record['data']}, {settings.model}", "value"), rows)
    parts = [table, record["report"], advice(record["not_learned"], settings)]
    return "\n\n".join(part for part in parts if part)


def advice(reason: str, settings: Settings) -> str:
    """Returns what to try if the model has not learned, or an empty string.

    Args:
        reason: `record["not_learned"]`.
        settings: The settings of the run.
    """
    if not reason:
        return ""
    ways = [
        "check that the schema names the right label and that its key columns repeat in the data, "
        "unlike a row number",
        "pass more --epochs or smaller batches (--batch_size), because rows may have had too few "
        "updates",
        f"change --rows_learning_rate={settings.rows_learning_rate:g} and "
        f"--learning_rate={settings.learning_rate:g} by factors of 3, lower if the training loss "
        "is erratic",
        "pass --early_stopping=2 if the training AUC is much higher, because the model then "
        "memorizes the training part",
        f"pass another --model than {settings.model}",
    ]
    return "\n".join([reason, "To find the cause:", *(f"- {way};" for way in ways)])[:-1] + "."


def commands_to_switch_on(
    flags: Mapping[str, Any], settings: Settings, ranks: int
) -> dict[str, str]:
    """Returns the commands that apply the policies of a dry run.

    Args:
        flags: Values of the flags from the command line and the settings file.
        settings: The settings of the dry run.
        ranks: Number of ranks of the job.

    Returns:
        A dictionary from purpose to command line. A purpose is the name of a policy, multiple names
        joined by "_and_", or a control for `skip_examples`: "uniform", "random" or "stop".
    """
    flags = {name: value for name, value in flags.items() if name != "dry_run"}
    choices = [settings.policies]
    if "policies" not in flags:
        choices = [(policy,) for policy in settings.policies]
    found = {}
    for policies in choices:
        alone = dataclasses.replace(settings, policies=policies, dry_run=False)
        chosen = {n: v for n, v in flags.items() if not idle_because(n, alone, make_flags())}
        mode = "_and_".join(policies)
        chosen = {**chosen, "policies": policies, "output": _sibling(flags.get("output"), mode)}
        found[mode] = _line(chosen, ranks)
        if has_pilot("fm", "linear", "model")(alone):
            output = _sibling(flags.get("output"), "uniform")
            found["uniform"] = _line({**chosen, "pilot": "label", "output": output}, ranks)
        if "skip_examples" in policies:
            match = os.path.join(chosen["output"], RECORD)
            for control in ("random", "stop"):
                output = _sibling(flags.get("output"), control)
                repeated = {"control": control, "match": match, "output": output}
                found[control] = _line(repeated, ranks)
    return found


def how_to_switch_on(flags: Mapping[str, Any], settings: Settings, ranks: int) -> str:
    """Returns the instructions printed after a dry run.

    Args:
        flags: Values of the flags from the command line and the settings file.
        settings: The settings of the dry run.
        ranks: Number of ranks of the job.
    """
    found = commands_to_switch_on(flags, settings, ranks)
    uniform = found.pop("uniform", None)
    controls = [found.pop(name) for name in ("random", "stop") if name in found]
    lines = []
    for mode, command in found.items():
        line = "To apply the policies, omit --dry_run:"
        if "policies" not in flags:
            line = f"To save {_SAVES[mode]}, pass --policies={mode} instead of --dry_run:"
        lines += [line, f"  {command}"]
    if uniform is not None:
        lines += [
            "Compare with uniform negative sampling at the same rate. Use it, because it is",
            f"simpler, unless the pilot reaches a higher AUC:\n  {uniform}",
        ]
    if controls:
        lines += [
            "Compare with the two controls, which skip as many examples at random, or stop after",
            "as many trained examples. Skipping is useful only if its AUC is higher than both:",
            *(f"  {command}" for command in controls),
        ]
    lines.append("Repeat all commands with other values of --seed, because single runs vary.")
    return "\n".join(lines)


def _sibling(output: str | None, name: str) -> str:
    """Returns the path of a folder `name` next to `output`.

    Without an output, it is in `runs`. If `output` itself is called `name`, the suffix "-on" is
    appended.
    """
    if output is None:
        return os.path.join("runs", name)
    folder, own = os.path.split(os.path.normpath(output))
    return os.path.join(folder, f"{name}-on" if name == own else name)


def _line(flags: Mapping[str, Any], ranks: int) -> str:
    launcher = ["horovodrun", "-np", str(ranks)] if ranks > 1 else []
    return shlex.join([*launcher, "slipstream-train", *(_flag(*item) for item in flags.items())])


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    if isinstance(value, (tuple, list)):
        return f"--{name}={','.join(map(str, value))}"
    return f"--{name}={value}"


def _require_matched_size(match: str | None, size: int) -> None:
    """Raises `UsageError` if the matched run had a different number of ranks.

    The examples per step depend on the number of ranks, so the runs would not be comparable.
    """
    if match is None:
        return
    before = read_record(match, "match").get("ranks", {}).get("size", 1)
    if before != size:
        raise UsageError(
            f"Invalid flag --match={match} with {size} rank(s): the matched run had {before} "
            "rank(s). Expected the same number of ranks."
        )


def _require_free(path: str) -> None:
    """Raises `UsageError` if no new folder can be written at `path`.

    The check runs before training, so that a long run does not fail at the export.
    """
    parent = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    reason = None
    if os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path)):
        reason = "the path exists and is not an empty folder"
    elif not os.path.isdir(parent):
        reason = f"{parent} is not a folder"
    elif not os.access(parent, os.W_OK | os.X_OK):
        reason = f"the folder {parent} is not writable"
    if reason is not None:
        raise UsageError(
            f"Invalid flag --export={path}: {reason}. Expected a new or empty folder in a writable "
            "folder."
        )


def _fraction(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "n/a"


def _set_threads(threads: int | None) -> None:
    if threads is None:
        return
    import tensorflow as tf

    config = tf.config.threading
    problem = (
        f"Invalid flag --threads={threads}: TensorFlow has already started its threads. Run "
        "slipstream-train in a new process. "
    )
    with raised_as(UsageError, problem, RuntimeError):
        if config.get_intra_op_parallelism_threads() != threads:
            config.set_intra_op_parallelism_threads(threads)
        if config.get_inter_op_parallelism_threads() != threads:
            config.set_inter_op_parallelism_threads(threads)


def entry_point(arguments: Sequence[str] | None = None, callbacks: Sequence[Any] = ()) -> None:
    """Runs the program as a process or rank, then exits.

    Args:
        arguments: Command line arguments without the program name. Defaults to `sys.argv[1:]`.
        callbacks: Additional Keras callbacks, called after the callbacks of the program.
    """
    if _is_elastic(arguments):
        # This process stays alive as an agent and starts a new rank process whenever ranks change.
        sys.exit(agent.run_under_launcher([sys.executable, *sys.orig_argv[1:]]))
    if agent.rank() is None:
        sys.exit(run_program(make_flags(), functools.partial(main, callbacks=callbacks), arguments))
    run = functools.partial(carry_out, callbacks=callbacks)
    sys.exit(run_rank(make_flags(), prepare, run, arguments, lambda p: p.saving.is_elastic))


def _is_elastic(arguments: Sequence[str] | None) -> bool:
    """Returns whether launcher and flags both request an elastic job.

    Invalid flags are ignored here. `run_rank` reports them.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    with contextlib.suppress(UsageError):
        return agent.is_elastic() and make_flags().parse(given)[0]["elastic"]
    return False


if __name__ == "__main__":
    entry_point()
