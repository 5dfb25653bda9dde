"""When to change each setting, by hand; `settings_table.py` puts it beside what the code says.

Of flags only those that do not carry the name of a `SaturationConfig` field: the others are told
by that field. A test fails on a setting that is missing here, and on one that is no more.
"""

from __future__ import annotations

from collections.abc import Mapping

SATURATION: Mapping[str, str] = {
    "skip": 'Always: with `shadow=True` first. Several epochs: "inputs" with remembered losses. '
    'Fewer bytes between ranks: "defer". The paper\'s rule and masks are baselines.',
    "score": 'Several epochs over the same inputs: "remembered_loss". It needs inputs with ids.',
    "metric": 'Rows of very different size: "relative". Rows that tremble in place: "signal" '
    "(native store only).",
    "target_skip": "With remembered losses 0.6 to 0.75 were measured. With the paper's rule every "
    "skipped input costs; lower it, or give `max_auc_loss`.",
    "threshold": "You know the unit of your rows and want the same T in every run.",
    "max_threshold": "T by share grows beyond what you call settled.",
    "max_auc_loss": "You would rather say what skipping may cost than how much to skip. It is an "
    "estimate, and does not hold on a stream that drifts.",
    "max_log_loss_increase": "The same, if log loss is what you are judged by. Not for deferring "
    "by movement.",
    "alpha": "Inputs have many fields of rare keys, so that next to none is all saturated: 0.8.",
    "snapshot_interval": "Training is short: shorter, so that there are many windows. Window ends "
    "take too long: longer.",
    "hot_budget_bytes": "Memory is short, or window ends take too long: less. The hot set covers "
    "too few lookups: more.",
    "warmup": "Rows settle sooner or later than after a quarter of the training.",
    "warmup_steps": "The number of planned steps is not known, or windows should begin at the same "
    "step in runs of different length.",
    "planned_steps": "The data does not know its length (a generator, `repeat()` without a "
    "count): without it and without `warmup_steps` nothing is skipped.",
    "release": "Keys come and go at window ends (larger), or moving keys stay too long (1).",
    "revisit_every": "Popularity changes quickly (less); inputs with many lookups are hardly "
    "ever skippable (more, or 0).",
    "saturated_share": "A remembered loss should hold only while the keys of its input have not "
    "moved. Skips less, at the same quality in our runs.",
    "max_skips": "More epochs (5 for 12, 2 for 6 in our runs).",
    "weigh_visits": "You want returned inputs to count once. The weights keep calibration; leave "
    "them on.",
    "protect_windows": "Keys that have just become popular are judged too early.",
    "keep_rate": "Calibration suffers when inputs are skipped by drift, or the guard is to watch "
    "what is skipped.",
    "guard_tolerance": "Training that nobody watches; with a `keep_rate` or `max_skips`.",
    "shadow": "First of all; and whenever data or model have changed.",
    "freeze_drift": "Sharded tables: a larger one reads more rows from copies, and older ones.",
    "decay_skipped": "Masks with Adam, if moments that stand still harm.",
    "defer_trigger": '"interval" for optimizers whose steps cannot be foretold.',
    "defer_movement": "To send less: a tenth of the rows' learning rate; a whole one cost 0.005 "
    "AUC. See the curve in [what it can and cannot do](limits.md).",
    "defer_max_age": "Rare rows should be sent less often: with 1,000, 1% fewer rows were sent.",
    "defer_steps": 'With the trigger "interval": how old a sum may get.',
    "defer_budget_bytes": "The summary tells of rows sent “without room”.",
    "loss_memory_bytes": "An epoch has more inputs than fit (20 to 40 bytes each) and memory "
    "is there.",
    "exempt_tables": "A table must see every gradient: small ones, or those of rare labels.",
    "table_hot_budget_bytes": "One table takes the hot set's room from the others.",
    "reservoir_size": "T jumps from window to window (more), or inputs have hundreds of lookups "
    "and memory counts (less).",
    "count_decay": "Popularity changes quickly: nearer to 0. Never changes: nearer to 1.",
    "random_shares": 'Control runs only (`skip="random"`).',
    "simulated_ranks": "You have one process and want to know what a job would send.",
    "seed": "Repeat an experiment: at least three.",
}

