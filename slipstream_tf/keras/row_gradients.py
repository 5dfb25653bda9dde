"""Gradients of rows, which the backward pass or the optimizer applies.

Rows are not Keras weights. A layer therefore has anchors, scalar weights on which its outputs
depend, so that TensorFlow computes gradients for it. With `apply="backward"` the backward pass
updates the rows. With `apply="step"` the gradient of the anchor of each table is a
`tf.IndexedSlices` with distinct keys. `StoreGradients` holds these gradients until the update.
Scaling all gradients of a table, for example by a clipped norm, takes one factor that the update
applies, so that no gradient is copied.
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid
from slipstream_tf.ops import row_gradients as ops
from slipstream_tf.ops.exchange import SendBuffer, merge_rows

MODES = ("backward", "step")


class Anchor(NamedTuple):
    """Describes an anchor: a scalar weight with value 0 that represents tables.

    Attributes:
        layer: Name of the layer, for errors.
        store: The `EmbeddingStore` of the tables.
        table: Index of the table in the store. None means all tables of the store, whose rows the
            backward pass updates.
    """

    layer: str
    store: Any
    table: int | None


def anchor_of(variable: Any) -> Anchor | None:
    """Returns the description of an anchor; None for any other variable."""
    return getattr(variable, "slipstream_anchor", None)


class _Anchor(keras.Variable):
    """A variable with the rows of a store in checkpoints, but not in SavedModels."""

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        # A SavedModel has the rows as variables. TensorFlow would warn about other state.
        return super()._trackable_children(save_type, **kwargs) if save_type == "checkpoint" else {}


class _CheckedAnchor(_Anchor):
    """A variable that checks the optimizer before the optimizer changes anything."""

    @property
    def overwrite_with_gradient(self) -> bool:
        """False. Keras optimizers read this property first in `build` and `apply`."""
        self.constraint.check()
        return False


def add_anchors(layer: Any, store: Any, apply: str, constraint: Any) -> list[Any]:
    """Adds the anchors to a layer, on which its gradients depend.

    Args:
        layer: An `EmbeddingCollection` without anchors.
        store: The store of the layer.
        apply: `"backward"` adds a single anchor, `"step"` one anchor per table.
        constraint: A `CheckApply`. Keras optimizers call it each time they have applied a gradient
            of the anchor.

    Returns:
        The Keras variables.
    """
    names = ["update_anchor"]
    if apply == "step":
        names = [f"{table.name}_anchor" for table in store.tables]
    else:
        _updates_of(store)  # TensorFlow traces a function twice that creates variables.
    anchors = []
    for index, name in enumerate(names):
        anchor = layer.add_weight(
            name=name, shape=(), initializer="zeros", dtype="float32", constraint=constraint
        )
        # With "step", an optimizer that ignores rows would fail before it calls the constraint.
        anchor.__class__ = _CheckedAnchor if apply == "step" else _Anchor
        anchor.slipstream_anchor = Anchor(layer.name, store, index if apply == "step" else None)
        anchors.append(anchor)
    return anchors


# Numbers of stores in the attributes of ops, and the stores by number. Both are weak, so that a
# traced graph does not keep a store.
_numbers: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
_stores: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_next_number = itertools.count(1)


def _number_of(store: Any) -> int:
    if store not in _numbers:
        _numbers[store] = next(_next_number)
        _stores[_numbers[store]] = store
    return _numbers[store]


# Number of updates of each store by backward passes since an optimizer applied an anchor.
_updates: "weakref.WeakKeyDictionary[Any, tf.Variable]" = weakref.WeakKeyDictionary()


def _updates_of(store: Any) -> tf.Variable:
    if store not in _updates:
        with tf.init_scope(), tf.device("CPU:0"):
            _updates[store] = tf.Variable(0, dtype=tf.int64, trainable=False)
    return _updates[store]


def require_one_update(store: Any, layer: str) -> list[Any]:
    """Checks that one backward pass has updated the rows since the previous call.

    Call it when an optimizer applies an anchor of a layer with `apply="backward"`.

    Args:
        store: The store of the layer.
        layer: Name of the layer, for the error.

    Returns:
        Operations that must run in a graph.
    """
    updates = _updates_of(store)
    details = (
        f"The rows of layer {layer!r} were updated by multiple backward passes before "
        "optimizer.apply. Expected one call of tape.gradient per apply, because each call updates "
        "the rows (apply='backward'). To sum gradients over micro-batches, pass apply='step' to "
        "the layer and use slip.keras.CombinedOptimizer(optimizer) with "
        "gradient_accumulation_steps. To train only other variables in a pass, call the layer with "
        "training=False in this pass. Number of backward passes:"
    )
    passes = updates.read_value()
    # The number is reset even if the check fails, so that the next step can succeed.
    with tf.control_dependencies([passes] if not tf.executing_eagerly() else []):
        reset = updates.assign(0, read_value=False)
    with tf.control_dependencies([] if reset is None else [reset]):
        return [tf.raw_ops.Assert(condition=passes <= 1, data=[details, passes])]


class _Source(NamedTuple):
    """The source of the rows of a store, see `ops.row_gradients.row_source`.

    Attributes:
        tensor: The source.
        apply: `"backward"` or `"step"`.
        anchors: The ids of the variables that receive its gradient.
    """

    tensor: tf.Tensor
    apply: str
    anchors: frozenset[int]


class _EagerSources(threading.local):
    """The latest source of each store in eager code."""

    def __init__(self) -> None:
        self.by_store: weakref.WeakKeyDictionary[Any, _Source] = weakref.WeakKeyDictionary()


_eager_sources = _EagerSources()


def _shared_source(store: Any, anchors: Sequence[Any], apply: str, layer: str) -> _Source:
    """Returns the source that the lookups of a training step share.

    An earlier source is shared if it is certain that the tapes that record now have recorded it as
    well. Otherwise the new source passes gradients on to an earlier source that some of the tapes
    have recorded. A source is created outside of loops and branches, so that all their lookups
    share it.
    """
    graph = _compat.graph_outside_of_control_flow()
    if graph is None:
        sources = _eager_sources.by_store
    else:
        # Stored in the graph, because a dictionary of graphs would keep them.
        if not hasattr(graph, "_slipstream_sources"):
            graph._slipstream_sources = weakref.WeakKeyDictionary()
        sources = graph._slipstream_sources
    with contextlib.nullcontext() if graph is None else graph.as_default():
        values = [_compat.value_without_autocast(anchor) for anchor in anchors]
        known = sources.get(store)
        previous = []
        if known is not None:
            tapes, known_tapes = _compat.num_tapes(values[0]), _compat.num_tapes(known.tensor)
            is_shared = tapes == known_tapes < 2
            if (is_shared or known_tapes) and known.apply != apply:
                place = f"layer {layer!r}, which shares its store with another layer"
                raise invalid("apply", apply, place, f"{known.apply!r}, as in the other layer")
            if is_shared:
                return known
            if known_tapes:
                previous = [known.tensor]
        tensor = ops.row_source(values, _number_of(store), apply, previous)
        sources[store] = _Source(tensor, apply, frozenset(map(id, anchors)))
    return sources[store]


def training_lookup(
    store: Any, anchors: Sequence[Any], apply: str, packed: Any, stacked: bool, layer: str
) -> list[tf.Tensor]:
    """Looks up a training batch, with a backward pass for its rows.

    With `apply="backward"` the backward pass updates the rows. With `apply="step"` it changes no
    row and returns a `tf.IndexedSlices` per table: distinct keys, int64 [n], and their summed
    gradients, float32 [n, dim]. With multiple ranks, the sums are the contribution of this rank to
    the average. If a gradient of any table is not finite, all returned gradients are NaN.

    All lookups of a store that a call of `tape.gradient` reaches are one update.

    Args:
        store: An `EmbeddingStore`. For `"step"`, it must have `collects_gradients`.
        anchors: The result of `add_anchors`.
        apply: `"backward"` or `"step"`.
        packed: The keys, from `ops.features.pack`.
        stacked: Whether to return one tensor instead of one tensor per feature.
        layer: Name of the layer, for errors.

    Returns:
        The rows, as returned by the `lookup` of the store.

    Raises:
        ValueError: Recording of gradients is stopped, or another layer of the store has another
            `apply`.
    """
    if _compat.is_recording_stopped():
        place = f"layer {layer!r} in tf.recompute_grad, keras.RematScope or tape.stop_recording()"
        allowed = (
            "False, because the rows would be looked up again in the backward pass. Call the layer "
            "before the recomputed part and pass its output"
        )
        raise invalid("training", True, place, allowed)
    if tf.executing_eagerly() and not _compat.is_recording():
        return list(store.lookup(packed, training=True, stacked=stacked)[0])
    source = _shared_source(store, anchors, apply, layer)
    rows, plan = store.lookup(packed, training=True, stacked=stacked, joins_step=True)
    # The gradient of another layer's variables is 0, because the source has other variables.
    # With "step" it is None, see `CombinedOptimizer`.
    others = [a for a in anchors if id(a) not in source.anchors] if apply == "backward" else []
    values = [_compat.value_without_autocast(anchor) for anchor in others]
    ranks = 1 if store.comm is None else store.comm.size
    return ops.connect_rows(source.tensor, plan, values, rows, ranks)


@tf.RegisterGradient("SlipstreamConnectRows")
def _gradients_of_lookup(op: Any, *upstream: Any) -> list[Any]:
    gradients = [tf.cast(tf.convert_to_tensor(g), tf.float32) for g in upstream]
    if (ranks := op.get_attr("ranks")) > 1:
        # Before gradients are deferred, so that the movement of a deferred sum is estimated
        # correctly.
        gradients = [gradient / ranks for gradient in gradients]
    num_anchors = op.get_attr("num_anchors")
    of_anchors = [tf.zeros_like(anchor) for anchor in op.inputs[2 : 2 + num_anchors]]
    of_source = ops.row_gradients(op.inputs[1], gradients)
    return [of_source, None, *of_anchors, *[None] * len(gradients)]


@tf.RegisterGradient("SlipstreamRowSource")
def _gradients_of_source(op: Any, gradients: tf.Tensor) -> list[Any]:
    store = _stores.get(op.get_attr("store"))
    if store is None:
        raise RuntimeError("The embedding layer of a lookup was deleted before its gradients.")
    is_step = _as_text(op.get_attr("apply")) == "step"
    anchors = op.inputs[: op.get_attr("num_anchors")]
    num_previous = op.get_attr("num_previous")
    if num_previous and _compat.needs_gradient(op, len(anchors)):
        of_anchors = [None if is_step else tf.zeros_like(anchor) for anchor in anchors]
        return [*of_anchors, gradients]
    of_previous = [None] * num_previous
    if is_step:
        return [*by_table(store.collect_gradients(gradients, ()), store), *of_previous]
    # Otherwise TensorFlow builds the gradients of a function in advance, where tapes may record.
    is_of_tape = not isinstance(op, tf.Operation)
    if is_of_tape and _compat.num_tapes(anchors[0]):
        place = "a tape inside of another tape that records the same lookups"
        allowed = (
            "'step', because the gradients of the inner tape would update the rows. Pass "
            "apply='step' to the layer, call the layer before the inner tape, or leave the outer "
            "tape first"
        )
        raise invalid("apply", "backward", place, allowed)
    update = store.apply_gradients(gradients, ())
    with tf.control_dependencies([] if update is None else [update]):
        counted = _updates_of(store).assign_add(1, read_value=False)
    # The gradient of the anchor must depend on the update, because TensorFlow prunes operations
    # that the outputs of a backward graph do not need. The gradient is the value of the anchor, 0.
    # Grappler would fold a constant 0 together with the update, for example in `fit` with Adam,
    # which multiplies it by its moments.
    with tf.control_dependencies([part for part in (update, counted) if part is not None]):
        return [tf.identity(anchors[0]), *of_previous]


def _as_text(attribute: Any) -> str:
    """Returns a text attribute of an op, which is bytes in a graph or in eager code."""
    return attribute.decode() if isinstance(attribute, bytes) else attribute


def by_table(collected: SendBuffer, store: Any) -> list[tf.IndexedSlices]:
    """Splits collected gradients by table.

    Args:
        collected: Gradients of all tables, from `store.collect_gradients`.
        store: The store of the tables.

    Returns:
        For each table, gradients float32 [n, dim] of keys int64 [n].
    """
    dims = [table.dim for table in store.tables]
    slices = []
    for table, (keys, values) in enumerate(collected.of_tables(dims)):
        part = tf.IndexedSlices(tf.reshape(values, [-1, dims[table]]), keys)
        part.values.slipstream_part = _Part(collected, table, part.indices)
        slices.append(part)
    return slices


class _Part(NamedTuple):
    """Marks a gradient tensor as an unmodified part of collected gradients.

    Operations on the tensor return new tensors without the mark.
    """

    collected: SendBuffer
    table: int
    indices: tf.Tensor


def collected_of(slices: Sequence[tf.IndexedSlices | None]) -> SendBuffer | None:
    """Returns the `SendBuffer` from which `by_table` created gradients.

    Args:
        slices: Gradients of each table of a store, in order. None means no gradient.

    Returns:
        The buffer, or None if a gradient is missing or was modified since.
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
    """Joins the gradients of the tables of a store, for `apply_collected`.

    Args:
        slices: Gradients of each table, in order. None means no gradient.

    Returns:
        The gradients of all tables in one buffer. Unmodified gradients are not copied.
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


# Added to the square of a norm. Not a denormal number, which processors can flush to 0.
_MIN_SQUARE = 1e-36


class StoreGradients:
    """The gradients of some or all tables of a store."""

    def __init__(self, store: Any, slices: Sequence[tf.IndexedSlices | None]):
        """Stores the gradients.

        Args:
            store: An `EmbeddingStore` with `collects_gradients`.
            slices: Gradients of each table, in order. None means no gradient.
        """
        self._store, self._slices = store, list(slices)

    def follow(self, optimizer: Any) -> None:
        """Sets the optimizer that applies the gradients; see `Rates.follow`."""
        self._store.follow(optimizer)

    def exchange(self) -> None:
        """Averages the gradients over the ranks, in place.

        A collective: all ranks must call it. All ranks receive the average. If the rows are
        sharded, each rank receives the average for its rows.
        """
        if self._store.comm is None or self._store.comm.size == 1:
            return
        own = collected_of(self._slices)
        if own is None:
            own = self._merged(self._store.comm.size if self._store.is_spread else 1)
        self._slices = list(by_table(self._store.exchange_collected(own), self._store))

    def merge(self) -> None:
        """Sums the gradients of equal keys, in place and in their order."""
        if self._squares() is None:
            self._slices = list(by_table(self._merged(1), self._store))

    def _merged(self, ranks: int) -> SendBuffer:
        dims = [table.dim for table in self._store.tables]
        return merge_rows(joined(self._slices), dims, ranks)

    def values(self) -> list[tf.Tensor]:
        """Returns the gradients, float32 [n, dim], of each table with gradients."""
        return [part.values for part in self._slices if part is not None]

    def replace(self, values: Sequence[tf.Tensor]) -> None:
        """Replaces the gradients.

        Args:
            values: Tensors in the order and with the shapes that `values()` returned.
        """
        others = iter(values)
        self._slices = [
            None if part is None else tf.IndexedSlices(next(others), part.indices)
            for part in self._slices
        ]

    def norms(self) -> tf.Tensor:
        """Returns the L2 norm of the gradients of each table, float32 [tables].

        Call `merge` before. With sharded rows it is a collective. A norm is never 0, because the
        clipped norm is divided by it: gradients whose squares underflow then keep their values.
        """
        squares = self._squares()
        if squares is None:
            values = [tf.zeros([0]) if part is None else part.values for part in self._slices]
            squares = tf.stack([2.0 * tf.nn.l2_loss(of_table) for of_table in values])
        if self._store.is_spread and self._store.comm.size > 1:
            squares = self._store.sum_of_parts(squares)
        squares = tf.ensure_shape(squares, [len(self._slices)])
        return tf.sqrt(squares + _MIN_SQUARE)

    def _squares(self) -> tf.Tensor | None:
        """Returns the squared norm per table, float32 [tables], if known.

        The ops that collect or merge gradients compute these norms as well. The result is None if a
        gradient was modified since, or if its keys may be repeated.
        """
        collected = collected_of(self._slices)
        if collected is None or collected.squares is None:
            return None
        return collected.squares[0]

    def apply(self, scale: Any = ()) -> Any:
        """Updates all rows, or no row if an error occurs.

        Args:
            scale: A factor for the gradients of each table, float32 [tables]. If empty, the
                gradients are applied without a factor.

        Returns:
            The operation in a graph, None in eager mode.
        """
        return self._store.apply_collected(joined(self._slices), scale)


def _added(first: tf.IndexedSlices | None, second: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns the sum of the gradients of a table from two lookups."""
    if first is None:
        return second
    values = tf.concat([first.values, second.values], 0)
    return tf.IndexedSlices(values, tf.concat([first.indices, second.indices], 0))


def add_by_table(
    gradients: Sequence[tuple[Anchor, tf.IndexedSlices]],
) -> list[tuple[Anchor, tf.IndexedSlices]]:
    """Adds the gradients of anchors that represent the same table.

    Args:
        gradients: Anchors of tables with their gradients.

    Returns:
        One anchor per table, with the sum.
    """
    sums: dict[Any, tuple[Anchor, tf.IndexedSlices]] = {}
    for anchor, part in gradients:
        key = id(anchor.store), anchor.table
        before = sums[key][1] if key in sums else None
        sums[key] = anchor, _added(before, part)
    return list(sums.values())


def by_store(gradients: Sequence[tuple[Anchor, tf.IndexedSlices]]) -> list[StoreGradients]:
    """Groups the gradients of tables by store.

    Args:
        gradients: Anchors with their gradients, in any order.
    """
    stores = {id(anchor.store): anchor.store for anchor, _ in gradients}
    slices: dict[int, list[tf.IndexedSlices | None]] = {
        key: [None] * len(store.tables) for key, store in stores.items()
    }
    for anchor, part in gradients:
        if anchor.table is not None:
            slices[id(anchor.store)][anchor.table] = part
    return [StoreGradients(store, slices[key]) for key, store in stores.items()]
