"""Converts the state of a store to named NumPy arrays and back.

Weight files, `.keras` files, `tf.train.Checkpoint` and `get_weights` use it. The arrays contain the
`TableState` of each table and a manifest (tables, dimensions, update rules), which is checked
before any row is overwritten. `choose` selects the
tables to load: all tables of the file, or within `tables_by_name` the tables that file and store
share.
"""

import collections
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
from slipstream_tf.checkpoint import table_state
from slipstream_tf.checkpoint.array_file import CheckpointMismatchError
from slipstream_tf.ops.update_policy import UpdatePolicy

# Results of `choose`: load a table with or without its slots.
WHOLE, WITHOUT_SLOTS = "whole", "without slots"
REMEDY = "or load only the matching tables within slipstream_tf.checkpoint.tables_by_name()"


@dataclasses.dataclass(frozen=True)
class SavedAs:
    """The description of a table in a file.

    Attributes:
        name: The name of the table.
        dim: The number of values per row.
        rule: The class name of the update rule, or None if unknown.
    """

    name: str
    dim: int
    rule: str | None


_is_by_name = False


@contextlib.contextmanager
def tables_by_name() -> Iterator[None]:
    """Returns a context in which files are loaded by table name.

    It applies to `load_weights` (pass `skip_mismatch=True` if dense layers have changed),
    `tf.train.Checkpoint` and `distributed.CheckpointManager`. A table of the store stays unchanged
    if the file does not contain it or contains it with another dimension. Other tables in the file
    are ignored. If the update rule differs, rows and access counts are loaded, and slots get their
    initial values. The log lists the loaded and skipped tables.

    Example:

    >>> with slip.checkpoint.tables_by_name():
    ...     pass  # For example, model.load_weights("model.weights.h5")
    """
    global _is_by_name
    before, _is_by_name = _is_by_name, True
    try:
        yield
    finally:
        _is_by_name = before


def is_active() -> bool:
    """Returns whether the `tables_by_name` context is active."""
    return _is_by_name


def choose(saved: Sequence[SavedAs], store: Any, place: str) -> Mapping[str, str]:
    """Selects the tables to load from a file.

    Args:
        saved: The tables of a file.
        store: The store that loads them.
        place: The name of the loaded object, for errors and the log.

    Returns:
        Name of each table to load -> `WHOLE`, or `WITHOUT_SLOTS` if the update rules differ.

    Raises:
        CheckpointMismatchError: If tables, dimensions or rules differ outside of `tables_by_name`.
    """
    if not _is_by_name:
        _require_same(saved, store, place)
        return {table.name: WHOLE for table in saved}
    by_name = {table.name: table for table in saved}
    taken = {}
    for table in store.tables:
        found = by_name.pop(table.name, None)
        if found is None:
            logging.warning("Table %r stays unchanged: %s does not have it.", table.name, place)
        elif found.dim != table.dim:
            dims = f"has it with dim={found.dim} instead of dim={table.dim}"
            logging.warning("Table %r stays unchanged: %s %s.", table.name, place, dims)
        elif found.rule != (rule := store.slot_layout(table.name).rule):
            taken[table.name] = WITHOUT_SLOTS
            rules = f"from scratch, because their optimizer was {found.rule} instead of {rule}"
            logging.warning("Loading table %r of %s. Its slots start %s.", table.name, place, rules)
        else:
            taken[table.name] = WHOLE
            logging.info("Loading table %r of %s.", table.name, place)
    for name in by_name:
        logging.warning("Ignored table %r of %s: this program does not have it.", name, place)
    return taken


def _require_same(saved: Sequence[SavedAs], store: Any, place: str) -> None:
    by_name = {table.name: table for table in saved}
    here = {table.name: table for table in store.tables}
    problem, remedy = "", ""
    if set(by_name) != set(here):
        problem = f"the checkpoint was saved with tables {sorted(by_name)}, but this program has "
        problem += str(sorted(here))
        remedy = "the same tables"
    for name, table in here.items() if not problem else ():
        found, rule = by_name[name], store.slot_layout(name).rule
        if found.dim != table.dim:
            problem = f"was saved with dim={found.dim}, but this program has dim={table.dim}"
            remedy = "tables with the same dimensions"
        elif None not in (found.rule, rule) and found.rule != rule:
            problem = f"was saved with the optimizer {found.rule}, but this program uses {rule}"
            remedy = "tables with the same optimizers"
        if problem:
            problem = f"table {name!r} {problem}"
            break
    if problem:
        raise CheckpointMismatchError(
            place, problem, f"Load it into a program with {remedy}, {REMEDY}."
        )


# A dictionary with only this key represents an array. The value is the name of the array.
_ARRAY = "__array__"


