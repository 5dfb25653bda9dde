"""When to change each setting, by hand; `settings_table.py` puts it beside what the code says.

Flags that set a setting are told by it. A test fails on a setting that is missing here, and on one
that is no more.
"""

from __future__ import annotations

from collections.abc import Mapping

# Class of settings -> setting -> when to change it.
CLASSES: Mapping[str, Mapping[str, str]] = {
    "SkipExamples": {
        "by": "Always. `ForeseenLoss` for a single pass; over several epochs a shorter schedule is "
        "the control to beat. `RowDrift` is a baseline.",
        "share": "By foreseen loss: the lower the click rate, the more is free (0.85 measured at "
        "2% clicks). With the paper's rule every skipped example costs; lower it, or set "
        "`max_auc_loss`, which fails on a changing stream.",
        "keep": "Calibration suffers when examples are skipped by drift.",
    },
    "ForeseenLoss": {
        "pilot": "Uniform negative sampling (`label`; a dry run prints its command) is as good. "
        "`model` where the forward pass is a small part of a step.",
        "correct": "The model is a `slip.keras.Model` and weights disturb something of your own.",
        "floor": "What is foreseen wrongly costs quality: higher. Less is to be trained: lower.",
        "factors": "Memory is short: up to 4 take half of it.",
        "memory": "There are many more keys than 32 MiB has buckets (half a million).",
    },
    "RowDrift": {
        "alpha": "Examples have many fields of rare keys, so that next to none is all saturated: "
        "0.8.",
    },
    "DeferGradients": {
        "until": "`Interval` for tables in SOK, or for variables under Adam: the store does not "
        "know how far an update would move a row.",
        "memory": "The report tells of rows over budget.",
    },
    "Movement": {
        "distance": "To send less: a tenth of the rows' learning rate; a whole one cost 0.005 AUC. "
        "See the curve in [what it can and cannot do](limits.md).",
        "max_age": "Rare rows should be sent less often: with 1,000, 1% fewer rows were sent.",
    },
    "Interval": {
        "steps": "How old a deferred gradient may get. Not for native tables: deferring by "
        "interval cost .0171 AUC on a [changing stream](limits.md#a-changing-stream), and by "
        "movement .0007.",
        "share": "How many keys are deferred.",
    },
    "MaskGradients": {
        "share": "How many keys are masked: each costs.",
        "decay_moments": "Masks with Adam, if moments that stand still harm.",
    },
    "Window": {
        "steps": "Window ends take too long: longer. T is to follow sooner: shorter.",
        "warmup": "Rows settle sooner or later than after a quarter of the training; the planned "
        "steps are not known: in steps.",
        "planned_steps": "A loop of your own, or data that do not know their length.",
        "sample": "T jumps from window to window (more), or examples have hundreds of lookups and "
        "memory counts (less).",
        "seed": "Repeat an experiment: at least three.",
    },
    "HotSet": {
        "memory": "Memory is short, or window ends take too long: less. The hot set covers too few "
        "lookups: more.",
        "table_memory": "One table takes the hot set's room from the others.",
        "exclude": "A table must see every gradient: small ones, or those of rare labels.",
        "count_decay": "Popularity changes quickly: nearer to 0. Never changes: nearer to 1.",
    },
    "Saturation": {
        "metric": 'The distance matters more than the largest change of a value: "l2".',
        "threshold": "You know the unit of your rows and want the same T in every run.",
        "max_threshold": "T by share grows beyond what you call settled.",
        "revisit_every": "Popularity changes quickly (less); examples with many lookups are hardly "
        "ever skippable (more, or 0).",
    },
    "DryRun": {
        "estimates_cost": "The model tells losses, and you want to know what skipping would cost.",
    },
    "SkipAtRandom": {
        "shares": "Control runs only.",
    },
    "Table": {
        "name": "Always: one per table.",
        "dim": "Always. The models need one for all tables.",
        "optimizer": "Tables that differ: a lower rate for small ones, `SGD` for biases.",
        "combiner": 'Bags of keys: "mean" if their lengths differ much.',
        "initializer": "As for any embedding; `Constant` or `Zeros` for biases.",
        "storage": 'Memory is short: `Storage("bfloat16")`; see [memory](using/memory.md).',
        "retention": "Tables must stay small. Not with replicated tables of several ranks.",
    },
    "Storage": {
        "dtype": '"bfloat16": half the bytes. "float16": finer, for rows of values below 65,504.',
        "slot_dtype": '"bfloat16": half the bytes of the optimizer, too.',
        "memory": "Tables are larger than memory.",
        "spill": "The same: a folder on a local SSD.",
    },
    "Retention": {
        "capacity": "Memory must be bounded.",
        "eviction": 'Keys go out of use for good: "lru".',
        "admit_after": "Most keys come once: 2.",
        "expire_after": 'Keys go out of use, and the table is to stay small: "30d".',
    },
    "FeatureSpec": {
        "name": "Always: the key in the input dictionary.",
        "table": "Always; features that share ids share a table.",
        "padding_key": "A key of your data is -1 (None, or another number).",
        "combiner": "As for `Table`.",
    },
}

