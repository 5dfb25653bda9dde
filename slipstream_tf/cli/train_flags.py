"""The flags of `slipstream-train`: names, parsers, help texts, defaults and conditions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from slipstream_tf import optimizers
from slipstream_tf._utils import agent
from slipstream_tf.cli.flag_set import (
    Choice,
    Flag,
    FlagSet,
    Integer,
    NameList,
    Number,
    Size,
    Text,
    Widths,
)
from slipstream_tf.config import ROW_DTYPES, SLOT_DTYPES, WIRE_DTYPES
from slipstream_tf.optimizers.base import DECAYS

# Replaces `cli.settings.Settings`, which cannot be imported because that module imports this one.
Settings = Any


class Need(NamedTuple):
    """A condition that must hold for a flag to have an effect.

    Attributes:
        words: Description of the condition for error messages, in flags where possible.
        is_met: Function that returns whether the given `Settings` meet the condition.
    """

    words: str
    is_met: Callable[[Settings], bool]


def _saves(policy: str) -> Callable[[Settings], bool]:
    return lambda settings: policy in settings.policies


def _skips_by(score: str) -> Callable[[Settings], bool]:
    return lambda settings: (
        "skip_examples" in settings.policies and settings.engine["skip_score"] == score
    )


predicts_losses = _skips_by("predicted_loss")
"""Returns whether the settings skip examples by predicted loss."""


def has_pilot(*pilots: str) -> Callable[[Settings], bool]:
    """Returns a predicate: whether settings skip by such a pilot's loss."""
    return lambda settings: (
        predicts_losses(settings) and settings.engine.get("pilot", "fm") in pilots
    )


def goes_by_keys(settings: Settings) -> bool:
    """Returns whether a policy or `--watch` needs the saturation of keys."""
    if settings.control == "random":
        return False
    by_drift = (
        {"mask_gradients"} if predicts_losses(settings) else {"skip_examples", "mask_gradients"}
    )
    return bool(by_drift & set(settings.policies)) or settings.watch


def _is_steered(settings: Settings) -> bool:
    return bool(
        set(settings.policies) - ({"skip_examples"} if predicts_losses(settings) else set())
    )


WATCHING = Need(
    "--policies or --watch", lambda settings: settings.uses_engine and settings.control != "random"
)
WINDOWS = Need(WATCHING.words, lambda settings: settings.uses_engine)
WARMUP = Need(
    WATCHING.words, lambda settings: settings.uses_engine or settings.wire_dtype != "float32"
)
STEERED = Need("--policies", _is_steered)
EXAMPLES = Need("--policies=skip_examples", _saves("skip_examples"))
BY_KEYS = Need("--skip_score=row_drift", _skips_by("row_drift"))
PREDICTED_LOSS = Need("--skip_score=predicted_loss", predicts_losses)
DEFER = Need("--policies=defer_gradients", _saves("defer_gradients"))
MASK = Need("--policies=mask_gradients", _saves("mask_gradients"))
KEYS = Need("--policies that go by drift, or --watch", goes_by_keys)
HOT_SET = Need(KEYS.words, lambda settings: goes_by_keys(settings) or settings.schedule != "plain")
NO_AUC_BOUND = Need(
    "no --max_auc_loss, which decides it",
    lambda settings: settings.engine.get("max_auc_loss") is None,
)
NO_POLICY = Need(
    "no --policies and no --control=random",
    lambda settings: not settings.policies and settings.control != "random",
)
NO_SAVING = Need(
    "no --policies and --control=none",
    lambda settings: not settings.policies and settings.control == "none",
)
RANKS = Need(
    "several ranks, started by horovodrun or mpirun", lambda settings: agent.rank() is not None
)
ONE_PROCESS = Need("one process", lambda settings: agent.rank() is None or not settings.batch_norm)
SHARDED = Need("--placement=sharded", lambda settings: settings.placement == "sharded")
NO_PREFETCH = Need(
    # After a measurement, the keys that were prefetched before it would be sent and counted again.
    "no --prefetch",
    lambda settings: agent.rank() is None or not settings.prefetch,
)
STOPPING = Need("--early_stopping", lambda settings: settings.early_stopping > 0)
DECAYING = Need(
    "--rows_l2 or --rows_optimizer=adamw",
    lambda settings: settings.rows_l2 > 0 or settings.rows_optimizer == "adamw",
)
MEMORY = Need("--memory", lambda settings: settings.memory is not None)
SPILL = Need("--spill", lambda settings: settings.spill is not None)
CAPACITY = Need("--capacity", lambda settings: settings.capacity is not None)
DLRM = Need("--model=dlrm", lambda settings: settings.model == "dlrm")
DCN = Need("--model=dcn", lambda settings: settings.model == "dcn")

