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
STEERED = Need(
    "--policies=defer_gradients, --policies=mask_gradients or --skip_score=row_drift", _is_steered
)
EXAMPLES = Need("--policies=skip_examples", _saves("skip_examples"))
BY_KEYS = Need("--skip_score=row_drift", _skips_by("row_drift"))
PREDICTED_LOSS = Need("--skip_score=predicted_loss", predicts_losses)
DEFER = Need("--policies=defer_gradients", _saves("defer_gradients"))
MASK = Need("--policies=mask_gradients", _saves("mask_gradients"))
KEYS = Need("--policies=mask_gradients, --skip_score=row_drift or --watch", goes_by_keys)
HOT_SET = Need(
    "--policies=mask_gradients, --skip_score=row_drift, --watch or --schedule",
    lambda settings: goes_by_keys(settings) or settings.schedule != "plain",
)
NO_AUC_BOUND = Need(
    "a run without --max_auc_loss, which determines the distance",
    lambda settings: settings.engine.get("max_auc_loss") is None,
)
NO_POLICY = Need(
    "a run without --policies and without --control=random",
    lambda settings: not settings.policies and settings.control != "random",
)
NO_SAVING = Need(
    "a run without --policies and without --control",
    lambda settings: not settings.policies and settings.control == "none",
)
RANKS = Need(
    "multiple ranks, started by horovodrun or mpirun", lambda settings: agent.rank() is not None
)
ONE_PROCESS = Need(
    "a single process", lambda settings: agent.rank() is None or not settings.batch_norm
)
SHARDED = Need("--placement=sharded", lambda settings: settings.placement == "sharded")
NO_PREFETCH = Need(
    # After a measurement, the keys that were prefetched before it would be sent and counted again.
    "a run without --prefetch",
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
    "a folder that slipstream-prepare wrote, a Criteo TSV file (.tsv, .txt, also .gz), an Avazu "
    "CSV file (.csv, also .gz), or 'generated[:COUNT[:KEYS[:RATE]]]', synthetic examples with at "
    "most KEYS keys per field and the click rate RATE"
)
BY_DATA = "by the data"
SHUFFLES = ("none", "shards", "examples")
SCHEDULES = ("plain", "fae", "hotline")
POLICIES = ("skip_examples", "defer_gradients", "mask_gradients")
# Flags of the engine that are stored in `Settings.engine`; `cli.build` reads them.
ENGINE_FLAGS = (
    *("skip_score", "skip_fraction", "skip_keep_rate", "skip_alpha"),
    *("pilot", "defer_movement", "defer_max_age", "mask_fraction"),
    *("revisit_every", "hot_set_memory", "max_auc_loss"),
)


