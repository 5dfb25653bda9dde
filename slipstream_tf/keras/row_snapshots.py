"""Rows in `get_weights`, `set_weights` and SavedModels.

Keras requires a fixed shape of every weight. A table has no fixed shape and may be larger than
memory. Therefore the weight is a token, a scalar int64, which identifies a snapshot in this
process. Reading the weight (`get_weights`) creates a snapshot, and assigning it (`set_weights`)
restores a snapshot.

While `model.export` or `tf.saved_model.save` writes a SavedModel, lookups use TensorFlow ops on
variables, as in `slip.export.saved_model`, because a SavedModel must work without the ops of this
package. Only the thread that writes it looks up these variables. They stay alive with the rows of
the last SavedModel, because TensorFlow reuses the traced functions.
"""

import collections
import functools
import itertools
import secrets
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils import memory
from slipstream_tf._utils.errors import invalid, require_integer
from slipstream_tf.checkpoint.store_state import export_state, restore_state
from slipstream_tf.config import Table
from slipstream_tf.export.serving import (
    Numbering,
    ServedTable,
    ServingStore,
    encoded,
    refuse_own_ops,
    serving_store,
)

_NUMBER_BITS = 32
_PROCESS = 1 + secrets.randbits(30)  # Part of each token, to detect tokens of other processes.
_ALLOWED = (
    "the unchanged result of `get_weights` in this process, because the token for the rows is "
    "valid only here. Use `save_weights` and `load_weights` between processes"
)


