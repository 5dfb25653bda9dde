"""Exports a model as a SavedModel that needs only TensorFlow."""

import functools
import itertools
import keyword
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
from slipstream_tf.export.columns import RawColumns
from slipstream_tf.export.serving import ServedTable, ServingStore, refuse_own_ops, served_by

_ALLOWED = (
    "specs (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec) or an example batch, nested "
    "like the inputs of the model"
)


def saved_model(
    model: Any,
    path: str | os.PathLike[str],
    keys: Mapping[str, Any] | None = None,
    signature: Any = None,
    rows_dtype: str | None = None,
    prepared: str | os.PathLike[str] | None = None,
) -> None:
    """Exports a model as a SavedModel for serving with plain TensorFlow.

    The SavedModel uses only built-in TensorFlow ops, therefore the serving process needs neither
    this package nor its op library. It returns the predictions of
    `model(inputs, training=False)`. The rows are served from TensorFlow hash tables. A key
    without a row gets the initial row that the table's initializer would give it, as in the
    layer. Deferred gradients are applied before the rows are copied. Optimizers and their slots
    are not exported.

    The SavedModel has a function `serve` that takes the same inputs as the model, and a signature
    `"serving_default"` with named tensors:

    - Names of nested inputs are joined by `"_"`, for example `"keys_user"`. Names that TensorFlow
      does not accept or that differ only in case are changed, for example `"größe"` to `"gr__e"`,
      `"class"` to `"inputs_class"`, and `"user"` beside `"User"` to `"user_2"`.
    - A ragged input or output is passed as two tensors: `"NAME"` (flat values) and
      `"NAME_row_splits"`. The splits of further ragged dimensions are `"NAME_row_splits_1"`, and so
      on.
    - A sparse input is passed as three tensors: `"NAME"` (values), `"NAME_indices"` and
      `"NAME_dense_shape"`.
    - The output of a model that returns one tensor is named `"outputs"`.
    - String keys are hashed in the graph, as in the layer.

    With `prepared`, the SavedModel has one input per column of the files that
    `slipstream-prepare` read, with the users' values. Hashing, parsing, splitting of bags,
    transforms and missing values are inside:

    - A key column is text, or int64 or uint64 if the file or the schema has integers. A missing
      value is a text in the schema's `missing`, or the integer `-2**63`.
    - A bag with a `separator` is one text per example. A column of lists is ragged.
    - A dense column is float32 before its transform. NaN is a missing number.

    With multiple ranks, call this function on all ranks. Rank 0 collects the rows of sharded
    tables, writes the files, and must have enough memory for all rows.

    Other threads may train, evaluate, predict and export meanwhile. The rows of a table are a copy
    of one moment, and so is each other weight. Different tables and weights may be copied between
    different steps. For a copy of exactly one step, export while no other thread trains.

    Note: rank 0 needs about four times the memory of the rows for the export, and additional memory
    for one copy of the optimizer slots.

    Example:

    >>> import tempfile
    >>> layer = slip.keras.Embedding(10, 2, optimizer=slip.optimizers.SGD(0.1))
    >>> model = keras.Sequential([keras.Input((), dtype="int64"), layer])
    >>> folder = tempfile.mkdtemp()
    >>> slip.export.saved_model(model, folder)
    >>> served = tf.saved_model.load(folder)
    >>> served.serve(tf.constant([1, 2], tf.int64)).shape
    TensorShape([2, 2])

    Args:
        model: A Keras model with at least one `EmbeddingCollection` at any depth, or an
            `EmbeddingCollection`. It is called with `training=False`.
        path: Folder to write. It must not exist or must be empty.
        keys: The keys to export, as a mapping from table name to int64 [n]. For example, export
            only the hot keys from `store.hot_keys`, or no key of the tables that only another tower
            uses. Tables that are not named are exported completely. Keys that are not exported are
            served with their initial row, as if they had never been trained. If multiple layers
            have a table of the same name, use `"layer/table"`.
        signature: The model's input specs (`tf.TensorSpec`, ragged or sparse), nested like its
            inputs, or an example batch. The exported function accepts any batch size for dense
            specs and for an example batch. Defaults to the model's `input_signature()` (the click
            models have this method: one number per dense feature, and per categorical feature a key
            or a bag, as in training), else to the model's symbolic inputs.
        rows_dtype: Dtype of the exported rows: `"float32"`, `"bfloat16"`, `"float16"`, or
            `"int8"` with one scale per row. Lookups return float32 in all cases. Defaults to
            the dtype of each table (`Storage.dtype`). Note: a dtype other than the table's rounds
            the rows. A delta can neither be computed from nor applied to a rounded SavedModel.
        prepared: Folder of the training data, which `slipstream-prepare` wrote with a schema. The
            model takes the features that `PreparedReader` returns.

    Raises:
        ValueError: If `rows_dtype` is not supported, the model has no embedding tables, its inputs
            are unknown, `keys` names an unknown table, `path` is a file or a folder that is not
            empty, `prepared` was not prepared with a schema, or `signature` and `prepared` are both
            given. Also if the `call` of the model is a `tf.function`, because TensorFlow would
            share its traces between training and the export.
        RuntimeError: On the other ranks, if rank 0 failed.
    """
    if rows_dtype is not None:
        require_choice("rows_dtype", rows_dtype, (*ROW_DTYPES, "int8"), "saved_model")
    if prepared is not None and signature is not None:
        raise invalid("signature", signature, "saved_model with `prepared`", "None")
    columns = None if prepared is None else RawColumns(prepared)
    tables = rows.collect(model, keys)
    write = functools.partial(_write, model, tables or [], path, signature, rows_dtype, columns)
    rows.on_rank_zero(model, write, f"write {os.fspath(path)}")


