"""The settings of one training run, resolved from flags, presets and the run to be matched."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream_tf import launch
from slipstream_tf.cli.flag_set import UsageError, does_nothing
from slipstream_tf.cli.presets import Preset, preset
from slipstream_tf.cli.train_flags import engine_settings
from slipstream_tf.telemetry.run_record import to_json

_COLUMNS = ("label_column", "key_columns", "dense_columns")
# A control repeats a run; with other values of these, its numbers would compare different things.
_MUST_MATCH = (
    "data", "split", *_COLUMNS, "shuffle_shards", "max_inputs", "batch_size", "model", "dim",
    "bottom", "mlp", "cross_layers", "epochs", "store", "capacity", "eviction", "placement",
    "wire_dtype", "wire_warmup_steps", "snapshot_interval", "warmup_steps",
)  # fmt: skip
# What makes a control another run than the one that it is compared with.
_NOT_REPEATED = (
    "skip", "control", "track", "segregate", "random_shares", "stop_after", "engine", "tensorboard",
)  # fmt: skip
# Of no use where gradients are deferred whatever their rows' drift.
FLAGS_OF_DRIFT = ("target_skip", "alpha", "max_threshold", "metric")
_LISTS = ("bottom", "mlp", "key_columns", "dense_columns")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(Preset):
    """Everything that decides a run; the fields are the flags of `slipstream-train`.

    Attributes:
        data: path of the data, or the name of a generated set.
        split: which split of the globo task: "random" or "time"; None for other data.
        label_column, key_columns, dense_columns: names of the columns of Parquet data.
        shuffle_shards: whether the shards of prepared data are read in another order every epoch.
        store: which embedding store.
        capacity: most rows of each table, on each rank; None: no bound.
        eviction: which rows leave a full table: "lru" or "lfu".
        placement: where the embedding rows of a job are: "replicated", all of them on each.
        wire_dtype: in which rows are sent between ranks.
        wire_warmup_steps: steps before rows are rounded to `wire_dtype`; None: those of the
            warm-up.
        prefetch: whether a batch's keys are sent to their owners a step ahead.
        copy_movement: how far hot rows may move before their refreshed replicas are sent
            anew; None: there are none.
        skip: a mode of `SaturationConfig` but "random", which is a control.
        control: "none", "random" or "stop".
        track: whether windows are followed though nothing is skipped.
        segregate: whether hot and cold inputs are trained in batches of their own.
        warmup: share of the planned steps before anything is skipped, 0 to 1.
        warmup_steps: the same in steps; None: by `warmup`.
        max_inputs: most inputs of the training part that the run sees, over all epochs; or None.
        evaluate_every: steps between evaluations in training; None: there are none.
        tensorboard: folder for TensorBoard; or None.
        random_shares: of the matched run, per window after its warm-up (control "random").
        stop_after: inputs that the matched run trained (control "stop").
        engine: further settings of `SaturationConfig`; see `cli.train_flags`.
        The rest: see `presets.Preset`, `SaturationConfig` and `slipstream-train --help`.
    """

    data: str
    split: str | None
    label_column: str | None
    key_columns: tuple[str, ...]
    dense_columns: tuple[str, ...]
    strict: bool
    store: str
    placement: str
    wire_dtype: str
    wire_warmup_steps: int | None
    prefetch: bool
    copy_movement: float | None
    max_inputs: int | None
    skip: str
    control: str
    track: bool
    segregate: bool
    metric: str
    warmup: float
    warmup_steps: int | None
    max_threshold: float | None
    seed: int
    precision: str
    threads: int | None
    shuffle_shards: bool = False
    evaluate_every: int | None = None
    capacity: int | None = None
    eviction: str = "lru"
    tensorboard: str | None = None
    random_shares: tuple[float, ...] = ()
    stop_after: int | None = None
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def needs_ids(self) -> bool:
        """Whether inputs must be told apart."""
        return self.skip != "none" and self.engine.get("score") == "remembered_loss"

    @property
    def uses_engine(self) -> bool:
        """Whether the saturation engine runs at all."""
        return self.skip != "none" or self.control == "random" or self.track

    def some(self, *names: str) -> dict[str, Any]:
        """Returns these fields, as arguments of what has arguments of the same names."""
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON-serialisable values."""
        return to_json(dataclasses.asdict(self))


def resolve(
    values: Mapping[str, Any], given: frozenset[str], name_of: Callable[[str], str]
) -> Settings:
    """Fills in what was not given: from the matched run, else from the data set's preset.

    Args:
        values: by flag, as parsed.
        given: flags that stand on the command line.
        name_of: tells the name of a data set, e.g. "globo", from the value of --data.

    Returns:
        The settings.

    Raises:
        UsageError: flags that contradict each other or the matched run, or a record that cannot be
            read.
    """
    chosen = {name: values[name] for name in given}
    matched = _matched_record(values)
    if matched is not None:
        chosen = {**_repeated(matched, chosen), **chosen}
    if chosen.get("data") is None:
        raise UsageError("Missing flag --data. Allowed: a path of a data set; see --help.")
    data_name = name_of(chosen["data"])
    defaults = {**values, **dataclasses.asdict(preset(data_name))}
    fields = [f.name for f in dataclasses.fields(Settings)]
    merged: dict[str, Any] = {name: chosen.get(name, defaults.get(name)) for name in fields}
    merged["random_shares"], merged["stop_after"] = (), None
    if matched is not None:
        merged.update(_controlled(values["control"], matched))
    merged["skip"], by_default = _shadowed(merged, values, given)
    watches = merged["skip"] == "none" and merged["track"]
    chosen_engine = engine_settings(values, given, "track" if watches else merged["skip"])
    merged["engine"] = {**by_default, **chosen_engine}
    merged["split"] = _split(merged["split"], "split" in given, data_name)
    for name in _LISTS:
        merged[name] = tuple(merged[name] or ())
    settings = Settings(**merged)
    _refuse_idle_flags(settings, given, data_name)
    return settings


