"""What a user sets of an embedding table. Frozen, validated, serialisable."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream_tf import initializers
from slipstream_tf.errors import invalid, require_choice, require_integer
from slipstream_tf.saturation_config import SaturationConfig

__all__ = ["SaturationConfig", "TableConfig"]

COMBINERS = ("sum", "mean", "sqrtn")
EVICTIONS = ("lfu", "lru")
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
