"""The op of the classifier's pilot: which inputs of a batch are kept by their foreseen losses.

In: a classifier, keys and labels of a batch. Out: the rows that are kept, and what corrects for the
others. Methods: local case-control sampling (Fithian & Hastie, 2014), nonuniform negative sampling
(Wang, Zhang & Wang, 2021).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from slipstream_tf.ops import _loader

PILOTS = ("none", "label", "linear", "fm", "model")
PILOT = {"base": np.float64, "buckets": np.int64, "numbers": np.float32}
"""Arrays of `InputClassifier.export_pilot`."""


class KeptInputs(NamedTuple):
    """Inputs of a batch that are kept by their foreseen losses.

    Attributes:
        rows: int64 [kept], of the batch, ascending.
        correction: float32 [kept], inputs that each stands for: 1 / its probability to be kept.
        offset: float32 [kept], log of (its probability to be kept with label 1 / with label 0):
            what the log-odds of what is kept are above those of all.
        skippable: bool [kept], whether it could have been left out.
    """

    rows: tf.Tensor
    correction: tf.Tensor
    offset: tf.Tensor
    skippable: tf.Tensor


def foresee(
    handle: tf.Tensor,
    keys: Mapping[str, Any],
    labels: Any,
    weights: Any = None,
    predictions: Any = None,
) -> KeptInputs:
    """Runs the op SlipstreamForeseeInputs.

    Args:
        handle: of the classifier.
        keys: the op's arguments that are of features.
        labels: float32 [batch], 0 to 1.
        weights: float32 [batch], the inputs' sample weights, at least 0; None: 1.
        predictions: float32 [batch], probabilities, where the pilot is the model; else None.
    """
    given = {"labels": labels, "sample_weights": weights, "predictions": predictions}
    values = {
        name: tf.zeros([0]) if value is None else tf.cast(value, tf.float32)
        for name, value in given.items()
    }
    with tf.device("CPU:0"):
        result = _loader.library().slipstream_foresee_inputs(handle=handle, **values, **keys)
    return KeptInputs(result.rows, result.correction, result.offset, result.skippable)
