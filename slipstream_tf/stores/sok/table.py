"""One of SOK's variables as a table of keys.

In: a variable of the user's. Out: a `SokTable`; or an error that says what is allowed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from slipstream_tf.errors import invalid
from slipstream_tf.stores.sok import hkv
from slipstream_tf.stores.sok.library import open_sok

# Keys by which its hash tables mark places.
_RESERVED = {"hybrid": (-4, -3, -2, -1), "hbm": (tf.int64.max, tf.int64.min)}


@dataclasses.dataclass(frozen=True)
class SokTable:
    """One of SOK's variables as a table of keys.

    Attributes:
        name: of the table.
        variable: `sok.DynamicVariable`, or what `sok.Variable` made.
        is_dynamic: which of them.
        sok: the module.
    """

    name: str
    variable: Any
    is_dynamic: bool
    sok: Any

    @property
    def rank(self) -> int:
        """Of this process."""
        return int(self.sok.communication.rank())

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.sok.communication.num_ranks())

    @property
    def dim(self) -> int:
        """Values per row."""
        return int(self.variable.shape[1])

    @property
    def is_hybrid(self) -> bool:
        """Whether it is an HKV table, which evicts rows."""
        return self.is_dynamic and self.variable.backend_type == "hybrid"

    def size(self) -> int:
        """Returns the number of rows on this rank."""
        return int(self.variable.size[0] if self.is_dynamic else self.variable.shape[0])

    @property
    def num_keys(self) -> int | None:
        """Keys that it has rows of, 0 to that number, on all ranks; None: any number of any."""
        return None if self.is_dynamic else int(self.variable._global_shape[0])

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
            ValueError: all rows are on one rank: SOK would ask the others for them, too.
            tf.errors.InvalidArgumentError: a key is one that SOK's table uses itself.
        """
        if self.variable.target_gpu >= 0 and self.ranks > 1:
            allowed = "mode='distributed' (sok.lookup_sparse looks up what is on one rank)"
            mode = f"localized:{self.variable.target_gpu}"
            raise invalid("mode", mode, f"lookup of table {self.name!r}", allowed)
        return self.sok.all2all_dense_embedding(self.variable, self.checked(keys))

    @property
    def reserved_keys(self) -> tuple[int, ...]:
        """Keys by which its hash table marks places, and which have no row."""
        return _RESERVED[self.variable.backend_type] if self.is_dynamic else ()

    def checked(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the keys, int64 [n], of which none is one that SOK's table uses itself.

        Its hash tables mark free places by such keys. HKV passes over them without a word: what is
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
                "%s has no max_capacity: SOK makes room for %d rows, %.1f GiB on the GPU and %.1f "
                "in host memory, and as much again for each slot of the optimizer.",
                place,
                hkv.DEFAULT_CAPACITY,
                taken.gpu / 2**30,
                taken.host / 2**30,
            )
    return SokTable(name, variable, is_dynamic, sok)
