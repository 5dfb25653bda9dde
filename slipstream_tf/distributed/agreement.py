"""What every rank hears of every other: values, settings, and errors of work done alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.distributed.comm import Communicator


def gather_json(comm: Communicator, value: Any, name: str) -> list[Any]:
    """Returns every rank's value, rank 0 first; a collective.

    Args:
        comm: the ranks.
        value: JSON-serialisable; of any size on each rank.
        name: of the collective.
    """
    if comm.size == 1:
        return [json.loads(json.dumps(value))]
    line = np.frombuffer(json.dumps(value).encode() + b"\n", np.uint8)
    with tf.device("CPU:0"):
        gathered = comm.gather(tf.constant(line), "control", name).numpy().tobytes()
    return [json.loads(text) for text in gathered.splitlines()]


def together(comm: Communicator, work: Callable[[], Any], name: str, what: str) -> list[Any]:
    """Works on every rank; none goes on before all have done it. A collective at its end.

    Args:
        comm: the ranks.
        work: calls no collective; returns what is JSON-serialisable.
        name: of the collective.
        what: the work is, for the error: "write a file".

    Returns:
        What it returned on each rank, rank 0 first.

    Raises:
        RuntimeError: it failed on another rank, which is named. The rank itself raises its own
            error.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    told = None if error is None else f"{type(error).__name__}: {error}"
    reports = gather_json(comm, [told, result], name)
    if error is not None:
        raise error
    for rank, (reason, _) in enumerate(reports):
        if reason is not None:
            raise RuntimeError(f"Rank {rank} could not {what}: {reason}")
    return [result for _, result in reports]


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
