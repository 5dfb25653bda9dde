"""The flags of `slipstream-train`: one table of name, parser, unit, default and what each needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_tf import optimizers
from slipstream_tf._utils.comm import WIRE_DTYPES
from slipstream_tf.cli import needs, presets
from slipstream_tf.cli.flag_set import (
    Choice,
    Flag,
    FlagSet,
    Integer,
    Lifetime,
    Names,
    Number,
    Size,
    Text,
    Widths,
)
from slipstream_tf.config import DRIFT_METRICS, MAX_ADMIT, ROW_DTYPES, SLOT_DTYPES

DATA_HELP = (
    "folder of slipstream-prepare, Criteo TSV (.tsv, .txt, also .gz), Avazu CSV (.csv, also .gz), "
    "Parquet (.parquet or a folder; name its columns); "
    "or 'generated' or 'generated:COUNT', examples drawn from a fixed law "
    "('generated:COUNT:KEYS:RATE': with fields of at most so many keys, and such a click rate)"
)
SHUFFLES = ("none", "shards", "examples")
SCHEDULES = ("plain", "fae", "hotline")
POLICIES = ("skip_examples", "defer_gradients", "mask_gradients")
# What a run's engine is set by, beside `Settings`' own fields; names as of `cli.engine`.
ENGINE_FLAGS = (
    *("skip_by", "skip_share", "skip_keep", "skip_alpha"),
    *("pilot", "pilot_factors", "pilot_memory", "correct", "floor"),
    *("defer_movement", "defer_max_age", "mask_share", "mask_decay_moments"),
    *("drift_metric", "threshold", "max_threshold", "revisit_every"),
    *("hot_set_memory", "exclude_tables", "max_auc_loss"),
)


def _preset(name: str, parser: Any, text: str, *required: needs.Need) -> Flag:
    return Flag(name, parser, text, None, presets.describe(name), required)


_FLAGS: Mapping[str, Sequence[Flag]] = {
    "Data and output": (
        Flag("data", Text(), DATA_HELP),
        Flag("settings", Text(), 'JSON file of flags, such as {"dim": 32, "mlp": [128, 64]}, for '
             "flags that are not on the command line"),
        Flag("evaluate_on", Choice(("test", "valid")), "the part that quality is measured on; the "
             "validation part is not trained then, and the test part not opened", "test"),
        Flag("label_column", Text(), "column of the label, of Parquet data",
             needs=(needs.PARQUET,)),
        Flag("key_columns", Names(), "columns of the keys, of Parquet data",
             needs=(needs.PARQUET,)),
        Flag("dense_columns", Names(), "columns of numbers, of Parquet data",
             needs=(needs.PARQUET,)),
        Flag("shuffle", Choice(SHUFFLES), "of data of slipstream-prepare: read the shards in an "
             "order that --seed and the epoch give, or keep the training part in memory and "
             "shuffle its examples in every epoch", "none"),
        Flag("max_examples", Integer(1),
             "stop after this many examples, over all epochs and ranks"),
        Flag("strict", None, "a line that cannot be read ends the run, instead of being counted"),
        Flag("output", Text(), "folder for metrics.json; without it nothing is written"),
        Flag("export", Text(),
             "folder for a SavedModel of the trained model; it needs TensorFlow alone"),
        Flag("tensorboard", Text(),
             "folder for TensorBoard's curves and histograms of the windows",
             needs=(needs.WINDOWS,)),
        Flag("trace", Text(), "file for a trace of 32 steps, from the 128th on: operations, and "
             "messages between ranks; open it in ui.perfetto.dev"),
        Flag("evaluate_every", Integer(1), "steps between measurements of the test part in "
             "training, or with --early_stopping of the validation part; their time is "
             "evaluation's", None, "at the end only; with --early_stopping once an epoch",
             needs=(needs.NO_PREFETCH,)),
        Flag("checkpoint_every", Integer(0),
             "steps of the job between checkpoints in OUTPUT/checkpoints; 0: none are saved", 0),
        Flag("keep_checkpoints", Integer(1), "checkpoints that are kept, the newest ones", 3),
        Flag("resume", None, "go on from the newest checkpoint, of the same flags; without one, "
             "from the beginning"),
    ),
    "Model": (
        _preset("model", Choice(("dlrm", "dcn", "deepfm")), "DLRM, DCN-v2 or DeepFM"),
        _preset("dim", Integer(1, 65536), "values per embedding row"),
        _preset("bottom", Widths(),
                "units of the hidden layers of DLRM's bottom MLP (data with numbers only)",
                needs.DLRM),
        _preset("mlp", Widths(),
                "units of the hidden layers of DLRM's top MLP, or the others' deep MLP"),
        _preset("cross_layers", Integer(1), "number of cross layers of DCN-v2", needs.DCN),
        _preset("batch_norm", None, "hidden units are normalised over the batch, in front of ReLU",
                needs.ONE_PROCESS),
        _preset("output_bias", None, "the output starts at the log odds of a click in the first "
                "100 batches"),
        _preset("dropout", Number(0, 1, open_maximum=True),
                "share of hidden units dropped in training"),
        Flag("store", Choice(("native",)), "what holds the embedding rows", "native"),
        Flag("row_dtype", Choice(ROW_DTYPES), "dtype of the rows in memory; narrower ones are "
             "computed in float32 and rounded by chance", "float32"),
        Flag("slot_dtype", Choice(SLOT_DTYPES), "dtype of the optimizer's values beside a row",
             "float32"),
        Flag("memory", Size(), "of the rows of each table, on each rank; the others are on disk",
             None, "all rows", needs=(needs.SPILL,)),
        Flag("spill", Text(), "folder on a local disk, for the rows beyond --memory", None, "none",
             needs=(needs.MEMORY,)),
        Flag("capacity", Integer(1), "most rows of each table, on each rank; not with replicated "
             "tables of several", None, "no bound"),
        Flag("eviction", Choice(("lru", "lfu")),
             "which row leaves a full table: the one not used for longest, or least often", "lru",
             needs=(needs.CAPACITY,)),
        Flag("admit_after", Integer(1, MAX_ADMIT), "accesses until a key gets a row; it reads its "
             "initial row until then", 1),
        Flag("expire_after", Lifetime(), "without an access, until a row leaves", None, "never"),
    ),
    "Training": (
        _preset("batch_size", Integer(1, 1 << 24), "examples per step, of each rank"),
        _preset("epochs", Integer(1), "passes over the training part"),
        _preset("rows_optimizer", Choice(optimizers.NAMES),
                "update rule of the embedding rows; Adagrad's sums of squares start at 0"),
        Flag("rows_momentum", Number(0, 1, open_maximum=True), "momentum of the rows", 0.0,
             needs=(needs.SGD,)),
        _preset("rows_l2", Number(0),
                "factor on the squared norm of rows, a penalty; 0: none"),
        _preset("rows_weight_decay", Number(0),
                "rows decay by this factor on the learning rate; 0: none, but adamw's default of "
                "0.004"),
        _preset("rows_decay", Choice(optimizers.DECAYS), "which rows are penalised and decay: "
                "those of a batch, or all in every step (with --rows_l2 beside another rule than "
                "sgd, for tables of some 100,000 rows)", needs.DECAYING),
        _preset("layers_l2", Number(0), "factor on the squared weights of the dense layers, a "
                "penalty; 0: none"),
        Flag("rows_clip_norm", Number(0, open_minimum=True),
             "most of the norm of a row's gradient, in the unit of the loss", None, "no bound"),
        _preset("rows_learning_rate", Number(0),
                "learning rate of the rows, in their unit per step"),
        _preset("rows_init", Number(0),
                "rows start uniform between minus this and this, in their unit"),
        _preset("learning_rate", Number(0), "learning rate of Adam on the dense layers, per step"),
        _preset("early_stopping", Integer(0), "measurements of the validation part without a "
                "higher AUC after which training ends; the best weights and rows come back; 0: "
                "none"),
        _preset("plateau_factor", Number(0, 1, open_minimum=True), "factor on the rates after a "
                "measurement without a higher AUC; 1: none", needs.STOPPING),
        Flag("seed", Integer(0, (1 << 31) - 1), "of rows, layers, data order and sampling", 0),
        Flag("precision", Choice(("float32", "mixed_bfloat16")),
             "of the dense layers; rows are float32", "float32"),
        Flag("threads", Integer(1, 1024), "threads of TensorFlow and the data, of each rank", None,
             "all cores"),
    ),
    "Several ranks (under horovodrun or mpirun)": (
        Flag("placement", Choice(("replicated", "sharded")), "where embedding rows are held: all "
             "of them on every rank, or spread over the ranks by hash", "replicated",
             needs=(needs.RANKS,)),
        Flag("wire_dtype", Choice((*WIRE_DTYPES, "bfloat16,int8", "auto")),
             "in which embedding rows and their gradients travel between ranks; of two, the first "
             "is of rows, which sharded tables alone send", "float32", needs=(needs.RANKS,)),
        Flag("wire_warmup_steps", Integer(0), "steps before rows are rounded to --wire_dtype: "
             "rounding disturbs the first ones most", None, "the steps of --warmup",
             needs=(needs.RANKS, needs.ROUNDED)),
        Flag("prefetch", None,
             "with --placement=sharded: send the next batch's keys while this one trains",
             needs=(needs.RANKS, needs.SHARDED)),
        Flag("elastic", None, "ranks may come and go (horovodrun --host-discovery-script): "
             "training goes on from the newest checkpoint with those that there are",
             needs=(needs.RANKS,)),
    ),
    "Saving": (
        Flag("policies", Names(POLICIES), "what is saved: examples that teach nothing are left "
             "out; gradients are deferred, or masked", None, "none: plain training"),
        Flag("dry_run", None, "save nothing, and tell what --policies (if not given, skip_examples "
             "and what else goes with the rows' settings) would have saved, at what estimated "
             "cost"),
        Flag("watch", None, "without --policies: find T and saturated keys all the same",
             needs=(needs.NO_POLICY,)),
        Flag("skip_by", Choice(("foreseen_loss", "row_drift")), "what makes an example skippable: "
             "the loss that a pilot foresees, or its keys' drift (paper; a baseline)", None,
             "foreseen_loss", (needs.EXAMPLES,)),
        Flag("skip_share", Number(0, 1), "share of the hot examples to skip", None,
             "0.3; by foreseen_loss 0.5", (needs.EXAMPLES, needs.NO_THRESHOLD)),
        Flag("pilot", Choice(("fm", "linear", "label", "model")), "what foresees: a factorisation "
             "machine or a linear model of the keys, the label alone (uniform negative sampling), "
             "or the model's own forward pass", None, "fm", (needs.FORESEEN_LOSS,)),
        Flag("pilot_factors", Integer(1, 8), "numbers of a key's factor", None, "8",
             (needs.FM_PILOT,)),
        Flag("pilot_memory", Size(), "what the pilot learns of the keys", None, "32MiB",
             (needs.KEY_PILOT,)),
        Flag("correct", Choice(("weight", "offset")), "what corrects for the skipped: weights of "
             "the kept, or an offset of the log-odds in training", None, "weight",
             (needs.FORESEEN_LOSS,)),
        Flag("floor", Number(0, 0.999, True), "least share that is kept of examples that are "
             "foreseen alike", None, "0.4 of the share that is kept",
             (needs.FORESEEN_LOSS,)),
        Flag("skip_keep", Number(0, 0.999), "share of skippable examples that is trained all the "
             "same, with weight 1 / skip_keep", None, "0", (needs.EXAMPLES, needs.BY_KEYS)),
        _preset("skip_alpha", Number(0, 1, True),
                "share of an example's lookups that must be saturated", needs.EXAMPLES,
                needs.BY_KEYS),
        Flag("defer_movement", Number(0, open_minimum=True), "distance up to which deferred "
             "gradients may leave a row's values behind, in the unit of the rows", None,
             "0.05 * --rows_learning_rate", (needs.DEFER, needs.NO_AUC_BOUND)),
        Flag("defer_max_age", Integer(1), "maximum steps that a gradient is deferred", None, "200",
             (needs.DEFER,)),
        Flag("mask_share", Number(0, 1), "share of the hot examples whose keys are to be saturated",
             None, "0.3", (needs.MASK, needs.NO_THRESHOLD)),
        Flag("mask_decay_moments", None, "masking a row's gradient decays its moments",
             needs=(needs.MASK, needs.MOMENTS)),
        Flag("max_auc_loss", Number(0, 1, True), "maximum AUC that saving may cost, by an estimate "
             "that held on shuffled data and failed on a changing stream (.0020 lost of .0005)",
             None, "no bound", (needs.POLICIES,)),
    ),
    "Windows and saturated keys": (
        _preset("window_steps", Integer(1), "window length in steps; by default a 20th of the "
                "planned steps, 5 to 1000", needs.WINDOWS),
        Flag("warmup", Number(0, 1), "share of the planned steps before any saving", 0.25,
             needs=(needs.WARMUP,)),
        Flag("warmup_steps", Integer(0), "the same in steps", None, "by --warmup",
             (needs.WARMUP,)),
        Flag("hot_set_memory", Size(), "snapshots of hot keys", None, "256MiB", (needs.HOT_SET,)),
        Flag("exclude_tables", Names(), "tables that are neither watched nor saved on", None,
             "none", (needs.WATCHING,)),
        Flag("drift_metric", Choice(DRIFT_METRICS), "drift of a row from its snapshot", None,
             "linf", (needs.KEYS,)),
        Flag("threshold", Number(0), "T itself, in the unit of --drift_metric", None,
             "by the share of a policy", (needs.KEYS,)),
        Flag("max_threshold", Number(0), "upper bound of T, in the unit of --drift_metric", None,
             "none", (needs.KEYS,)),
        Flag("revisit_every", Integer(0), "windows from probe to probe of a saturated key; 0: "
             "never", None, "10 where gradients are withheld, 100 where examples are skipped, 0 "
             "with losses", (needs.KEYS,)),
    ),
    "Controls": (
        Flag("control", Choice(("none", "random", "stop")), "random: leave out as many examples as "
             "the matched run, whatever their keys; stop: train plainly until as many are trained",
             "none"),
        Flag("match", Text(), "metrics.json of the run that the control repeats; settings not "
             "given come from it"),
        Flag("schedule", Choice(SCHEDULES), "fae: batches of hot and batches of cold examples; "
             "hotline: each batch in two parts; hot keys, within --hot_set_memory, are chosen in a "
             "pass over the data before training", "plain", needs=(needs.NO_SAVING,)),
    ),
}  # fmt: skip
# What `--help` lists: a screen of them.
_BASIC = (
    *("data", "settings", "max_examples", "output", "model", "dim", "batch_size", "epochs"),
    *("seed", "dry_run", "policies", "skip_by", "skip_share", "control", "match"),
)


def make_flags() -> FlagSet:
    """Returns the program's flags."""
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
        _FLAGS,
        basic=_BASIC,
    )
