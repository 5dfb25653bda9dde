"""Subsampling by predicted loss, and the choice between the ways to drop examples.

In: labelled batches and an input classifier with a pilot. Out: full batches of the kept examples in
their order, each with a correction for the dropped ones. `leave_out` and `thin` apply the policies
of an engine.
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


def thin_inputs(
    dataset: tf.data.Dataset,
    classifier: InputClassifier,
    specs: Sequence[FeatureSpec],
    batch_size: int | None = None,
    get_keys: Callable[..., Any] | None = None,
    drop_remainder: bool = False,
    correct: str = "weight",
    adds_skippable: bool = False,
    refill: bool = True,
) -> tf.data.Dataset:
    """Leaves out inputs by their foreseen losses and refills the batches.

    A batch is decided on when it is pulled, as with `skip_inputs`, and its inputs in their order;
    the pilot learns from those that are kept of each 1,024, and at the batch's end.

    Args:
        dataset: elements are batches `(features, label)` or `(features, label, sample_weight)`,
            of dense, ragged and sparse tensors.
        classifier: one with a pilot of the keys, or of the label.
        specs: the features that the keys belong to.
        batch_size: as of `skip_inputs`; likewise `get_keys`, `drop_remainder`, `adds_skippable`.
        correct: "weight": elements become `(features, label, sample_weight)`, weights that are
            there are multiplied, and a last batch that is not full weighs less (`weigh_last`);
            "offset": the features get "log_odds_offset", float32 [batch].
        refill: whether batches may lose inputs. False in shadow mode: they stay as they are.

    Returns:
        The dataset.

    Raises:
        ValueError: as `skip_inputs`; or the elements have no labels.
        tf.errors.InvalidArgumentError: while iterating: a label is not 0 to 1, or, with "offset",
            neither 0 nor 1; a sample weight is negative; or components differ in batch size.
    """
    element_spec = dataset.element_spec
    if not isinstance(element_spec, tuple) or len(element_spec) not in (2, 3):
        allowed = "(features, label) or (features, label, sample_weight): losses are foreseen"
        raise invalid("dataset", element_spec, "its elements", allowed)
    has_offset = correct == "offset"
    dropping.require_form(element_spec, not has_offset, adds_skippable or has_offset)
    size = dropping.size_to_refill(element_spec, batch_size, drop_remainder, refill)
    keys_of = get_keys or functools.partial(dropping.default_keys, specs)

    def thin(features: Any, label: Any, weight: Any = None) -> Any:
        keys = keys_of(without_wrapping(features), *(v for v in (label, weight) if v is not None))
        clicks = click_of(label)
        parts = (features, label) if weight is None else (features, label, weight)
        checks = [dropping.assert_same_batch(parts, clicks)]
        if has_offset:
            checks.append(require_binary(clicks))
        with tf.control_dependencies(checks):
            kept = classifier.foresee(keys, specs, clicks, weight_of(weight))
        if refill:
            parts = rows_of(parts, kept.rows)
        return _corrected(parts, kept, correct, adds_skippable)

    thinned = dataset.map(dropping.as_it_is(thin, get_keys))
    thinned = dropping.in_order(thinned, size, drop_remainder)
    # What is left over at the end may be a single input.
    if not refill or size is None or has_offset:
        return thinned
    return dropping.weigh_last(thinned, size)


def _corrected(parts: Any, kept: KeptInputs, correct: str, adds_skippable: bool) -> Any:
    """Kept parts of a batch, with what corrects for the others."""
    notes: dict[str, Any] = {SKIPPABLE: kept.skippable} if adds_skippable else {}
    if correct == "offset":
        notes[OFFSET] = kept.offset
    features = add_notes(parts[0], **notes) if notes else parts[0]
    if correct == "offset":
        return (features, *parts[1:])
    return features, parts[1], dropping.times_weights(kept.correction, *parts[2:])


def click_of(label: Any) -> tf.Tensor:
    """Returns the label by which a loss is foreseen, float32 [batch]: of several, the largest.

    Args:
        label: a tensor [batch] or [batch, ...], or several, nested.
    """
    parts = []
    for part in tf.nest.flatten(label):
        part = tf.cast(part, tf.float32)
        parts.append(
            part if part.shape.rank == 1 else tf.reduce_max(part, tf.range(1, tf.rank(part)))
        )
    return parts[0] if len(parts) == 1 else tf.reduce_max(tf.stack(parts), 0)


def weight_of(weight: Any) -> tf.Tensor | None:
    """Returns sample weights [batch] or [batch, 1] as [batch]; None for none, or others."""
    if not isinstance(weight, tf.Tensor) or (weight.shape.rank != 1 and weight.shape[1:] != [1]):
        return None
    return tf.reshape(weight, [-1])


def require_binary(clicks: tf.Tensor) -> tf.Operation:
    """Asserts that labels are 0 and 1: only of such a label's log-odds the shift is known."""
    message = "A label is neither 0 nor 1: correct='offset' needs such; 'weight' takes 0 to 1."
    return tf.debugging.Assert(tf.reduce_all(clicks * (1.0 - clicks) == 0.0), [message, clicks])


