"""Measures a model on the test part, whose batches are shared out to the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.cli.flag_set import RunError
from slipstream_tf.distributed import Communicator
from slipstream_tf.telemetry.metrics import ClickMetrics, click_metrics


def predictor(model: Any) -> Callable[[Any], tf.Tensor]:
    """Returns the function from features to a model's outputs, for inference; changes nothing."""
    return tf.function(lambda features: model(features, training=False), reduce_retracing=True)


def evaluate(
    predict: Callable[[Any], tf.Tensor], dataset: tf.data.Dataset, comm: Communicator
) -> ClickMetrics:
    """Measures predictions. A collective.

    Args:
        predict: gives logits, float [batch] or [batch, 1], of a batch's features.
        dataset: this rank's batches (features, label); there may be none.
        comm: the ranks.

    Returns:
        The exact metrics of the inputs of all ranks.

    Raises:
        RunError: no rank has inputs, or a logit is not finite.
    """
    labels, logits = [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    for features, label in dataset:
        logits.append(predict(features).numpy().ravel())
        labels.append(label.numpy().ravel().astype(np.float32))
    all_labels = _gathered(labels, comm, "labels")
    all_logits = _gathered(logits, comm, "logits")
    if not all_labels.size:
        raise RunError("The test part has no inputs; nothing can be measured.")
    try:
        return click_metrics(all_labels, all_logits)
    except ValueError as error:
        raise RunError(f"The model cannot be measured on the test part. {error}") from None


def _gathered(parts: list[np.ndarray], comm: Communicator, name: str) -> np.ndarray:
    own = tf.constant(np.concatenate(parts))
    return comm.gather(own, "control", f"slipstream.evaluation.{name}").numpy()
