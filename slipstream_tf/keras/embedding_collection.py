"""The Keras layer that looks up embedding tables.

The rows are not Keras weights. The sparse optimizer of each table updates them in the backward
pass, as fused optimizers do, because Keras 3 converts sparse gradients to dense tensors.
"""

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from slipstream_tf import _compat, initializers, optimizers
from slipstream_tf._utils.comm import Communicator
from slipstream_tf._utils.errors import invalid, require_choice
from slipstream_tf.checkpoint.store_state import StoreState
from slipstream_tf.config import Retention, Storage, Table
from slipstream_tf.keras import feature_layouts as layouts
from slipstream_tf.keras.contract import (
    CheckApply,
    refuse_loss_scaling,
    refuse_replicas,
    require_apply,
    require_fitting_optimizer,
    require_own_store,
    require_training_argument,
)
from slipstream_tf.keras.feature_layouts import resolve_features, resolve_tables
from slipstream_tf.keras.row_gradients import add_anchors, training_lookup
from slipstream_tf.keras.row_snapshots import ExportedRows, add_rows_weight, refuse_legacy_file
from slipstream_tf.ops.features import PADDING_KEY, FeatureSpec, given_specs, pack
from slipstream_tf.sampling.look_ahead import prefetch_rows
from slipstream_tf.tables.rates import require_rate
from slipstream_tf.tables.rows import TableRows

_compat.require_keras()

STORES = ("native", "sok")
PLACEMENTS = ("replicated", "sharded")
_ENGINE = "engine"  # Name of the engine state in weight files.
# Defaults of the settings that only affect the exchange between ranks.
_PLAIN_EXCHANGE: dict[str, Any] = {
    **{"prefetch": False, "wire_dtype": "float32", "wire_warmup_steps": 0}
}

# Users' layers may take these objects as arguments and return them from `get_config`.
for _cls in (Table, FeatureSpec, Retention, Storage, *initializers.CLASSES, *optimizers.CLASSES):
    keras.saving.register_keras_serializable(package="slipstream_tf")(_cls)


