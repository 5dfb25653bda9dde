"""SOK variables as tables, and the base class of SOK stores.

This is the only module that imports SOK, and only when a store is created. It also wraps optimizers
for SOK.
"""

import functools
import importlib
import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid
from slipstream_tf.tables.base import UpdatedElsewhere
from slipstream_tf.tables.sok import hkv

OPTIMIZERS = (
    "an optimizer of tf.compat.v1.train, sok.SGD, or an optimizer of tf_keras.optimizers.legacy. "
    "For the latter, set TF_USE_LEGACY_KERAS=1 in the environment before TensorFlow is imported"
)
_MISSING = (
    "SOK cannot be imported: {error}. Install it on a host with an NVIDIA GPU (pip install "
    "merlin-sok), or pass store='native'."
)


def open_sok() -> Any:
    """Imports SOK, and initializes SOK and Horovod unless already initialized.

    Returns:
        The module `sparse_operation_kit`.

    Raises:
        ImportError: SOK is not installed or cannot be loaded.
    """
    try:
        sok = importlib.import_module("sparse_operation_kit")
    except Exception as error:  # SOK raises plain Exceptions if libraries are missing.
        raise ImportError(_MISSING.format(error=error)) from error
    talk = sok.communication
    if not talk.hvd.is_initialized():
        talk.hvd.init()
    if talk._COMM_TOOL is None:
        # The default, True, replaces tf.keras.optimizers in the whole process.
        sok.init(use_legacy_optimizer=False)
    return sok


def require_lookup_sparse() -> None:
    """Raises RuntimeError if `sok.lookup_sparse` cannot run with this Python."""
    if not hasattr(importlib, "find_loader"):
        version = ".".join(map(str, sys.version_info[:2]))
        raise RuntimeError(
            "sok.lookup_sparse of merlin-sok 2.1.0 calls importlib.find_loader, which Python 3.12 "
            f"removed, but this is Python {version}. Use Python 3.11, or pass store='sok' to the "
            "layer, which does not need lookup_sparse."
        )


