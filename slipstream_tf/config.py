"""What a user sets of embedding tables and of the saturation engine: frozen dataclasses."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from slipstream_tf import initializers, optimizers
from slipstream_tf.errors import invalid, require_choice, require_integer, require_number
from slipstream_tf.hashing import hash_text

COMBINERS = ("sum", "mean", "sqrtn")
EVICTIONS = ("lfu", "lru")
MAX_DIM = 65536
MAX_CAPACITY = 1 << 36
SKIP_MODES = ("none", "inputs", "gradients", "defer", "both", "inputs+gradients", "random")
SCORES = ("drift", "remembered_loss")
DRIFT_METRICS = ("linf", "l2", "relative", "signal")
DEFER_TRIGGERS = ("movement", "interval")


@dataclasses.dataclass(frozen=True)
class Retention:
    """How long a table keeps its rows.

    Attributes:
        capacity: most rows that the table may hold.
        eviction: which row leaves a full table: "lfu" (the lowest decayed access count) or "lru"
            (the one not accessed for longest).
    """

    capacity: int
    eviction: str = "lfu"

    def __post_init__(self) -> None:
        capacity = require_integer("capacity", self.capacity, 1, MAX_CAPACITY, "Retention")
        object.__setattr__(self, "capacity", capacity)
        require_choice("eviction", self.eviction, EVICTIONS, "Retention")


@dataclasses.dataclass(frozen=True)
class Table:
    """One embedding table: a named set of rows of `dim` float32 values, one per int64 key.

    Attributes:
        name: unique name of the table.
        dim: values per row, 1 to 65,536.
        optimizer: the rule of the table's rows, with its rate: an object of
            `slipstream_tf.optimizers`, or what `optimizers.get` makes one of. None: that of the
            layer or store.
        combiner: how the rows of a bag become one vector: "sum", "mean" or "sqrtn".
        initializer: how a new key's row starts: an object of `slipstream_tf.initializers`, or what
            `initializers.get` makes one of. Without a seed of its own, it is seeded by the table's
            name: equal keys of two tables start with different rows, and the same key of a table
            always with the same.
        retention: bounds the table; None: it grows without bound.
    """

    name: str
    dim: int
    optimizer: optimizers.SparseOptimizer | None = None
    combiner: str = "sum"
    initializer: initializers.Initializer = dataclasses.field(
        default_factory=initializers.RandomUniform
    )
    retention: Retention | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise invalid("name", self.name, "a table", "a non-empty string")
        place = f"table {self.name!r}"
        dim = require_integer("dim", self.dim, 1, MAX_DIM, place)
        object.__setattr__(self, "dim", dim)
        if self.optimizer is not None:
            object.__setattr__(self, "optimizer", optimizers.get(self.optimizer))
        require_choice("combiner", self.combiner, COMBINERS, place)
        object.__setattr__(self, "initializer", initializers.get(self.initializer))
        if self.retention is not None and not isinstance(self.retention, Retention):
            allowed = "None or slipstream_tf.Retention(capacity)"
            raise invalid("retention", self.retention, place, allowed)

    @property
    def seed(self) -> int:
        """Of the initializer: its own, or one that the name gives, -2**63 to 2**63 - 1."""
        own = getattr(self.initializer, "seed", None)
        return hash_text(self.name) if own is None else own

    @property
    def capacity(self) -> int | None:
        """Most rows; None: there is no bound."""
        return None if self.retention is None else self.retention.capacity

    @property
    def eviction(self) -> str:
        """Which row leaves a full table; an unbounded one evicts none."""
        return EVICTIONS[0] if self.retention is None else self.retention.eviction

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`."""
        config = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.optimizer is not None:
            config["optimizer"] = optimizers.serialize(self.optimizer)
        config["initializer"] = initializers.serialize(self.initializer)
        if self.retention is not None:
            config["retention"] = dataclasses.asdict(self.retention)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Table":
        """Builds the object that `get_config` described."""
        config = dict(config)
        if config.get("retention") is not None:
            config["retention"] = Retention(**config["retention"])
        return cls(**config)


