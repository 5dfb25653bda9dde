"""What a served model takes and gives. In: a model, or what a user says. Out: specs and names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from slipstream_tf.errors import invalid

_ALLOWED = (
    "for a model of no known inputs: specs (tf.TensorSpec, tf.RaggedTensorSpec) or a batch of "
    "inputs, nested as the model takes them"
)


def resolve(model: Any, signature: Any) -> Any:
    """Finds the specs of a model's inputs.

    Args:
        model: that is exported.
        signature: specs, or a batch whose shapes and dtypes are taken, nested as the model takes
            them; None: from the model: its method `input_signature` (the click models have it) or
            its symbolic inputs (functional and sequential models).

    Returns:
        tf.TensorSpec and tf.RaggedTensorSpec, nested alike, with a batch dimension of None.

    Raises:
        ValueError: the model does not tell, or a leaf is neither a spec nor a tensor.
    """
    if signature is None:
        if callable(getattr(model, "input_signature", None)):
            return model.input_signature()
        signature = getattr(model, "input", None)
        if signature is None:
            raise invalid("signature", None, f"model {getattr(model, 'name', model)!r}", _ALLOWED)
    return tf.nest.map_structure(_spec, signature)


def _spec(leaf: Any) -> tf.TypeSpec:
    if isinstance(leaf, tf.RaggedTensorSpec):
        return leaf
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
    """Returns a flat signature's inputs by name; of a ragged one, flat values and row splits.

    Raises:
        ValueError: two inputs would have one name.
    """
    flat: dict[str, tf.TensorSpec] = {}
    for name, spec in leaves(specs, "inputs"):
        parts = {name: spec}
        if isinstance(spec, tf.RaggedTensorSpec):
            parts = {
                name: tf.TensorSpec([None], spec.dtype),
                f"{name}_row_splits": tf.TensorSpec([None], spec.row_splits_dtype),
            }
        for part, tensor in parts.items():
            if part in flat:
                allowed = "inputs whose names differ in letters, digits and '_'"
                raise invalid("signature", part, "an exported model", allowed)
            flat[part] = tf.TensorSpec(tensor.shape, tensor.dtype, name=part)
    return flat


def nested(specs: Any, flat: Mapping[str, tf.Tensor]) -> Any:
    """Puts the tensors of a flat signature back into the model's own structure."""
    tensors = iter(flat[name] for name in flat_specs(specs))
    whole = [
        tf.RaggedTensor.from_row_splits(next(tensors), next(tensors))
        if isinstance(spec, tf.RaggedTensorSpec)
        else next(tensors)
        for spec in tf.nest.flatten(specs)
    ]
    return tf.nest.pack_sequence_as(specs, whole)


def named_outputs(outputs: Any) -> dict[str, tf.Tensor]:
    """Returns a model's outputs by name: "outputs" for a single tensor, else as for inputs."""
    return dict(leaves(outputs, "outputs"))
