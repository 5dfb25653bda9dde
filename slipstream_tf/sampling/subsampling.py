"""Subsamples examples by predicted loss, and applies policies to a pipeline.

`drop_examples` drops examples in a `tf.data` pipeline. `subsample` drops examples of a single
batch.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.errors import invalid
from slipstream_tf.data.spec import OFFSET, SKIPPABLE
from slipstream_tf.distributed.batches import NEXT_KEYS
from slipstream_tf.ops.classifier import InputClassifier, KeptInputs
from slipstream_tf.ops.features import FeatureSpec
from slipstream_tf.sampling import classifier as dropping
from slipstream_tf.sampling.batches import rows_of
from slipstream_tf.sampling.notes import add_notes, without_wrapping


def subsample_inputs(
    dataset: tf.data.Dataset,
    classifier: InputClassifier,
    specs: Sequence[FeatureSpec],
    batch_size: int | None = None,
    get_keys: Callable[..., Any] | None = None,
    drop_remainder: bool = False,
    correction: str = "weight",
    adds_skippable: bool = False,
    refill: bool = True,
) -> tf.data.Dataset:
    """Subsamples examples by their predicted losses and refills the batches.

    As with `skip_inputs`, a batch is processed when it is requested, in the order of its examples.
    The pilot trains on the kept examples after every 1,024 examples and at the end of the batch.

    Args:
        dataset: Dataset of batches `(features, label)` or `(features, label, sample_weight)` of
            dense, ragged and sparse tensors.
        classifier: Classifier with a pilot that uses the keys or the label.
        specs: Features that have keys.
        batch_size: Number of examples in an output batch. Defaults to the static batch size of
            `dataset`.
        get_keys: Function of the components of an element that returns the keys. Defaults to the
            features; see `skip_inputs`.
        drop_remainder: Whether to drop a last batch that is not full.
        correction: `"weight"` returns `(features, label, sample_weight)`: existing weights are
            multiplied by `1 / probability`, and the weights of a smaller last batch are scaled
            (`weigh_last`). `"offset"` adds the feature `"log_odds_offset"`, float32 [batch].
        adds_skippable: Whether to add the feature `"skippable"`, bool [batch]: True if the keep
            probability of the example was below 1.
        refill: Whether to drop examples and refill batches. False in a dry run: batches are
            unchanged.

    Returns:
        The dataset.

    Raises:
        ValueError: As `skip_inputs`, or if the elements have no labels.
        tf.errors.InvalidArgumentError: During iteration, if a label is outside [0, 1] or, with
            `"offset"`, neither 0 nor 1; if a sample weight is negative; or if components differ in
            batch size.
    """
    element_spec = dataset.element_spec
    if not isinstance(element_spec, tuple) or len(element_spec) not in (2, 3):
        allowed = (
            "(features, label) or (features, label, sample_weight), because the pilot learns from "
            "labels"
        )
        raise invalid("dataset", element_spec, "its elements", allowed)
    has_offset = correction == "offset"
    dropping.require_form(element_spec, not has_offset, adds_skippable or has_offset)
    size = dropping.size_to_refill(element_spec, batch_size, drop_remainder, refill)
    keys_of = get_keys or functools.partial(dropping.default_keys, specs)

    def subsample(features: Any, label: Any, weight: Any = None) -> Any:
        keys = keys_of(without_wrapping(features), *(v for v in (label, weight) if v is not None))
        clicks = click_of(label)
        parts = (features, label) if weight is None else (features, label, weight)
        checks = [dropping.assert_same_batch(parts, clicks)]
        if has_offset:
            checks.append(require_binary(clicks))
        with tf.control_dependencies(checks):
            kept = classifier.subsample(keys, specs, clicks, weight_of(weight))
        if refill:
            parts = rows_of(parts, kept.rows)
        return _corrected(parts, kept, correction, adds_skippable)

    subsampled = dataset.map(dropping.without_autograph(subsample, get_keys))
    subsampled = dropping.in_order(subsampled, size, drop_remainder)
    # Refilling can leave a last batch with a single example.
    if not refill or size is None or has_offset:
        return subsampled
    return dropping.weigh_last(subsampled, size)


def _corrected(parts: Any, kept: KeptInputs, correction: str, adds_skippable: bool) -> Any:
    """Adds the correction for dropped examples, and notes, to a batch.

    Args:
        parts: `(features, label)` or `(features, label, sample_weight)` of the kept examples.
        kept: Corrections of these examples.
        correction: "weight" multiplies the sample weights; "offset" adds `"log_odds_offset"`.
        adds_skippable: Whether to add `"skippable"`.
    """
    notes: dict[str, Any] = {SKIPPABLE: kept.skippable} if adds_skippable else {}
    if correction == "offset":
        notes[OFFSET] = kept.offset
    features = add_notes(parts[0], **notes) if notes else parts[0]
    if correction == "offset":
        return (features, *parts[1:])
    return features, parts[1], dropping.times_weights(kept.correction, *parts[2:])


def click_of(label: Any) -> tf.Tensor:
    """Returns the label for loss prediction, float32 [batch].

    With multiple labels, it is their maximum.

    Args:
        label: A tensor [batch] or [batch, ...], or a nested structure of tensors.
    """
    parts = []
    for part in tf.nest.flatten(label):
        part = tf.cast(part, tf.float32)
        parts.append(
            part if part.shape.rank == 1 else tf.reduce_max(part, tf.range(1, tf.rank(part)))
        )
    return parts[0] if len(parts) == 1 else tf.reduce_max(tf.stack(parts), 0)


def weight_of(weight: Any) -> tf.Tensor | None:
    """Returns sample weights as [batch].

    Returns None if there are no weights or they have another shape.
    """
    if not isinstance(weight, tf.Tensor) or (weight.shape.rank != 1 and weight.shape[1:] != [1]):
        return None
    return tf.reshape(weight, [-1])


def require_binary(clicks: tf.Tensor) -> tf.Operation:
    """Asserts that labels are 0 or 1.

    The log-odds offset is only defined for such labels.
    """
    message = (
        "A label is neither 0 nor 1, which correction='offset' requires. Pass correction='weight' "
        "for labels in [0, 1]."
    )
    return tf.debugging.Assert(tf.reduce_all(clicks * (1.0 - clicks) == 0.0), [message, clicks])


def drop_examples(
    engine: Any,
    dataset: tf.data.Dataset,
    batch_size: int | None,
    get_keys: Callable[..., Any] | None,
    drop_remainder: bool,
) -> tf.data.Dataset:
    """Drops examples of a dataset as the policies of an engine decide.

    Implements `Slipstream.drop_examples`.

    Args:
        engine: The `Slipstream` instance.
        dataset: Dataset of batches.
        batch_size: Number of examples in an output batch; see `skip_inputs`.
        get_keys: Returns the keys of an element; see `skip_inputs`.
        drop_remainder: Whether to drop a last batch that is not full.
    """
    settings, classifier = engine.settings, engine.tracker.classifier
    if settings.subsamples_in_step:
        # `subsample` drops examples in the training step, with the model's predictions.
        size = dropping.size_to_refill(dataset.element_spec, batch_size, drop_remainder, False)
        return dropping.in_order(dataset, size, drop_remainder)
    given = (dataset, classifier, engine.specs, batch_size, get_keys, drop_remainder)
    if correction := settings.examples.correction:
        return subsample_inputs(*given, correction, settings.needs_losses, settings.skips_examples)
    only_counts = settings.dry_run and not settings.needs_losses
    return dropping.skip_inputs(
        *given,
        weighted=settings.examples.weighs_examples,
        adds_skippable=settings.needs_losses,
        window_batches=engine.tracker.window_steps if only_counts else 0,
        refill=settings.skips_examples,
    )


def subsample(engine: Any, batch: Any, predictions: tf.Tensor) -> Any:
    """Subsamples one batch by the losses that the model itself predicts.

    Args:
        engine: Engine with the model as the pilot (`pilot="model"`).
        batch: `(features, label)` or `(features, label, sample_weight)`.
        predictions: Probabilities, float [batch] or [batch, 1].

    Returns:
        The kept part of the batch with its correction: `(features, label, sample_weight)`, or with
        the feature `"log_odds_offset"`. If all examples would be dropped, one example with weight 0
        remains. In a dry run, no example is dropped. See `Slipstream.subsample`.
    """
    settings, classifier = engine.settings, engine.tracker.classifier
    if isinstance(batch[0], Mapping) and NEXT_KEYS in batch[0]:
        # Prefetching requests the rows of the next batch before its kept examples are known.
        allowed = "'fm', 'linear' or 'label'. To use the model as the pilot, disable prefetch"
        raise invalid("pilot", "model", "a batch with the keys of the next batch", allowed)
    correction = settings.examples.correction
    clicks = click_of(batch[1])
    weights = weight_of(batch[2]) if len(batch) == 3 else None
    checks = [require_binary(clicks)] if correction == "offset" else []
    with tf.control_dependencies(checks):
        kept = classifier.subsample_by(clicks, tf.reshape(predictions, [-1]), weights)
    if not settings.skips_examples:
        return _corrected(batch, kept, correction, settings.needs_losses)
    # An empty batch stays empty.
    one = tf.minimum(tf.shape(clicks), 1)
    nothing = KeptInputs(
        tf.zeros(one, tf.int64), tf.zeros(one), tf.zeros(one), tf.ones(one, tf.bool)
    )
    is_empty = tf.equal(tf.size(kept.rows), 0)
    kept = tf.cond(is_empty, lambda: nothing, lambda: kept)
    chosen = rows_of(batch, kept.rows)
    if correction == "offset":
        # The offset is the correction. The weight only removes the placeholder example.
        chosen = (*chosen[:2], dropping.times_weights(tf.sign(kept.correction), *chosen[2:]))
    return _corrected(chosen, kept, correction, settings.needs_losses)
