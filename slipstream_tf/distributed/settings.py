"""Ranks that were started with different settings are told so, instead of hanging or diverging."""

from __future__ import annotations

import json
from typing import Any

from slipstream_tf.distributed.agreement import gather_json
from slipstream_tf.distributed.comm import Communicator


def require_same(comm: Communicator, settings: Any, name: str, what: str) -> None:
    """Checks that all ranks were given the same settings; a collective.

    Args:
        comm: the ranks.
        settings: JSON-serialisable; tuples count as lists.
        name: of the collective.
        what: the settings are for, for the error.

    Raises:
        ValueError: a rank's differ from those of rank 0; every rank raises it.
    """
    if comm.size == 1:
        return
    # As texts, in which 1, 1.0 and True differ.
    texts = gather_json(comm, json.dumps(settings, sort_keys=True, default=repr), name)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            place, first, second = _first_difference(json.loads(texts[0]), json.loads(other), "")
            raise ValueError(
                f"Invalid settings of {what} on rank {rank}: {place or 'it'} is {second!r}, but on "
                f"rank 0 {first!r}. Allowed: the same settings on all ranks."
            )


def _first_difference(first: Any, second: Any, place: str) -> tuple[str, Any, Any]:
    if isinstance(first, dict) and isinstance(second, dict) and set(first) == set(second):
        pairs = [(f"{place}.{key}" if place else key, first[key], second[key]) for key in first]
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = [(f"{place}[{i}]", *pair) for i, pair in enumerate(zip(first, second, strict=True))]
    else:
        return place, first, second
    for inner, one, other in pairs:
        if one != other:
            return _first_difference(one, other, inner)
    return place, first, second