class _Snapshot:
    """A copy of a store's contents, in memory or in a folder.

    Args:
        arrays: The result of `export_state`.
        room: Maximum number of bytes in memory. Larger contents are stored in the folder.
        folder: Parent of the temporary folder, or None for the default of the system.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], room: int, folder: str | None):
        nbytes = sum(array.nbytes for array in arrays.values())
        is_small = nbytes <= room
        self.memory_bytes = nbytes if is_small else 0
        self._arrays = dict(arrays) if is_small else None
        if not is_small:
            self._folder = tempfile.TemporaryDirectory(prefix="slipstream_", dir=folder)
            for name, array in arrays.items():
                np.save(Path(self._folder.name, name), array)

    def arrays(self) -> dict[str, np.ndarray]:
        if self._arrays is not None:
            return dict(self._arrays)
        files = Path(self._folder.name).glob("*.npy")
        return {file.stem: np.load(file, allow_pickle=False) for file in files}


class _Token(np.ndarray):
    """A token, int64 [], that keeps its snapshot, as do NumPy copies."""

    _snapshot: _Snapshot | None

    def __array_finalize__(self, source: Any) -> None:
        self._snapshot = getattr(source, "_snapshot", None)


class _Snapshots:
    """The snapshots of this process."""

    def __init__(self) -> None:
        self._by_number: weakref.WeakValueDictionary[int, _Snapshot] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._newest = 0
        self.limit(2, None, None)

    def limit(self, last: int, memory_bytes: int | None, folder: str | None) -> None:
        self._memory_bytes, self._folder = memory_bytes, folder
        self._last: collections.deque[_Snapshot] = collections.deque(maxlen=last)

    def take(self, store: Any) -> np.ndarray:
        """Copies the contents of a store and returns the token, int64 []."""
        arrays, room = export_state(store), self._memory_bytes
        if room is None:
            found = memory.read()
            room = 1 << 62 if found is None else found.available // 4
        room -= sum(snapshot.memory_bytes for snapshot in list(self._by_number.values()))
        snapshot = _Snapshot(arrays, room, self._folder)
        self._newest = number = next(self._numbers)
        self._by_number[number] = snapshot
        self._last.append(snapshot)
        token = np.array(_PROCESS << _NUMBER_BITS | number, np.int64).view(_Token)
        token._snapshot = snapshot
        return token

    def restore_rows(self, store: Any, value: Any, place: str) -> None:
        """Restores a store, except its learning rates, from a token.

        Args:
            store: The store.
            value: A token, int64 [], from `take`.
            place: Owner of the store, for errors.
        """
        token = np.asarray(value)
        if token.shape != () or token.dtype != np.int64:
            raise invalid("weights", token, place, _ALLOWED)
        process, number = divmod(int(token), 1 << _NUMBER_BITS)
        snapshot = self._by_number.get(number)
        if process != _PROCESS or not 0 < number <= self._newest:
            raise invalid("weights", int(token), place, _ALLOWED)
        if snapshot is None:
            allowed = (
                "the token of a snapshot that was not deleted. Snapshots are deleted except for "
                f"the last {self._last.maxlen} and snapshots with a referenced token. Keep the "
                "result of `get_weights`, or increase `last` of slipstream_tf.keras.limit_snapshots"
            )
            raise invalid("weights", int(token), place, allowed)
        restore_state(store, {**snapshot.arrays(), **store.rates.export()}, place)


_snapshots = _Snapshots()


def limit_snapshots(
    last: int = 2, memory_bytes: int | None = None, folder: str | None = None
) -> None:
    """Sets how many snapshots of rows are kept, and where.

    `model.get_weights()` copies the state of each `EmbeddingCollection` into a snapshot. The newest
    snapshots are kept, and in addition each snapshot whose array from `get_weights` is still
    referenced, for example by `EarlyStopping`.

    Example:

    >>> slip.keras.limit_snapshots(last=4, memory_bytes=1 << 30)
    >>> slip.keras.limit_snapshots()  # Restores the defaults.

    Args:
        last: Number of the newest snapshots that are kept without a reference.
        memory_bytes: Maximum memory of all snapshots. Further snapshots are stored on disk. None
            uses a quarter of the memory that is available when a snapshot is created.
        folder: Folder for snapshots on disk, which are deleted when the process ends. None uses the
            temporary folder of the system.

    Raises:
        ValueError: A number is out of range, or the folder does not exist.
    """
    place = "limit_snapshots"
    require_integer("last", last, 1, None, place)
    if memory_bytes is not None:
        require_integer("memory_bytes", memory_bytes, 0, None, place)
    if folder is not None and not Path(folder).is_dir():
        raise invalid("folder", folder, place, "an existing folder")
    _snapshots.limit(last, memory_bytes, folder)


class RowsWeight(keras.Variable):
    """The weight that represents the rows of a store in `get_weights`.

    Reading it with `numpy()`, as `get_weights` does, creates a snapshot. TensorFlow reads return
    the stored number 0 and create no snapshot.

    Attributes:
        stands_for_rows: True, which identifies the weight in exports.
    """

    stands_for_rows = True

    def __init__(self, store: Any, place: str):
        """Creates the weight.

        Args:
            store: An embedding store.
            place: Owner of the weight, for errors.
        """
        super().__init__(0, dtype="int64", trainable=False, name="rows")
        self._store, self._place = store, place

    def numpy(self) -> np.ndarray:
        """Creates a snapshot of the complete state and returns its token, int64 [].

        Deferred gradients are copied, not applied.
        """
        return _snapshots.take(self._store)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the stored number 0 as a new array.

        Raises:
            ValueError: Keras is writing it to a legacy `.h5` file.
        """
        refuse_legacy_file(self._place)
        return super().__array__(dtype)

    def assign(self, value: Any) -> Any:
        """Restores the state of a snapshot, except the learning rates.

        Args:
            value: A token from `numpy`, of any layer with the same tables and update rule.

        Raises:
            ValueError: The value is not a token, or belongs to another process, a deleted snapshot
                or other tables. The store is unchanged.
        """
        if not tf.executing_eagerly() or isinstance(value, keras.KerasTensor):
            allowed = "eager execution. Call `set_weights` outside of a tf.function"
            raise invalid("weights", value, f"{self._place} in a graph", allowed)
        _snapshots.restore_rows(self._store, value, self._place)
        return value


def add_rows_weight(layer: Any, store: Any) -> None:
    """Adds a weight that represents the rows of a store.

    TensorFlow checkpoints and Keras files do not contain it, because they contain the rows.
    """
    with keras.name_scope(layer.name, caller=layer):
        weight = RowsWeight(store, f"layer {layer.name!r}")
    _compat.track_variable(layer, weight)


def refuse_legacy_file(place: str) -> None:
    """Raises an error for legacy `.h5` files, which cannot contain rows.

    Args:
        place: The layer, for the error.

    Raises:
        ValueError: Keras is writing or reading such a file.
    """
    if _compat.is_in_legacy_file():
        allowed = (
            "'NAME.keras' for model.save or 'NAME.weights.h5' for model.save_weights, because the "
            "legacy .h5 format cannot store the rows of tables and would lose them"
        )
        raise invalid("filepath", "*.h5", f"a model with {place}", allowed)


_SIGNATURE = (
    "signatures that TensorFlow can trace again: a tf.function with `input_signature`, not the "
    "result of `get_concrete_function`"
)


