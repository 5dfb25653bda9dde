"""When to change each setting; `settings_table.py` combines these texts with the code's docstrings.

A flag that sets a setting has no entry here: it takes the text of its setting. A test fails if a
setting has no entry, or an entry has no setting.
"""

from __future__ import annotations

from collections.abc import Mapping

# Class of settings -> setting -> when to change it.
CLASSES: Mapping[str, Mapping[str, str]] = {
    "SkipExamples": {
        "score": "Always. Use `PredictedLoss` for a single pass. Over multiple epochs, compare "
        "with a shorter schedule, which is hard to beat. `RowDrift` is a baseline.",
        "fraction": "With `PredictedLoss`, a lower click rate allows a larger fraction (0.85 at 2% "
        "clicks). With the paper's rule every dropped example costs AUC: choose a small fraction, "
        "or set `max_auc_loss`, which fails on a changing stream.",
        "keep_rate": "Dropping by drift has damaged the calibration of the model.",
    },
    "PredictedLoss": {
        "pilot": "Compare with uniform negative sampling (`label`; a dry run prints the command), "
        "which is often as good. Use `model` if the forward pass is a small part of a step.",
        "correction": "The model is a `slip.keras.Model`, and sample weights conflict with yours.",
        "min_keep_probability": "Increase it if wrong predictions of the pilot cost quality. "
        "Decrease it to drop more examples.",
        "factors": "Memory is short: up to 4 factors need half of it.",
        "memory": "The data has many more keys than 32 MiB has buckets (half a million).",
    },
    "RowDrift": {
        "alpha": "Examples have many fields with rare keys, so that almost no example has only "
        "saturated keys: 0.8.",
    },
    "DeferGradients": {
        "until": "Use `Interval` for tables in SOK and for variables under Adam, because the store "
        "cannot compute how far an update would move a row.",
        "memory": "The report counts rows over the budget.",
    },
    "Movement": {
        "distance": "To send fewer rows: a tenth of the rows' learning rate. A whole learning rate "
        "cost 0.005 AUC; see the curve in [what it can and cannot do](limits.md).",
        "max_age": "To send rare rows less often: with 1,000, 1% fewer rows were sent.",
    },
    "Interval": {
        "steps": "To change how long a gradient may be deferred. Not for native tables: deferring "
        "by interval cost .0171 AUC on a [changing stream](limits.md#a-changing-stream), deferring "
        "by movement .0007.",
        "fraction": "To change how many keys are deferred.",
    },
    "MaskGradients": {
        "fraction": "To change how many keys are masked. Every masked key costs AUC.",
        "decay_moments": "With Adam, if constant moments of masked rows harm the model.",
    },
    "Window": {
        "steps": "Increase it if window ends take too long. Decrease it if the threshold should "
        "adapt faster.",
        "warmup": "Rows settle earlier or later than after a quarter of training. If the number of "
        "planned steps is unknown, give the warm-up in steps.",
        "planned_steps": "You use a custom training loop, or a dataset of unknown length.",
        "sample": "Increase it if the threshold jumps from window to window. Decrease it if "
        "examples have hundreds of lookups and memory is short.",
        "seed": "To repeat an experiment. Use at least three seeds.",
    },
    "HotSet": {
        "memory": "Decrease it if memory is short or window ends take too long. Increase it if the "
        "hot set covers too few lookups.",
        "table_memory": "One table takes the memory of the hot set from the others.",
        "exclude": "A table needs every gradient, for example a small table or one with rare "
        "labels.",
        "count_decay": "Use a value closer to 0 if the popularity of keys changes quickly, and "
        "closer to 1 if it never changes.",
    },
    "Saturation": {
        "metric": 'Use "l2" if the distance matters more than the largest change of a value.',
        "threshold": "You know the unit of your rows and want the same threshold in every run.",
        "max_threshold": "The threshold exceeds the drift of rows that you consider settled.",
        "revisit_every": "Decrease it if the popularity of keys changes quickly. Increase it, or "
        "use 0, if examples with many lookups can almost never be dropped.",
    },
    "DryRun": {
        "estimates_cost": "The training step reports losses, and you want an estimate of the cost "
        "of dropping examples.",
    },
    "SkipAtRandom": {
        "fractions": "Only for control runs.",
    },
    "Table": {
        "name": "Always. Each table needs a unique name.",
        "dim": "Always. The models need the same value for all tables.",
        "optimizer": "Tables need different optimizers, for example a lower rate for small tables "
        "or `SGD` for biases.",
        "combiner": 'Use "mean" for bags of keys whose lengths differ a lot.',
        "initializer": "As for any embedding. Use `Constant` or `Zeros` for biases.",
        "storage": 'Memory is short: `Storage("bfloat16")`; see [memory](using/memory.md).',
        "retention": "Tables must stay small. Not with replicated tables of multiple ranks.",
    },
    "Storage": {
        "dtype": '"bfloat16" halves the bytes. "float16" is more precise, for values below 65,504.',
        "slot_dtype": '"bfloat16" halves the bytes of the optimizer too.',
        "memory": "Tables are larger than memory.",
        "spill": "Tables are larger than memory: a folder on a local SSD.",
    },
    "Retention": {
        "capacity": "Memory must be bounded.",
        "eviction": 'Use "lru" if keys go out of use forever.',
        "admit_after": "Most keys occur only once: 2.",
        "expire_after": 'Keys go out of use, and the table must stay small: "30d".',
    },
    "FeatureSpec": {
        "name": "Always: the key in the input dictionary.",
        "table": "Always. Features with the same ids share a table.",
        "padding_key": "-1 is a valid key of your data: use None or another number.",
        "combiner": "As for `Table`.",
    },
}

