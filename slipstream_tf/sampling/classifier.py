"""Drops skippable examples from a `tf.data` pipeline and refills the batches.

The kept examples stay in order. If a fraction of the skippable examples is kept, they receive
sample weights that account for the dropped ones. Implements the input classifier block of
Slipstream, arXiv 2404.04270.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from slipstream_tf._utils.errors import invalid, require_integer, require_number
from slipstream_tf.data.spec import OFFSET, SKIPPABLE
from slipstream_tf.ops.classifier import InputClassifier
from slipstream_tf.ops.features import FeatureSpec, given_specs, num_rows, of_specs
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
    """Drops skippable examples and refills the batches.

    Kept examples are neither reordered, duplicated nor lost.

    A batch is classified when it is requested, so that the threshold of the current window applies
    immediately and the same seed gives the same run. To classify on another thread, apply
    `LookAhead.read` after this transformation.

    Note: `.prefetch(n)` after this transformation delays each new threshold by n batches, because
    prefetched batches are classified with the previous threshold. Their examples then count for the
    previous window. Prefetching before this transformation is fine.

    Args:
        dataset: Dataset of batches. An element is a nested structure of dense, ragged and sparse
            tensors with the same first dimension, for example `(features, label)` or
            `(features, label, sample_weight)`.
        classifier: Classifies the examples. It observes each example once per pass.
        specs: Features that have keys.
        batch_size: Number of examples in an output batch. Defaults to the static batch size of
            `dataset`, for example after `.batch(n, drop_remainder=True)`.
        get_keys: Function of the components of an element that returns the keys in any format of
            `ops.features.pack`. By default, the keys are read from the features, which are the
            first component of a tuple or the whole element. A mapping is searched for the names in
            `specs`, or for `"keys"` if no spec has this name. A tensor is the key matrix, or the
            keys of a single feature.
        drop_remainder: Whether to drop a last batch that is not full.
        weighted: Whether to return `(features, label, sample_weight)`. Required if the classifier
            keeps a fraction of the skippable examples, because each kept example then represents
            the dropped ones. Existing sample weights are multiplied.
        adds_skippable: Whether to add the feature `"skippable"`, bool [batch]: True if the example
            could have been dropped. Required to record losses. Features that are not a mapping are
            wrapped into one (`notes.add_notes`) and unwrapped by the model
            (`keras.LossFeedback`).
        window_batches: Number of batches per window, to classify only a part of them in a dry run;
            see `InputClassifier.classify`. 0 classifies all batches.
        refill: Whether to drop examples and refill batches. Set to False if the classifier drops
            no examples. Batches then keep their sizes, unless `batch_size` differs.

    Returns:
        The dataset. Its batch dimension is static if `drop_remainder` is True, or if batches keep
        a static size.

    Raises:
        ValueError: If the batch size is neither given nor known, a component of the dataset is not
            a tensor with a batch dimension, or the elements cannot hold weights or `"skippable"`.
        tf.errors.InvalidArgumentError: During iteration, if components differ in batch size or a
            label of shape [batch] or [batch, 1] is not finite.
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

    return in_order(dataset.map(without_autograph(compact, get_keys)), size, drop_remainder)


def size_to_refill(
    element_spec: Any, batch_size: int | None, drop_remainder: bool, refill: bool
) -> int | None:
    """Returns the output batch size, or None if batches keep their sizes.

    Args:
        element_spec: The `element_spec` of the dataset.
        batch_size: Number of examples in an output batch. None takes the static batch size.
        drop_remainder: Whether to drop a last batch that is not full.
        refill: Whether to drop examples and refill batches.

    Raises:
        ValueError: If batches must be refilled and the batch size is neither given nor known.
    """
    known_size = static_batch_size(element_spec)
    size = known_size if batch_size is None else batch_size
    if not refill and size == known_size and not (drop_remainder and size is None):
        return None
    if size is None:
        allowed = "an integer >= 1, because neither .batch(n) nor the shape of the dataset sets it"
        raise invalid("batch_size", None, "the output batches", allowed)
    return require_integer("batch_size", size, 1, None, "the output batches")


