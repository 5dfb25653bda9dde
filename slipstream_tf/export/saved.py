"""Writes a model as a SavedModel that needs neither this package nor its op library."""

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from slipstream_tf import _compat
from slipstream_tf._utils.errors import invalid, require_choice
from slipstream_tf.config import ROW_DTYPES
from slipstream_tf.export import rows
from slipstream_tf.export.serving import ServedTable, ServingStore

_ALLOWED = (
    "for a model of no known inputs: specs (tf.TensorSpec, tf.RaggedTensorSpec) or a batch of "
    "inputs, nested as the model takes them"
)

# Suffixes of the names for the tensors of a composite input, in TensorFlow's order.
_SUFFIXES: Mapping[type, tuple[str, ...]] = {
    tf.RaggedTensorSpec: ("", "_row_splits"),
    tf.SparseTensorSpec: ("_indices", "", "_dense_shape"),
}


def saved_model(
    model: Any,
    path: str | os.PathLike[str],
    keys: Mapping[str, Any] | None = None,
    signature: Any = None,
    rows_dtype: str | None = None,
) -> None:
    """Writes a SavedModel that TensorFlow alone can load and serve.

        slip.export.saved_model(model, "served/1")
        served = tf.saved_model.load("served/1")
        served.signatures["serving_default"](dense=..., keys=...)

    Its predictions are those of `model(inputs, training=False)`: rows are in hash tables of
    TensorFlow's, and a key without a row gets the row that its table's initializer would start it
    with, as in the layer. Deferred gradients are applied before the rows are copied.
    Optimizers and their slots are not in it. While it writes, it needs memory for the rows about
    four times, and for the slots once.

    The SavedModel has the function `serve`, which takes what the model takes, and the signature
    "serving_default" of named tensors: nested names are joined by "_" ("keys_user"), a ragged input
    or output is two tensors, "NAME" (its flat values) and "NAME_row_splits", a sparse input three,
    "NAME" (its values), "NAME_indices" and "NAME_dense_shape". A model that gives one tensor gives
    "outputs". Texts as keys are hashed in the graph, as the layer does.

    On several ranks all must call it; rank 0 writes. Rows of sharded tables are sent to rank 0,
    which needs memory for all of them.

    Args:
        model: a Keras model with one `EmbeddingCollection` or more anywhere, of `slip.models` or
            one's own, or such a layer by itself. It is called with `training=False`.
        path: folder to be written; not there yet, or empty.
        keys: table name -> keys, int64 [n], whose rows are exported, e.g. the hot ones of
            `store.hot_keys`; a table not named is exported whole. Other keys get their initial row,
            as if they had never been trained. Tables of one name in several layers are
            "layer/table".
        signature: specs (tf.TensorSpec, ragged or sparse) nested like the model's inputs, or a
            batch of inputs whose specs are taken (batch dimension None). None: those of the model's
            `input_signature()` (the click models: a number per dense feature and one key per
            feature) or of its symbolic inputs.
        rows_dtype: of the rows in the SavedModel: "float32", "bfloat16", "float16", or "int8" with
            a scale for each row; the graph makes float32 of what it looks up. None: as each table
            keeps its rows (`Storage.dtype`). Rows of another dtype than that are rounded: no delta
            can be since such a SavedModel, or be applied to it.

    Raises:
        ValueError: `rows_dtype` is another, the model has no embedding tables or does not tell its
            inputs, `keys` names an unknown table, something is at `path`, or the graph has ops of
            this package all the same (the model's `call` is a `tf.function` that was traced
            before).
    """
    if rows_dtype is not None:
        require_choice("rows_dtype", rows_dtype, (*ROW_DTYPES, "int8"), "saved_model")
    tables = rows.collect(model, keys)
    write = functools.partial(_write, model, tables or [], path, signature, rows_dtype)
    rows.on_rank_zero(model, write, f"write {os.fspath(path)}")


