"""Gradients of rows: applied in the backward pass, or with all others by the optimizer.

In: a batch's keys, and the gradients of their rows. Out: with apply="backward", updated rows; with
apply="step", one gradient per table, `tf.IndexedSlices` of distinct keys, as the gradient of the
table's anchor. `StoreGradients` holds them between the backward pass and their update: an operation
on all gradients of a table is one factor, so that no row is touched for it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from slipstream_tf.ops.exchange import SendBuffer, merge_rows

MODES = ("backward", "step")


class Anchor(NamedTuple):
    """What an anchor, a weight of shape () that is 0, stands for.

    Attributes:
        layer: name of the layer, for errors.
        store: whose rows.
        table: index of the table; None: of all, whose rows are updated in the backward pass.
    """

    layer: str
    store: Any
    table: int | None


def anchor_of(variable: Any) -> Anchor | None:
    """Returns what a Keras variable is the anchor of; None: it is none."""
    return getattr(variable, "slipstream_anchor", None)


def add_anchors(layer: Any, store: Any, apply: str) -> list[Any]:
    """Gives a layer the weights behind which its gradients lie.

    Args:
        layer: an `EmbeddingCollection`, without any.
        store: its store.
        apply: "backward" for one anchor; "step" for one per table.

    Returns:
        The Keras variables.
    """
    names = ["update_anchor"]
    if apply == "step":
        names = [f"{table.name}_anchor" for table in store.tables]
    anchors = []
    for index, name in enumerate(names):
        anchor = layer.add_weight(name=name, shape=(), initializer="zeros", dtype="float32")
        anchor.slipstream_anchor = Anchor(layer.name, store, index if apply == "step" else None)
        anchors.append(anchor)
    return anchors


def training_lookup(
    store: Any, anchors: Sequence[Any], apply: str, packed: Any, stacked: bool
) -> tuple[tf.Tensor, ...]:
    """Looks up a training batch whose backward pass updates rows, or returns their gradients.

    With apply="step" the backward pass gives each table's anchor a gradient, `tf.IndexedSlices`:
    the keys, int64 [n], each once, and the sums of their gradients, float32 [n, dim]; with multiple
    ranks this rank's part of the average. No row is changed. If a value is not finite, all are NaN.

    Args:
        store: an `EmbeddingStore`; for "step", one that `collects_gradients`.
        anchors: from `add_anchors`.
        apply: "backward" or "step".
        packed: the keys, from `ops.features.pack`.
        stacked: one tensor instead of one per feature.

    Returns:
        As the store's `lookup`.
    """

    @tf.custom_gradient
    def lookup(*values: tf.Tensor) -> Any:
        rows, plan = store.lookup(packed, training=True, stacked=stacked)

        def backward(*upstream: Any) -> Any:
            gradients = [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in upstream]
            if apply == "step":
                return by_table(store.collect_gradients(plan, gradients), store)
            update = store.apply_gradients(plan, gradients)
            # The anchor's gradient must depend on the update: where the backward pass is a
            # graph of its own, TensorFlow prunes what its outputs do not need. The gradient,
            # 0, is the anchor's own value: a constant 0 is folded away together with the
            # update (by Grappler, in `fit` with Adam, whose moments multiply it).
            with tf.control_dependencies([] if update is None else [update]):
                return tf.identity(values[0])

        return tuple(rows), backward

    return lookup(*(tf.convert_to_tensor(anchor.value) for anchor in anchors))


def by_table(collected: SendBuffer, store: Any) -> list[tf.IndexedSlices]:
    """Splits what was collected into keys [n] and rows [n, dim] of each table, part by part."""
    dims = [table.dim for table in store.tables]
    slices = []
    for table, (keys, values) in enumerate(collected.of_tables(dims)):
        part = tf.IndexedSlices(tf.reshape(values, [-1, dims[table]]), keys)
        part.values.slipstream_part = _Part(collected, table, part.indices)
        slices.append(part)
    return slices


class _Part(NamedTuple):
    """Values of a table as they were collected: what is done to them makes others."""

    collected: SendBuffer
    table: int
    indices: tf.Tensor


def collected_of(slices: Sequence[tf.IndexedSlices | None]) -> SendBuffer | None:
    """Returns the collection whose gradients these are, all of them as they left it.

    Args:
        slices: of each table of a store, in order; None: no gradient.

    Returns:
        None: another gradient was added, or something was done to one.
    """
    found = None
    for table, part in enumerate(slices):
        if part is None:
            return None
        known = getattr(part.values, "slipstream_part", None)
        if known is None or known.table != table or known.indices is not part.indices:
            return None
        if found is not None and known.collected is not found:
            return None
        found = known.collected
    return found


def joined(slices: Sequence[tf.IndexedSlices | None]) -> SendBuffer:
    """Puts the gradients of a store's tables together, for its `apply_collected`.

    Args:
        slices: of each table, in order; None: no gradient.
    """
    collected = collected_of(slices)
    if collected is not None:
        return collected
    given = [part for part in slices if part is not None]
    sizes = [
        tf.constant(0, tf.int64) if part is None else tf.size(part.indices, tf.int64)
        for part in slices
    ]
    return SendBuffer(
        tf.stack(sizes)[None],
        tf.concat([part.indices for part in given], 0),
        tf.concat([tf.reshape(part.values, [-1]) for part in given], 0),
    )


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
            values = [tf.zeros([0]) if part is None else part.values for part in self._slices]
            squares = tf.stack([2.0 * tf.nn.l2_loss(of_table) for of_table in values])
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