def without_autograph(function: Callable[..., Any], get_keys: Callable[..., Any] | None) -> Any:
    """Disables AutoGraph for a function for `Dataset.map`, unless it calls user code.

    The conversion takes about a second, and the functions of this package do not need it.

    Args:
        function: Function of this package, without Python control flow on tensors.
        get_keys: User function that `function` calls, or None.
    """
    return function if get_keys else tf.autograph.experimental.do_not_convert(function)


def in_order(kept: tf.data.Dataset, size: int | None, drop_remainder: bool) -> tf.data.Dataset:
    """Rebatches the output of a stateful map, in order.

    Args:
        kept: The mapped dataset.
        size: Number of examples in an output batch. None keeps the batches.
        drop_remainder: Whether to drop a last batch that is not full.
    """
    # tf.data runs a stateful map neither in parallel nor ahead of the consumer.
    if size is not None:
        kept = kept.rebatch(size, drop_remainder=drop_remainder)
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_optimization.inject_prefetch = False
    # The iterator does not save the classifier's state; `distributed.CheckpointManager` saves both.
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return kept.with_options(options)


def weigh_last(dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Scales the weights of a smaller last batch.

    A training step uses the mean loss of its batch. Without scaling, a single leftover example
    would change the model by the same amount as a full batch. With scaling, all examples of a pass
    count equally.

    Args:
        dataset: Elements are `(features, label)` or `(features, label, sample_weight)`.
        size: Number of examples in a full batch.

    Returns:
        Elements `(features, label, sample_weight)`. Weights are multiplied by
        `examples in the batch / size`.
    """

    @tf.autograph.experimental.do_not_convert
    def weigh(state: tf.Tensor, element: Any) -> Any:
        features, label, *weight = element
        inputs = num_rows(tf.nest.flatten(label)[0])
        fraction = tf.fill([inputs], tf.cast(inputs, tf.float32) / size)
        return state, (features, label, times_weights(fraction, *weight))

    # `scan` instead of `map`, because tf.data would run a stateless map ahead of the window.
    return dataset.scan(tf.constant(0), weigh)


def default_keys(specs: Sequence[FeatureSpec], *element: Any, requires_all: bool = True) -> Any:
    """Returns the keys of an element if the user passes no `get_keys`.

    The features are the first component of `element`. Their entry `"keys"` is returned if it is a
    dictionary, no spec has this name or other features are missing; otherwise the entries named in
    `specs`. A single tensor is returned as the keys.

    Args:
        specs: The features.
        *element: Components of an element of a dataset.
        requires_all: Whether a dictionary must contain all features, and not only some.

    Raises:
        ValueError: If the features are a tuple or list, or a feature is missing.
    """
    features = element[0]
    if isinstance(features, (tuple, list)):
        allowed = (
            "a dictionary {feature name: keys} or one tensor. Pass `get_keys` to extract keys from "
            "other elements"
        )
        raise invalid("dataset", features, "the features of its elements", allowed)
    if not isinstance(features, Mapping):
        return {specs[0].name: features} if len(specs) == 1 else features
    if "keys" in features:
        names = {spec.name for spec in specs}
        # A feature may be called "keys", too. It is a tensor next to the other features.
        is_feature = "keys" in names and not isinstance(features["keys"], Mapping)
        if not is_feature or (requires_all and not names <= features.keys()):
            return features["keys"]
    place = "the features of a dataset without get_keys="
    if not requires_all:
        specs = given_specs(features, specs, place)
    return of_specs(features, specs, place)


def times_weights(weight: tf.Tensor, before: Any = None) -> Any:
    """Multiplies weights [batch] by existing sample weights.

    Args:
        weight: float32 [batch].
        before: Existing sample weights [batch, ...] or a nested structure of them. None means 1.
    """
    if before is None:
        return weight

    def times(part: tf.Tensor) -> tf.Tensor:
        ones = tf.ones(tf.rank(part) - 1, tf.int32)
        return tf.cast(part, tf.float32) * tf.reshape(weight, tf.concat([[-1], ones], axis=0))

    return tf.nest.map_structure(times, before)


def require_form(element_spec: Any, weighted: bool, adds_notes: bool) -> None:
    """Raises ValueError if a dataset's elements cannot hold weights or notes.

    Args:
        element_spec: The `element_spec` of the dataset.
        weighted: Whether sample weights are added.
        adds_notes: Whether notes are added to the features (`sampling.notes`).
    """
    features = element_spec[0] if isinstance(element_spec, tuple) else element_spec
    if weighted and not (isinstance(element_spec, tuple) and len(element_spec) in (2, 3)):
        allowed = (
            "(features, label) or (features, label, sample_weight), because kept examples receive "
            "sample weights"
        )
        raise invalid("dataset", element_spec, "its elements", allowed)
    if not (adds_notes and isinstance(features, Mapping)):
        return
    if taken := next((name for name in (SKIPPABLE, OFFSET) if name in features), None):
        allowed = f"features without {taken!r}, which Slipstream.apply adds. Rename the feature"
        raise invalid("dataset", sorted(features), "the features of its elements", allowed)


def assert_same_batch(element: Any, skippable: tf.Tensor) -> Any:
    """Asserts that all components of a batch have equally many examples.

    Args:
        element: Nested structure of dense, ragged and sparse tensors.
        skippable: A tensor [batch], which determines the number.

    Returns:
        A control dependency.
    """
    known = {component.shape[0] for component in (*tf.nest.flatten(element), skippable)}
    if len(known) == 1 and None not in known:
        return skippable
    rows = tf.stack([num_rows(component) for component in tf.nest.flatten(element)])
    return tf.debugging.assert_equal(
        rows,
        tf.size(skippable, out_type=tf.int64),
        "The components of a batch have different numbers of examples. Expected the same first "
        "dimension for keys, features, labels and weights.",
    )


def _check_label(element: Any) -> list[tf.Tensor]:
    """Checks that single labels are finite.

    A NaN would permanently corrupt the dense weights.
    """
    label = element[1] if len(element) > 1 else None
    if not isinstance(label, tf.Tensor) or not label.dtype.is_floating:
        return []
    if label.shape.rank != 1 and label.shape[1:] != [1]:
        return []
    message = (
        "A label is not finite. Expected finite numbers. Remove examples without a label before "
        "Slipstream.apply"
    )
    return [tf.debugging.check_numerics(label, message)]


def _keep(element: Any, is_kept: tf.Tensor) -> Any:
    return tf.cond(tf.reduce_all(is_kept), lambda: element, lambda: chosen_rows(element, is_kept))


def weigh_classes(dataset: tf.data.Dataset, class_weight: Mapping[int, float]) -> tf.data.Dataset:
    """Multiplies sample weights by class weights.

    Args:
        dataset: Dataset of batches `(features, label)` or `(features, label, sample_weight)` with
            one label: a class index [batch] or [batch, 1], or one-hot [batch, classes].
        class_weight: Weight per class index. Classes that are not listed have weight 1.

    Returns:
        A dataset of `(features, label, sample_weight)` with float32 [batch] weights.

    Raises:
        ValueError: If the elements have another structure, or a class or weight is out of range.
    """
    if not isinstance(class_weight, Mapping) or not class_weight:
        allowed = "a non-empty dictionary {class: weight}"
        raise invalid("class_weight", class_weight, "Slipstream.apply", allowed)
    for kind, weight in class_weight.items():
        require_integer("class_weight", kind, 0, 1 << 24, "a class index")
        require_number("class_weight", weight, 0.0, place=f"class {kind}")
    spec = dataset.element_spec
    is_pair = isinstance(spec, tuple) and len(spec) in (2, 3)
    if not is_pair or not isinstance(spec[1], tf.TensorSpec):
        allowed = "(features, label) or (features, label, sample_weight), each with one label"
        raise invalid("dataset", spec, "Slipstream.apply(..., class_weight=...)", allowed)
    table = tf.constant([class_weight.get(k, 1.0) for k in range(max(class_weight) + 2)])

    def weigh(features: Any, label: tf.Tensor, weight: Any = None) -> Any:
        # Larger classes use the extra last entry of the table, which is 1.
        own = tf.gather(table, tf.minimum(_classes(label), max(class_weight) + 1))
        return features, label, times_weights(own, weight)

    return dataset.map(weigh)


def _classes(label: tf.Tensor) -> tf.Tensor:
    """Returns the class index of each example, int32 [batch]."""
    if label.shape.rank == 1:
        return tf.cast(tf.round(label), tf.int32)
    if label.shape[-1] == 1:
        return tf.cast(tf.round(tf.squeeze(label, axis=-1)), tf.int32)
    return tf.argmax(label, axis=-1, output_type=tf.int32)
