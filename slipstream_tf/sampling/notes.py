"""Adds notes to a batch's features, and removes them.

Notes are additional features of each example, for example whether it could have been dropped, or
the offset of its log-odds.
"""

from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from slipstream_tf.data.spec import FRACTION_OF_STEP, NOTES
from slipstream_tf.ops.features import num_rows

FEATURES = "slipstream_features"
"""Name under which features that are not a mapping are stored, for example a key matrix."""


def add_notes(features: Any, **notes: Any) -> dict[str, Any]:
    """Adds notes to features.

    Args:
        features: A mapping, or another structure, which is stored under the name `FEATURES`.
        **notes: Tensors [batch] by name: `"skippable"`, `"log_odds_offset"` or `"fraction_of_step"`
            (see `data.spec`).

    Returns:
        A new mapping.
    """
    if not isinstance(features, Mapping):
        features = {FEATURES: features}
    return {**features, **notes}


def take_notes(features: Any, own: Collection[str] = ()) -> tuple[Any, dict[str, Any]]:
    """Removes notes from features.

    Args:
        features: Features that `add_notes` returned, or features without notes.
        own: Names of model inputs. They are never treated as notes.

    Returns:
        The original features, and the notes by name.
    """
    if not isinstance(features, Mapping):
        return features, {}
    notes = {n: features[n] for n in NOTES if n in features and n not in own}
    if FEATURES in features:
        return features[FEATURES], notes
    if not notes:
        return features, notes
    return {name: value for name, value in features.items() if name not in notes}, notes


def without_wrapping(features: Any) -> Any:
    """Returns the original features if `add_notes` wrapped them.

    Mappings are returned with their notes.
    """
    if isinstance(features, Mapping) and FEATURES in features:
        return features[FEATURES]
    return features


@tf.autograph.experimental.do_not_convert
def note_fraction(batch: tuple[Any, ...], fraction: tf.Tensor) -> tuple[Any, ...]:
    """Adds the relative batch size of a rank to its batch.

    The loss of a rank is a mean over its batch. The model scales the loss by this note, so that
    examples count equally if batch sizes differ between ranks.

    Args:
        batch: `(features, label, ...)`.
        fraction: float32 scalar: examples of this batch divided by the mean over the ranks.

    Returns:
        The batch, with the note `"fraction_of_step"` in its features.
    """
    features, label, *rest = batch
    rows = num_rows(tf.nest.flatten(label)[0])
    return (add_notes(features, **{FRACTION_OF_STEP: tf.fill([rows], fraction)}), label, *rest)