_FLAGS: Mapping[str, Sequence[Flag]] = {
    "Data and output": (
        Flag("data", Text(), DATA_HELP),
        Flag("settings", Text(), 'JSON file with values of flags, for example {"dim": 32, "mlp": '
             "[128, 64]}; flags on the command line override them"),
        Flag("evaluate_on", Choice(("test", "valid")), "part of the data on which the model is "
             "evaluated; with valid, the validation part is excluded from training and the test "
             "part is not read", "test"),
        Flag("shuffle", Choice(SHUFFLES), "order of training data that slipstream-prepare wrote: "
             "none keeps the order of the files, shards shuffles the shards in every epoch, and "
             "examples loads the training part into memory and shuffles its examples in every "
             "epoch", "none", "none; examples by the data"),
        Flag("max_examples", Integer(1),
             "maximum number of examples over all epochs and ranks"),
        Flag("output", Text(), "folder for metrics.json; without it, results are only printed"),
        Flag("export", Text(), "folder for a SavedModel of the trained model, which TensorFlow can "
             "load without slipstream_tf; its inputs are the columns of the original files if the "
             "data was prepared with a schema"),
        Flag("tensorboard", Text(),
             "folder for TensorBoard logs: curves and histograms of the windows",
             needs=(WINDOWS,)),
        Flag("trace", Text(), "file for a trace of the 32 steps after step 128, with operations "
             "and messages between ranks; open it in ui.perfetto.dev"),
        Flag("evaluate_every", Integer(1), "steps between evaluations during training, on the part "
             "of --evaluate_on, or on the validation part with --early_stopping; their time does "
             "not count as training time", None,
             "only at the end; once per epoch with --early_stopping",
             needs=(NO_PREFETCH,)),
        Flag("checkpoint_every", Integer(0), "steps between checkpoints, which are saved in the "
             "subfolder checkpoints of --output; 0 disables checkpoints", 0),
        Flag("keep_checkpoints", Integer(1), "number of checkpoints to keep, newest first", 3),
        Flag("resume", None, "continue from the newest checkpoint in --output, which requires the "
             "same flags, or train from scratch if there is no checkpoint"),
    ),
    "Model": (
        Flag("model", Choice(("dlrm", "dcn", "deepfm")), "model to train: DLRM, DCN-v2 or DeepFM",
             None, BY_DATA),
        Flag("dim", Integer(1, 65536), "number of values per embedding row", 16),
        Flag("bottom", Widths(), "units of each hidden layer of DLRM's bottom MLP, which requires "
             "data with numeric features", "64", needs=(DLRM,)),
        Flag("mlp", Widths(), "units of each hidden layer of DLRM's top MLP, or of the deep MLP of "
             "DCN-v2 and DeepFM", "64"),
        Flag("cross_layers", Integer(1), "number of cross layers of DCN-v2", 3, needs=(DCN,)),
        Flag("batch_norm", None, "batch normalization of the hidden units before ReLU",
             needs=(ONE_PROCESS,)),
        Flag("dropout", Number(0, 1, open_maximum=True),
             "fraction of the hidden units that is dropped in each training step", 0.0),
        Flag("row_dtype", Choice(ROW_DTYPES), "dtype of the embedding rows in memory; rows in a "
             "16-bit dtype are updated in float32 and rounded stochastically", "float32"),
        Flag("slot_dtype", Choice(SLOT_DTYPES), "dtype of the optimizer slots of each row",
             "float32"),
        Flag("memory", Size(), "maximum memory for the rows and slots of each table on each rank; "
             "the other rows are stored in --spill", None, "all rows", needs=(SPILL,)),
        Flag("spill", Text(), "folder on a local disk for the rows that exceed --memory", None,
             "none", needs=(MEMORY,)),
        Flag("capacity", Integer(1), "maximum number of rows of each table on each rank; "
             "replicated tables of multiple ranks do not support it", None, "no limit"),
        Flag("eviction", Choice(("lru", "lfu")), "row that a full table evicts: lru the least "
             "recently used, lfu the least frequently used", "lru", needs=(CAPACITY,)),
    ),
    "Training": (
        Flag("batch_size", Integer(1, 1 << 24), "examples per step on each rank", None,
             BY_DATA),
        Flag("epochs", Integer(1), "number of passes over the training part", None, BY_DATA),
        Flag("rows_optimizer", Choice(optimizers.NAMES), "optimizer of the embedding rows; the "
             "accumulators of Adagrad start at 0", "adagrad"),
        Flag("rows_l2", Number(0), "factor of the L2 penalty on embedding rows; 0 disables it",
             0.0),
        Flag("rows_decay", Choice(DECAYS), "rows to which --rows_l2 and the weight decay of adamw "
             "apply: the rows of the batch, or all rows in every step (with --rows_l2 and another "
             "optimizer than sgd, only for tables of up to about 100,000 rows)", "batch",
             needs=(DECAYING,)),
        Flag("rows_learning_rate", Number(0), "learning rate of the embedding rows", None,
             BY_DATA),
        Flag("rows_init", Number(0), "maximum absolute value of new rows, which are sampled "
             "uniformly, in the unit of the rows", 0.05),
        Flag("learning_rate", Number(0), "learning rate of Adam for the dense layers", 1e-3),
        Flag("early_stopping", Integer(0), "number of consecutive evaluations of the validation "
             "part without a higher AUC after which training stops and the best weights and rows "
             "are restored; 0 disables early stopping", 0),
        Flag("plateau_factor", Number(0, 1, open_minimum=True), "factor of the learning rates "
             "after each evaluation without a higher AUC; 1 keeps the learning rates constant",
             1.0, needs=(STOPPING,)),
        Flag("seed", Integer(0, (1 << 31) - 1), "seed of rows, layers, data order and sampling", 0),
        Flag("precision", Choice(("float32", "mixed_bfloat16")), "dtype policy of the dense "
             "layers; the dtype of the rows is --row_dtype", "float32"),
        Flag("threads", Integer(1, 1024), "threads of TensorFlow and of the data pipeline on "
             "each rank", None, "all cores"),
    ),
    "Multiple ranks (with horovodrun or mpirun)": (
        Flag("placement", Choice(("replicated", "sharded")), "ranks that store an embedding row: "
             "replicated stores all rows on every rank, sharded distributes the rows by hash",
             "replicated", needs=(RANKS,)),
        Flag("wire_dtype", Choice((*WIRE_DTYPES, "bfloat16,int8", "auto")), "dtype of embedding "
             "rows and gradients in messages between ranks after the warm-up; auto selects the "
             "fastest on this network; bfloat16,int8 sends rows as bfloat16 (only with "
             "--placement=sharded) and gradients as int8", "float32", needs=(RANKS,)),
        Flag("prefetch", None, "send the keys of the next batch to other ranks while the current "
             "batch trains, which requires --placement=sharded", needs=(RANKS, SHARDED)),
        Flag("elastic", None, "ranks may join and leave the job (horovodrun "
             "--host-discovery-script); after a change, training continues from the newest "
             "checkpoint", needs=(RANKS,)),
    ),
    "Policies": (
        Flag("policies", NameList(POLICIES), "policies that save work: skip examples, or defer or "
             "mask gradients of embedding rows", None, "none"),
        Flag("dry_run", None, "estimate the savings and the cost of --policies without applying "
             "them; by default of skip_examples, and of defer_gradients if the optimizer supports "
             "it"),
        Flag("watch", None, "measure the saturation of keys in a run without --policies",
             needs=(NO_POLICY,)),
        Flag("skip_score", Choice(("predicted_loss", "row_drift")), "score of an example: its loss "
             "predicted by a pilot model, or the drift of its keys (a baseline)", None,
             "predicted_loss", (EXAMPLES,)),
        Flag("skip_fraction", Number(0, 1, True), "fraction of examples to skip (row_drift: of "
             "hot examples)", None, "0.5; row_drift 0.3", (EXAMPLES,)),
        Flag("pilot", Choice(("fm", "linear", "label", "model")), "pilot model that predicts "
             "losses: a factorization machine (fm) or a linear model of the keys, only the label "
             "(uniform negative sampling), or the forward pass of the trained model", None, "fm",
             (PREDICTED_LOSS,)),
        Flag("skip_keep_rate", Number(0, 0.999), "fraction of the skippable examples that is "
             "trained nevertheless, with weight 1 / skip_keep_rate; 0 disables it", None, "0",
             (EXAMPLES, BY_KEYS)),
        Flag("skip_alpha", Number(0, 1, True), "minimum fraction of saturated keys among the "
             "lookups of an example that is skipped", 1.0, needs=(EXAMPLES, BY_KEYS)),
        Flag("defer_movement", Number(0, open_minimum=True), "deferred gradients of a row are "
             "applied when they would change any value of the row by this distance, in the unit of "
             "the rows", None, "0.05 * --rows_learning_rate", (DEFER, NO_AUC_BOUND)),
        Flag("defer_max_age", Integer(1), "maximum number of steps for which a gradient is "
             "deferred", None, "200", (DEFER,)),
        Flag("mask_fraction", Number(0, 1, True), "fraction of the hot examples that should have "
             "only saturated keys; it determines the drift threshold T", None, "0.3", (MASK,)),
        Flag("max_auc_loss", Number(0, 1, True), "maximum AUC loss that policies may cause, by an "
             "estimate that held on shuffled data but failed on a changing stream (with 0.0005, "
             "training lost 0.0020)", None, "no limit", (STEERED,)),
    ),
    "Windows and saturated keys": (
        Flag("window_steps", Integer(1), "number of steps per window; policies decide at the end "
             "of each window", None, "planned steps / 20, clamped to [5, 1000]; 200 if unknown",
             (WINDOWS,)),
        Flag("warmup", Number(0, 1), "fraction of the planned steps before policies take effect",
             0.25, needs=(WARMUP,)),
        Flag("warmup_steps", Integer(0), "number of steps before policies take effect", None,
             "from --warmup", (WARMUP,)),
        Flag("hot_set_memory", Size(), "maximum memory for the snapshots of the rows of hot keys",
             None, "256MiB", (HOT_SET,)),
        Flag("revisit_every", Integer(0), "number of windows between probes of a saturated key; a "
             "probe trains the key for a window and measures its drift; 0 disables probes", None,
             "10 with mask_gradients, else 100", (KEYS,)),
    ),
    "Controls": (
        Flag("control", Choice(("none", "random", "stop")), "random skips as many examples as the "
             "matched run, independent of their keys; stop trains without policies until it has "
             "trained as many examples", "none"),
        Flag("match", Text(), "metrics.json, or its folder, of the run that the control repeats; "
             "it also provides the settings that are not given as flags"),
        Flag("schedule", Choice(SCHEDULES), "baseline for the order of training: fae trains hot "
             "and cold examples in separate batches, hotline splits each batch into a hot and a "
             "cold part; a pass over the data before training selects the hot keys, which must fit "
             "into --hot_set_memory", "plain", needs=(NO_SAVING,)),
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
        "Trains a click model: without policies, with --policies, as a --dry_run of policies, or "
        "as a --control. Prints a table of results and writes metrics.json. With horovodrun or "
        "mpirun, all ranks train one model, each in batches of --batch_size examples.",
        (
            "slipstream-train --data=clicks --settings=clicks.json --output=runs/plain",
            "slipstream-train --data=clicks --dry_run",
            "slipstream-train --data=clicks --policies=defer_gradients",
            "slipstream-train --control=random --match=runs/skip/metrics.json --output=runs/rnd",
            "horovodrun -np 2 slipstream-train --data=clicks --output=runs/ranks",
        ),
        _FLAGS,
        basic=_BASIC,
    )
