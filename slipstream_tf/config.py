"""Settings of embedding tables, windows and the hot set: frozen dataclasses."""

import dataclasses
import numbers
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_tf import initializers, optimizers
from slipstream_tf._utils.errors import invalid, require_choice, require_integer, require_number
from slipstream_tf._utils.hashing import hash_text

COMBINERS = ("sum", "mean", "sqrtn", None)
EVICTIONS = ("lfu", "lru")
ROW_DTYPES = ("float32", "bfloat16", "float16")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Sums of squares need the range of a float32.
SLOT_DTYPES = ("float32", "bfloat16")
# Types of rows in messages between ranks.
WIRE_DTYPES = ("float32", "bfloat16", "float16", "int8")
MAX_DIM = 65536
MAX_CAPACITY = 1 << 36
MAX_ADMIT = 255
DRIFT_METRICS = ("linf", "l2")
# Of a window's length: so many in planned training, of no fewer steps than say something by their
# AUC; and where nothing is planned.
_WINDOWS, _LEAST_WINDOW, _LONGEST_WINDOW, _UNPLANNED_WINDOW = 20, 5, 1000, 200
_TIME = re.compile(r"(\d{1,9})\s*([smhd])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGTkmgt])(i)?)?[Bb]?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which keys a table keeps rows for, and how long.

    With a row its access count, drift, snapshot and deferred gradient are forgotten; a key that
    comes back starts anew.

    Attributes:
        capacity: most rows that the table may hold; None: any number. Keys that are admitted in
            one batch may go beyond it by a few, until the next.
        eviction: which row leaves a full table: "lfu" (the lowest decayed access count) or "lru"
            (the one not accessed for longest).
        admit_after: accesses until a key gets a row, 1 to 255. Until then it reads its initial row,
            and its gradients are dropped. A filter of 16 MB a table counts; it may count too many,
            and halves its counts every 16 million accesses of keys without a row. On ranks whose
            tables are sharded, accesses of a rank's batch count as one.
        expire_after: without an access, until a row leaves: steps (lookups of a training batch), or
            a time such as "90s", "45m", "12h" or "30d". It leaves then, or up to a quarter of that
            time later. None: never.
    """

    capacity: int | None = None
    eviction: str = "lfu"
    admit_after: int = 1
    expire_after: int | str | None = None

    def __post_init__(self) -> None:
        if self.capacity is not None:
            capacity = require_integer("capacity", self.capacity, 1, MAX_CAPACITY, "Retention")
            object.__setattr__(self, "capacity", capacity)
        require_choice("eviction", self.eviction, EVICTIONS, "Retention")
        admit_after = require_integer("admit_after", self.admit_after, 1, MAX_ADMIT, "Retention")
        object.__setattr__(self, "admit_after", admit_after)
        if self.expire_after is not None:
            self.expiry  # noqa: B018 (raises)
        if self.capacity is None and admit_after == 1 and self.expire_after is None:
            allowed = "a capacity, an admit_after above 1 or an expire_after; or no Retention"
            raise invalid("capacity", None, "Retention", allowed)

    @property
    def expiry(self) -> tuple[int, bool]:
        """How long without an access a row stays, and whether that is in seconds; 0: for ever."""
        if self.expire_after is None:
            return 0, False
        if not isinstance(self.expire_after, str):
            most = MAX_CAPACITY
            return require_integer("expire_after", self.expire_after, 1, most, "Retention"), False
        found = _TIME.fullmatch(self.expire_after)
        if found is None or not int(found[1]):
            allowed = 'steps, or a time above 0 such as "90s", "45m", "12h" or "30d"'
            raise invalid("expire_after", self.expire_after, "Retention", allowed)
        return int(found[1]) * _SECONDS[found[2]], True


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a table keeps its rows, of a store of this package's own tables.

    What is narrower than float32 is computed in float32 and rounded when it is written back: to one
    of its two neighbours, by a chance that makes the mean right (stochastic rounding). So steps
    smaller than the neighbours' distance are not lost. The chance is a function of key and update:
    the same run gives the same bits. Where each value has a float32 slot (momentum, Adagrad, Adam,
    FTRL), that lends it 8 bits: value and slot are updated with 24 bits each, and take no more
    memory; lookups read the nearest value of `dtype`.

    Attributes:
        dtype: of a row's values: "float32"; "bfloat16" (8 bits of precision, float32's range) or
            "float16" (11 bits, up to 65,504), which take half the bytes.
        slot_dtype: of the optimizer's values beside a row: "float32" or "bfloat16", with which no
            bits are lent.
        memory: bytes of rows and slots in memory, or a text such as "2GB"; all others are on disk,
            the least valuable first, by their access counts and how long ago they were used. A
            batch's rows must fit. On top come the index, 20 to 25 bytes a key, and, for what moves,
            an eighth, and a quarter or 64 MB. None: all rows are in memory.
        spill: a folder on a local disk, for files that have no name and end with the process; with
            `memory` only. It must be there when the table is made. Ranks may share it.
    """

    dtype: str = "float32"
    slot_dtype: str = "float32"
    memory: int | str | None = None
    spill: str | None = None

    def __post_init__(self) -> None:
        require_choice("dtype", self.dtype, ROW_DTYPES, "Storage")
        require_choice("slot_dtype", self.slot_dtype, SLOT_DTYPES, "Storage")
        if (self.memory is None) != (self.spill is None):
            missing, given = ("memory", "spill") if self.memory is None else ("spill", "memory")
            place = f"Storage({given}={getattr(self, given)!r})"
            raise invalid(missing, None, place, "both memory and spill, or neither")
        if self.memory is not None:
            parse_bytes("memory", self.memory, "Storage")
            if not isinstance(self.spill, (str, os.PathLike)) or not os.fspath(self.spill):
                raise invalid("spill", self.spill, "Storage", "the path of a folder")
            object.__setattr__(self, "spill", os.fspath(self.spill))

    def in_memory(self) -> "Storage":
        """Returns the same for a table whose rows are all in memory."""
        return Storage(self.dtype, self.slot_dtype)

    def rows_in_memory(self, dim: int, slots: int) -> int:
        """Returns how many rows of `dim` values, with their slots, `memory` is of."""
        return self.memory_bytes // self.row_bytes(dim, slots)

    @property
    def memory_bytes(self) -> int:
        """Bytes of rows in memory; 0: all are."""
        return 0 if self.memory is None else parse_bytes("memory", self.memory, "Storage")

    def row_bytes(self, dim: int, slots: int) -> int:
        """Returns the bytes of memory of a row of `dim` values and of its slots.

        They are rounded up to 16. The index takes 20 to 25 more for each row.
        """
        nbytes = DTYPE_BYTES[self.dtype] * dim + DTYPE_BYTES[self.slot_dtype] * slots
        return -(-nbytes // 16) * 16


@dataclasses.dataclass(frozen=True)
class Table:
    """One embedding table: a named set of rows of `dim` values, one per int64 key.

    Attributes:
        name: unique name of the table.
        dim: values per row, 1 to 65,536.
        optimizer: the rule of the table's rows, with its rate: an object of
            `slipstream_tf.optimizers`, or what `optimizers.get` makes one of. None: that of the
            layer or store.
        combiner: how the rows of a bag become one vector: "sum", "mean" or "sqrtn"; None: not at
            all, each key's row comes out.
        initializer: how a new key's row starts: an object of `slipstream_tf.initializers`, or what
            `initializers.get` makes one of. Without a seed of its own, it is seeded by the table's
            name: equal keys of two tables start with different rows, and the same key of a table
            always with the same.
        storage: how its rows are kept; by default as float32, in memory.
        retention: which keys have rows, and how long; None: all of them, for ever.
    """

    name: str
    dim: int
    optimizer: optimizers.SparseOptimizer | None = None
    combiner: str | None = "sum"
    initializer: initializers.Initializer = dataclasses.field(
        default_factory=initializers.RandomUniform
    )
    retention: Retention | None = None
    storage: Storage = dataclasses.field(default_factory=Storage)

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
            allowed = "None or slipstream_tf.Retention(...)"
            raise invalid("retention", self.retention, place, allowed)
        if not isinstance(self.storage, Storage):
            allowed = 'slipstream_tf.Storage(), e.g. Storage(dtype="bfloat16")'
            raise invalid("storage", self.storage, place, allowed)

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

    @property
    def admits(self) -> bool:
        """Whether keys get a row only after some accesses."""
        return self.retention is not None and self.retention.admit_after > 1

    @property
    def tracks_use(self) -> bool:
        """Whether the table knows when its rows were accessed last."""
        if self.retention is None:
            return False
        is_lru = self.capacity is not None and self.eviction == "lru"
        return is_lru or self.retention.expire_after is not None

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`."""
        config = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.optimizer is not None:
            config["optimizer"] = optimizers.serialize(self.optimizer)
        config["initializer"] = initializers.serialize(self.initializer)
        if self.retention is not None:
            config["retention"] = dataclasses.asdict(self.retention)
        config["storage"] = dataclasses.asdict(self.storage)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Table":
        """Builds the object that `get_config` described."""
        config = dict(config)
        if config.get("retention") is not None:
            config["retention"] = Retention(**config["retention"])
        if "storage" in config:
            config["storage"] = Storage(**config["storage"])
        return cls(**config)


@dataclasses.dataclass(frozen=True)
class Window:
    """The steps between two snapshots: all decisions fall at a window's end.

    Attributes:
        steps: length of a window in trained steps. None: a twentieth of the planned steps, 5 to
            1,000, from 100 on in tens; 200 where these are not known.
        warmup: nothing is saved before: a float is a share of the planned steps, 0.0 to 1.0 (paper:
            0.25); an integer is steps.
        planned_steps: steps that training would take without skipping. None: `fit` tells, by the
            data's length, `steps_per_epoch` and `epochs`.
        sample: examples of a window whose keys are kept, uniform over it, to find T.
        seed: of that sample, of thinning and of random skipping.
    """

    steps: int | None = None
    warmup: float | int = 0.25
    planned_steps: int | None = None
    sample: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        for name, minimum, maximum in (
            ("steps", 1, None),
            ("planned_steps", 0, None),
            ("sample", 1, 1 << 24),
            ("seed", 0, (1 << 63) - 1),
        ):
            value = getattr(self, name)
            if value is not None or name in ("sample", "seed"):
                value = require_integer(name, value, minimum, maximum, "Window")
                object.__setattr__(self, name, value)
        if isinstance(self.warmup, numbers.Integral) and not isinstance(self.warmup, bool):
            warmup: float = require_integer("warmup", self.warmup, 0, None, "Window")
        else:
            warmup = require_number("warmup", self.warmup, 0.0, 1.0, "Window")
        object.__setattr__(self, "warmup", warmup)

    def length(self, planned_steps: int | None) -> int:
        """Returns the steps of a window.

        Args:
            planned_steps: of training, as far as known; this object's own go first.
        """
        if self.steps is not None:
            return self.steps
        planned = self.planned_steps if self.planned_steps is not None else planned_steps
        if planned is None:
            return _UNPLANNED_WINDOW
        length = min(max(planned // _WINDOWS, _LEAST_WINDOW), _LONGEST_WINDOW)
        # Keras's executions of five or ten steps end where a window does.
        return length - length % 10 if length >= 100 else length

    def warmup_steps(self, planned_steps: int | None) -> int | None:
        """Returns the steps before which nothing is saved; None: that cannot be told yet.

        Args:
            planned_steps: of training, as far as known; this object's own go first.
        """
        if isinstance(self.warmup, int):
            return self.warmup
        if self.warmup == 0.0:
            return 0
        planned = self.planned_steps if self.planned_steps is not None else planned_steps
        return None if planned is None else round(self.warmup * planned)


@dataclasses.dataclass(frozen=True)
class HotSet:
    """The keys that are watched: the most accessed ones whose snapshots fit the memory.

    Attributes:
        memory: bytes of the snapshots of all tables, or a text such as "256MB".
        table_memory: table name -> bytes of its snapshots at most, or a text.
        exclude: names of tables that are neither watched nor saved on.
        count_decay: factor on the access counts at each window's end, 0 to 1.
    """

    memory: int | str = "256MiB"
    table_memory: Mapping[str, int | str] = dataclasses.field(default_factory=dict)
    exclude: Sequence[str] = ()
    count_decay: float = 0.5

    def __post_init__(self) -> None:
        parse_bytes("memory", self.memory, "HotSet")
        if not isinstance(self.table_memory, Mapping):
            allowed = "a dictionary from table name to bytes"
            raise invalid("table_memory", self.table_memory, "HotSet", allowed)
        for table, memory in self.table_memory.items():
            parse_bytes(f"table_memory[{table!r}]", memory, "HotSet", minimum=0)
        object.__setattr__(self, "table_memory", dict(self.table_memory))
        if isinstance(self.exclude, str):
            allowed = f"a sequence of table names, e.g. ({self.exclude!r},)"
            raise invalid("exclude", self.exclude, "HotSet", allowed)
        object.__setattr__(self, "exclude", tuple(self.exclude))
        decay = require_number("count_decay", self.count_decay, 0.0, 1.0, "HotSet")
        object.__setattr__(self, "count_decay", decay)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the snapshots of all tables."""
        return parse_bytes("memory", self.memory, "HotSet")

    @property
    def table_bytes(self) -> dict[str, int]:
        """Table name -> bytes of its snapshots at most."""
        return {
            name: parse_bytes(name, memory, minimum=0) for name, memory in self.table_memory.items()
        }


@dataclasses.dataclass(frozen=True)
class Saturation:
    """When a hot key counts as saturated. For policies that go by it, and where none is given.

    Attributes:
        metric: drift of a row from its snapshot: "linf" (largest change of a value, as in the
            paper) or "l2".
        threshold: T itself, in the metric's unit. None: T is found for a policy's `share`.
        max_threshold: upper bound of a T that is found, or None.
        revisit_every: a saturated key is probed (trained as if it varied) one window in so many,
            at different windows for different keys; 0: never. None: as the policies say, 10 where
            gradients are withheld, 100 where examples are skipped, since a probing key holds all
            its examples back.
    """

    metric: str = "linf"
    threshold: float | None = None
    max_threshold: float | None = None
    revisit_every: int | None = None

    def __post_init__(self) -> None:
        place = "Saturation"
        require_choice("metric", self.metric, DRIFT_METRICS, place)
        for name in ("threshold", "max_threshold"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, require_number(name, value, 0.0, place=place))
        if self.revisit_every is not None:
            require_integer("revisit_every", self.revisit_every, 0, 1 << 30, place)
        if self.threshold is not None and self.max_threshold is not None:
            allowed = "None: it bounds a T that is found by share"
            raise invalid("max_threshold", self.max_threshold, f"{place} with a threshold", allowed)


@dataclasses.dataclass(frozen=True)
class DryRun:
    """Does everything but the saving, and tells what would have been saved.

    Attributes:
        estimates_cost: whether examples' losses are taken in, by which the report estimates what
            saving would have cost. It needs a model that tells them: a `slip.keras.Model`.
    """

    estimates_cost: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.estimates_cost, bool):
            raise invalid("estimates_cost", self.estimates_cost, "DryRun", "True or False")


def parse_bytes(argument: str, value: Any, place: str = "", minimum: int = 1) -> int:
    """Returns bytes from a number, or from a text such as "256MB" or "1.5GiB".

    Args:
        argument: as the user wrote it, for the error.
        value: an integer, or a text; KB, MB, GB, TB are powers of 1,000, KiB, MiB, GiB, TiB of
            1,024.
        place: where, for the error.
        minimum: least bytes.

    Raises:
        ValueError: it is neither, or less than that.
    """
    nbytes = value
    if isinstance(value, str):
        found = _BYTES.fullmatch(value.strip())
        if found is None:
            allowed = 'bytes, or a text such as "256MB" or "1.5GiB"'
            raise invalid(argument, value, place, allowed)
        base = 1024 if found[3] else 1000
        nbytes = round(float(found[1]) * base ** " KMGT".index((found[2] or " ").upper()))
    return require_integer(argument, nbytes, minimum, None, place)
