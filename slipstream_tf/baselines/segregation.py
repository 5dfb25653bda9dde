"""Batches of only hot or only cold examples (the schedule of FAE).

Hot keys, the most accessed keys, are chosen before training. An example is hot if all its keys are
hot, else cold. No example is dropped. FAE (frequently accessed embeddings, Adnan et al., arXiv
2103.00686) replicates the rows of hot keys on all ranks, so that hot batches need no exchange of
rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf._utils.errors import invalid, require_integer
from slipstream_tf.distributed.batches import no_inputs
from slipstream_tf.engine.hot_set import Candidates, choose_hot_keys, snapshot_bytes
from slipstream_tf.ops.features import PADDING_KEY, num_rows
from slipstream_tf.sampling.batches import chosen_rows

# Number of examples after which the collected key counts are merged.
_MERGED_AT_ONCE = 1 << 18


def segregate(
    dataset: tf.data.Dataset, hot_keys: Sequence[Any], batch_size: int
) -> tf.data.Dataset:
    """Sorts examples into batches of hot examples and batches of cold examples.

    Every example occurs exactly once in the result. Hot examples keep their order, and so do cold
    examples. A batch is emitted as soon as it is full. If one batch of the dataset fills a hot and
    a cold batch, the hot batch is emitted first. The remaining examples are emitted at the end, hot
    examples first. Padding (-1) counts as hot.

    Args:
        dataset: Batches `(features, label)` of dense tensors. `features` is a mapping with the
            entry "keys", integers [batch, fields].
        hot_keys: For each column of "keys", its hot keys, integers [n] in any order.
        batch_size: Number of examples per output batch. The last batch of each kind may be smaller.

    Returns:
        The dataset of batches `(features, label)`. Its static batch dimension is unknown.

    Raises:
        ValueError: The elements have another structure, or the number of lists in `hot_keys`
            differs from the number of columns.
    """
    fields = _require_key_matrix(dataset.element_spec, "segregate")
    require_integer("batch_size", batch_size, 1, None, "segregate")
    if len(hot_keys) != fields:
        allowed = f"one list of keys per field, {fields} in total"
        raise invalid("hot_keys", f"{len(hot_keys)} lists", "segregate", allowed)
    hot = [np.unique(np.asarray(keys, np.int64)) for keys in hot_keys]
    empty = no_inputs(dataset.element_spec, "segregate")

    def sort(waiting: Any, is_end: tf.Tensor, batch: Any) -> Any:
        is_hot = tf.reduce_all(are_hot(batch[0]["keys"], hot), axis=1)
        kinds = (chosen_rows(batch, is_hot), chosen_rows(batch, ~is_hot))
        joined = tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), waiting, kinds)
        taken, rest = zip(*(_first_rows(kind, batch_size, is_end) for kind in joined), strict=True)
        return rest, taken

    def in_batches(hot_part: Any, cold_part: Any) -> tf.data.Dataset:
        parts = (hot_part, cold_part)
        first, second = (tf.data.Dataset.from_tensors(p).rebatch(batch_size) for p in parts)
        return first.concatenate(second)

    going_on = dataset.map(lambda *batch: (False, batch))
    ended = going_on.concatenate(tf.data.Dataset.from_tensors((True, empty)))
    sorted_parts = ended.scan((empty, empty), lambda waiting, element: sort(waiting, *element))
    return sorted_parts.flat_map(in_batches)


def profile_hot_keys(
    dataset: tf.data.Dataset, budget_bytes: int, row_bytes: int
) -> list[np.ndarray]:
    """Counts keys in one pass and returns the most accessed keys.

    Args:
        dataset: A finite dataset as for `segregate`. Padding (-1) is not counted.
        budget_bytes: Maximum size in bytes of the hot rows of all columns together.
        row_bytes: Bytes per row, a multiple of 4, the same for all columns.

    Returns:
        For each key column, its hot keys, int64 [n] in ascending order.

    Raises:
        ValueError: The elements have another structure, or a number is out of range.
    """
    fields = _require_key_matrix(dataset.element_spec, "profile_hot_keys")
    require_integer("row_bytes", row_bytes, 1, None, "profile_hot_keys")
    dim, rest = divmod(row_bytes, snapshot_bytes(1))
    if rest:
        allowed = f"a multiple of {snapshot_bytes(1)}, the bytes of a float32 value"
        raise invalid("row_bytes", row_bytes, "profile_hot_keys", allowed)
    nothing = np.empty(0, np.int64), np.empty(0, np.int64)
    counted, waiting = [[nothing] for _ in range(fields)], 0
    for features, _ in dataset:
        keys = features["keys"].numpy().astype(np.int64)
        for parts, column in zip(counted, keys.T, strict=True):
            parts.append(np.unique(column[column != PADDING_KEY], return_counts=True))
        waiting += len(keys)
        if waiting >= _MERGED_AT_ONCE:
            counted, waiting = [[_merged(parts)] for parts in counted], 0
    tables = [Candidates(*_merged(parts), dim) for parts in counted]
    return choose_hot_keys(tables, budget_bytes)


def _merged(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Adds up the counts of equal keys.

    Args:
        parts: Keys and counts, each int64 [n].

    Returns:
        Unique keys in ascending order, and their counts.
    """
    keys, index = np.unique(np.concatenate([keys for keys, _ in parts]), return_inverse=True)
    counts = np.zeros(keys.size, np.int64)
    np.add.at(counts, index.ravel(), np.concatenate([counts for _, counts in parts]))
    return keys, counts


