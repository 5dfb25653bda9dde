"""Gradients of a store's rows between the backward pass and their update, as an optimizer has them.

In: `tf.IndexedSlices` of tables, from `row_gradients`. Out: updated rows. What an optimizer does to
all gradients alike is a factor of each table, so that no row is touched for it.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf.keras.row_gradients import Anchor, by_table, collected_of, joined
from slipstream_tf.ops.exchange import SendBuffer, merge_rows

# Added to the square of a norm; not a denormal number, which a processor may take for 0.
_LEAST_SQUARE = 1e-36


class StoreGradients:
    """The gradients of a store's tables; of some of them, or of all."""

    def __init__(self, store: Any, slices: Sequence[tf.IndexedSlices | None]):
        """Takes them.

        Args:
            store: an `EmbeddingStore` that `collects_gradients`.
            slices: of each table, in order; None: no gradient.
        """
        self._store, self._slices = store, list(slices)

    def share(self) -> None:
        """Exchanges them between ranks: the average, on all alike or, where rows are spread, of
        those that this rank owns. A collective.
        """
        if self._store.comm is None or self._store.comm.size == 1:
            return
        own = collected_of(self._slices)
        if own is None:
            own = self._merged(self._store.comm.size if self._store.is_spread else 1)
        self._slices = list(by_table(self._store.share_collected(own), self._store))

    def divide(self, by: Any) -> None:
        """Divides all by a number."""
        self.replace([values / by for values in self.values()])

    def merge(self) -> None:
        """Adds up the rows of each key, in their order."""
        if self._squares() is None:
            self._slices = list(by_table(self._merged(1), self._store))

    def _merged(self, ranks: int) -> SendBuffer:
        dims = [table.dim for table in self._store.tables]
        return merge_rows(joined(self._slices), dims, ranks)

    def values(self) -> list[tf.Tensor]:
        """Returns float32 [n, dim], the rows' gradients, of each table that has any."""
        return [part.values for part in self._slices if part is not None]

    def replace(self, values: Sequence[tf.Tensor]) -> None:
        """Puts others in the place of `values`."""
        others = iter(values)
        self._slices = [
            None if part is None else tf.IndexedSlices(next(others), part.indices)
            for part in self._slices
        ]

    def norms(self) -> tf.Tensor:
        """Returns float32 [tables], norms of merged gradients; a collective where rows are spread.

        Never 0, so that gradients whose squares vanish in float32 keep their values.
        """
        squares = self._squares()
        if squares is None:
            squares = tf.stack(
                [
                    tf.constant(0.0) if part is None else 2.0 * tf.nn.l2_loss(part.values)
                    for part in self._slices
                ]
            )
        if self._store.is_spread and self._store.comm.size > 1:
            squares = self._store.sum_of_parts(squares)
        squares = tf.ensure_shape(squares, [len(self._slices)])
        return tf.sqrt(squares + _LEAST_SQUARE)

    def _squares(self) -> tf.Tensor | None:
        """Those that came with the rows, if each key is once among them and nothing was done."""
        collected = collected_of(self._slices)
        if collected is None or collected.squares is None:
            return None
        return collected.squares[0]

    def apply(self, scale: Any = ()) -> Any:
        """Updates the rows: all or, at an error, none.

        Args:
            scale: float32 [tables], by which gradients are multiplied; empty: they stay.

        Returns:
            The operation in a graph, None in eager mode.
        """
        return self._store.apply_collected(joined(self._slices), scale)


def by_store(gradients: Sequence[tuple[Anchor, tf.IndexedSlices]]) -> list[StoreGradients]:
    """Puts the gradients of each store's tables together."""
    stores = {id(anchor.store): anchor.store for anchor, _ in gradients}
    slices: dict[int, list[tf.IndexedSlices | None]] = {
        key: [None] * len(store.tables) for key, store in stores.items()
    }
    for anchor, part in gradients:
        if anchor.table is not None:
            slices[id(anchor.store)][anchor.table] = part
    return [StoreGradients(store, slices[key]) for key, store in stores.items()]
