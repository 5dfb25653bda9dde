"""One of SOK's variables as a table of keys, and stores of such tables.

In: a variable of the user's. Out: a `SokTable`; or an error that says what is allowed. This is the
only file that imports SOK: when a store is made. It also wraps optimizers for SOK.
"""

import functools
import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from slipstream_tf._utils.errors import invalid
from slipstream_tf.tables.base import UpdatedElsewhere
from slipstream_tf.tables.sok import hkv

OPTIMIZERS = (
    "tf.compat.v1.train.AdagradOptimizer or another of tf.compat.v1.train, sok.SGD, or "
    "tf_keras.optimizers.legacy.Adagrad or another of them (with TF_USE_LEGACY_KERAS=1 in the "
    "environment before TensorFlow is imported)"
)
_MISSING = (
    "SOK cannot be imported: {error}. It needs an NVIDIA GPU: pip install merlin-sok, or give "
    "store='native'."
)


def open_sok() -> Any:
    """Imports SOK and, where the program did not, starts it and the Horovod that it talks by.

    Raises:
        ImportError: there is no SOK, or it cannot be loaded here.
    """
    try:
        sok = importlib.import_module("sparse_operation_kit")
    except Exception as error:  # SOK raises plain Exceptions where its libraries are missing.
        raise ImportError(_MISSING.format(error=error)) from error
    talk = sok.communication
    if not talk.hvd.is_initialized():
        talk.hvd.init()
    if talk._COMM_TOOL is None:
        # Its default replaces tf.keras.optimizers for the whole program.
        sok.init(use_legacy_optimizer=False)
    return sok


def require_lookup_sparse() -> None:
    """Raises RuntimeError if `sok.lookup_sparse` cannot run with this Python."""
    if not hasattr(importlib, "find_loader"):
        version = ".".join(map(str, sys.version_info[:2]))
        raise RuntimeError(
            "sok.lookup_sparse of merlin-sok 2.1.0 calls importlib.find_loader, which Python 3.12 "
            f"took out; this is Python {version}. Use Python 3.11, or look rows up with "
            "store='sok', which needs no lookup_sparse."
        )


def wrap_optimizer(optimizer: Any) -> Any:
    """Makes an optimizer able to update `sok.DynamicVariable`s: `sok.OptimizerWrapper`, checked.

    Args:
        optimizer: of `tf.compat.v1.train`, or a legacy one of Keras 2. What SOK made already
            (`sok.SGD`, `sok.OptimizerWrapper`) is returned as it is.

    Raises:
        ValueError: SOK cannot use it, as the optimizers of Keras 3; the error says which it can.
    """
    sok = open_sok()
    if type(optimizer).__module__.startswith(sok.__name__ + "."):
        return optimizer
    is_first = isinstance(optimizer, tf.compat.v1.train.Optimizer)
    is_legacy = any(base.__name__ == "OptimizerV2" for base in type(optimizer).__mro__)
    if is_first or is_legacy:
        try:
            return sok.OptimizerWrapper(optimizer)
        except (AttributeError, KeyError):
            # A legacy optimizer in a program whose tf.keras is Keras 3.
            pass
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    raise invalid("optimizer", kind, "SOK's variables", OPTIMIZERS) from None


def slots_of(optimizer: Any, variable: Any) -> dict[str, Any]:
    """Returns a variable's slots by name; none before the optimizer has made them.

    Args:
        optimizer: what `wrap_optimizer` returned, or None.
        variable: a `sok.DynamicVariable`.
    """
    # SOK's wrappers know what they made; `sok.SGD` has nothing.
    if not hasattr(optimizer, "get_slot_names"):
        return {}
    found = {}
    for name in optimizer.get_slot_names():
        try:
            slot = optimizer.get_slot(variable, name)
        except KeyError:  # Of the legacy optimizers, before the first step.
            slot = None
        if slot is not None:
            found[name] = slot
    return found


# Keys by which its hash tables mark free buckets.
_RESERVED = {"hybrid": (-4, -3, -2, -1), "hbm": (tf.int64.max, tf.int64.min)}


