"""What a user sets: embedding tables and the saturation engine. Frozen, validated, serialisable."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream_tf import initializers
from slipstream_tf.errors import (
    invalid,
    require_choice,
    require_integer,
    require_number,
)

COMBINERS = ("sum", "mean", "sqrtn")
EVICTIONS = ("lfu", "lru")
DRIFT_METRICS = ("linf", "l2", "relative")
SKIP_MODES = ("none", "inputs", "random")
MAX_DIM = 65536
MAX_CAPACITY = 1 << 36


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """One embedding table: a named set of rows of `dim` float32 values, one per int64 key.

    Attributes:
        name: unique name of the table.
        dim: values per row, 1 to 65,536.
        combiner: how the rows of a bag become one vector: "sum", "mean" or "sqrtn".
        capacity: most rows the table may hold; None grows without bound.
        eviction: which rows leave a full table: "lfu" (lowest decayed access count) or "lru".
        initializer: how a new key's row starts.
        seed: seeds the initializer; the same (seed, key) always gives the same row.
    """

    name: str
    dim: int
    combiner: str = "sum"
    capacity: int | None = None
    eviction: str = "lfu"
    initializer: initializers.Initializer = dataclasses.field(
        default_factory=initializers.RandomUniform
    )
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise invalid("name", self.name, "a table", "a non-empty string")
        place = f"table {self.name!r}"
        require_integer("dim", self.dim, 1, MAX_DIM, place)
        require_choice("combiner", self.combiner, COMBINERS, place)
        require_choice("eviction", self.eviction, EVICTIONS, place)
        if self.capacity is not None:
            require_integer("capacity", self.capacity, 1, MAX_CAPACITY, place)
        require_integer("seed", self.seed, -(1 << 63), (1 << 63) - 1, place)
        object.__setattr__(self, "initializer", initializers.get(self.initializer))

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`."""
        config = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        config["initializer"] = initializers.serialize(self.initializer)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TableConfig:
        """Builds the object that `get_config` described."""
        return cls(**config)


@dataclasses.dataclass(frozen=True)
class SaturationConfig:
    """Settings of the saturation engine (method: Slipstream, arXiv 2404.04270).

    Attributes:
        skip: "none" tracks and skips nothing; "inputs" leaves out inputs whose skip score is below
            the threshold (the paper's input classifier block); "random" is the control: it leaves
            out the shares given in `random_shares`, whatever the keys.
        metric: drift of a row from its snapshot: "linf" (paper), "l2" or "relative".
        target_skip: share of the hot inputs (those with a finite score) to skip, 0 to 1.
        alpha: share of an input's lookups that must be saturated, above 0, at most 1 (paper: 1).
        snapshot_interval: window length in steps.
        hot_budget_bytes: bytes of snapshots; bounds the hot set.
        warmup_steps: nothing is skipped before this many steps (paper: a quarter of training).
        max_threshold: upper bound of the threshold, or None.
        reservoir_size: inputs whose key lists are kept, uniform over the window, to find T.
        count_decay: factor on the access counts at each window's end, 0 to 1.
        random_shares: for skip="random": share to skip in window 0, 1, ...; the last one repeats.
        seed: seeds the reservoir and random skipping.
    """

    skip: str = "inputs"
    metric: str = "linf"
    target_skip: float = 0.3
    alpha: float = 1.0
    snapshot_interval: int = 1000
    hot_budget_bytes: int = 256 << 20
    warmup_steps: int = 0
    max_threshold: float | None = None
    reservoir_size: int = 8192
    count_decay: float = 0.5
    random_shares: tuple[float, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        place = "SaturationConfig"
        require_choice("skip", self.skip, SKIP_MODES, place)
        require_choice("metric", self.metric, DRIFT_METRICS, place)
        require_number("target_skip", self.target_skip, 0.0, 1.0, place)
        require_number("alpha", self.alpha, 0.0, 1.0, place, open_minimum=True)
        require_integer("snapshot_interval", self.snapshot_interval, 1, None, place)
        require_integer("hot_budget_bytes", self.hot_budget_bytes, 1, None, place)
        require_integer("warmup_steps", self.warmup_steps, 0, None, place)
        if self.max_threshold is not None:
            require_number("max_threshold", self.max_threshold, 0.0, place=place)
        require_integer("reservoir_size", self.reservoir_size, 1, 1 << 24, place)
        require_number("count_decay", self.count_decay, 0.0, 1.0, place)
        require_integer("seed", self.seed, 0, (1 << 63) - 1, place)
        object.__setattr__(self, "random_shares", tuple(self.random_shares))
        for share in self.random_shares:
            require_number("random_shares", share, 0.0, 1.0, place)
        if (self.skip == "random") != bool(self.random_shares):
            raise invalid(
                "random_shares",
                self.random_shares,
                f"{place} with skip={self.skip!r}",
                "one share or more with skip='random', none otherwise",
            )

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`."""
        config = dataclasses.asdict(self)
        config["random_shares"] = list(self.random_shares)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SaturationConfig:
        """Builds the object that `get_config` described."""
        return cls(**config)