class _Numbers(tf.lookup.StaticHashTable):
    """The hash table of a `_PackedTable`.

    TensorFlow does not trace a concrete function again for a SavedModel. This class refuses
    concrete functions that look up rows in a table of this package.
    """

    _graph: Any = None  # The graph of the SavedModel, in the copy that belongs to it.

    def __init__(self, initializer: Any, default: int, handle: tf.Tensor):
        """Creates the hash table that replaces the table with a handle."""
        super().__init__(initializer, default)
        self._handle = handle

    def _export_to_saved_model_graph(
        self, object_map: Any, tensor_map: Any, **kwargs: Any
    ) -> list[tf.Tensor]:
        tensors = super()._export_to_saved_model_graph(object_map, tensor_map, **kwargs)
        # A capture that is not in the map raises an error which names no alternative.
        tensor_map[self._handle] = tensor_map[self.resource_handle]
        object_map[self]._graph = tf.compat.v1.get_default_graph()
        return [*tensors, self._handle]

    def _maybe_initialize_trackable(self) -> None:
        """Checks the graph; TensorFlow calls it when the graph is complete."""
        super()._maybe_initialize_trackable()
        if self._graph is not None:
            refuse_own_ops(self._graph.as_graph_def(), _SIGNATURE)


class _PackedTable(ServedTable):
    """Holds keys and rows in one variable.

    While one thread writes a SavedModel, another thread may start to write one and then assigns
    the variable. A single variable contains keys and rows of the same moment.

    Attributes:
        contents: [n + 1, columns + dim] in the dtype of the table. Line i + 1 consists of the bits
            of the i-th key and its row. Line 0 contains the row of absent keys.
    """

    def __init__(self, config: Table, handle: tf.Tensor):
        """Creates the variable without keys."""
        tf.Module.__init__(self)
        self.config, self.scales = config, None
        with tf.device("CPU:0"):
            empty = _packed(config, np.empty(0, np.int64), np.empty((0, config.dim), np.float32))
            self._columns = empty.shape[1] - config.dim
            self.contents = tf.Variable(empty, shape=[None, empty.shape[1]], trainable=False)
            keys = functools.partial(_unpacked_keys, self.contents, self._columns)
            self.numbers = _Numbers(Numbering(keys), 0, handle)
        # Keras's export of a layer keeps hash tables and the objects that they track.
        self.numbers._track_trackable(self.contents, "contents")

    def _stored(self, numbers: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.contents, numbers)[:, self._columns :]


def _packed(config: Table, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the contents of a `_PackedTable` for keys int64 [n] and rows float32 [n, dim]."""
    values = encoded(config, rows, None)["rows"]
    bits = np.concatenate([np.zeros(1, np.int64), keys])[:, np.newaxis].view(values.dtype)
    return np.concatenate([bits, values], axis=1)


def _unpacked_keys(contents: tf.Variable, columns: int) -> tf.Tensor:
    return tf.bitcast(contents.read_value()[1:, :columns], tf.int64)


class ExportedRows:
    """Variables that contain the rows of a layer in a SavedModel of Keras or TensorFlow."""

    def __init__(self, layer: Any) -> None:
        """Creates the variables.

        A function that is traced again cannot create them.

        Args:
            layer: An `EmbeddingCollection` with a store.
        """
        self._store, self._place = layer.store, f"layer {layer.name!r}"
        with tf.init_scope():
            pairs = zip(self._store.tables, self._store._handles, strict=True)
            self._tables = [_PackedTable(table, handle) for table, handle in pairs]
        self._serving = ServingStore(self._tables)

    def store_for(self, layer: Any) -> Any:
        """Returns the store for a lookup of the layer without training.

        It is the store of the layer, unless this thread traces a SavedModel.

        Args:
            layer: The layer of this object.

        Raises:
            ValueError: This thread writes a SavedModel in a training with multiple ranks.
        """
        served = serving_store(layer)
        if served is not None:
            return served
        if not _compat.is_saving_model():
            return self._store
        comm = self._store.comm
        if comm is not None and comm.size > 1:
            allowed = "a single process. Call slip.export.saved_model(model, path) on all ranks"
            place = f"a SavedModel with {self._place}"
            raise invalid("model", f"a model on {comm.size} ranks", place, allowed)
        return self._serving

    def trackables(self) -> dict[str, Any]:
        """Copies the current rows into the variables and returns these.

        Returns:
            The trackable object of each table, under the name "served_<table>".
        """
        for table in self._tables:
            contents = self._store.export_table(table.config.name)
            table.contents.assign(_packed(table.config, contents["keys"], contents["rows"]))
        return {f"served_{table.config.name}": table for table in self._tables}
