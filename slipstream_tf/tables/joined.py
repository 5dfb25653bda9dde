"""Joins multiple stores, so that one engine can serve multiple layers.

Calls are forwarded to the store that has the table. Rows, slots and checkpoints stay in each store.
"""

from collections.abc import Callable, Sequence
from typing import Any

from slipstream_tf._utils.errors import invalid
from slipstream_tf.tables.base import TrackedStore


def _of_table(name: str) -> Callable[..., Any]:
    """Returns a method that forwards to the store that has the table."""

    def method(self: "JoinedStore", table: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.parts[self._part_of[self._require(table)]], name)(
            table, *args, **kwargs
        )

    method.__doc__ = f"Calls `{name}` of the store that has the table."
    return method


def _of_all(name: str) -> Callable[..., None]:
    """Returns a method that forwards to every store."""

    def method(self: "JoinedStore", *args: Any, **kwargs: Any) -> None:
        for part in self.parts:
            getattr(part, name)(*args, **kwargs)

    method.__doc__ = f"Calls `{name}` of every store."
    return method


class JoinedStore(TrackedStore):
    """Presents multiple stores as one store to the engine.

    Args:
        stores: Two or more stores with different table names and the same capabilities.

    Raises:
        ValueError: Two tables have the same name, or the stores have different capabilities.
    """

    # Attributes that must have the same value in all stores.
    _ALIKE = (
        *("comm", "is_spread", "is_in_sok", "prefetches"),
        *("lists_hot_keys_by_key", "takes_tables_at_once", "forgets_flags"),
    )

    def __init__(self, stores: Sequence[Any]) -> None:
        self._parts = tuple(stores)
        self.tables = tuple(table for store in stores for table in store.tables)
        names = [table.name for table in self.tables]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            allowed = "layers with distinct table names. Rename one of the tables"
            raise invalid("embeddings", twice, "Slipstream", allowed)
        self._part_of = {t.name: i for i, store in enumerate(stores) for t in store.tables}
        for field in self._ALIKE:
            values = [getattr(part, field) for part in stores]
            if any(value != values[0] for value in values):
                place = f"`{field}` of the stores of multiple layers in Slipstream"
                raise invalid("embeddings", values, place, "the same value for all layers")
            setattr(self, field, values[0])
        self.spills = any(part.spills for part in stores)
        optimizers = {id(store.optimizer): store.optimizer for store in stores}
        self.optimizer = stores[0].optimizer if len(optimizers) == 1 else None

    @property
    def parts(self) -> tuple[Any, ...]:
        return self._parts

    @property
    def updates_rows(self) -> bool:
        """Whether all stores apply gradients to their rows."""
        return all(part.updates_rows for part in self.parts)

    @property
    def rate_variables(self) -> list[Any]:
        """The rate variables of all stores."""
        return [variable for part in self.parts for variable in part.rate_variables]

    optimizer_of = _of_table("optimizer_of")
    learning_rate_of = _of_table("learning_rate_of")
    size = _of_table("size")
    owners = _of_table("owners")
    gather = _of_table("gather")
    measure = _of_table("measure")
    hot_keys = _of_table("hot_keys")
    policy_of = _of_table("policy_of")
    set_update_policy = _of_table("set_update_policy")
    set_row_flags = _of_table("set_row_flags")
    row_flags = _of_table("row_flags")
    update_counts = _of_table("update_counts")
    prefetch_rows = _of_all("prefetch_rows")
    follow = _of_all("follow")
    decay_counts = _of_all("decay_counts")
    flush = _of_all("flush")
    discard_prefetched = _of_all("discard_prefetched")
