"""The settings of one training run, resolved from flags, presets and the run to be matched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from slipstream_tf._utils import disk
from slipstream_tf.cli.flag_set import FROM_FILE, FlagSet, UsageError, does_nothing, raised_as
from slipstream_tf.cli.train_flags import ENGINE_FLAGS, PRESETS, foresees
from slipstream_tf.telemetry.run_record import to_json

# A control repeats a run; with other values of these, its numbers would compare different things.
_MUST_MATCH = (
    "data", "evaluate_on", "shuffle", "max_examples", "batch_size", "model", "dim", "bottom", "mlp",
    "cross_layers", "batch_norm", "epochs", "early_stopping", "row_dtype", "slot_dtype", "memory",
    "capacity", "eviction", "placement", "wire_dtype", "window_steps", "warmup_steps",
)  # fmt: skip
# What makes a control another run than the one that it is compared with.
_NOT_REPEATED = (
    "policies", "dry_run", "control", "watch", "schedule", "random_shares", "stop_after", "engine",
    "tensorboard", "trace", "data_name",
)  # fmt: skip
_OF_CONTROLS: Mapping[str, Any] = {"policies": (), "dry_run": False, "watch": False}
# Examples that are read at once.
_MOST_READ = 8192
_LISTS = ("bottom", "mlp", "policies", "random_shares")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides a run; the fields are the flags of `slipstream-train`.

    Attributes:
        data: path of the data, or the name of a generated set.
        evaluate_on: the part that quality is measured on: "test" or "valid".
        shuffle: order of the training part of prepared data, of `train_flags.SHUFFLES`.
        row_dtype, slot_dtype, memory, spill: of each table's rows and slots, see `config.Storage`.
        capacity: most rows of each table, on each rank; None: no bound.
        eviction: which rows leave a full table: "lru" or "lfu".
        placement: where the embedding rows of a job are: "replicated", all of them on each.
        wire_dtype: in which rows are sent between ranks.
        prefetch: whether a batch's keys are sent to their owners a step ahead.
        policies: what is saved, of `train_flags.POLICIES`.
        dry_run: whether all is done but the saving.
        control: "none", "random" or "stop".
        watch: whether windows are followed though nothing is skipped.
        schedule: of a baseline: "fae", hot and cold examples in batches of their own; "hotline",
            each batch in two parts; or "plain".
        warmup: share of the planned steps before anything is skipped, 0 to 1.
        warmup_steps: the same in steps; None: by `warmup`.
        max_examples: most examples of the training part that the run sees, over all epochs; or
            None.
        evaluate_every: steps between evaluations in training; None: there are none.
        tensorboard: folder for TensorBoard; or None.
        trace: file for a trace of some steps; or None.
        random_shares: of the matched run, per window after its warm-up (control "random").
        stop_after: examples that the matched run trained (control "stop").
        engine: further flags of the engine that were given, see `train_flags.ENGINE_FLAGS`.
        data_name: of the data set, e.g. "criteo".
        The rest: see `slipstream-train --helpfull`.
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
    random_shares: tuple[float, ...]
    stop_after: int | None
    engine: Mapping[str, Any]
    data_name: str

    @property
    def block_size(self) -> int:
        """Examples that are read at once: whole batches of `read_batch_size`."""
        return self.read_batch_size * max(1, _MOST_READ // self.read_batch_size)

    @property
    def read_batch_size(self) -> int:
        """Examples of a batch that comes in; `window_steps` must be known.

        Where most of what is read is left out, the work of a batch is a good part of what is left;
        but a window is decided on in several batches.
        """
        if not foresees(self) or self.dry_run:
            return self.batch_size
        assert self.window_steps is not None
        most = max(1, _MOST_READ // self.batch_size)
        return self.batch_size * min(most, max(1, self.window_steps // 8))

    @property
    def holds_out(self) -> bool:
        """Whether there is a validation part, which is not trained."""
        return self.evaluate_on == "valid" or self.early_stopping > 0

    @property
    def uses_engine(self) -> bool:
        """Whether the saturation engine runs at all."""
        return bool(self.policies) or self.control == "random" or self.watch

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON-serialisable values."""
        return to_json(dataclasses.asdict(self))


