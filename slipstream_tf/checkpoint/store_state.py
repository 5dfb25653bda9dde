"""A store's state as named NumPy arrays, and back. Used by Keras's weight files and checkpoints.

The arrays carry a manifest (tables, dimensions, update rule), so that state of other tables is
refused before anything is overwritten. `choose` decides which tables of a file a store takes: all
of the same tables, or within `tables_by_name` the tables that both have.
"""

import contextlib
import dataclasses
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from slipstream_tf import optimizers
from slipstream_tf.checkpoint.array_file import CheckpointMismatchError

WHOLE, WITHOUT_SLOTS = "whole", "without slots"
REMEDY = (
    "or within slipstream_tf.checkpoint.tables_by_name(), which takes the tables that both have"
)


@dataclasses.dataclass(frozen=True)
class SavedAs:
    """What a file says of a table.

    Attributes:
        name: of the table.
        dim: values of a row.
        rule: class name of its update rule; None: nobody knows it.
    """

    name: str
    dim: int
    rule: str | None


_is_by_name = False


@contextlib.contextmanager
def tables_by_name() -> Iterator[None]:
    """Within it, files of other tables may be loaded: tables go by their names.

    For `load_weights` (with `skip_mismatch=True` where dense layers have changed, too),
    `tf.train.Checkpoint` and `distributed.JobCheckpoints`. Tables that only one side has, or that
    have another dimension, stay as they are. Where the rule differs, rows and access counts are
    taken, and slots start anew. The log says what was taken and what was not.
    """
    global _is_by_name
    before, _is_by_name = _is_by_name, True
    try:
        yield
    finally:
        _is_by_name = before


def is_active() -> bool:
    """Whether tables go by their names now."""
    return _is_by_name


def choose(saved: Sequence[SavedAs], store: Any, place: str) -> Mapping[str, str]:
    """Returns the tables that a store takes, and whether `WHOLE` or `WITHOUT_SLOTS`.

    Args:
        saved: the tables of a file.
        store: that is to have them.
        place: what is being loaded, for errors and the log.

    Raises:
        CheckpointMismatchError: tables, dimensions or rules differ outside `tables_by_name`.
    """
    if not _is_by_name:
        _require_same(saved, store, place)
        return {table.name: WHOLE for table in saved}
    by_name = {table.name: table for table in saved}
    taken = {}
    for table in store.tables:
        found = by_name.pop(table.name, None)
        if found is None:
            logging.warning("%s: table %r is not in it; it stays as it is.", place, table.name)
        elif found.dim != table.dim:
            told = f"it was saved with dim={found.dim} and has dim={table.dim} here"
            logging.warning("%s: table %r is not taken: %s.", place, table.name, told)
        elif found.rule != (rule := store.slot_layout(table.name).rule):
            taken[table.name] = WITHOUT_SLOTS
            told = f"its slots, which start anew: they are of {found.rule}, not {rule}"
            logging.warning("%s: table %r is taken without %s.", place, table.name, told)
        else:
            taken[table.name] = WHOLE
            logging.info("%s: table %r is taken.", place, table.name)
    for name in by_name:
        logging.warning("%s: table %r is not taken: there is none here.", place, name)
    return taken


def _require_same(saved: Sequence[SavedAs], store: Any, place: str) -> None:
    by_name = {table.name: table for table in saved}
    here = {table.name: table for table in store.tables}
    problem, remedy = "", ""
    if set(by_name) != set(here):
        problem = f"was saved with tables {sorted(by_name)}, but this program has {sorted(here)}"
        remedy = "the same tables"
    for name, table in here.items() if not problem else ():
        found, rule = by_name[name], store.slot_layout(name).rule
        if found.dim != table.dim:
            problem = f"was saved with dim={found.dim}, but this program has dim={table.dim}"
            remedy = "tables of the same dimensions"
        elif None not in (found.rule, rule) and found.rule != rule:
            problem = f"was saved with the update rule {found.rule}, but this program uses {rule}"
            remedy = "tables of the same rule, because slots of different rules differ"
        if problem:
            problem = f"table {name!r} {problem}"
            break
    if problem:
        raise CheckpointMismatchError(place, problem, f"Restore it into {remedy}, {REMEDY}.")


# A value of this one key stands for an array, the name of which it gives.
_ARRAY = "__array__"


def flatten(tree: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Takes the arrays out of a tree.

    Args:
        tree: dictionaries with names for keys, lists, and leaves: JSON-serialisable values or
            arrays of at least one dimension.

    Returns:
        The tree with a reference for each array, JSON-serialisable; and the arrays by name.
    """
    arrays: dict[str, np.ndarray] = {}

    def stand_in(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            name = f"array-{len(arrays)}"
            arrays[name] = value
            return {_ARRAY: name}
        return value.item() if isinstance(value, np.generic) else dict(value)

    return json.loads(json.dumps(tree, default=stand_in)), arrays


def unflatten(skeleton: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Puts the arrays back.

    Raises:
        KeyError: an array is missing.
    """

    def put_back(value: dict[str, Any]) -> Any:
        return arrays[value[_ARRAY]] if set(value) == {_ARRAY} else value

    return json.loads(json.dumps(skeleton), object_hook=put_back)


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

    Within `tables_by_name` tables that only one side has are left as they are.

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
    """Returns nested dictionaries, as `flatten` takes them, as the bytes of an .npz file."""
    skeleton, arrays = flatten(state)
    return to_bytes({_MANIFEST: np.frombuffer(json.dumps(skeleton).encode(), np.uint8), **arrays})


def tree_from_bytes(content: bytes, place: str) -> Any:
    """Returns what `tree_to_bytes` was given.

    Raises:
        ValueError: it is damaged.
    """
    arrays = from_bytes(content, place)
    try:
        return unflatten(json.loads(arrays[_MANIFEST].tobytes().decode()), arrays)
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