DATA_HELP = (
    "folder of slipstream-prepare, Criteo TSV (.tsv, .txt, also .gz), Avazu CSV (.csv, also .gz); "
    "or 'generated' or 'generated:COUNT', examples drawn from a fixed law "
    "('generated:COUNT:KEYS:RATE': with fields of at most so many keys, and such a click rate)"
)
SHUFFLES = ("none", "shards", "examples")
SCHEDULES = ("plain", "fae", "hotline")
POLICIES = ("skip_examples", "defer_gradients", "mask_gradients")
# Flags of the engine that are stored in `Settings.engine`; `cli.build` reads them.
ENGINE_FLAGS = (
    *("skip_score", "skip_fraction", "skip_keep_rate", "skip_alpha"),
    *("pilot", "defer_movement", "defer_max_age", "mask_fraction"),
    *("revisit_every", "hot_set_memory", "max_auc_loss"),
)


# Defaults for each data set, as command line text.
PRESETS: Mapping[str, Mapping[str, str]] = {
    "criteo": {"bottom": "256-64", "mlp": "256-128"},
    "avazu": {"mlp": "256-128"},
    "generated": {"batch_size": "512", "window_steps": "20", "skip_alpha": "0.8"},
}


_FLAGS: Mapping[str, Sequence[Flag]] = {
    "Data and output": (
        Flag("data", Text(), DATA_HELP),
        Flag("settings", Text(), 'JSON file of flags, such as {"dim": 32, "mlp": [128, 64]}, for '
             "flags that are not on the command line"),
        Flag("evaluate_on", Choice(("test", "valid")), "the part that quality is measured on; the "
             "validation part is not trained then, and the test part not opened", "test"),
        Flag("shuffle", Choice(SHUFFLES), "of data of slipstream-prepare: read the shards in an "
             "order that --seed and the epoch give, or keep the training part in memory and "
             "shuffle its examples in every epoch", "none"),
        Flag("max_examples", Integer(1),
             "stop after this many examples, over all epochs and ranks"),
        Flag("output", Text(), "folder for metrics.json; without it nothing is written"),
        Flag("export", Text(),
             "folder for a SavedModel of the trained model; it needs TensorFlow alone"),
        Flag("tensorboard", Text(),
             "folder for TensorBoard's curves and histograms of the windows",
             needs=(WINDOWS,)),
        Flag("trace", Text(), "file for a trace of 32 steps, from the 128th on: operations, and "
             "messages between ranks; open it in ui.perfetto.dev"),
        Flag("evaluate_every", Integer(1), "steps between measurements of the test part in "
             "training, or with --early_stopping of the validation part; their time is "
             "evaluation's", None, "at the end only; with --early_stopping once an epoch",
             needs=(NO_PREFETCH,)),
        Flag("checkpoint_every", Integer(0),
             "steps of the job between checkpoints in OUTPUT/checkpoints; 0: none are saved", 0),
        Flag("keep_checkpoints", Integer(1), "checkpoints that are kept, the newest ones", 3),
        Flag("resume", None, "go on from the newest checkpoint, of the same flags; without one, "
             "from the beginning"),
    ),
    "Model": (
        Flag("model", Choice(("dlrm", "dcn", "deepfm")), "DLRM, DCN-v2 or DeepFM", "dlrm"),
        Flag("dim", Integer(1, 65536), "values per embedding row", 16),
        Flag("bottom", Widths(), "units of the hidden layers of DLRM's bottom MLP (data with "
             "numbers only)", "64", needs=(DLRM,)),
        Flag("mlp", Widths(),
             "units of the hidden layers of DLRM's top MLP, or the others' deep MLP", "64"),
        Flag("cross_layers", Integer(1), "number of cross layers of DCN-v2", 3, needs=(DCN,)),
        Flag("batch_norm", None, "hidden units are normalised over the batch, in front of ReLU",
             needs=(ONE_PROCESS,)),
        Flag("dropout", Number(0, 1, open_maximum=True),
             "fraction of hidden units dropped in training", 0.0),
        Flag("row_dtype", Choice(ROW_DTYPES), "dtype of the rows in memory; narrower ones are "
             "computed in float32 and rounded by chance", "float32"),
        Flag("slot_dtype", Choice(SLOT_DTYPES), "dtype of the optimizer's values beside a row",
             "float32"),
        Flag("memory", Size(), "of the rows of each table, on each rank; the others are on disk",
             None, "all rows", needs=(SPILL,)),
        Flag("spill", Text(), "folder on a local disk, for the rows beyond --memory", None, "none",
             needs=(MEMORY,)),
        Flag("capacity", Integer(1), "most rows of each table, on each rank; not with replicated "
             "tables of several", None, "no bound"),
        Flag("eviction", Choice(("lru", "lfu")),
             "which row leaves a full table: the one not used for longest, or least often", "lru",
             needs=(CAPACITY,)),
    ),
    "Training": (
        Flag("batch_size", Integer(1, 1 << 24), "examples per step, of each rank", 1024),
        Flag("epochs", Integer(1), "passes over the training part", 1),
        Flag("rows_optimizer", Choice(optimizers.NAMES),
             "update rule of the embedding rows; Adagrad's sums of squares start at 0", "adagrad"),
        Flag("rows_l2", Number(0), "factor on the squared norm of rows, a penalty; 0: none", 0.0),
        Flag("rows_decay", Choice(DECAYS), "which rows are penalised and decay: "
             "those of a batch, or all in every step (with --rows_l2 beside another rule than "
             "sgd, for tables of some 100,000 rows)", "batch", needs=(DECAYING,)),
        Flag("rows_learning_rate", Number(0), "learning rate of the rows, in their unit per step",
             0.05),
        Flag("rows_init", Number(0),
             "rows start uniform between minus this and this, in their unit", 0.05),
        Flag("learning_rate", Number(0), "learning rate of Adam on the dense layers, per step",
             1e-3),
        Flag("early_stopping", Integer(0), "measurements of the validation part without a "
             "higher AUC after which training ends; the best weights and rows come back; 0: "
             "none", 0),
        Flag("plateau_factor", Number(0, 1, open_minimum=True), "factor on the rates after a "
             "measurement without a higher AUC; 1: none", 1.0, needs=(STOPPING,)),
        Flag("seed", Integer(0, (1 << 31) - 1), "of rows, layers, data order and sampling", 0),
        Flag("precision", Choice(("float32", "mixed_bfloat16")),
             "of the dense layers; rows are float32", "float32"),
        Flag("threads", Integer(1, 1024), "threads of TensorFlow and the data, of each rank", None,
             "all cores"),
    ),
    "Several ranks (under horovodrun or mpirun)": (
        Flag("placement", Choice(("replicated", "sharded")), "where embedding rows are held: all "
             "of them on every rank, or spread over the ranks by hash", "replicated",
             needs=(RANKS,)),
        Flag("wire_dtype", Choice((*WIRE_DTYPES, "bfloat16,int8", "auto")),
             "in which embedding rows and their gradients travel between ranks, rows after the "
             "warm-up; of two, the first is of rows, which sharded tables alone send", "float32",
             needs=(RANKS,)),
        Flag("prefetch", None,
             "with --placement=sharded: send the next batch's keys while this one trains",
             needs=(RANKS, SHARDED)),
        Flag("elastic", None, "ranks may come and go (horovodrun --host-discovery-script): "
             "training goes on from the newest checkpoint with those that there are",
             needs=(RANKS,)),
    ),
    "Saving": (
        Flag("policies", NameList(POLICIES), "what is saved: examples that teach nothing are left "
             "out; gradients are deferred, or masked", None, "none: plain training"),
        Flag("dry_run", None, "save nothing, and tell what --policies (if not given, skip_examples "
             "and what else goes with the rows' settings) would have saved, at what estimated "
             "cost"),
        Flag("watch", None, "without --policies: find T and saturated keys all the same",
             needs=(NO_POLICY,)),
        Flag("skip_score", Choice(("predicted_loss", "row_drift")), "score of an example: the loss "
             "that a pilot predicts, or its keys' drift (paper; a baseline)", None,
             "predicted_loss", (EXAMPLES,)),
        Flag("skip_fraction", Number(0, 1, True), "fraction of the hot examples to skip", None,
             "0.3; by predicted_loss 0.5", (EXAMPLES,)),
        Flag("pilot", Choice(("fm", "linear", "label", "model")), "pilot model: a factorization "
             "machine or a linear model of the keys, the label alone (uniform negative sampling), "
             "or the model's own forward pass", None, "fm", (PREDICTED_LOSS,)),
        Flag("skip_keep_rate", Number(0, 0.999), "fraction of skippable examples to train on "
             "nevertheless, with weight 1 / skip_keep_rate", None, "0", (EXAMPLES, BY_KEYS)),
        Flag("skip_alpha", Number(0, 1, True),
             "fraction of an example's lookups that must be saturated", 1.0,
             needs=(EXAMPLES, BY_KEYS)),
        Flag("defer_movement", Number(0, open_minimum=True), "distance up to which deferred "
             "gradients may leave a row's values behind, in the unit of the rows", None,
             "0.05 * --rows_learning_rate", (DEFER, NO_AUC_BOUND)),
        Flag("defer_max_age", Integer(1), "maximum steps that a gradient is deferred", None, "200",
             (DEFER,)),
        Flag("mask_fraction", Number(0, 1), "fraction of the hot examples to have saturated "
             "keys only", None, "0.3", (MASK,)),
        Flag("max_auc_loss", Number(0, 1, True), "maximum AUC that saving may cost, by an estimate "
             "that held on shuffled data and failed on a changing stream (.0020 lost of .0005)",
             None, "no bound", (STEERED,)),
    ),
    "Windows and saturated keys": (
        Flag("window_steps", Integer(1), "window length in steps", None,
             "a 20th of the planned steps, 5 to 1000", (WINDOWS,)),
        Flag("warmup", Number(0, 1), "fraction of the planned steps before any saving", 0.25,
             needs=(WARMUP,)),
        Flag("warmup_steps", Integer(0), "the same in steps", None, "by --warmup",
             (WARMUP,)),
        Flag("hot_set_memory", Size(), "snapshots of hot keys", None, "256MiB", (HOT_SET,)),
        Flag("revisit_every", Integer(0), "windows from probe to probe of a saturated key; 0: "
             "never", None, "10 where gradients are withheld, 100 where examples are skipped, 0 "
             "with losses", (KEYS,)),
    ),
    "Controls": (
        Flag("control", Choice(("none", "random", "stop")), "random: leave out as many examples as "
             "the matched run, whatever their keys; stop: train plainly until as many are trained",
             "none"),
        Flag("match", Text(), "metrics.json of the run that the control repeats; settings not "
             "given come from it"),
        Flag("schedule", Choice(SCHEDULES), "fae: batches of hot and batches of cold examples; "
             "hotline: each batch in two parts; hot keys, within --hot_set_memory, are chosen in a "
             "pass over the data before training", "plain", needs=(NO_SAVING,)),
    ),
}  # fmt: skip
# The flags that `--help` lists, chosen to fit on one screen. `--helpfull` lists all.
_BASIC = (
    *("data", "settings", "max_examples", "output", "model", "dim", "batch_size", "epochs"),
    *("seed", "dry_run", "policies", "skip_score", "skip_fraction", "control", "match"),
)


def make_flags() -> FlagSet:
    """Returns the flags of `slipstream-train`."""
    return FlagSet(
        "slipstream-train",
        "Trains a click model plainly, with --policies that save, as a --dry_run of them, or as a "
        "--control. Ends with a table, and writes metrics.json. Under horovodrun or "
        "mpirun the ranks train one model; --batch_size is that of each rank.",
        (
            "slipstream-train --data=clicks --settings=clicks.json --output=runs/plain",
            "slipstream-train --data=clicks --dry_run",
            "slipstream-train --data=clicks --policies=defer_gradients",
            "slipstream-train --control=random --match=runs/skip/metrics.json --output=runs/rnd",
            "horovodrun -np 2 slipstream-train --data=clicks --output=runs/ranks",
        ),
        {title: [_by_data(flag) for flag in flags] for title, flags in _FLAGS.items()},
        basic=_BASIC,
    )


def _by_data(flag: Flag) -> Flag:
    """Adds preset defaults to a help text: "1024; generated 512"."""
    own = [f"{data} {found[flag.name]}" for data, found in PRESETS.items() if flag.name in found]
    common = flag.default_text or str(flag.default)
    return flag._replace(default_text="; ".join([common, *own])) if own else flag
