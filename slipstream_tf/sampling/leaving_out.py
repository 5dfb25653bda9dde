"""How an engine's policies leave examples out: of a data set, or of a batch that is trained.

In: an engine, and batches. Out: the batches that its classifier leaves, refilled.
"""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.errors import invalid
from slipstream_tf.distributed.batches import NEXT_KEYS
from slipstream_tf.sampling.classifier import in_order, size_to_refill, skip_inputs
from slipstream_tf.sampling.foreseen import thin_batch, thin_inputs


def leave_out(
    engine: Any,
    dataset: tf.data.Dataset,
    batch_size: int | None,
    get_keys: Callable[..., Any] | None,
    drop_remainder: bool,
) -> tf.data.Dataset:
    """See `Slipstream.leave_out`; `engine` is one."""
    settings, classifier = engine.settings, engine.tracker.classifier
    if settings.thins_in_step:
        # Its batches are thinned where they are trained.
        size = size_to_refill(dataset.element_spec, batch_size, drop_remainder, False)
        return in_order(dataset, size, drop_remainder)
    given = (dataset, classifier, engine.specs, batch_size, get_keys, drop_remainder)
    if settings.correct:
        return thin_inputs(*given, settings.correct, engine.needs_losses, settings.skips_examples)
    only_counts = settings.dry_run and not engine.needs_losses
    return skip_inputs(
        *given,
        weighted=settings.weighs_examples,
        adds_skippable=engine.needs_losses,
        window_batches=engine.tracker.window_steps if only_counts else 0,
        refill=settings.skips_examples,
    )


def thin(engine: Any, batch: Any, predictions: tf.Tensor) -> Any:
    """See `Slipstream.thin`; `engine` is one."""
    settings, classifier = engine.settings, engine.tracker.classifier
    if isinstance(batch[0], Mapping) and NEXT_KEYS in batch[0]:
        # Which of the next batch are trained is not known when its rows are asked for.
        allowed = "another pilot, or no keys of the next batch (prefetch)"
        raise invalid("pilot", "model", "a batch with the next one's keys", allowed)
    leaves_out = settings.skips_examples
    return thin_batch(
        batch, predictions, classifier, settings.correct, engine.needs_losses, leaves_out
    )
