"""Frozen dataclasses for the settings of tables, windows and the hot set."""

import dataclasses
import numbers
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slipstream_tf import initializers, optimizers
from slipstream_tf._utils.errors import invalid, require_choice, require_integer, require_number
from slipstream_tf._utils.hashing import hash_text
from slipstream_tf._utils.serialization import Serializable

COMBINERS = ("sum", "mean", "sqrtn", None)
EVICTIONS = ("lfu", "lru")
ROW_DTYPES = ("float32", "bfloat16", "float16")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# float16 is not allowed, because sums of squares need the range of float32.
SLOT_DTYPES = ("float32", "bfloat16")
# Dtypes of rows in messages between ranks.
WIRE_DTYPES = ("float32", "bfloat16", "float16", "int8")
MAX_DIM = 65536
MAX_CAPACITY = 1 << 36
MAX_ADMIT = 255
DRIFT_METRICS = ("linf", "l2")
# Default window length: planned_steps / _WINDOWS, clamped to [_MIN_WINDOW, _LONGEST_WINDOW], or
# _UNPLANNED_WINDOW. The AUC of shorter windows would be mostly noise.
_WINDOWS, _MIN_WINDOW, _LONGEST_WINDOW, _UNPLANNED_WINDOW = 20, 5, 1000, 200
_TIME = re.compile(r"(\d{1,9})\s*([smhd])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGTkmgt])(i)?)?[Bb]?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Retention(Serializable):
    """Selects which keys have rows in a table, and for how long.

    When a row is evicted or expires, its access count, drift, snapshot and deferred gradient are
    deleted as well. If the key occurs again, its row starts from the initializer.

    Example:

    >>> retention = slip.Retention(capacity=1_000_000, admit_after=2, expire_after="30d")
    >>> retention.expiry
    (2592000, True)
    >>> table = slip.Table("item", dim=16, retention=retention)

    Attributes:
        capacity: Maximum number of rows, or None for no limit. A training batch or a call of
            `write` with more distinct keys raises `tf.errors.ResourceExhaustedError` and changes no
            row. The keys that one batch admits may exceed the capacity by a few rows until the next
            batch.
        eviction: Which row a full table evicts. `"lfu"`: the row with the lowest access count,
            which decays over time (`HotSet.count_decay`). `"lru"`: the row with the oldest access.
        admit_after: A key gets a row with this access, 1 (its first access) to 255. Before that, a
            lookup returns the initial row, and the gradients of the key are dropped. The accesses
            are counted in a filter of 16 MB per table. The filter can overestimate a count, and it
            halves all counts after every 16 million accesses of keys without a row. With sharded
            tables, all accesses of a key in the batch of one rank count as one.
        expire_after: Time without an access after which a row is removed: an integer number of
            steps (lookups of a training batch), or a duration such as `"90s"`, `"45m"`, `"12h"` or
            `"30d"`. The removal can be late by up to a quarter of that time. None means never.
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
            place = "Retention without `admit_after` > 1 and `expire_after`"
            allowed = "an integer >= 1. Pass one of these three arguments, or omit the Retention"
            raise invalid("capacity", None, place, allowed)

    @property
    def expiry(self) -> tuple[int, bool]:
        """The lifetime of a row without access, as `(amount, is_in_seconds)`.

        The amount is in steps if `is_in_seconds` is False. An amount of 0 means that rows never
        expire.
        """
        if self.expire_after is None:
            return 0, False
        if not isinstance(self.expire_after, str):
            maximum = MAX_CAPACITY
            return require_integer(
                "expire_after", self.expire_after, 1, maximum, "Retention"
            ), False
        found = _TIME.fullmatch(self.expire_after)
        if found is None or not int(found[1]):
            allowed = 'a number of steps, or a duration > 0 such as "90s", "45m", "12h" or "30d"'
            raise invalid("expire_after", self.expire_after, "Retention", allowed)
        return int(found[1]) * _SECONDS[found[2]], True


@dataclasses.dataclass(frozen=True)
class Storage(Serializable):
    """Selects how the native store keeps the rows of a table.

    Rows in a 16-bit dtype are updated in float32 and rounded when they are written back. The
    rounding is stochastic and unbiased, so that updates smaller than the spacing of the dtype are
    not lost. The random bits are a function of the key and the update, therefore a repeated run
    gives the same bits. If the optimizer has at least one float32 slot per value (all except plain
    SGD and RowWiseAdagrad), 8 bits of that slot store additional bits of the value. Value and slot
    are then updated with 24 bits each and take no additional memory. Lookups read the value rounded
    to `dtype`.

    Example:

    >>> storage = slip.Storage(dtype="bfloat16")
    >>> storage.row_bytes(dim=16, slots=16)
    96
    >>> table = slip.Table("item", dim=16, storage=storage)

    Attributes:
        dtype: Dtype of the row values: `"float32"`, `"bfloat16"` (8 bits of precision, range of
            float32) or `"float16"` (11 bits of precision, up to 65,504). The 16-bit dtypes take
            half the memory.
        slot_dtype: Dtype of the optimizer slots of a row: `"float32"` or `"bfloat16"`. Slots in
            bfloat16 have no bits to spare for the values.
        memory: Memory for rows and slots, in bytes or as a text such as `"2GB"`. The other rows are
            stored on disk, the least valuable first, by access count and time since the last
            access. The rows of one batch must fit. In addition, the index from keys to rows takes
            20 to 25 bytes per key. Rows in transit between memory and disk take up to an eighth of
            `memory`, plus a quarter of `memory` or 64 MB, whichever is less. None keeps all rows in
            memory.
        spill: Folder on a local disk for the rows that exceed `memory`, which is required with it.
            The folder must exist when the table is created. The files have no name and are deleted
            when the process ends. Ranks may share the folder.
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
            allowed = "a value. Pass both `memory` and `spill`, or neither"
            raise invalid(missing, None, place, allowed)
        if self.memory is not None:
            parse_bytes("memory", self.memory, "Storage")
            if not isinstance(self.spill, (str, os.PathLike)) or not os.fspath(self.spill):
                raise invalid("spill", self.spill, "Storage", "a non-empty path of a folder")
            object.__setattr__(self, "spill", os.fspath(self.spill))

    def in_memory(self) -> "Storage":
        """Returns the same storage with all rows in memory."""
        return Storage(self.dtype, self.slot_dtype)

    def rows_in_memory(self, dim: int, slots: int) -> int:
        """Returns the number of rows that fit into `memory`; 0 without a limit.

        Args:
            dim: Number of values per row.
            slots: Number of optimizer values per row.
        """
        return self.memory_bytes // self.row_bytes(dim, slots)

    @property
    def memory_bytes(self) -> int:
        """Memory for rows in bytes.

        0 means that all rows stay in memory.
        """
        return 0 if self.memory is None else parse_bytes("memory", self.memory, "Storage")

    def row_bytes(self, dim: int, slots: int) -> int:
        """Returns the bytes of memory of one row with its slots.

        The result is a multiple of 16. The index from keys to rows takes 20 to 25 additional bytes
        per row.

        Args:
            dim: Number of values per row.
            slots: Number of optimizer values per row.
        """
        nbytes = DTYPE_BYTES[self.dtype] * dim + DTYPE_BYTES[self.slot_dtype] * slots
        return -(-nbytes // 16) * 16


@dataclasses.dataclass(frozen=True)
class Table(Serializable):
    """Describes one embedding table: a row of `dim` values per int64 key.

    Example:

    >>> table = slip.Table("item", dim=16, combiner="mean", initializer="zeros")
    >>> layer = slip.keras.EmbeddingCollection([table])
    >>> layer({"item": np.array([[3, 5], [8, -1]])}).keys()
    dict_keys(['item'])

    Attributes:
        name: Unique name of the table.
        dim: Number of values per row, 1 to 65,536.
        optimizer: Sparse optimizer of the table, with its learning rate: an object of
            `slipstream_tf.optimizers`, or an identifier that `optimizers.get` accepts. None uses
            the optimizer of the layer or store.
        combiner: How the rows of a bag (the keys of one feature of an example) are combined into
            one vector: `"sum"`, `"mean"`, or `"sqrtn"`, the sum divided by the square root of the
            number of keys. None returns the row of each key.
        initializer: Initial values of a new row: an object of `slipstream_tf.initializers`, or an
            identifier that `initializers.get` accepts. If it has no seed, the seed is a hash of the
            table name. The same key then starts with different rows in two tables, and always with
            the same row in one table.
        storage: Dtype and location of the rows. Defaults to float32 in memory.
        retention: Which keys have rows, and for how long. None keeps the rows of all keys.
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

    if TYPE_CHECKING:
        # Type checkers would accept only the types of the attributes, not the identifiers.
        def __init__(
            self,
            name: str,
            dim: int,
            optimizer: Any = None,
            combiner: str | None = "sum",
            initializer: Any = "uniform",
            retention: Retention | None = None,
            storage: Storage = ...,
        ) -> None: ...

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
            allowed = 'slipstream_tf.Storage(...), for example Storage(dtype="bfloat16")'
            raise invalid("storage", self.storage, place, allowed)

    @property
    def seed(self) -> int:
        """Seed of the initializer.

        It defaults to a hash of the table name, in the range of int64.
        """
        own = getattr(self.initializer, "seed", None)
        return hash_text(self.name) if own is None else own

    @property
    def capacity(self) -> int | None:
        """Maximum number of rows; None means unbounded."""
        return None if self.retention is None else self.retention.capacity

    @property
    def eviction(self) -> str:
        """Eviction order of a full table, `"lfu"` or `"lru"`; unused if unbounded."""
        return EVICTIONS[0] if self.retention is None else self.retention.eviction

    @property
    def admits(self) -> bool:
        """Whether a key needs more than one access to get a row."""
        return self.retention is not None and self.retention.admit_after > 1

    @property
    def tracks_use(self) -> bool:
        """Whether the table records when each row was last accessed."""
        if self.retention is None:
            return False
        is_lru = self.capacity is not None and self.eviction == "lru"
        return is_lru or self.retention.expire_after is not None

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary for `from_config`."""
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
        """Creates a table from the dictionary that `get_config` returned."""
        config = dict(config)
        if config.get("retention") is not None:
            config["retention"] = Retention(**config["retention"])
        if "storage" in config:
            config["storage"] = Storage(**config["storage"])
        return cls(**config)


@dataclasses.dataclass(frozen=True)
class Window:
    """Sets the length of windows, after which the engine decides.

    A window is a sequence of training steps. At its end, the engine measures the drift of each
    tracked row (the distance from its snapshot, the copy at the window's start), updates the
    threshold T, classifies keys with a drift below T as saturated, and takes new snapshots.

    Example:

    >>> window = slip.Window(warmup=0.25)
    >>> window.length(planned_steps=10_000)
    500
    >>> window.warmup_steps(planned_steps=10_000)
    2500

    Attributes:
        steps: Length of a window in training steps. None uses a twentieth of the planned steps,
            clamped to [5, 1000] and rounded down to a multiple of 10 from 100 on. If the planned
            steps are unknown, a window has 200 steps.
        warmup: Training before policies take effect. A float is a fraction of the planned steps in
            [0, 1] (0.25 in the paper). An integer is a number of steps.
        planned_steps: Number of steps that training takes without skipping. None uses the number
            that `fit` derives from the length of the data, `steps_per_epoch` and `epochs`.
        sample: Maximum number of examples per window, sampled uniformly, that determine T.
        seed: Seed of that sample and of the random decisions that keep or skip examples.
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
        """Returns the length of a window in steps.

        Args:
            planned_steps: Planned steps of training, or None if unknown. `Window.planned_steps`
                takes precedence.
        """
        if self.steps is not None:
            return self.steps
        planned = self.planned_steps if self.planned_steps is not None else planned_steps
        if planned is None:
            return _UNPLANNED_WINDOW
        length = min(max(planned // _WINDOWS, _MIN_WINDOW), _LONGEST_WINDOW)
        # With steps_per_execution of 5 or 10, an execution then ends where the window ends.
        return length - length % 10 if length >= 100 else length

    def warmup_steps(self, planned_steps: int | None) -> int | None:
        """Returns the number of warm-up steps, or None if unknown.

        Args:
            planned_steps: Planned steps of training, or None if unknown. `Window.planned_steps`
                takes precedence.
        """
        if isinstance(self.warmup, int):
            return self.warmup
        if self.warmup == 0.0:
            return 0
        planned = self.planned_steps if self.planned_steps is not None else planned_steps
        return None if planned is None else round(self.warmup * planned)


@dataclasses.dataclass(frozen=True)
class HotSet:
    """Selects the keys that the engine tracks: the most accessed keys.

    The snapshots (copies) of their rows must fit into `memory`.

    Example:

    >>> hot_set = slip.HotSet(memory="64MiB", exclude=["country"])
    >>> hot_set.memory_bytes
    67108864

    Attributes:
        memory: Memory for the snapshots of all tables, in bytes or as a text such as `"256MB"`.
        table_memory: Additional limits for single tables: a dictionary from table name to the
            maximum memory for the snapshots of that table, in bytes or as a text.
        exclude: Names of tables that are not tracked and to which no policy applies.
        count_decay: Factor in [0, 1] by which all access counts are multiplied at the end of each
            window.
    """

    memory: int | str = "256MiB"
    table_memory: Mapping[str, int | str] = dataclasses.field(default_factory=dict)
    exclude: Sequence[str] = ()
    count_decay: float = 0.5

    def __post_init__(self) -> None:
        parse_bytes("memory", self.memory, "HotSet")
        if not isinstance(self.table_memory, Mapping):
            allowed = 'a dictionary from table name to memory, for example {"user": "64MiB"}'
            raise invalid("table_memory", self.table_memory, "HotSet", allowed)
        for table, memory in self.table_memory.items():
            parse_bytes(f"table_memory[{table!r}]", memory, "HotSet", minimum=0)
        object.__setattr__(self, "table_memory", dict(self.table_memory))
        if isinstance(self.exclude, str):
            allowed = f"a sequence of table names, for example ({self.exclude!r},)"
            raise invalid("exclude", self.exclude, "HotSet", allowed)
        object.__setattr__(self, "exclude", tuple(self.exclude))
        decay = require_number("count_decay", self.count_decay, 0.0, 1.0, "HotSet")
        object.__setattr__(self, "count_decay", decay)

    @property
    def memory_bytes(self) -> int:
        """Memory for the snapshots of all tables, in bytes."""
        return parse_bytes("memory", self.memory, "HotSet")

    @property
    def table_bytes(self) -> dict[str, int]:
        """Maximum bytes of the snapshots of single tables, by table name."""
        return {
            name: parse_bytes(name, memory, minimum=0) for name, memory in self.table_memory.items()
        }


@dataclasses.dataclass(frozen=True)
class Saturation:
    """Defines when a tracked key counts as saturated.

    A key is saturated if its drift is below a threshold T. The definition applies to `RowDrift`,
    `MaskGradients` and `DeferGradients(until=Interval())`. Without policies, it applies to the
    reported states of keys.

    Example:

    >>> saturation = slip.Saturation(metric="l2", threshold=0.01)
    >>> saturation.threshold
    0.01

    Attributes:
        metric: Distance of a row from its snapshot: `"linf"` (the largest change of a value, as in
            the paper) or `"l2"`.
        threshold: The threshold T in units of the metric. None derives T from the `fraction` of a
            policy.
        max_threshold: Upper bound of a derived T, or None.
        revisit_every: A saturated key is probed, which means trained like a varying key, in one of
            `revisit_every` windows. The windows differ between keys. 0 means never. None means 10
            with `MaskGradients` or `Interval`, and 100 otherwise, because an example with a probing
            key is not skipped.
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
            place = f"Saturation(threshold={self.threshold!r})"
            allowed = "None, because the threshold is fixed. Pass only one of the two arguments"
            raise invalid("max_threshold", self.max_threshold, place, allowed)


@dataclasses.dataclass(frozen=True)
class DryRun:
    """Makes the engine decide and count everything without saving anything.

    Every example is trained and every gradient is applied. The report estimates the savings.

    Example:

    >>> layer = slip.keras.EmbeddingCollection([slip.Table("item", dim=4)])
    >>> engine = slip.Slipstream(layer, slip.DeferGradients(), dry_run=slip.DryRun())

    Attributes:
        estimates_cost: Whether the report also estimates the AUC loss of the policies. The estimate
            needs the loss of each example, which a `slip.keras.Model` records.
    """

    estimates_cost: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.estimates_cost, bool):
            raise invalid("estimates_cost", self.estimates_cost, "DryRun", "True or False")


def parse_bytes(argument: str, value: Any, place: str = "", minimum: int = 1) -> int:
    """Parses a number of bytes, or a text such as `"1.5GiB"`.

    Args:
        argument: Name of the argument, for the error.
        value: An integer or a text. KB, MB, GB and TB are powers of 1,000, and KiB, MiB, GiB and
            TiB are powers of 1,024.
        place: Where the argument was passed, for the error.
        minimum: Minimum number of bytes.

    Raises:
        ValueError: The value is neither an integer nor such a text, or is below the minimum.
    """
    nbytes = value
    if isinstance(value, str) and (found := _BYTES.fullmatch(value.strip())):
        base = 1024 if found[3] else 1000
        nbytes = round(float(found[1]) * base ** " KMGT".index((found[2] or " ").upper()))
    is_integer = isinstance(nbytes, numbers.Integral) and not isinstance(nbytes, bool)
    if not is_integer or nbytes < minimum:
        allowed = f'an integer number of bytes >= {minimum}, or a text such as "256MB" or "1.5GiB"'
        raise invalid(argument, value, place, allowed)
    return int(nbytes)
