"""Resolves training settings from flags, data and a matched run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

from slipstream_tf._utils import agent, disk
from slipstream_tf.cli.defaults import WITHOUT_STOPPING, DataFacts, choose
from slipstream_tf.cli.flag_set import FROM_FILE, FlagSet, UsageError, does_nothing, raised_as
from slipstream_tf.cli.train_flags import ENGINE_FLAGS, predicts_losses
from slipstream_tf.telemetry.run_record import RECORD, to_json

# A control repeats a run. These settings must have the same values, because results would not be
# comparable otherwise.
_MUST_MATCH = (
    "data", "evaluate_on", "shuffle", "max_examples", "batch_size", "model", "dim", "bottom", "mlp",
    "cross_layers", "batch_norm", "epochs", "early_stopping", "row_dtype", "slot_dtype", "memory",
    "capacity", "eviction", "placement", "wire_dtype", "window_steps", "warmup_steps",
)  # fmt: skip
# Settings that a control does not take from the matched run.
_NOT_REPEATED = (
    "policies", "dry_run", "control", "watch", "schedule", "random_fractions", "stop_after",
    "engine", "tensorboard", "trace", "data_name", "click_rate", "reasons",
)  # fmt: skip
_OF_CONTROLS: Mapping[str, Any] = {"policies": (), "dry_run": False, "watch": False}
# Maximum number of examples that are read at once, except that one batch may be larger.
_MAX_READ = 8192
_LISTS = ("bottom", "mlp", "policies", "random_fractions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a training run.

    The fields are named like the flags of `slipstream-train`. `slipstream-train --helpfull`
    describes the fields that are not listed here.

    Attributes:
        data: Path of the data, or the name of a generated data set.
        evaluate_on: Part of the data for the final evaluation: "test" or "valid".
        shuffle: Order of the training examples of prepared data, from `train_flags.SHUFFLES`.
        row_dtype, slot_dtype, memory, spill: Storage of the rows of each table, see
            `config.Storage`.
        capacity: Maximum number of rows of each table on each rank. None means unbounded.
        eviction: Eviction strategy of a full table: "lru" or "lfu".
        placement: "replicated" stores all embedding rows on every rank, "sharded" distributes them
            over the ranks by hash.
        wire_dtype: Dtype of rows and their gradients in messages between ranks.
        prefetch: Whether to send the keys of a batch to their owners one step ahead.
        policies: Names of the policies, from `train_flags.POLICIES`.
        dry_run: Whether policies only estimate their savings and change nothing.
        control: Kind of a control, a run that repeats another run without its policies. "random"
            skips examples at random, "stop" ends after as many trained examples. "none" if the run
            is no control.
        watch: Whether to measure saturation in a run without policies.
        schedule: "plain", or a baseline: "fae" trains hot and cold examples in separate batches,
            "hotline" splits each batch into two parts.
        warmup: Fraction of the planned steps before the policies take effect, in [0, 1].
        warmup_steps: Number of warm-up steps. None derives it from `warmup`.
        max_examples: Maximum number of training examples over all epochs and ranks. None means
            unbounded.
        evaluate_every: Steps between evaluations during training. None means no evaluations, or
            one per epoch with `early_stopping`.
        tensorboard: Folder for TensorBoard logs, or None.
        trace: File for a trace of a few steps, or None.
        random_fractions: Skipped fraction of each window of the matched run after its warm-up. Used
            by the control "random".
        stop_after: Number of training examples after which the control "stop" ends.
        engine: Values of the flags in `train_flags.ENGINE_FLAGS` that were given. With
            `skip_examples` it always contains "skip_score" and "skip_alpha".
        data_name: Name of the data set, for example "criteo".
        click_rate: Fraction of the training labels that are 1, at whose log odds the output of the
            model starts. None if unknown.
        reasons: Why a value was chosen, by name of the setting, for settings that were chosen by
            the data. Contains the properties of the data as "data".
    """

    data: str
    evaluate_on: str
    shuffle: str
    max_examples: int | None
    tensorboard: str | None
    trace: str | None
    evaluate_every: int | None
    model: str
    dim: int
    bottom: tuple[int, ...]
    mlp: tuple[int, ...]
    cross_layers: int
    batch_norm: bool
    dropout: float
    row_dtype: str
    slot_dtype: str
    memory: int | str | None
    spill: str | None
    capacity: int | None
    eviction: str
    batch_size: int
    epochs: int
    rows_optimizer: str
    rows_l2: float
    rows_decay: str
    rows_learning_rate: float
    rows_init: float
    learning_rate: float
    early_stopping: int
    plateau_factor: float
    seed: int
    precision: str
    threads: int | None
    placement: str
    wire_dtype: str
    prefetch: bool
    policies: tuple[str, ...]
    dry_run: bool
    watch: bool
    skip_alpha: float
    window_steps: int | None
    warmup: float
    warmup_steps: int | None
    control: str
    schedule: str
    random_fractions: tuple[float, ...]
    stop_after: int | None
    engine: Mapping[str, Any]
    data_name: str
    click_rate: float | None
    reasons: Mapping[str, str]

    @property
    def block_size(self) -> int:
        """Number of examples per read block, a multiple of `read_batch_size`."""
        return self.read_batch_size * max(1, _MAX_READ // self.read_batch_size)

    @property
    def read_batch_size(self) -> int:
        """Number of examples per batch before examples are skipped.

        With skipping by predicted loss, batches are read larger, and the kept examples are batched
        again to `batch_size`. Larger batches amortize the overhead per batch, which matters if most
        examples are dropped. The size is limited to an eighth of a window, because a window needs
        statistics from more than one batch.

        Note: `window_steps` must be set.
        """
        if not predicts_losses(self) or self.dry_run:
            return self.batch_size
        assert self.window_steps is not None
        maximum = max(1, _MAX_READ // self.batch_size)
        return self.batch_size * min(maximum, max(1, self.window_steps // 8))

    @property
    def holds_out(self) -> bool:
        """Whether a validation part is held out of the training part."""
        return self.evaluate_on == "valid" or self.early_stopping > 0

    @property
    def uses_engine(self) -> bool:
        """Whether the run needs the saturation engine."""
        return bool(self.policies) or self.control == "random" or self.watch

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON-serializable values."""
        return to_json(dataclasses.asdict(self))


def resolve(
    values: Mapping[str, Any],
    given: frozenset[str],
    facts_of: Callable[[str], DataFacts],
    flags: FlagSet,
) -> Settings:
    """Merges flags, matched run, settings file, choices by the data and defaults into settings.

    A value from an earlier source in this list takes precedence: the command line, the matched
    run, the settings file, the choice by the data (`defaults.choose`), the default of the flag.

    Args:
        values: Parsed values by flag name. The entry `FROM_FILE` names the flags that only the
            settings file sets.
        given: Names of the flags on the command line.
        facts_of: Function that returns the properties of a data set for the value of --data.
        flags: The flags of the program.

    Returns:
        The settings.

    Raises:
        UsageError: If flags contradict each other or the matched run, a flag has no effect, or the
            record of the matched run cannot be read.
    """
    chosen = {name: values[name] for name in given}
    from_file = {name: values[name] for name in values.get(FROM_FILE, ())}
    if values["control"] != "none":
        # A settings file may be shared with other runs, so its policies are ignored for a control.
        off = {name: of_control for name, of_control in _OF_CONTROLS.items() if name in from_file}
        values, from_file = {**values, **off}, {**from_file, **off}
    warmups = {"warmup", "warmup_steps"}
    if warmups <= given or warmups <= from_file.keys():
        raise UsageError("Flags --warmup and --warmup_steps exclude each other. Pass one flag.")
    if "warmup" in given:
        from_file["warmup_steps"] = None
    matched = _matched_record(values)
    if matched is not None:
        chosen = {**_repeated(matched, chosen), **chosen}
    chosen = {**from_file, **chosen}
    if chosen.get("data") is None:
        raise UsageError(
            "Missing flag --data. Expected the path of a data set, or 'generated' for generated "
            f"examples. Run {flags.program} --help for the formats."
        )
    facts = facts_of(chosen["data"])
    unused = (None, False, 0, "none", "plain", ())
    may_stop_early = matched is None and "early_stopping" not in chosen
    may_stop_early &= all(values[name] in unused for name in WITHOUT_STOPPING)
    # The ranks of an elastic job change, but its settings do not.
    ranks = 1 if values["elastic"] else agent.size()
    choices = choose(facts, chosen, may_stop_early, ranks)
    defaults = {**values, **{name: value for name, (value, _) in choices.items()}}
    fields = [f.name for f in dataclasses.fields(Settings)]
    merged: dict[str, Any] = {name: chosen.get(name, defaults.get(name)) for name in fields}
    if matched is not None:
        merged.update(_controlled(values["control"], matched, merged["batch_size"]))
    merged.update(data_name=facts.name, click_rate=facts.click_rate)
    merged["reasons"] = {
        "data": str(facts),
        **{name: reason for name, (_, reason) in choices.items()},
    }
    if values["dry_run"] and not values["policies"] and values["control"] == "none":
        # A dry run without --policies estimates skipping, and deferring if the settings allow it.
        defers = not merged["rows_l2"] and merged["rows_optimizer"] != "adamw"
        merged["policies"] = ("skip_examples", *(("defer_gradients",) if defers else ()))
    engine = {n: values[n] for n in ENGINE_FLAGS if n in given or n in from_file}
    if "skip_examples" in (merged["policies"] or ()):
        engine.setdefault("skip_score", "predicted_loss")
        engine.setdefault("skip_alpha", merged["skip_alpha"])
    merged["engine"] = engine
    for name in _LISTS:
        merged[name] = tuple(merged[name] or ())
    settings = Settings(**merged)
    for name in flags.names:
        if name in given and (unmet := idle_because(name, settings, flags)):
            raise does_nothing(name, unmet)
    return settings


def read_record(path: str, flag: str) -> dict[str, Any]:
    """Reads the metrics.json of a run.

    Args:
        path: Path of the file or of its folder.
        flag: Name of the flag that contains the path, for error messages.

    Raises:
        UsageError: If the file cannot be read or is not the record of a run.
    """
    parts = ("settings", "examples", "windows")
    expected = "Expected the metrics.json of a run of slipstream-train."
    with raised_as(UsageError, f"Invalid flag --{flag}={path}. {expected} Cause: "):
        record = disk.read_json(os.path.join(path, RECORD) if os.path.isdir(path) else path)
    missing = [part for part in parts if not isinstance(record, dict) or part not in record]
    if missing:
        problem = f"the file has no {', '.join(missing)}"
        raise UsageError(f"Invalid flag --{flag}={path}: {problem}. {expected}")
    return record


def _matched_record(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the record of the run that a control repeats, or None."""
    control, path = values["control"], values["match"]
    if control == "none":
        if path is not None:
            raise UsageError(
                f"Invalid flag --match={path} with --control=none. Expected --control=random or "
                "--control=stop, which repeat the matched run."
            )
        return None
    if path is None:
        raise UsageError(
            f"Missing flag --match with --control={control}. Expected the path of metrics.json of "
            "the run that the control repeats."
        )
    if values["policies"] or values["dry_run"]:
        name = "policies" if values["policies"] else "dry_run"
        raise UsageError(
            f"Invalid flag --{name} with --control={control}: a control repeats a run without its "
            f"policies. Expected no --{name}."
        )
    return read_record(path, "match")


def _repeated(matched: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that a control repeats from the matched run.

    Raises:
        UsageError: If a flag contradicts a setting that must be the same in both runs.
    """
    settings = dict(matched["settings"])
    for name in _MUST_MATCH:
        if name in chosen and name in settings:
            before = settings[name]
            before = tuple(before) if isinstance(before, list) else before
            if chosen[name] != before:
                raise UsageError(
                    f"Invalid flag --{name}={chosen[name]} with --match: the matched run used "
                    f"{before}. Expected that value, or no --{name}."
                )
    return {name: value for name, value in settings.items() if name not in _NOT_REPEATED}


def _controlled(control: str, matched: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    """Returns the settings that a control derives from its matched run.

    "random" skips the same fraction of each window after the same warm-up. "stop" ends after as
    many trained examples.
    """
    if control == "stop":
        if matched["settings"].get("early_stopping"):
            raise UsageError(
                "Invalid flag --control=stop: the matched run used --early_stopping="
                f"{matched['settings']['early_stopping']}, so the control would stop early, too. "
                "Expected a matched run with --early_stopping=0."
            )
        # Round to whole batches, because a small last batch would move the weights as far as a
        # full one.
        batches = max(1, round(int(matched["examples"]["trained"]) / batch_size))
        return {"stop_after": batches * batch_size}
    fractions = [w["skipped_fraction"] for w in matched["windows"] if not w["is_warming_up"]]
    # Use the warm-up of the matched run, so that both runs start to skip at the same step.
    return {
        "random_fractions": tuple(fractions) or (0.0,),
        "warmup_steps": matched["engine"]["window"]["config"]["warmup"]
        if matched.get("engine")
        else None,
    }


def idle_because(name: str, settings: Settings, flags: FlagSet) -> str:
    """Returns why a flag has no effect, or an empty string.

    Args:
        name: Name of the flag.
        settings: The settings of the run.
        flags: The flags of the program.

    Returns:
        The words of the first condition in `Flag.needs` that the settings do not meet.
    """
    return next((need.words for need in flags.needs[name] if not need.is_met(settings)), "")
