"""Gradient rows between ranks: every rank's to all ranks, in float32 or bfloat16.

In: what `ops.exchange` collected on this rank. Out: what to apply on this rank. Every rank must
call it, with no rows if it has none.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any, ClassVar

import tensorflow as tf

from slipstream_tf.distributed.comm import Communicator
from slipstream_tf.ops.exchange import RowParcels

WIRE_DTYPES = ("float32", "bfloat16")


class Names:
    """Names of collectives: the same on all ranks, and of one collective under way only.

    A graph's collectives are numbered within the graph: ranks may trace a function at different
    times (their last batches differ), but they trace the same one.
    """

    _prefixes: ClassVar[collections.Counter[str]] = collections.Counter()

    def __init__(self, prefix: str):
        """Takes a prefix; a second object with the same one gets a number.

        Args:
            prefix: what the collectives are for.
        """
        number = Names._prefixes[prefix]
        Names._prefixes[prefix] += 1
        self._prefix = f"slipstream.{prefix}" + (f".{number}" if number else "")
        self._used: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, collective: str) -> str:
        """Returns a name for one call of a collective."""
        name = f"{self._prefix}.{collective}"
        if tf.executing_eagerly():
            return name
        used = self._used.setdefault(tf.compat.v1.get_default_graph(), collections.Counter())
        number = used[collective]
        used[collective] += 1
        return f"{name}#{number}" if number else name


def to_wire(values: tf.Tensor, wire_dtype: str) -> tf.Tensor:
    """Returns float32 values in the form that is sent; bfloat16 travels as uint16."""
    if wire_dtype == "float32":
        return values
    return tf.bitcast(tf.cast(values, tf.bfloat16), tf.uint16)


def from_wire(sent: tf.Tensor, wire_dtype: str) -> tf.Tensor:
    """Returns the float32 values of what `to_wire` made."""
    if wire_dtype == "float32":
        return sent
    return tf.cast(tf.bitcast(sent, tf.bfloat16), tf.float32)


def gather_rows(
    comm: Communicator, parcels: RowParcels, names: Names, what: str, wire_dtype: str, kind: Any
) -> RowParcels:
    """Gives every rank the rows of all.

    Args:
        comm: the ranks.
        parcels: of this rank, for all: sizes [1, tables].
        names: names the collectives.
        what: the rows are, e.g. "gradients".
        wire_dtype: "float32" or "bfloat16".
        kind: what the values' bytes are counted as, see `Communicator`.

    Returns:
        The ranks' rows, sizes [ranks, tables].
    """
    if comm.size == 1:
        return parcels
    # All three are asked for at once: Horovod sends them together.
    sizes = comm.gather(parcels.sizes, "control", names.of(f"{what}.sizes"))
    keys = comm.gather(parcels.keys, "keys", names.of(f"{what}.keys"))
    values = comm.gather(to_wire(parcels.values, wire_dtype), kind, names.of(f"{what}.values"))
    return RowParcels(sizes, keys, from_wire(values, wire_dtype))