class SokTable:
    """One of SOK's variables as a table of keys.

    Attributes:
        name: of the table.
        variable: `sok.DynamicVariable`, or what `sok.Variable` made.
        is_dynamic: which of them.
        sok: the module.
        rank: of this process.
        ranks: how many there are.
        dim: values per row.
        is_hybrid: whether it is an HKV table, which evicts rows.
        num_keys: keys that it has rows of, 0 to that number, on all ranks; None: any number of any.
        reserved_keys: keys by which its hash table marks free buckets, and which have no row.
    """

    def __init__(self, name: str, variable: Any, sok: Any):
        """Takes a variable, whose kind and settings are checked."""
        self.name, self.variable, self.sok = name, variable, sok
        self.is_dynamic = isinstance(variable, sok.DynamicVariable)
        self.rank = int(sok.communication.rank())
        self.ranks = int(sok.communication.num_ranks())
        self.dim = int(variable.shape[1])
        self.is_hybrid = self.is_dynamic and variable.backend_type == "hybrid"
        self.num_keys = None if self.is_dynamic else int(variable._global_shape[0])
        self.reserved_keys = _RESERVED[variable.backend_type] if self.is_dynamic else ()

    def size(self) -> int:
        """Returns the number of rows on this rank."""
        return int(self.variable.size[0] if self.is_dynamic else self.variable.shape[0])

    def owners(self, keys: np.ndarray) -> np.ndarray:
        """Returns int64 [n], the rank that owns each key."""
        if self.variable.target_gpu >= 0:
            return np.full(keys.shape, self.variable.target_gpu, np.int64)
        return self.spread(tf.constant(keys, tf.int64)).numpy()

    def spread(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns int64 [n], the owner of each key of a table on all ranks; in graphs, too.

        As SOK does it: the remainder of the unsigned number.
        """
        with tf.device("CPU:0"):
            unsigned = tf.bitcast(keys, tf.uint64)
            return tf.cast(unsigned % tf.constant(self.ranks, tf.uint64), tf.int64)

    def own(self, keys: np.ndarray) -> np.ndarray:
        """Returns the keys that this rank owns."""
        return keys[self.owners(keys) == self.rank]

    def indices(self, own_keys: np.ndarray) -> np.ndarray:
        """Returns int64 [n], what this rank's gradients have in place of its keys."""
        return np.asarray(self.variable.key_map(np.asarray(own_keys, np.int64)), np.int64)

    def keys_of(self, indices: np.ndarray) -> np.ndarray:
        """Returns int64 [n], the keys of this rank that have these `indices`."""
        if self.is_dynamic or self.variable.target_gpu >= 0:
            return np.asarray(indices, np.int64)
        return np.asarray(indices, np.int64) * self.ranks + self.rank

    def read(self, own_keys: np.ndarray) -> tf.Tensor:
        """Returns float32 [n, dim], rows of this rank; SOK makes those that are missing."""
        return self.variable.sparse_read(tf.constant(self.indices(own_keys), tf.int64))

    def lookup(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns float32 [n, dim], rows of any rank's keys, int64 [n]; a collective.

        Raises:
            tf.errors.InvalidArgumentError: a key is one that SOK's table uses itself.
        """
        return self.sok.all2all_dense_embedding(self.variable, self._checked(keys))

    def _checked(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the keys, int64 [n], of which none is one that SOK's table uses itself.

        Its hash tables mark free buckets by such keys. HKV passes over them without a word: what is
        read is no row; under an hbm table the program dies.
        """
        reserved = self.reserved_keys
        if not reserved:
            return keys
        is_reserved = functools.reduce(tf.logical_or, [keys == key for key in reserved])
        place = (
            f" of table {self.name!r}: SOK's {self.variable.backend_type} tables use "
            f"{', '.join(map(str, reserved))} themselves. Give other keys."
        )
        found = tf.reduce_min(tf.where(is_reserved, keys, tf.int64.max))
        with tf.device("CPU:0"):
            message = tf.strings.join(["Invalid key ", tf.strings.as_string(found), place])
            fine = tf.debugging.Assert(~tf.reduce_any(is_reserved), [message])
        with tf.control_dependencies([] if fine is None else [fine]):
            return tf.identity(keys)

    @property
    def initial_value(self) -> float | None:
        """What all values of a new row are; None: they are random, or given."""
        try:
            return float(self.variable.initializer_str) if self.is_dynamic else None
        except (TypeError, ValueError):
            return None

    def touch(self, own_keys: np.ndarray, slots: Iterable[Any] = ()) -> None:
        """Writes rows as they are, so that HKV takes them for young.

        Its lookups do not: a row that is read, but never written, is evicted first.

        Args:
            own_keys: int64 [n], keys of this rank.
            slots: variables of the optimizer, whose rows of these keys are touched as well.
        """
        if not self.is_hybrid or not own_keys.size:
            return
        keys = tf.constant(own_keys, tf.int64)
        for variable in (self.variable, *slots):
            rows = variable.sparse_read(keys)
            variable.scatter_update(tf.IndexedSlices(rows, keys))


def open_table(name: str, variable: Any) -> SokTable:
    """Makes a table of one of SOK's variables, whose settings are checked.

    Raises:
        ValueError: it is none, or has settings that SOK passes over or misreads.
    """
    sok = open_sok()
    place = f"table {name!r}"
    is_dynamic = isinstance(variable, sok.DynamicVariable)
    if not is_dynamic and not isinstance(
        variable, (sok.DistributedVariable, sok.LocalizedVariable)
    ):
        allowed = "a sok.DynamicVariable or a sok.Variable"
        raise invalid("variables", type(variable).__name__, place, allowed)
    if is_dynamic and variable.key_type != tf.int64:
        raise invalid("key_type", variable.key_type.name, place, "tf.int64")
    if is_dynamic and variable.backend_type == "hybrid":
        settings = variable.config_dict
        hkv.require_settings(settings, place, are_capacities_needed=False)
        if "max_capacity" not in settings:
            taken = hkv.memory(settings, variable.dimension)
            logging.warning(
                "%s has no max_capacity: SOK reserves %d rows, %.1f GiB on the GPU and %.1f "
                "in host memory, and as much again for each slot of the optimizer.",
                place,
                hkv.DEFAULT_CAPACITY,
                taken.gpu / 2**30,
                taken.host / 2**30,
            )
    return SokTable(name, variable, sok)


class SpreadStore(UpdatedElsewhere):
    """Base of the stores whose rows are in SOK: each is on the rank that SOK puts its key on."""

    is_in_sok = True
    is_spread = True
    _opened: Mapping[str, SokTable]

    def _require_ranks(self, ranks: int) -> None:
        """Raises ValueError unless the store was given as many ranks as SOK has."""
        if ranks != self._ranks:
            allowed = f"distributed.init(): SOK has {ranks} ranks"
            raise invalid("comm", self.comm, type(self).__name__, allowed)

    @property
    def _ranks(self) -> int:
        return 1 if self.comm is None else self.comm.size

    def _table(self, table: str) -> SokTable:
        return self._opened[self._require(table)]

    def owners(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns int64 [n]: the rank that SOK puts each key, int64 [n], on."""
        return self._table(table).owners(np.asarray(keys, np.int64))

    def size(self, table: str) -> int:
        """Returns the number of rows of a table on this rank."""
        return self._table(table).size()

    def gather(self, table: str, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads rows of this rank.

        Args:
            table: name of the table.
            keys: int64 [n], keys that this rank owns.

        Returns:
            rows float32 [n, dim] and found bool [n], all true: SOK makes a row that is missing.
        """
        keys = np.asarray(keys, np.int64)
        return self._read(self._table(table), keys), tf.ones([keys.size], tf.bool)

    def _read(self, found: SokTable, keys: np.ndarray) -> tf.Tensor:
        return found.read(keys)

    def reserved_keys(self, table: str) -> tuple[int, ...]:
        """Returns the keys that SOK's table uses itself, and can have no row of."""
        return self._table(table).reserved_keys

    def num_keys(self, table: str) -> int | None:
        """Returns how many keys, from 0, a table has on all ranks; None: any number of any."""
        return self._table(table).num_keys