OPTIMIZERS: Mapping[str, str] = {
    "SparseOptimizer.learning_rate": "Always. Rows take larger rates than dense layers.",
    "SparseOptimizer.follow": "A dense rate that is scheduled or reduced must not touch the rows.",
    "Adagrad.learning_rate": "Always worth a try: 0.05 to 0.2.",
    "Adagrad.initial_accumulator_value": "0.1 for the steps of `keras.optimizers.Adagrad`, which "
    "hardly move rows; SOK needs one above 0.",
    "Adagrad.epsilon": "To be tuned, from 1e-8 to 1e-5: it shortens first steps of rare rows.",
    "Adam.learning_rate": "Always worth a try: 0.001 to 0.01.",
    "Adam.beta_1": "As for any Adam.",
    "Adam.beta_2": "As for any Adam.",
    "Adam.epsilon": "As for any Adam.",
    "SparseOptimizer.l2": "Several epochs: overfitting.",
    "SparseOptimizer.clip_value": "Single examples move rows too far.",
    "SparseOptimizer.clip_norm": "The same.",
    "SparseOptimizer.weight_decay": "Overfitting, with `Adam`: it does not go through the moments.",
    "SparseOptimizer.max_norm": "Rows of few examples grow too long.",
    "SparseOptimizer.decay": "Several epochs over a table of some 100,000 rows, or a weight decay.",
    "SGD.learning_rate": "Always worth a try: 1 to 100.",
    "SGD.momentum": "Several epochs; one more value beside each.",
    "SGD.nesterov": "As for any SGD.",
    "Adam.bias_correction": "Rows come late, or seldom: `row`.",
    "Ftrl.learning_rate": "Always worth a try: 0.05 to 0.2.",
    "Ftrl.follow": "Never: it cannot.",
    "Ftrl.learning_rate_power": "Hardly ever.",
    "Ftrl.initial_accumulator_value": "0.1 for the steps of `keras.optimizers.Ftrl`, which forget "
    "how rows start.",
    "Ftrl.l1_regularization_strength": "Values that do little are to be 0.",
    "Ftrl.l2_regularization_strength": "Overfitting.",
    "Ftrl.l2_shrinkage_regularization_strength": "Overfitting.",
    "Ftrl.beta": "Steps of new rows are too long.",
}

FLAGS: Mapping[str, str] = {
    "max_auc_loss": "You would rather bound the cost of saving than its amount. The bound held on "
    "shuffled data and failed on a changing stream: "
    "[both results](using/choosing.md#a-bound-of-the-auc-loss).",
    "data": "Always.",
    "evaluate_on": "While settings are chosen: always `valid`.",
    "max_examples": "A short try.",
    "settings": "Runs share their settings.",
    "shuffle": "The order of prepared data means something, such as time or the label.",
    "output": "Always, but for a try: records, controls and reports need it.",
    "export": "You want to serve the model.",
    "tensorboard": "You want to look while it runs.",
    "trace": "A step takes longer than you expect.",
    "evaluate_every": "Curves of test quality in the report.",
    "checkpoint_every": "Training takes hours, or the machine may be taken away.",
    "keep_checkpoints": "Disk is short: 1. A run may have to go back further: more.",
    "elastic": "Machines are taken away, or come, while it trains.",
    "resume": "Always, in a job that is started again by itself; else after it was ended.",
    "model": "Data without numbers, or many crosses: `dcn`.",
    "dim": "As for any embedding.",
    "bottom": "As for any MLP.",
    "mlp": "As for any MLP.",
    "cross_layers": "As for any DCN-v2.",
    "dropout": "Several epochs: overfitting.",
    "batch_norm": "Several epochs, or wide layers.",
    "row_dtype": "Memory is short: `bfloat16`.",
    "memory": "The tables are larger than memory.",
    "spill": "With `--memory`.",
    "slot_dtype": "Memory is still short.",
    "capacity": "Memory must be bounded. Not with replicated tables of several ranks.",
    "eviction": "Keys come back after long: `lfu`.",
    "batch_size": "Per rank: divide by the number of ranks to train the same model.",
    "epochs": "As for any model.",
    "rows_optimizer": "`rowwise_adagrad` to save memory: one value per row instead of one per "
    "value. Several epochs: `adam`, beside a lower rate.",
    "rows_l2": "Several epochs: overfitting.",
    "rows_decay": "Several epochs over tables of some 100,000 rows: `all`.",
    "early_stopping": "Several epochs.",
    "plateau_factor": "With early stopping: 0.1 adds the last thousandth.",
    "rows_learning_rate": "First thing to tune; what deferring saves is in its unit.",
    "rows_init": "With the learning rate: smaller for few inputs.",
    "learning_rate": "As for any Adam.",
    "precision": "Processors with bfloat16 units.",
    "threads": "Several ranks on one machine, or other work beside.",
    "placement": "Tables do not fit one rank: `sharded`.",
    "wire_dtype": "The network is what you wait for: `auto`. A dry run tells what each would take.",
    "prefetch": "Sharded tables and time to hide; memory for one batch more.",
    "control": "After every skipping run: without its controls it says nothing.",
    "match": "With `--control`.",
    "schedule": "As a [baseline](baselines.md).",
    "policies": "Always, after a `--dry_run`; then its controls.",
    "dry_run": "First of all; and whenever data or model have changed.",
    "watch": "What would be saturated, without any saving.",
    "warmup_steps": "Windows should begin at the same step in runs of different length.",
}

# Flag -> the setting that it is.
FLAGS_OF_SETTINGS: Mapping[str, str] = {
    "skip_by": "SkipExamples.by",
    "skip_share": "SkipExamples.share",
    "skip_keep": "SkipExamples.keep",
    "pilot": "ForeseenLoss.pilot",
    "skip_alpha": "RowDrift.alpha",
    "defer_movement": "Movement.distance",
    "defer_max_age": "Movement.max_age",
    "mask_share": "MaskGradients.share",
    "window_steps": "Window.steps",
    "warmup": "Window.warmup",
    "hot_set_memory": "HotSet.memory",
    "revisit_every": "Saturation.revisit_every",
    "seed": "Window.seed",
}