@keras.saving.register_keras_serializable(package="slipstream_tf")
class EmbeddingCollection(keras.layers.Layer):
    """Looks up any number of features in embedding tables with sparse optimizers.

    The format of the inputs determines the outputs. A dictionary returns a dictionary from feature
    name to a tensor [batch, dim], and a key matrix returns one tensor [batch, features, dim]. With
    `stacked=True` the layer always returns the tensor, which requires tables with the same
    dimension. A feature without a combiner returns the row of each key: [batch, width, dim], with
    zeros and a Keras mask at the padding, or a RaggedTensor [batch, None, dim].

    A dictionary may contain only some of the features. The outputs then have exactly these
    features, so that multiple towers of a model can share one layer.

    Example:

    >>> layer = slip.keras.EmbeddingCollection(
    ...     [slip.Table("user", dim=8), slip.Table("item", dim=8)], optimizer="adagrad"
    ... )
    >>> layer(np.array([[17, 5], [18, 9]])).shape
    TensorShape([2, 2, 8])
    >>> outputs = layer({"user": np.array([17, 18]), "item": np.array([[5, 6], [9, -1]])})
    >>> outputs["item"].shape
    TensorShape([2, 8])
    >>> list(layer({"user": np.array([17, 18])}))  # A tower that uses only this feature.
    ['user']

    **Training.** With `training=True`, new keys get a row, every access is counted, and the
    backward pass of the surrounding `tf.GradientTape` updates the rows. There is one update per
    call of `tape.gradient`, also if the layer is called repeatedly: the gradients of a repeated key
    are summed first, in the order of the calls. The gradients belong to the given loss. Keras
    losses are means over the batch, so that the gradient of a row contains the factor 1/batch.
    Without a tape, rows are created and counted but not updated. With `training=False` (`evaluate`,
    `predict`) no state changes, and a key without a row returns its initial values. A layer with
    `trainable=False` does the same in training.

    Note: Keras's `fit` passes `training=True` only to a model with the argument `training` in its
    `call`. Under a tape, a layer that receives no `training` argument raises an error.

    **Where gradients are applied.** With `apply="backward"` the backward pass updates the rows,
    before the gradients of other weights are known. It does so whenever a gradient reaches the
    layer, even if you request only the gradients of other layers. Set `layer.trainable = False` to
    keep the rows as they are. With `apply="step"` the tape returns the gradients of the rows as
    `tf.IndexedSlices`, one per table, and the optimizer, a `slip.keras.CombinedOptimizer`, applies
    them. This is slower and required for clipping, gradient accumulation, loss scaling and training
    of only the dense layers. If none of these is active, both modes compute bitwise identical rows.
    With `apply=None`, a `slip.keras.Model` or another model with `LossFeedback` selects `"step"` if
    its optimizer requires it, and converts that optimizer to a `CombinedOptimizer`. Any other model
    raises an error if a setting of its optimizer would not apply to the rows.

    **Anchors.** TensorFlow runs the backward pass of a layer only if the layer depends on a
    trainable variable. Therefore the layer has a scalar weight `update_anchor`, or with
    `apply="step"` one anchor per table. Its value is 0 and remains 0 with every Keras optimizer.
    With `apply="backward"` its gradient is 0. Request it with the other gradients, for example by
    `tape.gradient(loss, model.trainable_variables)`, because TensorFlow can omit operations of a
    graph that no requested gradient needs.

    **The weight `rows`.** `get_weights` and `set_weights` include the rows as a token, a scalar
    int64, which identifies a snapshot that this process stores (see `limit_snapshots`).

    **Precision.** Gradients are float32. Rows and slots (optimizer values) have the dtypes of
    `Table.storage`, by default float32. The output has the compute dtype of the dtype policy
    (bfloat16 with "mixed_bfloat16"). "mixed_float16" and a `LossScaleOptimizer` also scale the
    gradients of rows and therefore require `apply="step"`.

    **XLA.** The table ops run outside of XLA. `compile(jit_compile=True)` falls back to a plain
    `tf.function` with a Keras warning. A `tf.function(jit_compile=True)` must not contain the
    layer.

    Args:
        tables: Sequence of `Table`s with unique names.
        optimizer: Sparse optimizer for tables that do not specify one: an object of
            `slipstream_tf.optimizers`, or an identifier that `optimizers.get` accepts. None uses
            `Adagrad` with its defaults.
        features: None creates one feature per table, with the name of the table. Alternatively, a
            dictionary from feature name to table name, or a sequence of `FeatureSpec`s, each with a
            separate combiner. Features may share a table.
        store: `"native"` stores the tables in the host's memory. `"sok"` stores them on GPUs with
            the Sparse Operation Kit of NVIDIA (tables of the HierarchicalKV library with `capacity`
            rows on each rank, always sharded; see `tables.SokEmbeddingStore`). Alternatively, a
            store object, for example a `distributed.ShardedStore`. A layer with a store object is
            not serializable.
        comm: Ranks that train the tables together, from `distributed.init()`. None uses this
            process only. A saved layer is loaded with a single process.
        placement: With `comm`: `"replicated"` stores all rows on every rank, and `"sharded"`
            distributes the rows by hash. A sharded layer saves and loads the rows of its rank.
        wire_dtype: Dtype of rows and gradients in messages between ranks: `"float32"`,
            `"bfloat16"`, `"float16"` or `"int8"` with a scale per row. Two dtypes separated by a
            comma apply to rows and to gradients. `"auto"` measures the link for about two seconds
            and selects the fastest dtype.
        wire_warmup_steps: Number of table updates before rows are rounded to `wire_dtype`.
        prefetch: Whether sharded tables send the keys of `next_inputs` to their owners while the
            current batch trains. The results are bitwise identical. With one rank, no keys are
            sent.
        stacked: Whether a dictionary also returns one tensor [batch, features, dim].
        padding_key: The key that marks padding, for features that are not given as `FeatureSpec`.
            For text keys, the empty text is padding. Padding trains no row and returns zeros if an
            example has no other key. None disables padding.
        apply: Where the gradients of rows are applied: `"backward"`, or `"step"`, which needs
            native tables. None selects the mode that the optimizer of the model requires, by
            default `"backward"`.
        **kwargs: Arguments of `keras.layers.Layer`: name, dtype, trainable.

    Raises:
        ValueError: A table, feature, optimizer, store or dtype policy is invalid.
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
        # Autocast would convert keys to floats. The anchor must be float32.
        super().__init__(autocast=False, **kwargs)
        if apply != "step":
            refuse_loss_scaling(self.dtype_policy, self.name)
        refuse_replicas(self.name)
        self.supports_jit = False  # Makes Keras compile without XLA.
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
        self._prefetches = self.store.prefetches
        self.prefetch = bool(prefetch) or self._prefetches
        self.follows_optimizer = apply is None
        self._optimizer_ref: Callable[[], Any] = lambda: None
        self.apply = require_apply(apply, self.store, self.name)
        self._store_state = StoreState(self.store, f"layer {self.name!r}")
        self._add_anchors()
        add_rows_weight(self, self.store)
        # Bypasses attribute tracking, which would add it to TensorFlow checkpoints.
        object.__setattr__(self, "_exported", ExportedRows(self))
        self._engine: Any = None
        self.built = True

    def _add_anchors(self) -> None:
        self._anchors = add_anchors(self, self.store, self.apply, CheckApply(self))
        if self.apply == "backward":
            (self.update_anchor,) = self._anchors
        _compat.track_with(self._anchors[0], "rows", self._store_state)

    @property
    def compute_dtype(self) -> str:
        """The dtype of keys, int64.

        A Sequential model without an Input declares inputs of this dtype. The dtype of outputs is
        `dtype_policy.compute_dtype`.
        """
        return "int64"

    @property
    def variable_dtype(self) -> str:
        """The dtype of keys, because Keras would cast weights if it differed."""
        return self.compute_dtype

    @property
    def _row_dtype(self) -> str:
        return super().compute_dtype

    @property
    def anchors(self) -> list[Any]:
        """The trainable scalar weights that represent the tables in the backward pass.

        With `apply="backward"` there is one, with `apply="step"` one per table.
        """
        return self._anchors

    def follow_optimizer(self, applies_rows: bool) -> None:
        """Selects the mode that an optimizer requires, if `apply` is None.

        The anchors change with the mode. Call it before the optimizer is built.

        Args:
            applies_rows: Whether the optimizer is a `CombinedOptimizer`.
        """
        apply = "step" if applies_rows and self.store.collects_gradients else "backward"
        if not self.follows_optimizer or apply == self.apply:
            return
        old, self.apply = self._anchors, apply
        if apply == "step":
            del self.update_anchor
        _compat.exchange_weights(self, old, self._add_anchors)

    def connect(self, optimizer: Any) -> None:
        """Sets the optimizer of the layer, see `slip.keras.connect`.

        Args:
            optimizer: A Keras optimizer.
        """
        self._optimizer_ref = weakref.ref(optimizer)

    @property
    def connected_optimizer(self) -> Any:
        """The optimizer from `connect`, or None."""
        return self._optimizer_ref()

    def when_restored(self, listener: Callable[[], None]) -> None:
        """Registers a function to call after a `tf.train.Checkpoint` restores the tables.

        Args:
            listener: Function without arguments.
        """
        self._store_state.when_restored(listener)

    def include_engine(self, engine: Any) -> None:
        """Includes the state of an engine in weight files.

        Args:
            engine: A `Slipstream`. Loading a weight file that contains its state restores it. None
                saves the tables only.
        """
        # Bypasses attribute tracking, which would add the engine to the state of the layer.
        object.__setattr__(self, "_engine", engine)

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the tables, a scalar `tf.Variable`.

        Assign a number to change it. The rate of an update also contains the factor by which the
        rates follow the optimizer of the dense layers (`SparseOptimizer.follow`). None means that
        the tables have a schedule or different rates. Use `table(name).learning_rate` then.
        """
        return self.store.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if self.store.learning_rate is None:
            allowed = (
                "tables with the same constant rate. Set layer.table(name).learning_rate instead"
            )
            raise invalid("learning_rate", value, f"layer {self.name!r}", allowed)
        self.store.learning_rate.assign(require_rate(value, f"layer {self.name!r}"))

    def table(self, name: str) -> TableRows:
        """Returns an object to read, write, remove and list rows by key.

        Example:

        >>> layer = slip.keras.EmbeddingCollection([slip.Table("item", dim=2)])
        >>> layer.table("item").write([7], [[1.0, 2.0]])
        >>> layer(np.array([[7]])).numpy()
        array([[[1., 2.]]], dtype=float32)

        Args:
            name: Name of the table.
        """
        return TableRows(self.store, name)

    def prefetch_rows(
        self, dataset: tf.data.Dataset, get_keys: Callable[..., Any] | None = None
    ) -> tf.data.Dataset:
        """Returns a dataset that loads rows from disk in advance.

        Use it in training and evaluation if tables store rows on disk (`Storage.spill`). For other
        tables it returns `dataset`. Put it last, followed by `.prefetch(2)`, so that the rows are
        loaded while earlier batches train. `Slipstream.apply` includes it.

        Args:
            dataset: Dataset of batches, for example `(features, label)`.
            get_keys: Function that returns the keys of an element, as in `Slipstream.apply`.
        """
        return prefetch_rows(dataset, self.store, self.specs, get_keys)

    def build(self, input_shape: Any = None) -> None:
        """Creates no state, because the constructor creates the tables.

        Args:
            input_shape: Ignored.
        """

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("next_inputs") is not None:
            kwargs["next_inputs"] = self._as_inputs(kwargs["next_inputs"])
        return super().__call__(self._as_inputs(inputs), *args, **kwargs)

    def _as_inputs(self, inputs: Any) -> Any:
        return layouts.as_inputs(inputs, self._specs_of(inputs), f"layer {self.name!r}")

    def _specs_of(self, inputs: Any) -> tuple[FeatureSpec, ...]:
        """Returns the specs of the features in the inputs or input shapes of a call."""
        if self.stacked or not isinstance(inputs, Mapping):
            return self.specs
        return given_specs(inputs, self.specs, f"layer {self.name!r}")

    def call(
        self,
        inputs: Any,
        weights: Any = None,
        training: bool | None = None,
        next_inputs: Any = None,
    ) -> Any:
        """Looks up the rows of a batch and combines each bag.

        Args:
            inputs: A dictionary from feature name to keys: [batch], [batch, width], or a
                RaggedTensor or SparseTensor [batch, None]. It may contain only some features, such
                as the features of a tower. With `stacked=True`, all features are required. Entries
                that are not features are ignored. Alternatively, one matrix [batch, features] with
                a column per feature, in order. Keys are int64, other integers (uint64 keeps its
                bits) or texts, which are hashed in the same way as by the readers.
            weights: A dictionary from feature name to a float32 weight per key, in the layout of
                the keys. The combiner "mean" then divides by the sum of the weights, and "sqrtn" by
                the square root of the sum of their squares. Features that are missing are
                unweighted. No gradient flows to the weights.
            training: Whether to create rows for new keys, count accesses and update rows.
            next_inputs: With `prefetch=True`, the inputs of the next training call, whose keys are
                sent ahead (see `distributed.prefetch_keys`). Ignored without training. With None,
                the next call sends its keys itself. Note: if prefetched inputs are not used, for
                example at the end of an epoch, call `store.discard_prefetched()` on all ranks. The
                callbacks do that.

        Returns:
            A dictionary from feature name to tensor [batch, dim], or a tensor [batch, features,
            dim]; see the class.

        Raises:
            ValueError: There is no feature, the name of a missing feature is misspelled, keys have
                the wrong dtype or rank, or `next_inputs` is given without `prefetch=True`.
            tf.errors.InvalidArgumentError: The keys differ from the `next_inputs` of the previous
                call.
        """
        if next_inputs is not None and not self.prefetch:
            place = f"layer {self.name!r} with next_inputs"
            raise invalid("prefetch", False, place, "True. Pass prefetch=True to the layer")
        specs = self._specs_of(inputs)
        packed = pack(inputs, specs, weights)
        stacked = self._gives_tensor(inputs)
        if _compat.infers_shapes():
            rows = layouts.zero_rows(packed, self._dims, stacked)
        elif training and self.trainable:
            rows = self._trained_lookup(packed, stacked)
            if next_inputs is not None and self._prefetches:
                # The rows of this batch have priority over the prefetched keys.
                with tf.control_dependencies(rows):
                    self.store.prefetch_keys(pack(next_inputs, self._specs_of(next_inputs)))
        else:
            if self.trainable:
                require_training_argument(self, training)
            store = self._exported.store_for(self)
            rows, _ = store.lookup(packed, training=False, stacked=stacked)
        outputs = [tf.cast(tensor, self._row_dtype) for tensor in rows]
        if stacked:
            return outputs[0]
        for index, spec in enumerate(specs):
            if spec.combiner is None:
                outputs[index] = layouts.sequences(outputs[index], packed, index)
        return {spec.name: tensor for spec, tensor in zip(specs, outputs, strict=True)}

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        """Returns a mask per feature name, None for pooled features.

        Keys [batch] have no mask. A key matrix and a layer with `stacked=True` have no masks, and
        the result is None.
        """
        if not isinstance(inputs, Mapping) or self.stacked:
            return None
        specs, mask_of = self._specs_of(inputs), layouts.mask_of
        # A mask [batch] would make Keras leave examples out of the loss.
        return {spec.name: mask_of(spec, inputs[spec.name], min_rank=2) for spec in specs}

    def _trained_lookup(self, packed: Any, stacked: bool) -> list[tf.Tensor]:
        optimizer = self._known_optimizer()
        if optimizer is not None:
            require_fitting_optimizer(self, optimizer)
            self.store.follow(optimizer)
        elif not tf.executing_eagerly():
            self.store.rates.await_optimizer()
        return training_lookup(self.store, self._anchors, self.apply, packed, stacked, self.name)

    def rematerialized_call(self, layer_call: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the call unchanged: a `keras.RematScope` does not look rows up again."""
        return layer_call

    def _known_optimizer(self) -> Any:
        """Returns the optimizer of the anchors, if it is known before it applies gradients."""
        model = _compat.outermost_layer(self)
        if getattr(model, "optimizer", None) is None or _compat.trains_itself(model):
            return self._optimizer_ref()
        return _compat.optimizer_of(model.optimizer, self._anchors[0])

    def _gives_tensor(self, inputs: Any) -> bool:
        if isinstance(inputs, Mapping):
            return self.stacked
        self._require_stackable("a key matrix")
        return True

    def _require_stackable(self, cause: str) -> None:
        if unpooled := [spec.name for spec in self.specs if spec.combiner is None]:
            allowed = (
                "a combiner for every feature, because the output is one tensor. For features "
                "without a combiner, pass keys as a dictionary and leave stacked=False"
            )
            place = f"features {unpooled} of layer {self.name!r} with {cause}"
            raise invalid("combiner", None, place, allowed)
        dims = {spec.name: self._dims[spec.table] for spec in self.specs}
        if len(set(dims.values())) > 1:
            allowed = (
                "the same dimension for all features, because the output is one tensor [batch, "
                "features, dim]. Otherwise pass keys as a dictionary and leave stacked=False"
            )
            raise invalid("dim", dims, f"layer {self.name!r} with {cause}", allowed)

    def compute_output_shape(self, input_shape: Any, weights_shape: Any = None) -> Any:
        """Returns the output shape, or a dictionary of output shapes by feature.

        Args:
            input_shape: Shape of the key matrix, or a dictionary of shapes by feature.
            weights_shape: Ignored.
        """
        is_mapping = isinstance(input_shape, Mapping)
        if self.stacked or not is_mapping:
            first = input_shape[self.specs[0].name] if is_mapping else input_shape
            return (first[0], len(self.specs), self._dims[self.specs[0].table])
        specs, shape_of = self._specs_of(input_shape), layouts.output_shape
        return {s.name: shape_of(s, input_shape[s.name], self._dims[s.table]) for s in specs}

    def compute_output_spec(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs as `keras.KerasTensor`s, without a lookup."""
        specs = self._specs_of(inputs)
        layouts.require_layout(inputs, specs, f"layer {self.name!r}")
        dtype, spec_of = self._row_dtype, layouts.output_spec
        if self._gives_tensor(inputs):
            is_mapping = isinstance(inputs, Mapping)
            shape = {n: t.shape for n, t in inputs.items()} if is_mapping else inputs.shape
            return keras.KerasTensor(self.compute_output_shape(shape), dtype=dtype)
        dims = [(spec, self._dims[spec.table]) for spec in specs]
        return {spec.name: spec_of(spec, inputs[spec.name], dim, dtype) for spec, dim in dims}

    def count_params(self) -> int:
        """Returns the current number of row values, which `summary` shows."""
        return sum(self.store.size(table.name) * table.dim for table in self.tables)

    def save_own_variables(self, store: Any) -> None:
        """Saves the complete state of all tables.

        It consists of rows, slots, access counts, admission filters, times of use, deferred
        gradients, the numbers of updates and lookups, and learning rates. After `include_engine`,
        it also includes the state of the engine.

        Args:
            store: The mapping of Keras from name to array.
        """
        for name, value in self._store_state.export().items():
            store[name] = value
        if self._engine is not None:
            store[_ENGINE] = np.frombuffer(self._engine.serialize(), np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Replaces the state of all tables with a saved state.

        Args:
            store: The mapping of Keras from name to array.

        Raises:
            ValueError: The saved tables or optimizers are different.
        """
        arrays = {name: store[name] for name in store.keys()}  # noqa: SIM118
        self._store_state.restore(arrays)
        if _ENGINE in arrays and self._engine is not None:
            self._engine.restore_backup(np.asarray(arrays[_ENGINE], np.uint8).tobytes())

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type != "savedmodel":
            return children
        children.pop("_store_state", None)  # TensorFlow would warn that it cannot load it.
        return {**children, **self._exported.trackables()}

    def get_config(self) -> dict[str, Any]:
        """Returns a JSON-serializable dictionary for `from_config`, without rows."""
        refuse_legacy_file(f"layer {self.name!r}")
        if self._store_name is None:
            place = f"get_config of layer {self.name!r}"
            allowed = "'native' or 'sok', because a store object is not serializable"
            raise invalid("store", self.store, place, allowed)
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
        """Creates a layer with empty tables from the result of `get_config`."""
        refuse_legacy_file(f"layer {config.get('name', 'embedding_collection')!r}")
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
                place = f"EmbeddingCollection with store={store!r}"
                allowed = f"{default!r}, because SOK exchanges the {what}"
                raise invalid(name, exchange[name], place, allowed)
        from slipstream_tf.tables.sok.embeddings import SokEmbeddingStore

        return SokEmbeddingStore(tables, optimizer, comm)
    # Imported here, so that this module can be imported without the compiled ops.
    if comm is None or comm.size == 1:
        from slipstream_tf.tables.native import NativeStore

        return NativeStore(tables, optimizer)
    from slipstream_tf.distributed.exchanged import ReplicatedStore
    from slipstream_tf.distributed.sharded import ShardedStore

    if placement == "sharded":
        return ShardedStore(tables, optimizer, comm, **exchange)
    if exchange.pop("prefetch"):
        allowed = "'sharded', because replicated tables do not request rows from other ranks"
        raise invalid("placement", placement, "EmbeddingCollection with prefetch=True", allowed)
    return ReplicatedStore(tables, optimizer, comm, **exchange)