def flatten(tree: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Separates a tree into a JSON-serializable structure and arrays.

    Args:
        tree: Dictionaries with string keys, lists, and leaves. Leaves are JSON-serializable values
            or arrays with at least one dimension.

    Returns:
        The tree with a reference in place of each array, and the arrays by name.
    """
    arrays: dict[str, np.ndarray] = {}

    def placeholder_of(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            name = f"array-{len(arrays)}"
            arrays[name] = value
            return {_ARRAY: name}
        return value.item() if isinstance(value, np.generic) else dict(value)

    return json.loads(json.dumps(tree, default=placeholder_of)), arrays


def unflatten(skeleton: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns the tree that was passed to `flatten`.

    Args:
        skeleton: The first result of `flatten`.
        arrays: The second result of `flatten`.

    Raises:
        KeyError: If an array is missing.
    """

    def put_back(value: dict[str, Any]) -> Any:
        return arrays[value[_ARRAY]] if set(value) == {_ARRAY} else value

    return json.loads(json.dumps(skeleton), object_hook=put_back)


FORMAT = 2
_MANIFEST = "manifest"
_RATES = ("learning_rate", "followed_rate")
# Additional columns that stores of tables in SOK export.
_OF_SOK = ("trained", "powers")


def export_state(store: Any) -> dict[str, np.ndarray]:
    """Copies the complete state of a store.

    Deferred gradients are copied, not applied.

    Args:
        store: An embedding store.

    Returns:
        Arrays by name: "manifest" (JSON as uint8), the rates of `Rates.export` and, for each group
        of `tables.KINDS` of table i, "table_<i>_<group>_<column>", for example
        "table_0_contents_rows".

    Raises:
        RuntimeError: If there are multiple ranks, and this rank has deferred gradients. A file of a
            single rank would lose the gradients of the other ranks.
    """
    is_job = table_state.num_ranks(store) > 1
    arrays, described = store.rates.export(), []
    for index, table in enumerate(store.tables):
        contents = store.export_table(table.name, flush=is_job)
        state = table_state.export_table(store, table.name, contents)
        for group, columns in state.groups().items():
            for column, values in columns.items():
                arrays[f"table_{index}_{group}_{column}"] = np.asarray(values)
        entry = {
            "name": table.name,
            "dim": table.dim,
            "seed": table.seed,
            "optimizer": optimizers.serialize(store.optimizer_of(table.name)),
            "layout": store.slot_layout(table.name).rule,
            "policy": dataclasses.asdict(state.policy),
        }
        described.append(entry)
    manifest = {"format": FORMAT, "ranks": table_state.num_ranks(store), "tables": described}
    return {_MANIFEST: np.frombuffer(json.dumps(manifest).encode(), np.uint8), **arrays}


def restore_state(
    store: Any, arrays: Mapping[str, Any], place: str, is_engine_next: bool = False
) -> None:
    """Replaces the state of a store by arrays from `export_state`.

    Within `tables_by_name`, tables of the store that the arrays do not contain stay unchanged.

    Args:
        store: An embedding store with the same tables and update rules. Settings of a rule other
            than the learning rate (epsilon, betas) keep their current values.
        arrays: The arrays from `export_state`.
        place: The name of the loaded object, for errors.
        is_engine_next: See `table_state.defer`.

    Raises:
        ValueError: If the arrays are not from `export_state`, or if the tables, a dimension or an
            update rule differ. The store is then unchanged.
    """
    if _MANIFEST not in arrays:
        raise ValueError(
            f"{place}: the saved state has no embedding tables, but {sorted(arrays)}. Another kind "
            "of layer saved it, or the file is damaged. Load a file of the same model."
        )
    manifest = json.loads(np.asarray(arrays[_MANIFEST]).astype(np.uint8).tobytes().decode())
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{place}: the saved state has format {manifest.get('format')!r}; this version reads "
            f"format {FORMAT}. Load it with the version of slipstream_tf that saved it."
        )
    saved = [SavedAs(t["name"], t["dim"], t["layout"]) for t in manifest["tables"]]
    taken = choose(saved, store, place)
    has_replicas = manifest["ranks"] == table_state.num_ranks(store)
    states = []
    for index, entry in enumerate(manifest["tables"]):
        if entry["name"] not in taken:
            continue
        found: dict[str, Any] = collections.defaultdict(dict)
        for name in arrays:
            if name.startswith(f"table_{index}_"):
                _, _, group, column = name.split("_", 3)
                found[group][column] = np.asarray(arrays[name])
        contents = found["contents"]
        if not store.is_in_sok:
            contents = {n: values for n, values in contents.items() if n not in _OF_SOK}
        if taken[entry["name"]] == WITHOUT_SLOTS:
            initial = store.slot_layout(entry["name"]).initial
            contents["slots"] = np.tile(initial, (contents["keys"].size, 1))
        state = table_state.TableState(
            entry["name"],
            contents,
            found["pending"],
            UpdatePolicy(**entry["policy"]),
            num_deferred=found["pending"]["keys"].size,
            accesses=found.get("accesses"),
            replicas=found.get("copies") if has_replicas else None,
            admission=found.get("admission"),
        )
        states.append(state)
    table_state.replace(store, states)
    _warn_of_seeds({t["name"]: t.get("seed") for t in manifest["tables"]}, store, place)
    rates = {name: np.asarray(arrays[name]) for name in _RATES if name in arrays}
    store.rates.restore(rates, [table.name for table in saved])
    table_state.replace_replicas(store, states, is_in_window=False)
    table_state.defer(store, states, is_engine_next=is_engine_next)


