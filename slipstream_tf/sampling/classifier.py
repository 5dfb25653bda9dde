"""Skipping as a `tf.data` transformation: skippable inputs leave, batches are refilled.

In: a dataset of batches and an input classifier. Out: a dataset of full batches of the inputs that
are worth training on, in their order, with sample weights where skippable ones are thinned.
Slipstream, arXiv 2404.04270, input classifier block.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.errors import invalid, require_integer, require_number
from slipstream_tf.data.spec import OFFSET, SKIPPABLE
from slipstream_tf.ops.classifier import InputClassifier
from slipstream_tf.ops.features import FeatureSpec, num_rows, of_specs
from slipstream_tf.sampling.batches import chosen_rows, static_batch_size
from slipstream_tf.sampling.notes import add_notes, without_wrapping


def skip_inputs(
    dataset: tf.data.Dataset,
    classifier: InputClassifier,
    specs: Sequence[FeatureSpec],
    batch_size: int | None = None,
    get_keys: Callable[..., Any] | None = None,
    drop_remainder: bool = False,
    weighted: bool = False,
    adds_skippable: bool = False,
    window_batches: int = 0,
    refill: bool = True,
) -> tf.data.Dataset:
    """Leaves out skippable inputs and refills the batches; no kept input is lost, doubled or moved.

    A batch is classified when it is pulled, so the threshold of the present window applies at once
    and the same seed gives the same run; `LookAhead.read` after this transformation keeps it so,
    and has that done on another thread. A `.prefetch(n)` makes every new threshold take effect n
    batches late, and inputs of those batches count for the window in which they were classified.
    Anything upstream may be prefetched.

    Args:
        dataset: its elements are batches: nested structures of dense, ragged and sparse tensors,
            all with the same first dimension, e.g. `(features, label)` or `(features, label,
            sample_weight)`.
        classifier: decides; it observes every input once per pass over the dataset.
        specs: the features that the keys belong to.
        batch_size: inputs of an output batch; default: that of `dataset`, if its element_spec
            tells it (`.batch(n, drop_remainder=True)`).
        get_keys: called like a function for `dataset.map`; returns the keys in any format of
            `ops.features.pack`. Default: what the features (the first component of a tuple, else
            the whole element) have under the names of `specs`; `features["keys"]`, where they are a
            mapping that has "keys" and no spec has this name; or all of a tensor, which is a key
            matrix, or the keys of the one feature.
        drop_remainder: whether a last batch that is not full is left out.
        weighted: whether elements become `(features, label, sample_weight)`: skippable inputs that
            are kept stand for those that are not (needed where the classifier thins). A weight
            that is there is multiplied.
        adds_skippable: whether the features get "skippable", bool [batch]: what could have been
            left out (read where losses are recorded). Features that are no mapping become one
            (`notes.add_notes`); a model takes it apart again (`keras.LossFeedback`).
        window_batches: see `InputClassifier.classify`; 0: all batches are classified.
        refill: whether batches may lose inputs, and are refilled. False, where the classifier
            leaves none out: they stay as they are, unless `batch_size` is another than theirs.

    Returns:
        The dataset; its batch dimension is known if `drop_remainder` is true, or if it was and
        batches stay as they are.

    Raises:
        ValueError: the batch size is neither given nor known, a component of the dataset has no
            batch dimension or is no tensor, or its elements cannot hold weights or
            "skippable".
        tf.errors.InvalidArgumentError: while iterating: components differ in their batch size, or
            a label, [batch] or [batch, 1], is not finite.
    """
    element_spec = dataset.element_spec
    require_form(element_spec, weighted, adds_skippable)
    size = size_to_refill(element_spec, batch_size, drop_remainder, refill)
    keys_of = get_keys or functools.partial(default_keys, specs)

    def compact(*components: Any) -> Any:
        keys = keys_of(without_wrapping(components[0]), *components[1:])
        classified = classifier.classify(keys, specs, window_batches=window_batches)
        checks = [assert_same_batch(components, classified.skippable), *_check_label(components)]
        with tf.control_dependencies(checks):
            if weighted:
                weights = times_weights(classified.weight, *components[2:])
                components = (*components[:2], weights)
            if adds_skippable:
                features = add_notes(components[0], **{SKIPPABLE: classified.skippable})
                components = (features, *components[1:])
            if refill:
                components = _keep(components, classified.weight > 0.0)
            else:
                components = tf.nest.map_structure(tf.identity, components, expand_composites=True)
        return components if isinstance(element_spec, tuple) else components[0]

    return in_order(dataset.map(as_it_is(compact, get_keys)), size, drop_remainder)


def size_to_refill(
    element_spec: Any, batch_size: int | None, drop_remainder: bool, refill: bool
) -> int | None:
    """Returns how many inputs batches become; None: they stay as they are.

    Args:
        element_spec: of the dataset.
        batch_size: inputs of an output batch; None: that of the dataset.
        drop_remainder: whether a last batch that is not full is left out.
        refill: whether batches may lose inputs.

    Raises:
        ValueError: the batch size is neither given nor known.
    """
    known_size = static_batch_size(element_spec)
    size = known_size if batch_size is None else batch_size
    if not refill and size == known_size and not (drop_remainder and size is None):
        return None
    if size is None:
        allowed = "an integer >= 1; None only where the dataset's .batch(n) or shape tells it"
        raise invalid("batch_size", None, "skip_inputs", allowed)
    return require_integer("batch_size", size, 1, None, "skip_inputs")


def as_it_is(function: Callable[..., Any], get_keys: Callable[..., Any] | None) -> Any:
    """Returns a function for `map`, which TensorFlow is not to rewrite; that takes a second.

    Args:
        function: of our own, which has no need of it.
        get_keys: a user's, which it calls and which may have; None: there is none.
    """
    return function if get_keys else tf.autograph.experimental.do_not_convert(function)


def in_order(kept: tf.data.Dataset, size: int | None, drop_remainder: bool) -> tf.data.Dataset:
    """Returns the batches that a stateful map has made, which is called for one after the other.

    Args:
        kept: the batches as it returns them.
        size: inputs of the batches that they become; None: they stay as they are.
        drop_remainder: whether a last batch that is not full is left out.
    """
    # tf.data neither runs a stateful map in parallel nor ahead.
    if size is not None:
        kept = kept.rebatch(size, drop_remainder=drop_remainder)
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_optimization.inject_prefetch = False
    # The classifier's state is not the iterator's: `distributed.JobCheckpoints` saves both.
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return kept.with_options(options)


def weigh_last(dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Returns batches whose inputs all count alike, those of a smaller last one, too.

    A step goes by the mean of its batch: the only input that is left over would move the model as
    far as `size` others together. Its weight becomes a part of 1.

    Args:
        dataset: elements are `(features, label)` or `(features, label, sample_weight)`.
        size: inputs of a full batch.

    Returns:
        `(features, label, sample_weight)`: weights are times the batch's inputs by `size`.
    """

    @tf.autograph.experimental.do_not_convert
    def weigh(state: tf.Tensor, element: Any) -> Any:
        features, label, *weight = element
        inputs = num_rows(tf.nest.flatten(label)[0])
        share = tf.fill([inputs], tf.cast(inputs, tf.float32) / size)
        return state, (features, label, times_weights(share, *weight))

    # Without a use for the state: tf.data would run a map that has none ahead of the window.
    return dataset.scan(tf.constant(0), weigh)


