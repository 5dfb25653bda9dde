"""Averages the gradients of a step over the ranks; sparse ones may be withheld instead of sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf.distributed.comm import KINDS, Communicator
from slipstream_tf.distributed.exchange import Names, Wire, from_wire, to_wire
from slipstream_tf.errors import invalid
from slipstream_tf.ops.mask import KeySet, mask_gradients
from slipstream_tf.stores.variable import VariableStore


class GradientExchange:
    """Averages all gradients over the ranks; those of a store's tables are masked or deferred."""

    def __init__(
        self,
        comm: Communicator,
        store: VariableStore | None,
        wire_dtype: str,
        names: Names,
    ):
        """Takes the ranks.

        Args:
            comm: the ranks.
            store: watches the variables whose gradients are masked or deferred, or None.
            wire_dtype: "float32" or "bfloat16", in which sparse rows travel.
            names: names the collectives. An exchange that is made while a function is traced takes
                one that was there before: other ranks may have traced it more or less often.
        """
        self._comm, self._store = comm, store
        self._rounds = Wire(wire_dtype).rounds(tf.constant(0))
        self._names = names
        self._nothing: dict[str, KeySet] = {}

    def average(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """Returns the gradients to apply: of watched tables what their policies pass on, averaged.

        Args:
            gradients: of this rank: dense, `tf.IndexedSlices` or None; None must be so on all
                ranks.
            sources: what they are the gradients of.

        Raises:
            TypeError: the gradient of a watched variable is dense.
        """
        tables = [None if self._store is None else self._store.table_of(s) for s in sources]
        passed = [
            self._withhold(self._share(gradient), table)
            for gradient, table in zip(gradients, tables, strict=True)
        ]
        if self._comm.size == 1:
            return passed
        averaged = list(passed)
        dense: dict[tf.DType, list[int]] = {}
        for index, (gradient, table) in enumerate(zip(passed, tables, strict=True)):
            if isinstance(gradient, tf.IndexedSlices):
                averaged[index] = self._add_rows(gradient, f"{index}", self._kind_of(table))
            elif gradient is not None:
                dense.setdefault(tf.as_dtype(gradient.dtype), []).append(index)
        for dtype, indices in dense.items():
            values = self._average_dense([passed[index] for index in indices], dtype.name)
            for index, value in zip(indices, values, strict=True):
                averaged[index] = value
        return averaged

    def _share(self, gradient: Any) -> Any:
        """A sparse gradient's part of the average; dense ones are divided when they are summed.

        Before it is deferred, so that a sum moves its row as far as it will when applied.
        """
        if self._comm.size == 1 or not isinstance(gradient, tf.IndexedSlices):
            return gradient
        values = gradient.values / tf.cast(self._comm.size, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)

    def _kind_of(self, table: str | None) -> Any:
        """What rows are counted as: as deferred ones while any of the table's may be."""
        if self._store is None or table is None:
            return "gradients"
        deferred, gradients = (
            tf.constant(KINDS.index(kind), tf.int64) for kind in ("deferred", "gradients")
        )
        return tf.where(self._store.is_deferring(table), deferred, gradients)

    def _withhold(self, gradient: Any, table: str | None) -> Any:
        if self._store is None or table is None or gradient is None:
            return gradient
        if not isinstance(gradient, tf.IndexedSlices):
            raise TypeError(
                f"The gradient of table {table!r} is dense ({type(gradient).__name__} of shape "
                f"{gradient.shape}), so that single rows cannot be withheld. Rows must be "
                "read by tf.gather, tf.nn.embedding_lookup or keras.layers.Embedding alone: a "
                "matmul (one-hot or tied weights), a regularizer, a cast of the whole variable, "
                "or `unconnected_gradients='zero'` makes it dense. Or leave the variable out of "
                "the store."
            )
        return self._store.mask_gradients(table, gradient)

    def _average_dense(self, gradients: Sequence[Any], name: str) -> list[tf.Tensor]:
        """In one sum, so that the order in which ranks' values are added is always the same."""
        flat = tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)
        total = self._comm.sum(flat, "dense", self._names.of(f"dense.{name}"))
        parts = tf.split(
            total / tf.cast(self._comm.size, total.dtype),
            [tf.size(gradient) for gradient in gradients],
        )
        return [
            tf.reshape(part, tf.shape(gradient))
            for part, gradient in zip(parts, gradients, strict=True)
        ]

    def _add_rows(self, gradient: tf.IndexedSlices, number: str, kind: Any) -> tf.IndexedSlices:
        own = self._add_up(gradient)
        keys = self._comm.gather(own.indices, "keys", self._names.of(f"keys.{number}"))
        sent = to_wire(own.values, self._rounds)
        rows = self._comm.gather(sent, kind, self._names.of(f"rows.{number}"))
        rows = from_wire(rows, self._rounds)
        return self._add_up(tf.IndexedSlices(rows, keys, gradient.dense_shape))

    def _add_up(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """The sum of each index's rows, in their order; Horovod would send them all."""
        device = slices.values.device or "CPU:0"
        nothing = self._nothing.setdefault(device, KeySet(device))
        return mask_gradients(slices, nothing).slices


def store_of(watched: Any, place: str) -> VariableStore:
    """Returns the variable store that `watched` is or has as its `store`.

    Raises:
        ValueError: there is none.
    """
    found = getattr(watched, "store", watched)
    if not isinstance(found, VariableStore):
        allowed = "a VariableStore, or an object that has one as its `store`"
        raise invalid("store", type(found).__name__, place, allowed)
    return found