def read_record(path: str, flag: str) -> dict[str, Any]:
    """Reads a run's metrics.json.

    Raises:
        UsageError: it cannot be read, or is no such record.
    """
    parts = ("settings", "inputs", "windows")
    reason = f"it has no {', '.join(parts)}"
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        if isinstance(record, dict) and all(part in record for part in parts):
            return record
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not JSON"
    raise UsageError(
        f"Invalid flag --{flag}={path}: {reason}. Allowed: the metrics.json of a run of "
        "slipstream-train."
    )


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
    if values["skip"] != "none":
        raise UsageError(
            f"Invalid flag --skip={values['skip']} with --control={control}. Allowed: --skip=none; "
            "a control does not look at keys."
        )
    return read_record(path, "match")


def _shadowed(
    merged: Mapping[str, Any], values: Mapping[str, Any], given: frozenset[str]
) -> tuple[str, dict[str, Any]]:
    """Returns the skip mode, and settings that --shadow alone stands for.

    It looks at leaving inputs out and at deferring gradients, each of which is measured as if it
    were alone. Inputs go by what their losses were where they come again: within one pass there is
    nothing to remember.
    """
    if not values["shadow"] or "skip" in given or values["control"] != "none":
        return merged["skip"], {}
    return "both", {} if merged["epochs"] == 1 else {"score": "remembered_loss"}


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


def _controlled(control: str, matched: Mapping[str, Any]) -> dict[str, Any]:
    if control == "stop":
        return {"stop_after": int(matched["inputs"]["trained"])}
    shares = [w["skipped_share"] for w in matched["windows"] if not w["is_warming_up"]]
    # As long as the windows themselves: both start to skip at the same step.
    return {
        "random_shares": tuple(shares) or (0.0,),
        "warmup_steps": matched["engine"]["warmup_steps"] if matched.get("engine") else None,
    }


def _split(split: str | None, is_given: bool, data_name: str) -> str | None:
    if data_name == "globo":
        return split or "random"
    if is_given:
        raise UsageError(
            f"Invalid flag --split={split} for {data_name} data. Allowed: with globo data only."
        )
    return None


def _refuse_idle_flags(settings: Settings, given: frozenset[str], data_name: str) -> None:
    """A flag that would do nothing is an error, not a surprise."""
    engine, control = settings.engine, settings.control
    is_alone, is_sharded = launch.rank() is None, settings.placement == "sharded"
    skips = settings.skip != "none"
    watches, is_shadow = skips or settings.track, bool(engine.get("shadow"))
    has_windows, is_exact = watches or control == "random", settings.wire_dtype == "float32"
    # Gradients are deferred whatever the drift of their rows.
    by_movement = engine.get("defer_trigger", "movement") == "movement"
    ignores_drift = settings.skip == "defer" and by_movement
    by_losses = engine.get("score") == "remembered_loss"
    has_threshold = engine.get("threshold") is not None and not by_losses
    has_auc_bound = engine.get("max_auc_loss") is not None
    several = "several ranks, started by horovodrun or mpirun"
    watching, by_drift = "a --skip other than none, or --track", "a --skip that goes by drift"
    at_windows, by_warmup = ("snapshot_interval", "tensorboard"), ("warmup", "warmup_steps")
    sharded, unwatched = ("prefetch", "copy_movement"), f"{watching}, without --shadow"
    of_ranks = ("placement", "wire_dtype", "wire_warmup_steps", *sharded)
    for names, needs, is_idle in (
        (of_ranks, several, is_alone),
        (sharded, "--placement=sharded", not is_alone and not is_sharded),
        (["copy_movement"], unwatched, not is_alone and is_sharded and (not watches or is_shadow)),
        # What was sent ahead would be sent once more, and count.
        (["evaluate_every"], "no --prefetch", not is_alone and settings.prefetch),
        (["wire_warmup_steps"], "--wire_dtype=bfloat16", not is_alone and is_exact),
        (_COLUMNS, "Parquet data that slipstream-prepare did not write", data_name != "parquet"),
        (["eviction"], "--capacity", settings.capacity is None),
        (["bottom"], "--model=dlrm", settings.model != "dlrm"),
        (["cross_layers"], "--model=dcn", settings.model != "dcn"),
        (["target_skip", "alpha", "metric", "max_threshold"], watching, not watches),
        (["hot_budget_mb"], watching, not watches and not settings.segregate),
        (at_windows, watching, not has_windows),
        (by_warmup, watching, not has_windows and is_exact),
        # Skipping refills batches, with inputs of both kinds.
        (["segregate"], "--skip=none and --control=none", skips or control != "none"),
        (["track"], "--skip=none without --control=random", skips or control == "random"),
        (FLAGS_OF_DRIFT, by_drift, ignores_drift),
        # With replicas it bounds the rows that have them.
        (["hot_budget_mb"], by_drift, ignores_drift and settings.copy_movement is None),
        (["defer_movement"], "no --max_auc_loss, which decides it", has_auc_bound),
        (["target_skip"], "no --threshold, which decides it", has_threshold),
        (["decay_skipped"], "--rows_optimizer=adam", settings.rows_optimizer != "adam"),
    ):
        for name in names:
            if is_idle and name in given:
                raise does_nothing(name, needs)
    if "warmup" in given and "warmup_steps" in given:
        raise UsageError("Flags --warmup and --warmup_steps exclude each other. Give one of them.")