OPTIMIZERS: Mapping[str, str] = {
    "SparseOptimizer.learning_rate": "Always. Rows need larger rates than dense layers.",
    "SparseOptimizer.follow": "A scheduled or reduced dense rate must not change the rate of the "
    "rows.",
    "Adagrad.learning_rate": "Always tune it: 0.05 to 0.2.",
    "Adagrad.initial_accumulator_value": "0.1 gives the steps of `keras.optimizers.Adagrad`, which "
    "hardly move rows. SOK needs a value above 0.",
    "Adagrad.epsilon": "Tune it between 1e-8 and 1e-5. It shortens the first steps of rare rows.",
    "Adam.learning_rate": "Always tune it: 0.001 to 0.01.",
    "Adam.beta_1": "As for any Adam.",
    "Adam.beta_2": "As for any Adam.",
    "Adam.epsilon": "As for any Adam.",
    "SparseOptimizer.l2": "Overfitting over multiple epochs.",
    "SparseOptimizer.clip_value": "Single examples move rows too far.",
    "SparseOptimizer.clip_norm": "Single examples move rows too far.",
    "SparseOptimizer.weight_decay": "Overfitting with `Adam`. The decay bypasses the moments.",
    "SparseOptimizer.max_norm": "Rows with few examples become too long.",
    "SparseOptimizer.decay": "Multiple epochs over a table of 100,000 rows, or a weight decay.",
    "SGD.learning_rate": "Always tune it: 1 to 100.",
    "SGD.momentum": "Multiple epochs. It stores one additional value per value.",
    "SGD.nesterov": "As for any SGD.",
    "Adam.bias_correction": "Keys first occur late, or occur rarely: `row`.",
    "Ftrl.learning_rate": "Always tune it: 0.05 to 0.2.",
    "Ftrl.follow": "Never: FTRL cannot follow another rate.",
    "Ftrl.learning_rate_power": "Almost never.",
    "Ftrl.initial_accumulator_value": "0.1 gives the steps of `keras.optimizers.Ftrl`, which "
    "discard the initial values of rows.",
    "Ftrl.l1_regularization_strength": "Values with little effect should be 0.",
    "Ftrl.l2_regularization_strength": "Overfitting.",
    "Ftrl.l2_shrinkage_regularization_strength": "Overfitting.",
    "Ftrl.beta": "The steps of new rows are too long.",
}