@dataclasses.dataclass(frozen=True)
class SaturationConfig:
    """Settings of the saturation engine (method: Slipstream, arXiv 2404.04270, and this project's).

    Attributes:
        skip: what is saved. "none" tracks only. "inputs" leaves skippable inputs out of training
            (the paper's input classifier block). "gradients" masks: gradients of saturated keys
            are thrown away. "defer" defers gradients, summed per row, and applies them later.
            "both" is inputs and defer, "inputs+gradients" inputs and mask. "random" is a control:
            it leaves out the shares given in `random_shares`, whatever the keys.
        score: what makes an input skippable: "drift" (paper) or "remembered_loss".
        metric: drift of a row from its snapshot: "linf" (paper), "l2", "relative", or "signal": net
            squared drift over the sum of squared update lengths (1: moves like noise).
        target_skip: share of the hot inputs (those with a finite score) to skip, 0 to 1.
        threshold: T itself, in the metric's unit, instead of a share; or None.
        max_threshold: upper bound of a T found by share, or None.
        max_auc_loss: most AUC that skipping may cost by the estimate of
            `saturation.quality_budget`, whose assumptions stand there (a stream that drifts breaks
            them); the share then only bounds from above. With skip="both" half of it is for each.
            None: no such bound.
        max_log_loss_increase: the same in log loss.
        alpha: share of an input's lookups that must be saturated, above 0, at most 1 (paper: 1).
        snapshot_interval: window length in steps.
        hot_budget_bytes: bytes of snapshots of all tables; bounds the hot set.
        warmup: share of the planned steps before which nothing is skipped, 0 to 1 (paper: 0.25).
        warmup_steps: the same in steps; None: by `warmup`, which needs the planned steps.
        planned_steps: steps that training would take without skipping; None: the Keras callback
            finds out where the data's length is known.
        release: a saturated key stays so until its drift exceeds release * T, at least 1.
        revisit_every: a saturated key is probed (trained as if it varied) one window in so many,
            at different windows for different keys; 0: never. None: 10 where gradients are
            withheld; 100 where inputs are skipped, since a probing key holds all its inputs back;
            0 with remembered losses whose inputs return by `max_skips`.
        saturated_share: with score="remembered_loss": share of the hot inputs whose keys count as
            saturated, 0 to 1; `target_skip` is then the share of lowest remembered losses. 1: all
            hot keys do, however far they move, and T is the largest float32.
        max_skips: with score="remembered_loss": an input is trained on again after so many
            skips, at most 127; 0: no limit.
        weigh_visits: with score="remembered_loss": an input that was skipped weighs 1 + its skips
            when it is trained on again.
        protect_windows: full windows that a key is watched in the hot set before it can be
            saturated, at least 1.
        keep_rate: share of the skippable inputs that is trained all the same, with weight
            1 / keep_rate; 0 to below 1 (paper: 0).
        guard_tolerance: how much the kept skippable inputs' mean loss may exceed (relative) what
            it was when skipping began before T is halved and keys are released; None: no guard.
            Needs a keep_rate above 0, or returning inputs (`max_skips`).
        shadow: do everything but the skipping, and report what it would have saved.
        freeze_drift: with sharded tables: saturated rows whose drift over the last window was below
            this are read from replicas, up to a window old, instead of being requested at every
            step; in the metric's unit. With skip="defer" by movement it is T itself. 0: none. None:
            a quarter of the rows' learning rate (where the store does not know it: 0.025).
        decay_skipped: whether moments of rows with a masked gradient decay (Adam).
        defer_trigger: "movement": any row's sum is deferred until applying it would move a value of
            the row by `defer_movement`, at most `defer_max_age` steps. "interval": saturated
            rows' sums, for `defer_steps` steps.
        defer_movement: in the unit of the rows. None: a twentieth of the rows' learning rate
            (where the store does not know it: 0.005). With max_auc_loss it is found from that and
            the learning rate instead (see `saturation.policies.movement_for_budget`).
        defer_max_age: in steps.
        defer_steps: in steps.
        defer_budget_bytes: bytes of all deferred sums; further rows' gradients are applied at once.
        loss_memory_bytes: bytes of remembered losses, 20 to 40 an input. Where an epoch has more
            inputs, the losses of a sample of them, the same in every epoch, are remembered.
        exempt_tables: names of tables that are neither tracked nor skipped.
        table_hot_budget_bytes: table name -> bytes of its snapshots at most.
        reservoir_size: inputs whose key lists are kept, uniform over the window, to find T.
        count_decay: factor on the access counts at each window's end, 0 to 1.
        random_shares: for skip="random": share to skip in window 0, 1, ...; the last one repeats.
        simulated_ranks: measures in one process what so many ranks would send: each batch is
            split evenly among them, and each has its own deferred sums.
        seed: seeds the reservoir, thinning and random skipping.
    """

    skip: str = "inputs"
    score: str = "drift"
    metric: str = "linf"
    target_skip: float = 0.3
    threshold: float | None = None
    max_threshold: float | None = None
    max_auc_loss: float | None = None
    max_log_loss_increase: float | None = None
    alpha: float = 1.0
    snapshot_interval: int = 1000
    hot_budget_bytes: int = 256 << 20
    warmup: float = 0.25
    warmup_steps: int | None = None
    planned_steps: int | None = None
    release: float = 1.5
    revisit_every: int | None = None
    saturated_share: float = 1.0
    max_skips: int = 3
    weigh_visits: bool = True
    protect_windows: int = 1
    keep_rate: float = 0.0
    guard_tolerance: float | None = None
    shadow: bool = False
    freeze_drift: float | None = None
    decay_skipped: bool = False
    defer_trigger: str = "movement"
    defer_movement: float | None = None
    defer_max_age: int = 200
    defer_steps: int = 20
    defer_budget_bytes: int = 64 << 20
    loss_memory_bytes: int = 64 << 20
    exempt_tables: tuple[str, ...] = ()
    table_hot_budget_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    reservoir_size: int = 8192
    count_decay: float = 0.5
    random_shares: tuple[float, ...] = ()
    simulated_ranks: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        place = "SaturationConfig"
        require_choice("skip", self.skip, SKIP_MODES, place)
        require_choice("score", self.score, SCORES, place)
        require_choice("metric", self.metric, DRIFT_METRICS, place)
        require_choice("defer_trigger", self.defer_trigger, DEFER_TRIGGERS, place)
        self._check_numbers(place)
        self._check_integers(place)
        for name in ("shadow", "decay_skipped", "weigh_visits"):
            if not isinstance(getattr(self, name), bool):
                raise invalid(name, getattr(self, name), place, "True or False")
        object.__setattr__(self, "random_shares", tuple(self.random_shares))
        object.__setattr__(self, "exempt_tables", tuple(self.exempt_tables))
        object.__setattr__(self, "table_hot_budget_bytes", dict(self.table_hot_budget_bytes))
        for share in self.random_shares:
            require_number("random_shares", share, 0.0, 1.0, place)
        for table, budget in self.table_hot_budget_bytes.items():
            require_integer(f"table_hot_budget_bytes[{table!r}]", budget, 0, None, place)
        self._check_combinations(place)

    def _check_numbers(self, place: str) -> None:
        for name in ("target_skip", "saturated_share", "warmup", "keep_rate", "count_decay"):
            require_number(name, getattr(self, name), 0.0, 1.0, place)
        require_number("alpha", self.alpha, 0.0, 1.0, place, open_minimum=True)
        require_number("release", self.release, 1.0, place=place)
        for name in ("threshold", "max_threshold", "guard_tolerance", "freeze_drift"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), 0.0, place=place)
        for name in ("max_auc_loss", "max_log_loss_increase", "defer_movement"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), 0.0, place=place, open_minimum=True)

    def _check_integers(self, place: str) -> None:
        for name in ("snapshot_interval", "hot_budget_bytes", "protect_windows", "defer_max_age"):
            require_integer(name, getattr(self, name), 1, None, place)
        for name in ("defer_steps", "defer_budget_bytes", "loss_memory_bytes"):
            require_integer(name, getattr(self, name), 1, None, place)
        for name in ("warmup_steps", "planned_steps"):
            if getattr(self, name) is not None:
                require_integer(name, getattr(self, name), 0, None, place)
        if self.revisit_every is not None:
            require_integer("revisit_every", self.revisit_every, 0, 1 << 30, place)
        require_integer("max_skips", self.max_skips, 0, 127, place)
        require_integer("reservoir_size", self.reservoir_size, 1, 1 << 24, place)
        require_integer("simulated_ranks", self.simulated_ranks, 1, 64, place)
        require_integer("seed", self.seed, 0, (1 << 63) - 1, place)

    def _check_combinations(self, place: str) -> None:
        if (self.skip == "random") != bool(self.random_shares):
            allowed = "one share or more with skip='random', none otherwise"
            where = f"{place} with skip={self.skip!r}"
            raise invalid("random_shares", self.random_shares, where, allowed)
        if self.keep_rate == 1.0:
            raise invalid("keep_rate", 1.0, place, "below 1 (shadow=True keeps every input)")
        watches_inputs = self.skips_inputs or self.masks_gradients
        if self.guard_tolerance is not None and not watches_inputs:
            allowed = "None: no input of saturated keys is told from others"
            where = f"{place} with skip={self.skip!r}"
            raise invalid("guard_tolerance", self.guard_tolerance, where, allowed)
        if self.guard_tolerance is not None and not self.keeps_some:
            allowed = "None, or a keep_rate above 0: the guard watches the kept inputs"
            where = f"{place} with keep_rate=0"
            raise invalid("guard_tolerance", self.guard_tolerance, where, allowed)
        if self.threshold is not None and self.max_threshold is not None:
            allowed = "None: it bounds a T that is found by share"
            where = f"{place} with a threshold"
            raise invalid("max_threshold", self.max_threshold, where, allowed)
        self._check_budgets(place)

    def _check_budgets(self, place: str) -> None:
        """Refuses a budget that nothing would steer by."""
        by_key = self.score == "drift" or not self.skips_inputs
        if self.threshold is not None and by_key:
            for name in ("max_auc_loss", "max_log_loss_increase"):
                if getattr(self, name) is not None:
                    allowed = "None: a budget bounds the share that T is found by, not a fixed T"
                    raise invalid(name, getattr(self, name), f"{place} with a threshold", allowed)
        if self.max_log_loss_increase is not None and self.defers_by_movement:
            allowed = "None: only max_auc_loss bounds what gradients wait for"
            where = f"{place} with skip={self.skip!r} by movement"
            raise invalid("max_log_loss_increase", self.max_log_loss_increase, where, allowed)

    @property
    def keeps_some(self) -> bool:
        """Whether some skippable inputs are trained all the same."""
        returns = self.score == "remembered_loss" and self.max_skips > 0
        return self.keep_rate > 0.0 or returns or self.shadow or not self.skips_inputs

    @property
    def weighs_inputs(self) -> bool:
        """Whether inputs get weights."""
        return self.keep_rate > 0.0 or (self.score == "remembered_loss" and self.weigh_visits)

    @property
    def skips_inputs(self) -> bool:
        """Whether inputs are left out by their keys (not at random)."""
        return self.skip in ("inputs", "both", "inputs+gradients")

    @property
    def skips_some_inputs(self) -> bool:
        """Whether inputs are left out, by their keys or at random."""
        return (self.skips_inputs or self.skip == "random") and not self.shadow

    @property
    def masks_gradients(self) -> bool:
        """Whether gradients of saturated keys are thrown away."""
        return self.skip in ("gradients", "inputs+gradients")

    @property
    def defers_gradients(self) -> bool:
        """Whether gradients are deferred."""
        return self.skip in ("defer", "both")

    @property
    def skips_by_losses(self) -> bool:
        """Whether nothing is skipped without losses: by what is remembered, or by a budget."""
        budgets = (self.max_auc_loss, self.max_log_loss_increase)
        return self.score == "remembered_loss" or any(budget is not None for budget in budgets)

    @property
    def defers_by_movement(self) -> bool:
        """Whether gradients wait until they would move their rows."""
        return self.defers_gradients and self.defer_trigger == "movement"

    @property
    def needs_key_states(self) -> bool:
        """Whether it matters which keys are saturated: not if gradients wait for movement only."""
        return self.skip != "defer" or not self.defers_by_movement

    @property
    def may_read_replicas(self) -> bool:
        """Whether ranks may read replicas of saturated rows, where tables are sharded."""
        skips = self.skip not in ("none", "random") and not self.shadow
        return skips and self.freeze_drift != 0.0

    @property
    def budget_share(self) -> float:
        """What each of the ways to save may spend of a quality budget: skip="both" has two."""
        return 0.5 if self.skips_inputs and self.defers_by_movement else 1.0

    @property
    def withholds_saturated(self) -> bool:
        """Whether gradients of saturated keys do not reach their rows at once."""
        by_interval = self.defers_gradients and self.defer_trigger == "interval"
        return self.masks_gradients or by_interval

    @property
    def probing_interval(self) -> int:
        """Windows from probe to probe of a saturated key; 0: no probes."""
        if self.revisit_every is not None:
            return self.revisit_every
        if self.withholds_saturated:
            return 10
        # An input's keys must have been saturated since its last visit, which an epoch's worth of
        # probes would never let all of them be; and inputs that return move their rows.
        returns = self.score == "remembered_loss" and self.max_skips > 0
        return 0 if returns else 100

    def resolve_warmup(self, planned_steps: int | None) -> int | None:
        """Returns the warm-up in steps.

        Args:
            planned_steps: what is known from outside; `self.planned_steps` goes first.

        Returns:
            Steps before which nothing is skipped, or None if that cannot be told.
        """
        if self.warmup_steps is not None:
            return self.warmup_steps
        if self.warmup == 0.0:
            return 0
        planned = self.planned_steps if self.planned_steps is not None else planned_steps
        return None if planned is None else round(self.warmup * planned)

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`."""
        config = dataclasses.asdict(self)
        for name in ("random_shares", "exempt_tables"):
            config[name] = list(config[name])
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SaturationConfig":
        """Builds the object that `get_config` described."""
        return cls(**config)