def _warn_of_seeds(saved: Mapping[str, int | None], store: Any, place: str) -> None:
    """Warns if keys without a row start with other values than in the saved model."""
    for table in store.tables:
        seed = saved.get(table.name)
        if hasattr(table.initializer, "seed") and seed not in (None, table.seed):
            logging.warning(
                "Table %r of %s: keys without a row start with other values than in the saved "
                "model, because the seed is %d instead of %d. Give the layer a name, or its "
                "initializer a seed.",
                *(table.name, place, table.seed, seed),
            )


# The ids of the stores within `excluded_from_checkpoint`.
_apart: set[int] = set()


@contextlib.contextmanager
def excluded_from_checkpoint(store: Any) -> Iterator[None]:
    """Returns a context that excludes a store from `tf.train.Checkpoint`.

    `CheckpointManager` uses it, because it stores the tables in separate files.
    """
    _apart.add(id(store))
    try:
        yield
    finally:
        _apart.discard(id(store))


class StoreState(tf.train.experimental.PythonState):
    """Makes a store part of a `tf.train.Checkpoint`.

    Args:
        store: An embedding store.
        place: The name of the store's owner, for errors.
    """

    def __init__(self, store: Any, place: str) -> None:
        super().__init__()
        self._store = store
        self._place = place
        self._listeners: list[Callable[[], None]] = []

    def when_restored(self, listener: Callable[[], None]) -> None:
        """Registers a function that is called after the tables have been replaced."""
        self._listeners.append(listener)

    def serialize(self) -> bytes:
        """Returns the store's state as an .npz file.

        The result is b"" within `excluded_from_checkpoint`.
        """
        if id(self._store) in _apart:
            return b""
        return to_bytes(self.export())

    def deserialize(self, string_value: bytes) -> None:
        """Replaces the store's state by the result of `serialize`.

        Raises:
            ValueError: If the state has other tables, or if separate files contain the tables.
        """
        if id(self._store) in _apart:
            return
        if not string_value:
            raise ValueError(
                f"{self._place}: this checkpoint has its tables in separate files. Restore it with "
                "slipstream_tf.distributed.CheckpointManager(..., store=layer.store)."
            )
        with tf.init_scope():
            self.restore(from_bytes(string_value, self._place))

    def export(self) -> dict[str, np.ndarray]:
        """Returns `export_state` of the store."""
        return export_state(self._store)

    def restore(self, arrays: Mapping[str, Any]) -> None:
        """Replaces the store's state by the result of `export`.

        Raises:
            ValueError: See `restore_state`.
        """
        restore_state(self._store, arrays, self._place, is_engine_next=bool(self._listeners))
        for listener in self._listeners:
            listener()


def tree_to_bytes(state: Any) -> bytes:
    """Returns a tree (see `flatten`) as the bytes of an .npz file."""
    skeleton, arrays = flatten(state)
    return to_bytes({_MANIFEST: np.frombuffer(json.dumps(skeleton).encode(), np.uint8), **arrays})


def tree_from_bytes(content: bytes, place: str) -> Any:
    """Returns the tree that was passed to `tree_to_bytes`.

    Raises:
        ValueError: If the bytes are damaged.
    """
    arrays = from_bytes(content, place)
    try:
        return unflatten(json.loads(arrays[_MANIFEST].tobytes().decode()), arrays)
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{place}: the checkpoint is damaged ({error}). Restore another checkpoint."
        ) from error


def to_bytes(arrays: Mapping[str, Any]) -> bytes:
    """Returns named arrays as the bytes of an .npz file."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def from_bytes(content: bytes, place: str) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz file by name.

    Raises:
        ValueError: If the file is damaged.
    """
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return dict(arrays)
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(
            f"{place}: the checkpoint is damaged ({error}). Restore another checkpoint."
        ) from error