FLAGS: Mapping[str, str] = {
    "max_auc_loss": "You want to bound the cost instead of choosing the amount of savings. The "
    "bound held on shuffled data and failed on a changing stream: "
    "[both results](using/choosing.md#a-bound-of-the-auc-loss).",
    "data": "Always.",
    "evaluate_on": "Use `valid` for as long as you choose settings.",
    "max_examples": "For a short trial.",
    "settings": "Multiple runs share their settings.",
    "shuffle": "The order of prepared data has a meaning, such as time or the label.",
    "output": "Always, except for a trial: records, controls and reports need it.",
    "export": "You want to serve the model.",
    "tensorboard": "You want to watch the run.",
    "trace": "A step takes longer than you expect.",
    "evaluate_every": "The report should contain curves of the test quality.",
    "checkpoint_every": "Training takes hours, or the machine may be taken away.",
    "keep_checkpoints": "Use 1 if disk space is short, and more if a run may have to return to an "
    "earlier state.",
    "elastic": "Machines join or leave during training.",
    "resume": "Always in a job that restarts automatically; otherwise after an interruption.",
    "model": "To compare models. DCN-v2 is the slowest with many key columns.",
    "dim": "As for any embedding.",
    "bottom": "As for any MLP.",
    "mlp": "As for any MLP.",
    "cross_layers": "As for any DCN-v2.",
    "dropout": "Overfitting over multiple epochs.",
    "batch_norm": "Multiple epochs, or wide layers.",
    "row_dtype": "Memory is short: `bfloat16`.",
    "memory": "The tables are larger than memory.",
    "spill": "With `--memory`.",
    "slot_dtype": "Memory is short even with `--row_dtype=bfloat16`.",
    "capacity": "Memory must be bounded. Not with replicated tables of multiple ranks.",
    "eviction": "Use `lfu` if keys return after a long time.",
    "batch_size": "The size is per rank: divide by the number of ranks to train the same model.",
    "epochs": "Runs are compared: they need the same number of passes.",
    "rows_optimizer": "Use `rowwise_adagrad` to save memory: one slot per row instead of one per "
    "value. For multiple epochs, `adam` with a lower rate.",
    "rows_l2": "Overfitting over multiple epochs.",
    "rows_decay": "Multiple epochs over tables of about 100,000 rows: `all`.",
    "early_stopping": "Multiple epochs.",
    "plateau_factor": "With early stopping, 0.1 adds about .001 AUC.",
    "rows_learning_rate": "Tune it first. The distance of deferring is in its unit.",
    "rows_init": "Tune it with the learning rate. Use a smaller value for few examples.",
    "learning_rate": "As for any Adam.",
    "precision": "Your processor has bfloat16 units.",
    "threads": "Multiple ranks or other work share the machine.",
    "placement": "The tables do not fit into one rank: `sharded`.",
    "wire_dtype": "Training waits for the network: `auto`. A dry run estimates the time of each "
    "type.",
    "prefetch": "Sharded tables that wait for the exchange. It needs memory for one more batch.",
    "control": "After every run that drops examples. Without its controls a run proves little.",
    "match": "With `--control`.",
    "schedule": "For a [baseline](baselines.md).",
    "policies": "Always, after a `--dry_run`. Run its controls afterwards.",
    "dry_run": "Before anything else, and whenever data or model have changed.",
    "watch": "You want to see which keys are saturated, without saving.",
    "warmup_steps": "Windows should start at the same step in runs of different length.",
}

# Flag -> the setting that it sets.
FLAGS_OF_SETTINGS: Mapping[str, str] = {
    "skip_score": "SkipExamples.score",
    "skip_fraction": "SkipExamples.fraction",
    "skip_keep_rate": "SkipExamples.keep_rate",
    "pilot": "PredictedLoss.pilot",
    "skip_alpha": "RowDrift.alpha",
    "defer_movement": "Movement.distance",
    "defer_max_age": "Movement.max_age",
    "mask_fraction": "MaskGradients.fraction",
    "window_steps": "Window.steps",
    "warmup": "Window.warmup",
    "hot_set_memory": "HotSet.memory",
    "revisit_every": "Saturation.revisit_every",
    "seed": "Window.seed",
}