def leave_out(
    engine: Any,
    dataset: tf.data.Dataset,
    batch_size: int | None,
    get_keys: Callable[..., Any] | None,
    drop_remainder: bool,
) -> tf.data.Dataset:
    """Applies the policies of an engine to a data set; see `Slipstream.leave_out`."""
    settings, classifier = engine.settings, engine.tracker.classifier
    if settings.thins_in_step:
        # Its batches are thinned where they are trained.
        size = dropping.size_to_refill(dataset.element_spec, batch_size, drop_remainder, False)
        return dropping.in_order(dataset, size, drop_remainder)
    given = (dataset, classifier, engine.specs, batch_size, get_keys, drop_remainder)
    if correct := settings.examples.correct:
        return thin_inputs(*given, correct, settings.needs_losses, settings.skips_examples)
    only_counts = settings.dry_run and not settings.needs_losses
    return dropping.skip_inputs(
        *given,
        weighted=settings.examples.weighs_examples,
        adds_skippable=settings.needs_losses,
        window_batches=engine.tracker.window_steps if only_counts else 0,
        refill=settings.skips_examples,
    )


def thin(engine: Any, batch: Any, predictions: tf.Tensor) -> Any:
    """Leaves out inputs of one batch by the losses that a model's own predictions foresee.

    Args:
        engine: whose pilot is the model.
        batch: `(features, label)` or `(features, label, sample_weight)`.
        predictions: float [batch] or [batch, 1], probabilities.

    Returns:
        `(features, label, sample_weight)`, smaller; of one input with weight 0 where nothing would
        be left. In a dry run as large as before. See `Slipstream.thin`.
    """
    settings, classifier = engine.settings, engine.tracker.classifier
    if isinstance(batch[0], Mapping) and NEXT_KEYS in batch[0]:
        # Which of the next batch are trained is not known when its rows are asked for.
        allowed = "another pilot, or no keys of the next batch (prefetch)"
        raise invalid("pilot", "model", "a batch with the next one's keys", allowed)
    correct = settings.examples.correct
    clicks = click_of(batch[1])
    weights = weight_of(batch[2]) if len(batch) == 3 else None
    checks = [require_binary(clicks)] if correct == "offset" else []
    with tf.control_dependencies(checks):
        kept = classifier.foresee_by(clicks, tf.reshape(predictions, [-1]), weights)
    if not settings.skips_examples:
        return _corrected(batch, kept, correct, settings.needs_losses)
    # Of a batch that was empty before, nothing.
    one = tf.minimum(tf.shape(clicks), 1)
    nothing = KeptInputs(
        tf.zeros(one, tf.int64), tf.zeros(one), tf.zeros(one), tf.ones(one, tf.bool)
    )
    is_empty = tf.equal(tf.size(kept.rows), 0)
    kept = tf.cond(is_empty, lambda: nothing, lambda: kept)
    chosen = rows_of(batch, kept.rows)
    if correct == "offset":
        # A weight above 0 is no correction here.
        chosen = (*chosen[:2], dropping.times_weights(tf.sign(kept.correction), *chosen[2:]))
    return _corrected(chosen, kept, correct, settings.needs_losses)