def _write(
    model: Any,
    tables: list[rows.ExportedTable],
    path: str | os.PathLike[str],
    given: Any,
    rows_dtype: str | None,
    columns: RawColumns | None,
) -> None:
    target = rows.require_new(path, "saved_model")
    specs = resolve(model, given) if columns is None else columns.signature
    served = [ServedTable(table.config, table.keys, table.rows, rows_dtype) for table in tables]
    root = tf.Module()
    root.tables = served
    root.weights = rows.weights_of(model)
    stores = _serving_stores(model, served)

    @tf.function(input_signature=[specs])
    def serve(inputs: Any) -> Any:
        with served_by(stores):
            features = inputs if columns is None else columns.features(inputs)
            return model(features, training=False)

    @tf.function
    def serve_flat(**inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return flat_outputs(serve(nested(specs, inputs)))

    def write(folder: Path) -> None:
        flat = serve_flat.get_concrete_function(**flat_specs(specs))
        root.serve = serve
        refuse_own_ops(
            flat.graph.as_graph_def(),
            "a model with a `call` that is not a tf.function, because a graph from training keeps "
            "the ops of slipstream_tf. Decorate the training step with tf.function instead",
        )
        _track_rest(root, model, flat)
        tf.saved_model.save(root, str(folder), signatures={"serving_default": flat})
        entries = [rows.table_entry(table, rows_dtype) for table in tables]
        weights = rows.weight_entries(root.weights)
        rows.write_manifest(folder, rows.manifest_of(entries, weights))

    rows.write_whole(target, write)


def _serving_stores(model: Any, served: list[ServedTable]) -> dict[int, ServingStore]:
    """Returns the serving store of each layer of a model, by the `id` of the layer."""
    layers = rows.layers_of(model)
    of_layer: dict[int, list[ServedTable]] = {id(layer): [] for layer in layers}
    for (layer, _, _), table in zip(rows.table_names(layers), served, strict=True):
        of_layer[id(layer)].append(table)
    return {layer: ServingStore(tables) for layer, tables in of_layer.items()}


def _track_rest(root: Any, model: Any, traced: Any) -> None:
    """Adds the model's other variables and lookup tables to the SavedModel.

    The variables are those that are neither in `model.weights` nor in a served table.
    """
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
    """Returns the specs of a model's inputs.

    Args:
        model: The model to export.
        signature: Specs, or an example batch, nested like the model's inputs. None takes the specs
            from the model's `input_signature()` method, else from its symbolic inputs (functional
            and sequential models).

    Returns:
        `tf.TensorSpec`, `tf.RaggedTensorSpec` and `tf.SparseTensorSpec`, nested like the model's
        inputs. The batch dimension of dense specs and of tensors in an example is None. Ragged and
        sparse specs, and the specs from `input_signature()`, are returned unchanged.

    Raises:
        ValueError: If the model does not define its inputs, or a leaf is neither a spec nor a
            tensor with a batch dimension.
    """
    if signature is None:
        if callable(getattr(model, "input_signature", None)):
            return model.input_signature()
        signature = getattr(model, "input", None)
        if signature is None and len(getattr(model, "inputs", ())) == 1:
            (signature,) = model.inputs  # Sequential models provide only `inputs`.
        if signature is None:
            place = f"model {getattr(model, 'name', model)!r}, which does not define its inputs"
            raise invalid("signature", None, place, _ALLOWED)
    return tf.nest.map_structure(_spec, signature)


def _spec(leaf: Any) -> tf.TypeSpec:
    if isinstance(leaf, (tf.RaggedTensorSpec, tf.SparseTensorSpec)):
        return leaf
    if isinstance(leaf, tf.SparseTensor) or getattr(leaf, "sparse", False):
        return tf.SparseTensorSpec([None] * len(leaf.shape), tf.as_dtype(leaf.dtype))
    if isinstance(leaf, tf.RaggedTensor):
        shape = [None] * (leaf.ragged_rank + 1) + leaf.flat_values.shape[1:]
        return tf.RaggedTensorSpec(shape, leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype)
    if getattr(leaf, "ragged", False):  # A symbolic input. Older releases of Keras have no rank.
        rank = getattr(leaf, "ragged_rank", None) or 1
        return tf.RaggedTensorSpec(leaf.shape, tf.as_dtype(leaf.dtype), rank)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype") or not len(leaf.shape):
        raise invalid("signature", leaf, "an exported model", _ALLOWED)
    return tf.TensorSpec([None, *leaf.shape[1:]], tf.as_dtype(leaf.dtype))


def leaves(structure: Any, prefix: str, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields (name, leaf) for each leaf of a nested structure.

    Leaves have the order of `tf.nest.flatten`. A name consists of the keys and indices on the path
    to the leaf, joined by `"_"`. Characters other than letters, digits and `"_"` are replaced by
    `"_"`.

    Args:
        structure: Dictionaries, lists and tuples of leaves.
        prefix: Start of a name that would be empty or start with a digit.
        path: Keys and indices from the root to `structure`.
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


def _suffixes(spec: tf.TypeSpec) -> tuple[str, ...]:
    """Returns the name suffixes of the component tensors of an input, in TensorFlow's order."""
    if isinstance(spec, tf.RaggedTensorSpec):
        return ("", *_split_suffixes(spec.ragged_rank))
    return ("_indices", "", "_dense_shape") if isinstance(spec, tf.SparseTensorSpec) else ("",)


def _split_suffixes(ragged_rank: int) -> list[str]:
    """Returns the name suffixes of the row splits of a ragged tensor, from the outermost."""
    return ["_row_splits" + (f"_{level}" if level else "") for level in range(ragged_rank)]


def flat_specs(specs: Any) -> dict[str, tf.TensorSpec]:
    """Returns the specs of the signature `"serving_default"`, by input name.

    A ragged or sparse input has one entry for each of its component tensors. The names are those of
    `leaves`, changed to what TensorFlow accepts as arguments and as names of ops:

    - Other characters than ASCII letters, digits and `"_"` are replaced by `"_"`.
    - A name that is a keyword of Python or `"self"`, or that does not start with a letter, starts
      with `"inputs_"` instead of its leading underscores.
    - A name that differs from an earlier name at most in case gets the suffix `"_2"`, `"_3"`, and
      so on. Names that the two rules above do not change come first.

    Args:
        specs: The specs of the model's inputs, from `resolve`.

    Returns:
        The specs in the order of `tf.nest.flatten`. The names are unique without regard to case.
    """
    found = list(leaves(specs, "inputs"))
    accepted = [_accepted(name) for name, _ in found]
    parts: dict[int, list[str]] = {}
    taken: set[str] = set()
    # Sorting is stable: within the changed and the unchanged names, the order remains.
    for index in sorted(range(len(found)), key=lambda i: accepted[i] != found[i][0]):
        for number in itertools.count(1):
            name = accepted[index] + (f"_{number}" if number > 1 else "")
            parts[index] = [f"{name}{suffix}" for suffix in _suffixes(found[index][1])]
            if taken.isdisjoint(part.lower() for part in parts[index]):
                break
        taken.update(part.lower() for part in parts[index])
    flat: dict[str, tf.TensorSpec] = {}
    for index, (_, spec) in enumerate(found):
        tensors = tf.nest.flatten(spec, expand_composites=True)
        for part, tensor in zip(parts[index], tensors, strict=True):
            flat[part] = tf.TensorSpec(tensor.shape, tensor.dtype, name=part)
    return flat


def _accepted(name: str) -> str:
    """Returns a name that TensorFlow accepts for an argument and an op, see `flat_specs`."""
    name = re.sub(r"\W", "_", name, flags=re.ASCII)
    if name[0].isalpha() and not keyword.iskeyword(name) and name != "self":
        return name
    return "_".join(filter(None, ("inputs", name.lstrip("_"))))


def nested(specs: Any, flat: Mapping[str, tf.Tensor]) -> Any:
    """Packs named tensors into the model's input structure.

    Args:
        specs: The specs of the model's inputs, from `resolve`.
        flat: A tensor for each name in `flat_specs(specs)`.
    """
    tensors = iter(flat[name] for name in flat_specs(specs))

    def next_of(spec: Any) -> Any:
        # `expand_composites` would not validate the row splits, which clients provide.
        if isinstance(spec, tf.RaggedTensorSpec):
            flat_values = next(tensors)
            splits = [next(tensors) for _ in range(spec.ragged_rank)]
            return tf.RaggedTensor.from_nested_row_splits(flat_values, splits)
        if isinstance(spec, tf.SparseTensorSpec):
            return tf.SparseTensor(next(tensors), next(tensors), next(tensors))
        return next(tensors)

    return tf.nest.map_structure(next_of, specs)


def flat_outputs(outputs: Any) -> dict[str, tf.Tensor]:
    """Returns the model's outputs by name.

    A ragged output has the entries `"NAME"` (flat values) and `"NAME_row_splits"`, and further
    row splits as in `saved_model`.
    """
    flat = {}
    for name, output in leaves(outputs, "outputs"):
        if isinstance(output, tf.RaggedTensor):
            suffixes = _split_suffixes(output.ragged_rank)
            for suffix, splits in zip(suffixes, output.nested_row_splits, strict=True):
                flat[f"{name}{suffix}"] = splits
            output = output.flat_values
        flat[name] = output
    return flat
