"""A store's state as named NumPy arrays, and back. Used by Keras's weight files and checkpoints.

The arrays carry a manifest (tables, dimensions, update rule), so that state of other tables is
refused before anything is overwritten.
"""

import contextlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf import optimizers
from slipstream_tf.checkpoint import tree
from slipstream_tf.checkpoint.by_name import WITHOUT_SLOTS, SavedAs, choose

FORMAT = 1
_MANIFEST = "manifest"
_RATES = ("learning_rate", "followed_rate")
# What stores of tables in SOK export of a table for themselves.
_OF_SOK = ("trained", "powers")


def export_state(store: Any) -> dict[str, np.ndarray]:
    """Copies everything a store holds.

    Args:
        store: an embedding store.

    Returns:
        Arrays by name: "manifest" (JSON as uint8), "learning_rate" and, for table i,
        "table_<i>_keys", "table_<i>_rows", "table_<i>_slots", "table_<i>_counts" and so on, as
        `store.export_table` names them.
    """
    manifest = {
        "format": FORMAT,
        "tables": [
            {
                "name": table.name,
                "dim": table.dim,
                "optimizer": optimizers.serialize(store.rule_of(table.name)),
                "layout": store.slot_layout(table.name).rule,
            }
            for table in store.tables
        ],
    }
    arrays: dict[str, np.ndarray] = {
        _MANIFEST: np.frombuffer(json.dumps(manifest).encode(), np.uint8),
        **store.rates.export(),
    }
    for index, table in enumerate(store.tables):
        for part, value in store.export_table(table.name).items():
            arrays[f"table_{index}_{part}"] = np.asarray(value)
    return arrays


def restore_state(store: Any, arrays: Mapping[str, Any], place: str) -> None:
    """Replaces everything a store holds by what `export_state` copied.

    Within `by_name.tables_by_name` tables that only one side has are left as they are.

    Args:
        store: an embedding store with the same tables and update rules. Values of a rule other
            than the learning rate (epsilon, betas) stay as the store has them.
        arrays: as `export_state` returned them.
        place: what is being loaded, for errors.

    Raises:
        ValueError: the tables, a dimension or an update rule differ; the error names both. The
            store is unchanged then.
    """
    if _MANIFEST not in arrays:
        raise ValueError(
            f"{place}: the saved state has no embedding tables (found {sorted(arrays)}). It was "
            "saved by another kind of layer or the file is damaged."
        )
    manifest = json.loads(np.asarray(arrays[_MANIFEST]).astype(np.uint8).tobytes().decode())
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{place}: saved in format {manifest.get('format')!r}, this version reads {FORMAT}."
        )
    saved = [SavedAs(t["name"], t["dim"], t["layout"]) for t in manifest["tables"]]
    taken = choose(saved, store, place)
    exported: dict[str, dict[str, np.ndarray]] = {}
    for index, table in enumerate(saved):
        prefix = f"table_{index}_"
        names = [name for name in arrays if name.startswith(prefix)]
        parts = {n[len(prefix) :]: np.asarray(arrays[n]) for n in names if table.name in taken}
        if not store.is_in_sok:
            parts = {n: values for n, values in parts.items() if n not in _OF_SOK}
        if taken.get(table.name) == WITHOUT_SLOTS:
            initial = store.slot_layout(table.name).initial
            parts["slots"] = np.tile(initial, (parts["keys"].size, 1))
        exported[table.name] = parts
    for name in taken:
        store.import_table(name, exported[name])
    rates = {name: np.asarray(arrays[name]) for name in _RATES if name in arrays}
    store.rates.restore(rates, [table.name for table in saved])


_apart: set[int] = set()


@contextlib.contextmanager
def kept_apart(store: Any) -> Iterator[None]:
    """Leaves a store out of any `tf.train.Checkpoint`, as its tables are in files of their own."""
    _apart.add(id(store))
    try:
        yield
    finally:
        _apart.discard(id(store))


class StoreState(tf.train.experimental.PythonState):
    """Lets `tf.train.Checkpoint` save and restore a store.

    Args:
        store: an embedding store.
        place: what it belongs to, for errors.
    """

    def __init__(self, store: Any, place: str) -> None:
        super().__init__()
        self._store = store
        self._place = place
        self._listeners: list[Callable[[], None]] = []

    def when_restored(self, listener: Callable[[], None]) -> None:
        """Calls a function whenever the tables have been replaced."""
        self._listeners.append(listener)

    def serialize(self) -> bytes:
        """Returns the store's state as the bytes of an .npz file; none if it is kept apart."""
        if id(self._store) in _apart:
            return b""
        return to_bytes(export_state(self._store))

    def deserialize(self, string_value: bytes) -> None:
        """Replaces the store's state by what `serialize` returned.

        Raises:
            ValueError: it is of other tables, or they were kept apart, and now are not.
        """
        if id(self._store) in _apart:
            return
        if not string_value:
            raise ValueError(
                f"{self._place}: the tables of this checkpoint are in files of their own. Restore "
                "it with distributed.JobCheckpoints, and give that the store."
            )
        restore_state(self._store, from_bytes(string_value, self._place), self._place)
        for listener in self._listeners:
            listener()


def tree_to_bytes(state: Any) -> bytes:
    """Returns nested dictionaries, as `tree.flatten` takes them, as the bytes of an .npz file."""
    skeleton, arrays = tree.flatten(state)
    return to_bytes({_MANIFEST: np.frombuffer(json.dumps(skeleton).encode(), np.uint8), **arrays})


def tree_from_bytes(content: bytes, place: str) -> Any:
    """Returns what `tree_to_bytes` was given.

    Raises:
        ValueError: it is damaged.
    """
    arrays = from_bytes(content, place)
    try:
        return tree.unflatten(json.loads(arrays[_MANIFEST].tobytes().decode()), arrays)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{place}: the checkpoint is damaged ({error}).") from error


def to_bytes(arrays: Mapping[str, Any]) -> bytes:
    """Returns named arrays as the bytes of an .npz file."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def from_bytes(content: bytes, place: str) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz file.

    Raises:
        ValueError: it is damaged.
    """
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return dict(arrays)
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{place}: the checkpoint is damaged ({error}).") from error
