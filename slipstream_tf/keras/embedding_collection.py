"""The Keras layer over an embedding store. In: keys of a batch. Out: their combined rows.

The rows are no Keras weights. The table's own sparse optimizer updates them inside the backward
pass (as fused optimizers do elsewhere): Keras 3 densifies sparse gradients, this layer never does.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from slipstream_tf import _compat, optimizers
from slipstream_tf._utils.comm import Communicator
from slipstream_tf._utils.errors import invalid, require_choice
from slipstream_tf.checkpoint.store_state import StoreState, export_state, restore_state
from slipstream_tf.config import Table
from slipstream_tf.keras import feature_layouts as layouts
from slipstream_tf.keras.contract import (
    refuse_loss_scaling,
    refuse_replicas,
    require_apply,
    require_fitting_optimizer,
    require_own_store,
    require_told_training,
)
from slipstream_tf.keras.feature_layouts import resolve_features, resolve_tables
from slipstream_tf.keras.row_gradients import add_anchors, training_lookup
from slipstream_tf.keras.row_snapshots import ExportedRows, add_rows_weight, refuse_legacy_file
from slipstream_tf.ops.features import PADDING_KEY, FeatureSpec, pack
from slipstream_tf.sampling.look_ahead import announce_rows
from slipstream_tf.tables.rates import require_rate
from slipstream_tf.tables.rows import TableRows

_compat.require_keras()

STORES = ("native", "sok")
PLACEMENTS = ("replicated", "sharded")
_ENGINE = "engine"  # name of its state in weight files
# What does nothing special about how rows go between ranks.
_PLAIN_EXCHANGE: dict[str, Any] = {
    **{"prefetch": False, "wire_dtype": "float32", "wire_warmup_steps": 0}
}


@keras.saving.register_keras_serializable(package="slipstream_tf")
class EmbeddingCollection(keras.layers.Layer):
    """Embedding tables with their own sparse optimizer, for any number of features.

    What goes in decides what comes out: a dictionary gives a dictionary {feature: [batch, dim]}, a
    key matrix gives one tensor [batch, features, dim]. With `stacked=True` it is always the tensor.
    Tensors need tables of one dimension; dictionaries do not. Of a feature without a combiner each
    key's row comes out: [batch, width, dim], with zeros and a Keras mask where keys are padding, or
    a RaggedTensor [batch, None, dim].

    Training. With `training=True` keys that are new get a row, every access is counted, and the
    backward pass of the `tf.GradientTape` around the call updates the rows: once per call of
    `tape.gradient`, however often a key occurs (its gradients are summed first). The gradients are
    those of the loss as given: Keras's losses are means over the batch, so a row's gradient carries
    the factor 1/batch. Without a tape rows are added and counted, not updated. With
    `training=False` (evaluate, predict) nothing changes: a key without a row gets the values its
    row would start with. A layer with `trainable=False` behaves like that in training, too.
    Keras's `fit` says `training=True` only to a model whose `call` has the argument `training`:
    under a tape, a layer that was told nothing raises an error.

    Where gradients are applied. With apply="backward" rows are updated in the backward pass,
    before the gradients of other weights are known, and whether or not anybody asks for the
    anchor's. With apply="step" the gradients of rows come out of the tape, as those of one anchor
    per table, `tf.IndexedSlices`, and the optimizer applies them: `slip.keras.StepOptimizer`. That
    takes longer, and is what clipping, gradient accumulation, loss scaling and a head trained alone
    need. Where none acts, the rows are the same, bit for bit. Without `apply`, a `slip.keras.Model`
    (or another one with `LossFeedback`) chooses "step" where its optimizer needs it, and makes that
    a `StepOptimizer`. Any other model whose optimizer has settings that would miss the rows raises
    an error.

    The anchors. TensorFlow runs the backward pass of a layer only if something trainable lies
    behind it, so the layer has a weight of shape (), `update_anchor` (with apply="step", one per
    table). It is 0, and stays 0 under every Keras optimizer. With apply="backward" its gradient is
    0, and must be computed, as `tape.gradient(loss, model.trainable_variables)` does.

    The weight `rows`. `get_weights` and `set_weights` carry the rows, too: as a token, int64 of
    shape (), of a snapshot that this process keeps (see `limit_snapshots`).

    Precision. Rows, gradients and slots are float32; the output has the policy's compute dtype
    (bfloat16 with "mixed_bfloat16"). "mixed_float16" and a `LossScaleOptimizer` scale the rows'
    gradients, too: they need apply="step".

    XLA. The table ops run outside XLA. `compile(jit_compile=True)` falls back to a plain
    `tf.function` with a warning of Keras; a `tf.function(jit_compile=True)` must not contain it.

    Args:
        tables: `Table`s with different names.
        optimizer: the rule of the tables without one of their own: of `slipstream_tf.optimizers`,
            or what `optimizers.get` makes one of. None: `Adagrad` with its defaults.
        features: None for a feature per table, named like it; or a dictionary from feature name to
            table name; or a sequence of `FeatureSpec`, each with its own combiner. Features may
            share a table.
        store: "native"; "sok" (NVIDIA's Sparse Operation Kit on GPUs: HKV tables of `capacity` rows
            on each rank, always spread over the ranks; see `stores.SokEmbeddingStore`); or an
            object with the interface of a store (not serialisable then).
        comm: ranks that train the tables together, from `distributed.init()`; None: this process
            alone. A layer that is saved is loaded as one of one process.
        placement: with `comm`: "replicated" (every rank holds all rows) or "sharded" (rows are
            spread over the ranks by hash; a layer saves and loads the rows of its own rank).
        wire_dtype: in which rows and their gradients travel between ranks: "float32", "bfloat16",
            "float16", "int8" with a scale per row; two with a comma, of rows and of gradients; or
            "auto": what is soonest on the ranks' link, which is measured in about two seconds.
        wire_warmup_steps: updates of the tables before rows are rounded to `wire_dtype`.
        prefetch: with sharded tables: whether the keys of `next_inputs` are sent to their owners
            while this batch trains. Results stay the same, bit for bit. With one rank nothing is
            sent.
        stacked: whether a dictionary gives one tensor [batch, features, dim], too.
        padding_key: the key that stands for no key, of features that are no `FeatureSpec` with one
            of their own; of texts it is the empty one. It trains no row, and gives zeros where an
            example has no other. None: every key is a key.
        apply: where gradients of rows are applied: "backward" or "step", see above. None: as the
            model's optimizer needs it, else "backward". "step" is of native tables.
        **kwargs: of `keras.layers.Layer`: name, dtype, trainable.

    Raises:
        ValueError: a table, feature, optimizer, store or dtype policy that cannot work.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        optimizer: optimizers.SparseOptimizer | str | None = None,
        features: Mapping[str, str] | Sequence[FeatureSpec] | None = None,
        store: Any = "native",
        stacked: bool = False,
        comm: Communicator | None = None,
        placement: str = "replicated",
        wire_dtype: str = "float32",
        wire_warmup_steps: int = 0,
        prefetch: bool = False,
        padding_key: int | None = PADDING_KEY,
        apply: str | None = None,
        **kwargs: Any,
    ) -> None:
        # No autocast: keys must reach the store as they are, and the anchor stays float32.
        super().__init__(autocast=False, **kwargs)
        if apply != "step":
            refuse_loss_scaling(self.dtype_policy, self.name)
        refuse_replicas(self.name)
        self.supports_jit = False  # Keras then compiles without XLA.
        self.tables = resolve_tables(tables)
        self.specs = resolve_features(features, self.tables, padding_key)
        self.stacked = bool(stacked)
        self._dims = {table.name: table.dim for table in self.tables}
        if self.stacked:
            self._require_stackable("stacked=True")
        self._store_name = store if isinstance(store, str) else None
        given = (bool(prefetch), wire_dtype, wire_warmup_steps)
        exchange = dict(zip(_PLAIN_EXCHANGE, given, strict=True))
        self.store = _open_store(store, self.tables, optimizer, comm, placement, exchange)
        self._announces = self.store.prefetches
        self.prefetch = bool(prefetch) or self._announces
        self.follows_optimizer = apply is None
        self.apply = require_apply(apply, self.store, self.name)
        self._add_anchors()
        add_rows_weight(self, self.store)
        # Past Keras, which would put it into TensorFlow's checkpoints.
        object.__setattr__(self, "_exported", ExportedRows(self.store, f"layer {self.name!r}"))
        self._store_state = StoreState(self.store, f"layer {self.name!r}")
        self._engine: Any = None
        self.built = True

    def _add_anchors(self) -> None:
        self._anchors = add_anchors(self, self.store, self.apply)
        if self.apply == "backward":
            (self.update_anchor,) = self._anchors

    @property
    def anchors(self) -> list[Any]:
        """The weights behind which the layer's gradients lie."""
        return self._anchors

    def follow_optimizer(self, applies_rows: bool) -> None:
        """Applies gradients where a model's optimizer needs them, if the layer has no `apply`.

        Its anchors are others then: call it before the optimizer is built.

        Args:
            applies_rows: whether that is a `StepOptimizer`.
        """
        apply = "step" if applies_rows and self.store.collects_gradients else "backward"
        if not self.follows_optimizer or apply == self.apply:
            return
        old, self.apply = self._anchors, apply
        if apply == "step":
            del self.update_anchor
        _compat.exchange_weights(self, old, self._add_anchors)

    def when_restored(self, listener: Callable[[], None]) -> None:
        """Calls a function whenever a `tf.train.Checkpoint` has replaced the tables."""
        self._store_state.when_restored(listener)

    def include_engine(self, engine: Any) -> None:
        """Puts an engine's state into the layer's part of weight files.

        Args:
            engine: a `Slipstream`, whose state is saved, and restored when a file that has it is
                loaded; None: the files have the tables alone.
        """
        # Past Keras, which would track the engine's state as the layer's.
        object.__setattr__(self, "_engine", engine)

    @property
    def learning_rate(self) -> Any:
        """The tables' learning rate, a tf.Variable of shape (); assign to change it.

        It is the rate before it follows the dense layers' optimizer. None: tables have rates of
        their own, see `table`.
        """
        return self.store.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if self.store.learning_rate is None:
            allowed = "layer.table(name).learning_rate: tables have rates of their own"
            raise invalid("learning_rate", value, f"layer {self.name!r}", allowed)
        self.store.learning_rate.assign(require_rate(value, f"layer {self.name!r}"))

    def table(self, name: str) -> TableRows:
        """Returns the rows of a table, to be read, written, removed and listed by key."""
        return TableRows(self.store, name)

    def announced(
        self, dataset: tf.data.Dataset, get_keys: Callable[..., Any] | None = None
    ) -> tf.data.Dataset:
        """Returns the same batches, whose rows begin to come from the disk before they are trained.

        For tables that spill (`Storage`), in training and evaluation. Put it last, in front of a
        `.prefetch(2)`. `Slipstream.apply` does it by itself.

        Args:
            dataset: elements are batches.
            get_keys: as of `Slipstream.apply`.
        """
        return announce_rows(dataset, self.store, self.specs, get_keys)

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer; see `call`."""
        if kwargs.get("next_inputs") is not None:
            kwargs["next_inputs"] = self._as_inputs(kwargs["next_inputs"])
        return super().__call__(self._as_inputs(inputs), *args, **kwargs)

    def _as_inputs(self, inputs: Any) -> Any:
        return layouts.as_inputs(inputs, self.specs, f"layer {self.name!r}")

    def call(
        self,
        inputs: Any,
        weights: Any = None,
        training: bool | None = None,
        next_inputs: Any = None,
    ) -> Any:
        """Looks up the rows of a batch and combines those of a bag.

        Args:
            inputs: a dictionary from feature name to keys, [batch] or [batch, width] or a
                RaggedTensor or SparseTensor [batch, None], whose other entries are left; or one
                matrix [batch, features] with a column per feature, in order. Keys are int64, other
                integers (uint64 keeps its bits) or texts, which are hashed as the readers do.
            weights: a dictionary from feature name to a float32 weight per key, laid out like the
                keys; features without one are unweighted. Constants: no gradient flows to them.
            training: whether to add missing keys, count accesses and update rows.
            next_inputs: with `prefetch=True`, the inputs of the next call in training, whose keys
                are then sent ahead (see `distributed.with_next`); not read without training. None:
                the next call sends its own. After next inputs that do not come, as where an epoch
                ends, call `store.forget_announced()` on all ranks (the callbacks do).

        Returns:
            A dictionary {feature: [batch, dim]} or a tensor [batch, features, dim], see above.

        Raises:
            ValueError: a feature is missing, keys are no integers or texts, or of another rank; or
                there are next inputs, without `prefetch=True`.
            tf.errors.InvalidArgumentError: the keys are not those of the `next_inputs` before.
        """
        if next_inputs is not None and not self.prefetch:
            raise invalid("prefetch", False, f"next_inputs of layer {self.name!r}", "prefetch=True")
        packed = pack(inputs, self.specs, weights)
        stacked = self._gives_tensor(inputs)
        if training and self.trainable:
            rows = self._trained_lookup(packed, stacked)
            if next_inputs is not None and self._announces:
                # These rows first: what is sent ahead must not hold them up.
                with tf.control_dependencies(rows):
                    self.store.announce(pack(next_inputs, self.specs))
        else:
            if self.trainable:
                require_told_training(self, training)
            is_served = self._exported.stands_in_for(self.store)
            store = self._exported.serving if is_served else self.store
            rows, _ = store.lookup(packed, training=False, stacked=stacked)
        outputs = [tf.cast(tensor, self.compute_dtype) for tensor in rows]
        if stacked:
            return outputs[0]
        for index, spec in enumerate(self.specs):
            if spec.combiner is None:
                outputs[index] = layouts.sequences(outputs[index], packed, index)
        return {spec.name: tensor for spec, tensor in zip(self.specs, outputs, strict=True)}

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Returns the masks of the outputs: which keys of features without a combiner are there."""
        if not isinstance(inputs, Mapping) or self.stacked:
            return None
        return {spec.name: layouts.mask_of(spec, inputs[spec.name]) for spec in self.specs}

    def _trained_lookup(self, packed: Any, stacked: bool) -> tuple[tf.Tensor, ...]:
        self.store.follow(getattr(_compat.outermost_layer(self), "optimizer", None))
        require_fitting_optimizer(self, self._anchors, self.apply)
        return training_lookup(self.store, self._anchors, self.apply, packed, stacked)

    def _gives_tensor(self, inputs: Any) -> bool:
        if isinstance(inputs, Mapping):
            return self.stacked
        self._require_stackable("a key matrix")
        return True

    def _require_stackable(self, cause: str) -> None:
        if unpooled := [spec.name for spec in self.specs if spec.combiner is None]:
            allowed = "a combiner for every feature of one tensor; feed a dictionary without"
            place = f"features {unpooled} and {cause} of layer {self.name!r}"
            raise invalid("combiner", None, place, allowed)
        dims = {spec.name: self._dims[spec.table] for spec in self.specs}
        if len(set(dims.values())) > 1:
            allowed = (
                "one dimension for all features (one tensor [batch, features, dim] comes out); "
                "with several, feed a dictionary and leave stacked=False"
            )
            raise invalid("dim", dims, f"{cause} of layer {self.name!r}", allowed)

    def compute_output_shape(self, input_shape: Any, weights_shape: Any = None) -> Any:
        """Returns the output's shape, or a dictionary of shapes, for the inputs' shape(s)."""
        is_mapping = isinstance(input_shape, Mapping)
        if self.stacked or not is_mapping:
            first = input_shape[self.specs[0].name] if is_mapping else input_shape
            return (first[0], len(self.specs), self._dims[self.specs[0].table])
        shape_of = layouts.output_shape
        return {s.name: shape_of(s, input_shape[s.name], self._dims[s.table]) for s in self.specs}

    def compute_output_spec(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the output as `keras.KerasTensor`s, without a lookup."""
        layouts.require_layout(inputs, self.specs, f"layer {self.name!r}")
        dtype, spec_of = self.compute_dtype, layouts.output_spec
        if self._gives_tensor(inputs):
            is_mapping = isinstance(inputs, Mapping)
            shape = {n: t.shape for n, t in inputs.items()} if is_mapping else inputs.shape
            return keras.KerasTensor(self.compute_output_shape(shape), dtype=dtype)
        dims = [(spec, self._dims[spec.table]) for spec in self.specs]
        return {spec.name: spec_of(spec, inputs[spec.name], dim, dtype) for spec, dim in dims}

    def count_params(self) -> int:
        """Returns how many values the tables' rows have now; `summary` shows it."""
        return sum(self.store.size(table.name) * table.dim for table in self.tables)

    def save_own_variables(self, store: Any) -> None:
        """Writes rows, slots, counts and step of all tables (`save_weights`, `model.save`)."""
        for name, value in export_state(self.store).items():
            store[name] = value
        if self._engine is not None:
            store[_ENGINE] = np.frombuffer(self._engine.serialize(), np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Replaces the state of all tables by the saved one; refuses other tables or rules."""
        arrays = {name: store[name] for name in store.keys()}  # noqa: SIM118
        restore_state(self.store, arrays, f"layer {self.name!r}")
        if _ENGINE in arrays and self._engine is not None:
            self._engine.restore_backup(np.asarray(arrays[_ENGINE], np.uint8).tobytes())

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type != "savedmodel":
            return children
        children.pop("_store_state", None)  # of checkpoints, with slots
        return {**children, **self._exported.trackables()}

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serialisable dictionary for `from_config`; no rows in it."""
        refuse_legacy_file(self.name)
        if self._store_name is None:
            place = f"get_config of layer {self.name!r}"
            raise invalid("store", self.store, place, f"one of {STORES} by name")
        return {
            **super().get_config(),
            "tables": [table.get_config() for table in self.tables],
            "optimizer": optimizers.serialize(self.store.optimizer),
            "features": [dataclasses.asdict(spec) for spec in self.specs],
            "store": self._store_name,
            "stacked": self.stacked,
            "apply": None if self.follows_optimizer else self.apply,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "EmbeddingCollection":
        """Builds the layer, with empty tables, that `get_config` described."""
        refuse_legacy_file(config.get("name", "embedding_collection"))
        config = dict(config)
        config["tables"] = [Table.from_config(table) for table in config["tables"]]
        config["optimizer"] = optimizers.get(config["optimizer"])
        config["features"] = [FeatureSpec(**spec) for spec in config["features"]]
        return super().from_config(config)


def _open_store(
    store: Any,
    tables: Sequence[Table],
    optimizer: Any,
    comm: Communicator | None,
    placement: str,
    exchange: dict[str, Any],
) -> Any:
    require_choice("placement", placement, PLACEMENTS, "EmbeddingCollection")
    if not isinstance(store, str):
        require_own_store(store, tables, comm, exchange["prefetch"])
        return store
    require_choice("store", store, STORES, "EmbeddingCollection")
    if store != "native":
        for name, default in _PLAIN_EXCHANGE.items():
            if exchange[name] != default:
                what = "keys" if name == "prefetch" else "rows"
                place = f"EmbeddingCollection, store={store!r}"
                raise invalid(name, exchange[name], place, f"{default!r}: SOK sends the {what}")
        from slipstream_tf.tables.sok.embeddings import SokEmbeddingStore

        return SokEmbeddingStore(tables, optimizer, comm)
    # Imported here, so that the layer's module loads where the op library is not built.
    if comm is None or comm.size == 1:
        from slipstream_tf.tables.native import NativeStore

        return NativeStore(tables, optimizer)
    from slipstream_tf.distributed.exchanged import ReplicatedStore
    from slipstream_tf.distributed.sharded import ShardedStore

    if placement == "sharded":
        return ShardedStore(tables, optimizer, comm, **exchange)
    if exchange.pop("prefetch"):
        allowed = "'sharded': replicated tables request rows from no other rank"
        raise invalid("placement", placement, "EmbeddingCollection, prefetch=True", allowed)
    return ReplicatedStore(tables, optimizer, comm, **exchange)