def default_keys(specs: Sequence[FeatureSpec], *element: Any) -> Any:
    features = element[0]
    if isinstance(features, (tuple, list)):
        allowed = "a dictionary by feature name or one tensor; get_keys= finds keys elsewhere"
        raise invalid("dataset", features, "the features of its elements", allowed)
    if not isinstance(features, Mapping):
        return {specs[0].name: features} if len(specs) == 1 else features
    if "keys" in features and "keys" not in [spec.name for spec in specs]:
        return features["keys"]
    place = "a data set's features (elsewhere in its elements, get_keys= finds them)"
    return of_specs(features, specs, place)


def times_weights(weight: tf.Tensor, before: Any = None) -> Any:
    """The classifier's weights [batch], times sample weights that were there, [batch, ...]."""
    if before is None:
        return weight

    def times(part: tf.Tensor) -> tf.Tensor:
        ones = tf.ones(tf.rank(part) - 1, tf.int32)
        return tf.cast(part, tf.float32) * tf.reshape(weight, tf.concat([[-1], ones], axis=0))

    return tf.nest.map_structure(times, before)


def require_form(element_spec: Any, weighted: bool, adds_notes: bool) -> None:
    """Checks that elements can hold weights and notes."""
    features = element_spec[0] if isinstance(element_spec, tuple) else element_spec
    if weighted and not (isinstance(element_spec, tuple) and len(element_spec) in (2, 3)):
        allowed = "(features, label) or (features, label, sample_weight), where inputs are thinned"
        raise invalid("dataset", element_spec, "its elements", allowed)
    if not (adds_notes and isinstance(features, Mapping)):
        return
    if taken := next((name for name in (SKIPPABLE, OFFSET) if name in features), None):
        allowed = f"features without {taken!r}, which is a note's name"
        raise invalid("dataset", sorted(features), "the features of its elements", allowed)


def assert_same_batch(element: Any, skippable: tf.Tensor) -> Any:
    known = {component.shape[0] for component in (*tf.nest.flatten(element), skippable)}
    if len(known) == 1 and None not in known:
        return skippable
    rows = tf.stack([num_rows(component) for component in tf.nest.flatten(element)])
    return tf.debugging.assert_equal(
        rows,
        tf.size(skippable, out_type=tf.int64),
        "The components of a batch must have as many rows as its keys have inputs.",
    )


def _check_label(element: Any) -> list[tf.Tensor]:
    """Refuses an input whose one label is not finite: dense weights would be NaN for good."""
    label = element[1] if len(element) > 1 else None
    if not isinstance(label, tf.Tensor) or not label.dtype.is_floating:
        return []
    if label.shape.rank != 1 and label.shape[1:] != [1]:
        return []
    message = (
        "A label is not finite. Allowed: finite numbers; leave inputs without a label out before "
        "Slipstream.apply"
    )
    return [tf.debugging.check_numerics(label, message)]


def _keep(element: Any, is_kept: tf.Tensor) -> Any:
    return tf.cond(tf.reduce_all(is_kept), lambda: element, lambda: chosen_rows(element, is_kept))


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
        return features, label, times_weights(own, weight)

    return dataset.map(weigh)


def _classes(label: tf.Tensor) -> tf.Tensor:
    """The class of each input, int32 [batch]."""
    if label.shape.rank == 1:
        return tf.cast(tf.round(label), tf.int32)
    if label.shape[-1] == 1:
        return tf.cast(tf.round(tf.squeeze(label, axis=-1)), tf.int32)
    return tf.argmax(label, axis=-1, output_type=tf.int32)