TABLE: Mapping[str, str] = {
    "name": "Always: one per table.",
    "dim": "Always. The models need one for all tables.",
    "optimizer": "Tables that differ: a lower rate for small ones, `SGD` for biases.",
    "combiner": 'Bags of keys: "mean" if their lengths differ much.',
    "initializer": "As for any embedding; `Constant` or `Zeros` for biases.",
    "retention": "Memory must be bounded. Not with replicated tables of several ranks.",
}

RETENTION: Mapping[str, str] = {
    "capacity": "Always: what memory allows.",
    "eviction": 'Keys go out of use for good: "lru".',
}

FEATURE: Mapping[str, str] = {
    "name": "Always: the key in the input dictionary.",
    "table": "Always; features that share ids share a table.",
    "combiner": "As for `Table`.",
}

OPTIMIZERS: Mapping[str, str] = {
    "SparseOptimizer.learning_rate": "Always. Rows take larger rates than dense layers.",
    "SparseOptimizer.follow": "A dense rate that is scheduled or reduced must not touch the rows.",
    "Adagrad.learning_rate": "Always worth a try: 0.05 to 0.2.",
    "Adagrad.initial_accumulator_value": "0.1 for the steps of `keras.optimizers.Adagrad`, which "
    "hardly move rows; SOK needs one above 0.",
    "Adagrad.epsilon": "1e-7 for the steps of `keras.optimizers.Adagrad`.",
    "Adam.learning_rate": "Always worth a try: 0.001 to 0.01.",
    "Adam.beta_1": "As for any Adam.",
    "Adam.beta_2": "As for any Adam.",
    "Adam.epsilon": "As for any Adam.",
}

FLAGS: Mapping[str, str] = {
    "data": "Always.",
    "split": 'Globo only: "time" for a test part that is later than training.',
    "label_column": "Parquet: always.",
    "key_columns": "Parquet: always.",
    "dense_columns": "Parquet with numbers.",
    "max_inputs": "A short try.",
    "shuffle_shards": "Prepared data in an order that training should not see.",
    "strict": "Lines that cannot be read are a fault, not noise.",
    "output": "Always, but for a try: records, controls and reports need it.",
    "export": "You want to serve the model.",
    "tensorboard": "You want to look while it runs.",
    "evaluate_every": "Curves of test quality in the report.",
    "checkpoint_every": "Training takes hours, or the machine may be taken away.",
    "keep_checkpoints": "Disk is short: 1. A run may have to go back further: more.",
    "resume": "Always, in a job that is started again by itself; else after it was ended.",
    "model": "Data without numbers, or many crosses: `dcn`.",
    "dim": "As for any embedding.",
    "bottom": "As for any MLP.",
    "mlp": "As for any MLP.",
    "cross_layers": "As for any DCN-v2.",
    "dropout": "Several epochs: overfitting.",
    "store": "There is one choice so far; SOK is used [from Python](sok.md).",
    "capacity": "Memory must be bounded. Not with replicated tables of several ranks.",
    "eviction": "Keys come back after long: `lfu`.",
    "batch_size": "Per rank: divide by the number of ranks to train the same model.",
    "epochs": "Remembered losses need several.",
    "rows_optimizer": "`rowwise_adagrad` to save memory: one value per row instead of one per "
    "value.",
    "rows_learning_rate": "First thing to tune; what deferring saves is in its unit.",
    "rows_init": "With the learning rate: smaller for few inputs.",
    "learning_rate": "As for any Adam.",
    "precision": "Processors with bfloat16 units.",
    "threads": "Several ranks on one machine, or other work beside.",
    "placement": "Tables do not fit one rank: `sharded`.",
    "wire_dtype": "The network is what you wait for: half of the bytes of rows.",
    "wire_warmup_steps": "Quality falls with `bfloat16`: later.",
    "prefetch": "Sharded tables and time to hide; memory for one batch more.",
    "copy_movement": "Sharded tables whose rows are most of what travels: a fifth of the rows' "
    "learning rate. 0 changes no result, and saves what rests.",
    "hot_budget_mb": "As `hot_budget_bytes`.",
    "track": "What would be saturated, without any skipping.",
    "control": "After every skipping run: without its controls it says nothing.",
    "match": "With `--control`.",
    "segregate": "The FAE schedule, as a baseline.",
}
