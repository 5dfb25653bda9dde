"""What the engine writes beside a batch's features, and takes off again before a model sees them.

In: features of any form, and notes of each input: whether it could have been left out, what its
log-odds are shifted by. Out: a mapping that holds both; of that, the features as they were.
"""

from collections.abc import Collection, Mapping
from typing import Any

import tensorflow as tf

from slipstream_tf.data.spec import NOTES, SHARE
from slipstream_tf.ops.features import num_rows

FEATURES = "slipstream_features"
"""Name of what the features were, where they are no mapping: a key matrix, a tuple."""


def add_notes(features: Any, **notes: Any) -> dict[str, Any]:
    """Returns a mapping with notes beside the features.

    Args:
        features: a mapping, or anything else, which becomes `FEATURES` of the mapping.
        **notes: "skippable", "log_odds_offset", "share_of_step".
    """
    if not isinstance(features, Mapping):
        features = {FEATURES: features}
    return {**features, **notes}


def take_notes(features: Any, own: Collection[str] = ()) -> tuple[Any, dict[str, Any]]:
    """Takes the notes off.

    Args:
        features: as `add_notes` returned them, or without any notes.
        own: names of features that are no notes, whatever their name.

    Returns:
        The features as they were, and the notes by name.
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
    """Returns the features as they were if they are no mapping, else the mapping with its notes."""
    if isinstance(features, Mapping) and FEATURES in features:
        return features[FEATURES]
    return features


def note_share(batch: tuple[Any, ...], share: tf.Tensor) -> tuple[Any, ...]:
    """Returns a batch of a rank with its share of the step noted, of which its loss is a mean.

    Args:
        batch: (features, label, ...).
        share: float32 scalar, its inputs over the mean of the ranks' batches.
    """
    features, label, *rest = batch
    rows = num_rows(tf.nest.flatten(label)[0])
    return (add_notes(features, **{SHARE: tf.fill([rows], share)}), label, *rest)