def _require_key_matrix(element_spec: Any, place: str) -> int:
    """Returns the number of key columns; raises ValueError without a matrix."""
    is_pair = isinstance(element_spec, tuple) and len(element_spec) == 2
    is_mapping = is_pair and isinstance(element_spec[0], Mapping)
    keys: Any = element_spec[0].get("keys") if is_mapping else None
    are_dense = all(isinstance(part, tf.TensorSpec) for part in tf.nest.flatten(element_spec))
    is_matrix = isinstance(keys, tf.TensorSpec) and keys.dtype.is_integer and keys.shape.rank == 2
    if not (is_matrix and are_dense) or keys.shape[1] is None:
        allowed = (
            'elements (features, label) of dense tensors, with integers features["keys"] of shape '
            "[batch, fields] and a static number of fields"
        )
        raise invalid("dataset", element_spec, place, allowed)
    return int(keys.shape[1])


def are_hot(keys: tf.Tensor, hot: Sequence[np.ndarray]) -> tf.Tensor:
    """Returns for each key whether it is hot or padding.

    Args:
        keys: integers [batch, columns].
        hot: For each column, int64 [n], ascending.

    Returns:
        bool [batch, columns].
    """
    keys = tf.cast(keys, tf.int64)
    found = []
    for column, hot_column in zip(tf.unstack(keys, axis=1), hot, strict=True):
        is_found = tf.equal(column, PADDING_KEY)
        if hot_column.size:
            index = tf.searchsorted(hot_column, column, out_type=tf.int64)
            index = tf.minimum(index, hot_column.size - 1)
            is_found |= tf.equal(tf.gather(hot_column, index), column)
        found.append(is_found)
    return tf.stack(found, axis=1)


def _first_rows(batch: Any, full: int, is_end: tf.Tensor) -> tuple[Any, Any]:
    """Splits off the examples that fill whole batches.

    Args:
        batch: Structure of tensors [n, ...].
        full: Number of examples in a full batch.
        is_end: Whether the data ends, so that all examples are split off.

    Returns:
        The first examples, and the rest.
    """
    size = num_rows(tf.nest.flatten(batch)[0])
    count = tf.where(is_end, size, size // full * full)
    first = tf.nest.map_structure(lambda part: part[:count], batch)
    rest = tf.nest.map_structure(lambda part: part[count:], batch)
    return first, rest
