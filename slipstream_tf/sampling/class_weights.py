"""Weights of classes become weights of inputs, as `fit(class_weight=...)` does, before skipping.

In: batches and a weight per class. Out: the batches with sample weights, which thinning multiplies.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.errors import invalid, require_integer, require_number


def weigh_classes(dataset: tf.data.Dataset, class_weight: Mapping[int, float]) -> tf.data.Dataset:
    """Gives each input the weight of its label's class, times a sample weight that is there.

    Args:
        dataset: its elements are batches `(features, label)` or `(features, label,
            sample_weight)`, with one label: a class [batch] or [batch, 1], or [batch, classes].
        class_weight: weight by class, from 0 on; a class that is not there weighs 1.

    Returns:
        The dataset of `(features, label, sample_weight)`, float32 [batch].

    Raises:
        ValueError: the elements are of another form, or a class or weight is out of its range.
    """
    if not isinstance(class_weight, Mapping) or not class_weight:
        raise invalid("class_weight", class_weight, "Slipstream.apply", "{class: weight, ...}")
    for kind, weight in class_weight.items():
        require_integer("class_weight", kind, 0, 1 << 24, "a class")
        require_number("class_weight", weight, 0.0, place=f"class {kind}")
    spec = dataset.element_spec
    is_pair = isinstance(spec, tuple) and len(spec) in (2, 3)
    if not is_pair or not isinstance(spec[1], tf.TensorSpec):
        allowed = "(features, label) or (features, label, sample_weight), with class_weight"
        raise invalid("dataset", spec, "Slipstream.apply", f"{allowed} and one label")
    table = tf.constant([class_weight.get(k, 1.0) for k in range(max(class_weight) + 2)])

    def weigh(features: Any, label: tf.Tensor, weight: Any = None) -> Any:
        # Classes past the last one weigh 1, as the one after it does.
        own = tf.gather(table, tf.minimum(_classes(label), max(class_weight) + 1))
        if weight is not None:
            ones = tf.ones(tf.rank(weight) - 1, tf.int32)
            own = tf.reshape(own, tf.concat([[-1], ones], axis=0)) * tf.cast(weight, tf.float32)
        return features, label, own

    return dataset.map(weigh)


def _classes(label: tf.Tensor) -> tf.Tensor:
    """The class of each input, int32 [batch]."""
    if label.shape.rank == 1:
        return tf.cast(tf.round(label), tf.int32)
    if label.shape[-1] == 1:
        return tf.cast(tf.round(tf.squeeze(label, axis=-1)), tf.int32)
    return tf.argmax(label, axis=-1, output_type=tf.int32)