def _write(
    model: Any,
    tables: list[rows.TableRows],
    path: str | os.PathLike[str],
    given: Any,
    rows_dtype: str | None,
) -> None:
    target = rows.require_new(path, "saved_model")
    specs = resolve(model, given)
    served = [ServedTable(table.config, table.keys, table.rows, rows_dtype) for table in tables]
    root = tf.Module()
    root.tables = served
    root.weights = rows.weights_of(model)

    @tf.function(input_signature=[specs])
    def serve(inputs: Any) -> Any:
        return model(inputs, training=False)

    @tf.function
    def serve_flat(**inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return flat_outputs(serve(nested(specs, inputs)))

    def write(folder: Path) -> None:
        # TensorFlow traces anew where it writes, too.
        with _served_by(model, served):
            flat = serve_flat.get_concrete_function(**flat_specs(specs))
            root.serve = serve
            _refuse_own_ops(flat)
            _track_rest(root, model, flat)
            tf.saved_model.save(root, str(folder), signatures={"serving_default": flat})
        entries = [rows.table_entry(table, rows_dtype) for table in tables]
        weights = rows.weight_entries(root.weights)
        rows.write_manifest(folder, rows.manifest_of(entries, weights))

    rows.write_whole(target, write)


@contextlib.contextmanager
def _served_by(model: Any, served: list[ServedTable]) -> Iterator[None]:
    """Gives the model's layers stores of TensorFlow's own ops while it is traced."""
    layers = rows.layers_of(model)
    of_layer: dict[int, list[ServedTable]] = {id(layer): [] for layer in layers}
    for (layer, _, _), table in zip(rows.table_names(layers), served, strict=True):
        of_layer[id(layer)].append(table)
    stores = [layer.store for layer in layers]
    try:
        for layer in layers:
            layer.store = ServingStore(of_layer[id(layer)])
        yield
    finally:
        for layer, store in zip(layers, stores, strict=True):
            layer.store = store


def _refuse_own_ops(traced: Any) -> None:
    graph = traced.graph.as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    own = sorted({node.op for node in [*graph.node, *nodes] if node.op.startswith("Slipstream")})
    if own:
        allowed = (
            "a model whose call is no tf.function of its own (a graph that was traced in training "
            "keeps its ops): decorate the training step instead"
        )
        raise invalid("model", own, "a SavedModel with ops of slipstream_tf", allowed)


def _track_rest(root: Any, model: Any, traced: Any) -> None:
    """Keeps what the graph reads besides tables and weights: variables, a user's lookup tables."""
    known = {v.ref() for v in root.weights}
    known |= {v.ref() for table in root.tables for v in table.variables_by_name().values()}
    root.others = [v for v in traced.graph.variables if v.ref() not in known]
    parts = [
        part
        for layer in _compat.layers_in(model)
        for part in tf.train.TrackableView(layer).descendants()
        if isinstance(part, tf.saved_model.experimental.TrackableResource)
    ]
    root.resources = list({id(part): part for part in parts}.values())


def resolve(model: Any, signature: Any) -> Any:
    """Finds the specs of a model's inputs.

    Args:
        model: that is exported.
        signature: specs, or a batch whose shapes and dtypes are taken, nested as the model takes
            them; None: from the model: its method `input_signature` (the click models have it) or
            its symbolic inputs (functional and sequential models).

    Returns:
        tf.TensorSpec, tf.RaggedTensorSpec and tf.SparseTensorSpec, nested alike, with a batch
        dimension of None.

    Raises:
        ValueError: the model does not tell, or a leaf is neither a spec nor a tensor.
    """
    if signature is None:
        if callable(getattr(model, "input_signature", None)):
            return model.input_signature()
        signature = getattr(model, "input", None)
        if signature is None and len(getattr(model, "inputs", ())) == 1:
            (signature,) = model.inputs  # Of a Sequential model.
        if signature is None:
            raise invalid("signature", None, f"model {getattr(model, 'name', model)!r}", _ALLOWED)
    return tf.nest.map_structure(_spec, signature)


def _spec(leaf: Any) -> tf.TypeSpec:
    if isinstance(leaf, (tf.RaggedTensorSpec, tf.SparseTensorSpec)):
        return leaf
    if isinstance(leaf, tf.SparseTensor) or getattr(leaf, "sparse", False):
        return tf.SparseTensorSpec([None] * len(leaf.shape), tf.as_dtype(leaf.dtype))
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(
            [None, None], leaf.dtype, ragged_rank=1, row_splits_dtype=leaf.row_splits.dtype
        )
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") or not len(leaf.shape):
        raise invalid("signature", leaf, "an exported model", _ALLOWED)
    return tf.TensorSpec([None, *leaf.shape[1:]], tf.as_dtype(leaf.dtype))


def leaves(structure: Any, prefix: str, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields (name, leaf) of a nested structure, in the order of `tf.nest.flatten`.

    A name is made of the keys and indices on the way, joined by "_", other characters than
    letters, digits and "_" replaced; the prefix is before it if it is empty or begins with a digit.
    """
    if isinstance(structure, Mapping):
        for key in sorted(structure):
            yield from leaves(structure[key], prefix, (*path, str(key)))
    elif isinstance(structure, (list, tuple)):
        for index, part in enumerate(structure):
            yield from leaves(part, prefix, (*path, str(index)))
    else:
        name = re.sub(r"\W", "_", "_".join(path))
        is_name = name and not name[0].isdigit()
        yield name if is_name else "_".join(filter(None, (prefix, name))), structure


def flat_specs(specs: Any) -> dict[str, tf.TensorSpec]:
    """Returns a flat signature's inputs by name; of composite ones, the tensors that make them.

    Raises:
        ValueError: two inputs would have one name.
    """
    flat: dict[str, tf.TensorSpec] = {}
    for name, spec in leaves(specs, "inputs"):
        tensors = tf.nest.flatten(spec, expand_composites=True)
        for suffix, tensor in zip(_SUFFIXES.get(type(spec), ("",)), tensors, strict=True):
            part = f"{name}{suffix}"
            if part in flat:
                allowed = "inputs whose names differ in letters, digits and '_'"
                raise invalid("signature", part, "an exported model", allowed)
            flat[part] = tf.TensorSpec(tensor.shape, tensor.dtype, name=part)
    return flat


def nested(specs: Any, flat: Mapping[str, tf.Tensor]) -> Any:
    """Puts the tensors of a flat signature back into the model's own structure."""
    tensors = iter(flat[name] for name in flat_specs(specs))

    def next_of(spec: Any) -> Any:
        # Not by `expand_composites`, which would not check the row splits.
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensor.from_row_splits(next(tensors), next(tensors))
        if isinstance(spec, tf.SparseTensorSpec):
            return tf.SparseTensor(next(tensors), next(tensors), next(tensors))
        return next(tensors)

    return tf.nest.map_structure(next_of, specs)


def flat_outputs(outputs: Any) -> dict[str, tf.Tensor]:
    """Returns a model's outputs by name; of a ragged one, flat values and row splits."""
    flat = {}
    for name, output in leaves(outputs, "outputs"):
        if isinstance(output, tf.RaggedTensor):
            flat[f"{name}_row_splits"] = output.row_splits
            output = output.flat_values
        flat[name] = output
    return flat
