"""Which saved tables a store takes: all of the same ones, or those that both have, by name.

In: what a file says of its tables, and a store. Out: the tables that are taken, or an error.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import logging

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
        ValueError: tables, dimensions or rules differ, and not all may be taken by name.
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
            logging.warning(
                "%s: table %r is not taken: it was saved with dim=%d and has dim=%d here.",
                place,
                table.name,
                found.dim,
                table.dim,
            )
        elif found.rule != (rule := store.slot_layout(table.name).rule):
            taken[table.name] = WITHOUT_SLOTS
            logging.warning(
                "%s: table %r is taken without its slots, which start anew: they are of %s, not "
                "%s.",
                place,
                table.name,
                found.rule,
                rule,
            )
        else:
            taken[table.name] = WHOLE
            logging.info("%s: table %r is taken.", place, table.name)
    for name in by_name:
        logging.warning("%s: table %r is not taken: there is none here.", place, name)
    return taken


def _require_same(saved: Sequence[SavedAs], store: Any, place: str) -> None:
    by_name = {table.name: table for table in saved}
    here = {table.name: table for table in store.tables}
    if set(by_name) != set(here):
        raise ValueError(
            f"{place}: saved with tables {sorted(by_name)}, but this layer has tables "
            f"{sorted(here)}. Load into a layer with the same tables, {REMEDY}."
        )
    for name, table in here.items():
        found, rule = by_name[name], store.slot_layout(name).rule
        if found.dim != table.dim:
            raise ValueError(
                f"{place}: table {name!r} was saved with dim={found.dim}, but this layer has "
                f"dim={table.dim}. Load into a layer with the same dimensions, {REMEDY}."
            )
        if found.rule != rule:
            raise ValueError(
                f"{place}: table {name!r} was saved with the update rule {found.rule}, but this "
                f"layer uses {rule}. Their slots mean different things; load into a layer with the "
                f"same rule, {REMEDY}."
            )
