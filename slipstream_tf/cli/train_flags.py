"""The flags of `slipstream-train`.

Those of the saturation engine beyond the paper's carry the names of `SaturationConfig`'s fields,
whose defaults hold where a flag is not given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from slipstream_tf.cli import presets
from slipstream_tf.cli.flag_set import (
    Choice,
    Flag,
    FlagSet,
    Integer,
    Names,
    Number,
    Text,
    Widths,
    does_nothing,
)
from slipstream_tf.config import DEFER_TRIGGERS, DRIFT_METRICS, SCORES, SaturationConfig

DATA_HELP = (
    "folder of slipstream-prepare, Criteo TSV (.tsv, .txt, also .gz), Avazu CSV (.csv, also .gz), "
    "globo or Frappe .npz, Parquet (.parquet or a folder; name its columns), MovieLens ml-1m.zip; "
    "or 'generated' or 'generated:COUNT', inputs drawn from a fixed law ('generated:COUNT:KEYS': "
    "with fields of at most so many keys)"
)
_SKIP_MODES = ("none", "inputs", "gradients", "defer", "both", "inputs+gradients")
_BY_INPUTS, _BY_DEFER = ("inputs", "both", "inputs+gradients"), ("defer", "both")


class Need(NamedTuple):
    """What a flag of the engine needs to matter.

    Attributes:
        words: flags that must be so.
        is_met: whether they are, given the chosen skip mode ("track": --skip=none with --track)
            and the other engine flags.
    """

    words: str
    is_met: Callable[[str, Mapping[str, Any]], bool]


def _defers_by(trigger: str, skip: str, chosen: Mapping[str, Any]) -> bool:
    chosen_trigger = chosen.get("defer_trigger", SaturationConfig.defer_trigger)
    return skip in _BY_DEFER and chosen_trigger == trigger


_INPUTS = Need("--skip=inputs or both", lambda skip, chosen: skip in _BY_INPUTS)
_LOSS = Need(
    "--score=remembered_loss",
    lambda skip, chosen: skip in _BY_INPUTS and chosen.get("score") == "remembered_loss",
)
_DEFER = Need("--skip=defer or both", lambda skip, chosen: skip in _BY_DEFER)
_MOVEMENT = Need("--defer_trigger=movement", functools.partial(_defers_by, "movement"))
_INTERVAL = Need("--defer_trigger=interval", functools.partial(_defers_by, "interval"))
_MASK = Need("--skip=gradients", lambda skip, chosen: skip in ("gradients", "inputs+gradients"))
_STATES = Need(
    "a --skip that goes by drift (inputs, gradients, both, or --defer_trigger=interval)",
    lambda skip, chosen: (
        skip not in ("none", "track") and (skip != "defer" or _defers_by("interval", skip, chosen))
    ),
)
_SKIP = Need("a --skip other than none", lambda skip, chosen: skip not in ("none", "track"))
_SHADOW = Need(f"{_SKIP.words}, or without a --skip", _SKIP.is_met)
_TRACKING = Need("a --skip other than none, or --track", lambda skip, chosen: skip != "none")
_NEEDS: Mapping[Need, Sequence[str]] = {
    _INPUTS: ("score", "keep_rate"),
    _LOSS: ("saturated_share", "max_skips"),
    _STATES: ("threshold", "release", "revisit_every", "protect_windows", "guard_tolerance",
              "max_log_loss_increase"),
    _SKIP: ("max_auc_loss", "freeze_drift"),
    _DEFER: ("defer_trigger",),
    _MOVEMENT: ("defer_movement", "defer_max_age"),
    _INTERVAL: ("defer_steps",),
    _TRACKING: ("simulated_ranks", "exempt_tables"),
    _MASK: ("decay_skipped",),
    _SHADOW: ("shadow",),
}  # fmt: skip
# Flag of the engine -> what it needs to matter.
ENGINE_FLAGS = {name: need for need, names in _NEEDS.items() for name in names}


def _preset(name: str, parser: Any, text: str) -> Flag:
    return Flag(name, parser, text, None, presets.describe(name))


def _engine(name: str, parser: Any, text: str, default_text: str = "") -> Flag:
    default = default_text or str(getattr(SaturationConfig, name))
    return Flag(name, parser, text, None, default)


_FLAGS: Mapping[str, Sequence[Flag]] = {
    "Data and output": (
        Flag("data", Text(), DATA_HELP),
        Flag("split", Choice(("random", "time")), "split of the globo task", None, "random"),
        Flag("label_column", Text(), "column of the label, of Parquet data"),
        Flag("key_columns", Names(), "columns of the keys, of Parquet data"),
        Flag("dense_columns", Names(), "columns of numbers, of Parquet data"),
        Flag("shuffle_shards", None,
             "read the shards of slipstream-prepare in an order that --seed and the epoch give"),
        Flag("max_inputs", Integer(1), "stop after this many inputs, over all epochs and ranks"),
        Flag("strict", None, "a line that cannot be read ends the run, instead of being counted"),
        Flag("output", Text(), "folder for metrics.json; without it nothing is written"),
        Flag("export", Text(),
             "folder for a SavedModel of the trained model; it needs TensorFlow alone"),
        Flag("tensorboard", Text(),
             "folder for TensorBoard's curves and histograms of the windows"),
        Flag("evaluate_every", Integer(1), "steps between measurements of the test part in "
             "training; their time is evaluation's", None, "at the end only"),
        Flag("checkpoint_every", Integer(0),
             "steps of the job between checkpoints in OUTPUT/checkpoints; 0: none are saved", 0),
        Flag("keep_checkpoints", Integer(1), "checkpoints that are kept, the newest ones", 3),
        Flag("resume", None, "go on from the newest checkpoint, of the same flags; without one, "
             "from the beginning"),
    ),
    "Model": (
        _preset("model", Choice(("dlrm", "dcn", "deepfm")), "the model: DLRM, DCN-v2 or DeepFM"),
        _preset("dim", Integer(1, 65536), "values per embedding row"),
        _preset("bottom", Widths(),
                "units of the hidden layers of DLRM's bottom MLP (data with numbers only)"),
        _preset("mlp", Widths(),
                "units of the hidden layers of DLRM's top MLP, or the others' deep MLP"),
        _preset("cross_layers", Integer(1), "number of cross layers of DCN-v2"),
        _preset("dropout", Number(0, 1, open_maximum=True),
                "share of hidden units dropped in training"),
        Flag("store", Choice(("native",)), "what holds the embedding rows", "native"),
        Flag("capacity", Integer(1), "most rows of each table, on each rank; not with replicated "
             "tables of several", None, "no bound"),
        Flag("eviction", Choice(("lru", "lfu")),
             "which row leaves a full table: the one not used for longest, or least often", "lru"),
    ),
    "Training": (
        _preset("batch_size", Integer(1, 1 << 24), "inputs per step, of each rank"),
        _preset("epochs", Integer(1), "passes over the training part"),
        _preset("rows_optimizer", Choice(("sgd", "adagrad", "rowwise_adagrad", "adam")),
                "update rule of the embedding rows; Adagrad's sums of squares start at 0"),
        _preset("rows_learning_rate", Number(0),
                "learning rate of the rows, in their unit per step"),
        _preset("rows_init", Number(0),
                "rows start uniform between minus this and this, in their unit"),
        _preset("learning_rate", Number(0), "learning rate of Adam on the dense layers, per step"),
        Flag("seed", Integer(0, (1 << 31) - 1), "of rows, layers, data order and sampling", 0),
        Flag("precision", Choice(("float32", "mixed_bfloat16")),
             "of the dense layers; rows are float32", "float32"),
        Flag("threads", Integer(1, 1024), "threads of TensorFlow and the data, of each rank", None,
             "all cores"),
    ),
    "Several ranks (under horovodrun or mpirun)": (
        Flag("placement", Choice(("replicated", "sharded")), "where embedding rows are held: all "
             "of them on every rank, or spread over the ranks by hash", "replicated"),
        Flag("wire_dtype", Choice(("float32", "bfloat16")),
             "in which embedding rows travel between ranks", "float32"),
        Flag("wire_warmup_steps", Integer(0), "steps before rows are rounded to --wire_dtype: "
             "rounding disturbs the first ones most", None, "the steps of --warmup"),
        Flag("prefetch", None,
             "with --placement=sharded: send the next batch's keys while this one trains"),
        Flag("copy_movement", Number(0), "with --placement=sharded: read copies of hot rows until "
             "they have moved by this", None, "no copies"),
    ),
    "Skipping": (
        Flag("skip", Choice(_SKIP_MODES), "inputs: leave skippable ones out; gradients: mask those "
             "of saturated keys; defer: hold gradients back and apply their sum; both: inputs and "
             "defer", "none"),
        _preset("target_skip", Number(0, 1), "share of the hot inputs to skip"),
        _preset("alpha", Number(0, 1, True),
                "share of an input's lookups that must be saturated"),
        Flag("metric", Choice(DRIFT_METRICS), "drift of a row from its snapshot", "linf"),
        Flag("max_threshold", Number(0),
             "upper bound of the threshold T, in the unit of --metric"),
        _preset("snapshot_interval", Integer(1), "window length in steps; the default of 1000 "
                "becomes a 20th of the planned steps, but not less than 5, where that is shorter"),
        _preset("hot_budget_mb", Number(0, open_minimum=True),
                "MiB of snapshots; bounds the hot set"),
        Flag("warmup", Number(0, 1), "share of the planned steps before any skipping", 0.25),
        Flag("warmup_steps", Integer(0), "the same in steps", None, "by --warmup"),
        _engine("score", Choice(SCORES),
                "what makes an input skippable: its keys' drift (paper), or its last loss"),
        _engine("saturated_share", Number(0, 1),
                "share of the hot inputs whose keys count as saturated"),
        _engine("max_skips", Integer(0, 127),
                "skips after which an input is trained on again; 0: no limit"),
        _engine("keep_rate", Number(0, 0.999),
                "share of skippable inputs that is kept, with weight 1 / keep_rate"),
        _engine("threshold", Number(0),
                "T itself, in the unit of --metric, instead of a share of inputs",
                "by --target_skip"),
        _engine("release", Number(1),
                "factor on T up to which a saturated key's drift may rise before it varies"),
        _engine("revisit_every", Integer(0),
                "windows from probe to probe of a saturated key; 0: never", "10 where gradients "
                "are withheld, 100 where inputs are skipped, 0 with losses"),
        _engine("protect_windows", Integer(1), "windows before a key that became hot is judged"),
        _engine("guard_tolerance", Number(0), "rise of the kept inputs' loss at which T is halved, "
                "as a share of that loss", "no guard"),
        _engine("max_auc_loss", Number(0, 1, True),
                "most AUC that skipping may cost, by the budget's estimate", "no bound"),
        _engine("max_log_loss_increase", Number(0, open_minimum=True), "the same in log loss",
                "no bound"),
        _engine("defer_trigger", Choice(DEFER_TRIGGERS), "movement: hold any row's gradients until "
                "they would move it; interval: hold those of saturated rows"),
        _engine("freeze_drift", Number(0), "drift below which saturated rows are read from copies "
                "(sharded), in the unit of --metric; 0: none", "0.25 * --rows_learning_rate"),
        _engine("defer_movement", Number(0, open_minimum=True), "gradients of a row are held until "
                "they would move it by this, in the unit of the rows",
                "0.05 * --rows_learning_rate"),
        _engine("defer_max_age", Integer(1), "most steps that a sum is held"),
        _engine("defer_steps", Integer(1), "steps that a sum is held"),
        _engine("simulated_ranks", Integer(1, 64),
                "count rows as if so many ranks shared each batch"),
        _engine("exempt_tables", Names(), "tables that are neither tracked nor skipped", "none"),
        _engine("decay_skipped", None, "masking a row's gradient decays its moments (Adam)"),
        _engine("shadow", None, "skip nothing, and tell what --skip (inputs and defer if it is not "
                "given) would have saved, at what estimated cost"),
        Flag("track", None, "with --skip=none: find T and saturated keys all the same"),
    ),
    "Controls": (
        Flag("control", Choice(("none", "random", "stop")), "random: leave out as many inputs as "
             "the matched run, whatever their keys; stop: train plainly until as many are trained",
             "none"),
        Flag("match", Text(), "metrics.json of the run that the control repeats; settings not "
             "given come from it"),
        Flag("segregate", None, "train on batches of hot and batches of cold inputs; hot keys, "
             "within --hot_budget_mb, are chosen in a pass over the data before training"),
    ),
}  # fmt: skip
# What `--help` lists: a screen of them.
_BASIC = (
    *("data", "max_inputs", "output", "model", "dim", "batch_size", "epochs"),
    *("seed", "skip", "target_skip", "warmup", "score", "defer_movement", "shadow", "control"),
    "match",
)


def make_flags() -> FlagSet:
    """Returns the program's flags."""
    return FlagSet(
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
        _FLAGS,
        basic=_BASIC,
    )


def engine_settings(values: Mapping[str, Any], given: frozenset[str], skip: str) -> dict[str, Any]:
    """Collects the given flags, as settings of `SaturationConfig`.

    Args:
        values: by flag, as parsed.
        given: flags that stand on the command line.
        skip: the chosen skip mode, or "track".

    Raises:
        UsageError: one does nothing with the other settings.
    """
    chosen = {name: values[name] for name in ENGINE_FLAGS if name in given}
    for name in chosen:
        if not ENGINE_FLAGS[name].is_met(skip, chosen):
            raise does_nothing(name, ENGINE_FLAGS[name].words)
    return chosen