def resolve(
    values: Mapping[str, Any],
    given: frozenset[str],
    name_of: Callable[[str], str],
    flags: FlagSet,
) -> Settings:
    """Fills in what was not given: by the matched run, the settings file or the data's preset.

    Args:
        values: by flag, as parsed; those of the settings file are in `FROM_FILE`.
        given: flags that stand on the command line.
        name_of: tells the name of a data set, e.g. "criteo", from the value of --data.
        flags: of the program.

    Returns:
        The settings.

    Raises:
        UsageError: flags that contradict each other or the matched run, a flag without effect, or
            a record that cannot be read.
    """
    chosen = {name: values[name] for name in given}
    from_file = {name: values[name] for name in values.get(FROM_FILE, ())}
    if values["control"] != "none":
        # A control skips and watches nothing; what the file says of that is for other runs.
        off = {name: of_control for name, of_control in _OF_CONTROLS.items() if name in from_file}
        values, from_file = {**values, **off}, {**from_file, **off}
    warmups = {"warmup", "warmup_steps"}
    if warmups <= given or warmups <= from_file.keys():
        raise UsageError("Flags --warmup and --warmup_steps exclude each other. Give one of them.")
    if "warmup" in given:
        from_file["warmup_steps"] = None
    matched = _matched_record(values)
    if matched is not None:
        chosen = {**_repeated(matched, chosen), **chosen}
    chosen = {**from_file, **chosen}
    if chosen.get("data") is None:
        raise UsageError("Missing flag --data. Allowed: a path of a data set; see --help.")
    data_name = name_of(chosen["data"])
    own = PRESETS.get(data_name, {})
    defaults = {**values, **{name: flags.parser_of(name).parse(text) for name, text in own.items()}}
    fields = [f.name for f in dataclasses.fields(Settings)]
    merged: dict[str, Any] = {name: chosen.get(name, defaults.get(name)) for name in fields}
    if matched is not None:
        merged.update(_controlled(values["control"], matched, merged["batch_size"]))
    merged["data_name"] = data_name
    if values["dry_run"] and not values["policies"] and values["control"] == "none":
        # What can be looked at side by side, each as if it were alone.
        defers = not merged["rows_l2"] and merged["rows_optimizer"] != "adamw"
        merged["policies"] = ("skip_examples", *(("defer_gradients",) if defers else ()))
    engine = {n: values[n] for n in ENGINE_FLAGS if n in given or n in from_file}
    if "skip_examples" in (merged["policies"] or ()):
        engine.setdefault("skip_by", "foreseen_loss")
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
    """Reads a run's metrics.json.

    Raises:
        UsageError: it cannot be read, or is no such record.
    """
    parts = ("settings", "examples", "windows")
    expected = "Expected the metrics.json of a run of slipstream-train"
    with raised_as(UsageError, f"Invalid flag --{flag}={path}. {expected}: "):
        record = disk.read_json(path)
    if isinstance(record, dict) and all(part in record for part in parts):
        return record
    raise UsageError(f"Invalid flag --{flag}={path}. {expected}: it has no {', '.join(parts)}.")


def _matched_record(values: Mapping[str, Any]) -> dict[str, Any] | None:
    control, path = values["control"], values["match"]
    if control == "none":
        if path is not None:
            raise UsageError(
                f"Invalid flag --match={path} with --control=none. Allowed: with "
                "--control=random or --control=stop, which repeat that run."
            )
        return None
    if path is None:
        raise UsageError(
            f"Missing flag --match with --control={control}. Allowed: the metrics.json of the run "
            "that the control repeats."
        )
    if values["policies"] or values["dry_run"]:
        name = "policies" if values["policies"] else "dry_run"
        raise UsageError(
            f"Invalid flag --{name} with --control={control}. Allowed: without it; a control does "
            "not look at keys."
        )
    return read_record(path, "match")


def _repeated(matched: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The matched run's settings; refuses given flags that would make another experiment."""
    settings = dict(matched["settings"])
    for name in _MUST_MATCH:
        if name in chosen and name in settings:
            before = settings[name]
            before = tuple(before) if isinstance(before, list) else before
            if chosen[name] != before:
                raise UsageError(
                    f"Invalid flag --{name}={chosen[name]} with --match: the matched run has "
                    f"{before}. Allowed: that value, or no --{name}."
                )
    return {name: value for name, value in settings.items() if name not in _NOT_REPEATED}


def _controlled(control: str, matched: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    if control == "stop":
        if matched["settings"].get("early_stopping"):
            raise UsageError(
                "Invalid flag --control=stop: the matched run has --early_stopping="
                f"{matched['settings']['early_stopping']}, by which the control would stop, too. "
                "Allowed: a matched run with --early_stopping=0."
            )
        # In whole batches: a small last one would move the model as far as any other.
        batches = max(1, round(int(matched["examples"]["trained"]) / batch_size))
        return {"stop_after": batches * batch_size}
    shares = [w["skipped_share"] for w in matched["windows"] if not w["is_warming_up"]]
    # As long as the windows themselves: both start to skip at the same step.
    return {
        "random_shares": tuple(shares) or (0.0,),
        "warmup_steps": matched["engine"]["window"]["config"]["warmup"]
        if matched.get("engine")
        else None,
    }


def idle_because(name: str, settings: Settings, flags: FlagSet) -> str:
    """Returns what a flag needs to matter and does not have; empty if it matters."""
    return next((need.words for need in flags.needs[name] if not need.is_met(settings)), "")