def wrap_optimizer(optimizer: Any) -> Any:
    """Wraps an optimizer so that it can update `sok.DynamicVariable`s.

    Example:

    >>> from slipstream_tf.tables.sok import wrap_optimizer
    >>> optimizer = tf.compat.v1.train.AdagradOptimizer(0.1)
    >>> optimizer = wrap_optimizer(optimizer)  # doctest: +SKIP

    Args:
        optimizer: An optimizer of `tf.compat.v1.train`, or a legacy optimizer of Keras 2.
            Optimizers of SOK (`sok.SGD`, `sok.OptimizerWrapper`) are returned unchanged.

    Returns:
        A `sok.OptimizerWrapper` of the optimizer, or the optimizer of SOK.

    Raises:
        ImportError: SOK is not installed or cannot be loaded.
        ValueError: SOK does not support the optimizer, for example an optimizer of Keras 3. The
            error lists the supported optimizers.
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
            # A legacy optimizer, but tf.keras is Keras 3 in this process.
            pass
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    raise invalid("optimizer", kind, "SOK's variables", OPTIMIZERS) from None


def slots_of(optimizer: Any, variable: Any) -> dict[str, Any]:
    """Returns the slot variables of a variable that exist, by slot name.

    Args:
        optimizer: Result of `wrap_optimizer`, or None.
        variable: A `sok.DynamicVariable`.
    """
    # SOK's wrappers list their slots. `sok.SGD` has no slots.
    if not hasattr(optimizer, "get_slot_names"):
        return {}
    found = {}
    for name in optimizer.get_slot_names():
        try:
            slot = optimizer.get_slot(variable, name)
        except KeyError:  # Legacy optimizers raise it before the first step.
            slot = None
        if slot is not None:
            found[name] = slot
    return found


def free_when_deleted(variable: Any) -> None:
    """Frees the rows of a `sok.DynamicVariable` when its Python object is deleted.

    SOK itself keeps them until the process ends.
    """
    weakref.finalize(variable, _free, variable.handle).atexit = False


def _free(handle: tf.Tensor) -> None:
    # Garbage collection can call this function while any graph is being built.
    with _compat.eager_mode():
        tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=True)


# Keys that mark free buckets in SOK's hash tables.
_RESERVED = {"hybrid": (-4, -3, -2, -1), "hbm": (tf.int64.max, tf.int64.min)}


class SokTable:
    """A SOK variable as a table of keys.

    Attributes:
        name: Name of the table.
        variable: A `sok.DynamicVariable`, or a variable created by `sok.Variable`.
        is_dynamic: Whether it is a `sok.DynamicVariable`.
        sok: The SOK module.
        rank: Rank of this process.
        ranks: Number of ranks.
        dim: Number of values per row.
        is_hybrid: Whether it is a HierarchicalKV (HKV) table, which evicts rows.
        num_keys: Number of keys on all ranks if they are 0 to n - 1; None for arbitrary keys.
        reserved_keys: Keys that mark free buckets in the hash table. They cannot have a row.
    """

    def __init__(self, name: str, variable: Any, sok: Any):
        """Wraps a variable of validated type and settings."""
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
        """Returns the rank that owns each key, int64 [n].

        A variable that SOK places on a single GPU has one owner for all keys.
        """
        if self.variable.target_gpu >= 0:
            return np.full(keys.shape, self.variable.target_gpu, np.int64)
        return self.spread(tf.constant(keys, tf.int64)).numpy()

    def spread(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns each key's owner if rows are sharded, int64 [n].

        It also works in a graph. SOK computes the owner as the unsigned key modulo the number of
        ranks.

        Args:
            keys: int64 [n].
        """
        with tf.device("CPU:0"):
            unsigned = tf.bitcast(keys, tf.uint64)
            return tf.cast(unsigned % tf.constant(self.ranks, tf.uint64), tf.int64)

    def own(self, keys: np.ndarray) -> np.ndarray:
        """Returns the subset of keys, int64 [n], that this rank owns."""
        return keys[self.owners(keys) == self.rank]

    def indices(self, own_keys: np.ndarray) -> np.ndarray:
        """Returns the row indices that gradients use for keys, int64 [n].

        Args:
            own_keys: int64 [n], keys that this rank owns.
        """
        return np.asarray(self.variable.key_map(np.asarray(own_keys, np.int64)), np.int64)

    def keys_of(self, indices: np.ndarray) -> np.ndarray:
        """Returns the keys of row indices, int64 [n]; the inverse of `indices`.

        Args:
            indices: int64 [n], row indices of this rank.
        """
        if self.is_dynamic or self.variable.target_gpu >= 0:
            return np.asarray(indices, np.int64)
        return np.asarray(indices, np.int64) * self.ranks + self.rank

    def read(self, own_keys: np.ndarray) -> tf.Tensor:
        """Returns rows of this rank, float32 [n, dim]; SOK creates missing rows.

        Args:
            own_keys: int64 [n], keys that this rank owns.
        """
        return self.variable.sparse_read(tf.constant(self.indices(own_keys), tf.int64))

    def lookup(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns rows of keys of any rank, float32 [n, dim]; a collective.

        Args:
            keys: int64 [n].

        Raises:
            tf.errors.InvalidArgumentError: SOK reserves one of the keys.
        """
        return self.sok.all2all_dense_embedding(self.variable, self._checked(keys))

    def _checked(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the keys, int64 [n], after a check for reserved keys.

        SOK does not check them. For a reserved key, an HKV table silently returns values that are
        no row, and an hbm table crashes the process.
        """
        reserved = self.reserved_keys
        if not reserved:
            return keys
        is_reserved = functools.reduce(tf.logical_or, [keys == key for key in reserved])
        place = (
            f" for table {self.name!r}. Expected keys other than {', '.join(map(str, reserved))}, "
            f"because SOK reserves them in {self.variable.backend_type} tables."
        )
        found = tf.reduce_min(tf.where(is_reserved, keys, tf.int64.max))
        with tf.device("CPU:0"):
            message = tf.strings.join(["Invalid `keys`: ", tf.strings.as_string(found), place])
            fine = tf.debugging.Assert(~tf.reduce_any(is_reserved), [message])
        with tf.control_dependencies([] if fine is None else [fine]):
            return tf.identity(keys)

    @property
    def initial_value(self) -> float | None:
        """The initial value of all row elements.

        None if the initializer is not a number, or if the variable is not dynamic.
        """
        try:
            return float(self.variable.initializer_str) if self.is_dynamic else None
        except (TypeError, ValueError):
            return None

    def touch(self, own_keys: np.ndarray, slots: Iterable[Any] = ()) -> None:
        """Rewrites rows unchanged, so that HKV does not evict them.

        HKV evicts the rows with the oldest write, and lookups do not count as writes.

        Args:
            own_keys: int64 [n], keys of this rank.
            slots: Slot variables of the optimizer. Their rows of these keys are rewritten too.
        """
        if not self.is_hybrid or not own_keys.size:
            return
        keys = tf.constant(own_keys, tf.int64)
        for variable in (self.variable, *slots):
            rows = variable.sparse_read(keys)
            variable.scatter_update(tf.IndexedSlices(rows, keys))


def open_table(name: str, variable: Any) -> SokTable:
    """Returns a table for a SOK variable, after validating its settings.

    Args:
        name: Name of the table.
        variable: A `sok.DynamicVariable` with int64 keys, or a variable created by `sok.Variable`.

    Raises:
        ValueError: It is not a SOK variable, or SOK would ignore or misread one of its settings.
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
                "%s has no max_capacity, so that SOK reserves %d rows: %.1f GiB of GPU memory and "
                "%.1f GiB of host memory, and the same for each optimizer slot. Pass max_capacity.",
                place,
                hkv.DEFAULT_CAPACITY,
                taken.gpu / 2**30,
                taken.host / 2**30,
            )
    return SokTable(name, variable, sok)


class SpreadStore(UpdatedElsewhere):
    """Base of stores with rows that SOK shards over the ranks."""

    is_in_sok = True
    is_spread = True
    _opened: Mapping[str, SokTable]

    def _require_ranks(self, ranks: int) -> None:
        """Raises ValueError unless `comm` has as many ranks as SOK."""
        if ranks != self._ranks:
            allowed = f"a communicator with the {ranks} ranks of SOK. Pass comm=distributed.init()"
            raise invalid("comm", f"{self._ranks} rank(s)", type(self).__name__, allowed)

    @property
    def _ranks(self) -> int:
        return 1 if self.comm is None else self.comm.size

    def _table(self, table: str) -> SokTable:
        return self._opened[self._require(table)]

    def owners(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns the rank on which SOK stores each key, int64 [n].

        Args:
            table: Name of the table.
            keys: int64 [n].
        """
        return self._table(table).owners(np.asarray(keys, np.int64))

    def size(self, table: str) -> int:
        return self._table(table).size()

    def gather(self, table: str, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Reads rows of this rank.

        Args:
            table: Name of the table.
            keys: int64 [n], keys that this rank owns.

        Returns:
            rows: float32 [n, dim].
            found: bool [n], always True, because SOK creates missing rows.
        """
        keys = np.asarray(keys, np.int64)
        return self._read(self._table(table), keys), tf.ones([keys.size], tf.bool)

    def _read(self, found: SokTable, keys: np.ndarray) -> tf.Tensor:
        return found.read(keys)

    def reserved_keys(self, table: str) -> tuple[int, ...]:
        """Returns the keys that SOK reserves; they cannot have a row."""
        return self._table(table).reserved_keys

    def num_keys(self, table: str) -> int | None:
        return self._table(table).num_keys
