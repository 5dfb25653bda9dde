"""Embedding tables in SOK whose bags are pooled where the rows are: `sok.lookup_sparse`.

In: each rank's batches. Their keys go to all ranks, each of which adds up the rows that it owns in
every bag; the sums come back. Gradients are masked or deferred where SOK has summed them: at the
rank that owns the row.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from slipstream_tf import optimizers
from slipstream_tf.config import Table
from slipstream_tf.errors import invalid, require_integer
from slipstream_tf.ops.features import FeatureSpec, PackedFeatures
from slipstream_tf.stores.access_counts import ExactCounts
from slipstream_tf.stores.sok.library import require_lookup_sparse
from slipstream_tf.stores.sok.table import FLOAT_BYTES, KEY_BYTES
from slipstream_tf.stores.sok.tables import SokTables
from slipstream_tf.stores.sok.watched import WatchedTables

# Values per row up to which SOK multiplies rows by weights.
_WIDEST_WEIGHTED = 256


class PooledPlan(NamedTuple):
    """What the backward pass of a lookup needs.

    Attributes:
        tape: that saw SOK's lookup.
        trained: float32 [batch, dim] of each feature, pooled: what training added to the rows.
        variables: of the tables that were looked up.
        is_stacked: whether gradients come as one tensor [batch, features, dim].
        sent_bytes: int64 scalar, of pooled vectors to other ranks; their gradients are as many.
    """

    tape: tf.GradientTape
    trained: list[tf.Tensor]
    variables: list[Any]
    is_stacked: bool
    sent_bytes: tf.Tensor


class SokPooledStore(SokTables, WatchedTables):
    """Embedding tables whose rows SOK holds and pools, spread by key modulo the number of ranks.

    Beside `SokEmbeddingStore`, whose exchanges carry the distinct keys of a batch with their rows
    and gradients: here all keys go to all ranks, and a pooled vector of every bag goes from every
    rank to the bag's, and its gradient back. That is less for bags of many keys, and as much for
    any keys: masked and deferred gradients save updates, not what is sent; there are no replicas.

    Every lookup (evaluation, too) and update is a collective; ranks without inputs take part with
    an empty batch. Gradients are averaged over the ranks. What SOK sends is in the communicator's
    traffic.

    SOK adds up what training added to the rows; their initial values, which follow from the keys,
    are pooled on the rank that has the bag. "mean" and "sqrtn" divide there, too: SOK's own mean of
    weighted keys is not a number where a bag is empty. SOK makes rows for all keys that are
    requested, in evaluation, too, and does not tell which there were: `gather` says of every key
    that it was found.

    HKV tables ("hybrid") that are full evict the rows that were written longest ago: masked rows
    and their slots are written once a window, as they are.

    Attributes:
        tables: as given.
        optimizer: the rule of all tables.
        rates: what the tables' rows move by; one for all.
        comm: the ranks, or None.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: optimizers.SparseOptimizer,
        comm: Any = None,
        var_type: str = "hybrid",
        settings: Mapping[str, Any] | None = None,
        counted_keys: int = 1 << 20,
    ):
        """Makes empty tables.

        Args:
            tables: at least one, of distinct names. With "hybrid": `capacity`, a power of two, is
                that of each rank's part, and `eviction` "lru".
            optimizer: the rule of all tables: `SGD`, `Adagrad` or `Adam`.
            comm: the ranks, from `distributed.init()`; None: this process alone.
            var_type: "hybrid" (HierarchicalKV: GPU and host memory) or "hbm" (GPU memory only).
            settings: of HKV, for all tables; see `stores.sok.hkv.NAMES`.
            counted_keys: keys of a table whose accesses are counted; at least those of a batch.

        Raises:
            ImportError: SOK cannot be loaded here.
            RuntimeError: its `lookup_sparse` cannot run with this Python.
            ValueError: a table or setting that SOK cannot have, or a rule that it does not know.
        """
        super().__init__(tables, optimizer, comm, var_type, settings)
        require_lookup_sparse()
        require_integer("counted_keys", counted_keys, 1, None, "SokPooledStore")
        self._watch(self._updater, ExactCounts(self._opened, counted_keys))

    def lookup(
        self,
        packed: PackedFeatures,
        specs: Sequence[FeatureSpec],
        training: bool,
        stacked: bool = False,
    ) -> tuple[list[tf.Tensor], Any]:
        """See `EmbeddingStore.lookup`; a collective. The plan is a `PooledPlan`.

        Raises:
            ValueError: a feature is not pooled; or keys have weights, and rows are too wide for SOK
                to weigh.
            tf.errors.InvalidArgumentError: a key is one that SOK's tables use themselves.
        """
        if unpooled := [spec.name for spec in specs if spec.combiner is None]:
            allowed = "a combiner for every feature (SOK pools them); or store='sok', without one"
            raise invalid("combiner", None, f"features {unpooled} of a SokPooledStore", allowed)
        widest = max(self._table(spec.table).dim for spec in specs)
        if packed.weights and widest > _WIDEST_WEIGHTED:
            allowed = (
                f"none where a table's dim is above {_WIDEST_WEIGHTED} (here {widest}): SOK 2.1.0 "
                "divides wider rows by their weights"
            )
            place = type(self).__name__
            raise invalid("weights", f"{len(packed.weights)} features'", place, allowed)
        initial, _ = self._initial.lookup(packed, specs, training=False)
        if training:
            self.count_accesses(packed, specs)
        names = {spec.table for spec in specs}
        variables = [table.variable for name, table in self._opened.items() if name in names]
        # The initial rows' lookup has checked the keys' layout, which SOK does not.
        with (
            tf.control_dependencies(initial),
            tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape,
        ):
            # Not the variables: a layer's custom gradient would ask for their gradients.
            tape.watch([variable.handle for variable in variables])
            trained, sent_bytes = self._pooled(packed, specs)
        pooled = [rows + added for rows, added in zip(initial, trained, strict=True)]
        if stacked:
            pooled = [tf.stack(pooled, axis=1)]
        plan = PooledPlan(tape, trained, variables, stacked, sent_bytes)
        return pooled, plan if training else None

    def _pooled(
        self, packed: PackedFeatures, specs: Sequence[FeatureSpec]
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Pools what training added to the rows.

        Returns:
            float32 [batch, dim] of each feature, and how many bytes went to other ranks for that.
        """
        found = [self._table(spec.table) for spec in specs]
        bags = [_bags_of(packed, feature) for feature in range(len(specs))]
        bags = [
            bag.with_values(table.checked(bag.values))
            for table, bag in zip(found, bags, strict=True)
        ]
        weights = [_weights_of(packed, feature, bag) for feature, bag in enumerate(bags)]
        batch = bags[0].nrows()
        # SOK takes all ranks to have as many inputs, one at least.
        most = tf.maximum(batch, 1)
        if self._ranks > 1:
            sizes = self.comm.gather(
                tf.reshape(most, [1]), "control", _unique("slipstream.sok.batch")
            )
            most = tf.reduce_max(sizes)
        padded = [_with_rows(bag, most) for bag in bags]
        # Keys, weights and the bags' lengths go to every other rank, pooled vectors from it.
        each, others = KEY_BYTES + bool(packed.weights) * FLOAT_BYTES, self._ranks - 1
        key_bytes = [tf.size(b.values, tf.int64) * each + b.nrows() * KEY_BYTES for b in padded]
        sent_bytes = most * (sum(table.dim for table in found) * FLOAT_BYTES * others)
        self._count_sent(tf.add_n(key_bytes) * others, "keys")
        self._count_sent(sent_bytes, "rows")
        sums = self._sok.lookup_sparse(
            [table.variable for table in found],
            padded,
            sp_weights=[_with_rows(bag, most) for bag in weights] if packed.weights else None,
            combiners=["sum"] * len(specs),
        )
        pooled = []
        for spec, table, total, of_bags in zip(specs, found, sums, weights, strict=True):
            rows = tf.ensure_shape(total[:batch], [None, table.dim])
            if spec.combiner == "mean":
                rows = tf.math.divide_no_nan(rows, tf.reduce_sum(of_bags, 1)[:, None])
            elif spec.combiner == "sqrtn":
                norms = tf.sqrt(tf.reduce_sum(tf.square(of_bags), 1))
                rows = tf.math.divide_no_nan(rows, norms[:, None])
            pooled.append(rows)
        return pooled, sent_bytes

    def apply_gradients(
        self, plan: PooledPlan, gradients: Sequence[tf.Tensor]
    ) -> tf.Operation | None:
        """See `EmbeddingStore.apply_gradients`; averages over the ranks. A collective.

        Raises:
            tf.errors.InvalidArgumentError: a gradient is not finite; nothing is sent then.
        """
        by_feature = tf.unstack(gradients[0], axis=1) if plan.is_stacked else gradients
        # SOK adds up what the ranks send.
        shares = [
            tf.debugging.check_numerics(gradient / self._ranks, "Gradient of bags that SOK pools")
            for gradient in by_feature
        ]
        handles = [variable.handle for variable in plan.variables]
        self._count_sent(plan.sent_bytes, "gradients")
        slices = plan.tape.gradient(plan.trained, handles, output_gradients=shares)
        self._steps.assign_add([1, 1])
        pairs = self.withhold(zip(slices, plan.variables, strict=True))
        return self._updater.apply_gradients(pairs)

    def flush(self) -> None:
        """Applies what this rank defers of its own rows; no collective."""
        self._apply_deferred(lambda: self._flush_by(self._updater))

    def _known_rate(self) -> Any:
        return self._rate_now()


def _unique(name: str) -> str:
    """A collective's name: lookups of one graph may be under way at the same time."""
    if tf.executing_eagerly():
        return name
    return str(tf.compat.v1.get_default_graph().unique_name(name))


def _bags_of(packed: PackedFeatures, feature: int) -> tf.RaggedTensor:
    """The keys of a feature, int64 [batch, None], without padding."""
    keys, row_splits, _ = packed.of(feature)
    if row_splits is not None:
        bags = tf.RaggedTensor.from_row_splits(keys, row_splits, validate=False)
    else:
        matrix = keys if keys.shape.rank == 2 else keys[:, None]
        bags = tf.RaggedTensor.from_tensor(matrix, row_splits_dtype=tf.int64)
    if (is_key := packed.is_key(feature)) is None:
        return bags
    return tf.ragged.boolean_mask(bags, bags.with_values(tf.reshape(is_key, [-1])))


def _weights_of(packed: PackedFeatures, feature: int, bags: tf.RaggedTensor) -> tf.RaggedTensor:
    """The weights of a feature's keys, float32 [batch, None], laid out like them."""
    _, _, weights = packed.of(feature)
    if weights is None:
        return bags.with_values(tf.ones_like(bags.values, tf.float32))
    weights = tf.reshape(weights, [-1])
    if (is_key := packed.is_key(feature)) is not None:
        weights = tf.boolean_mask(weights, tf.reshape(is_key, [-1]))
    return bags.with_values(weights)


def _with_rows(bags: tf.RaggedTensor, count: tf.Tensor) -> tf.RaggedTensor:
    """Adds empty bags, so that there are `count`."""
    last = tf.fill([count - bags.nrows()], bags.row_splits[-1])
    splits = tf.concat([bags.row_splits, last], 0)
    return tf.RaggedTensor.from_row_splits(bags.values, splits, validate=False)
