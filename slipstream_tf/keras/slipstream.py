"""The front object: skips saturated inputs of an `EmbeddingCollection`'s training data."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from slipstream_tf.config import SaturationConfig
from slipstream_tf.errors import invalid
from slipstream_tf.inputs.classifier import skip_inputs
from slipstream_tf.keras.callback import SaturationCallback
from slipstream_tf.keras.embedding_collection import EmbeddingCollection
from slipstream_tf.keras.ledger import Ledger
from slipstream_tf.saturation.report import WindowReport
from slipstream_tf.saturation.tracker import SaturationTracker


class Slipstream:
    """Finds saturated keys while a model trains and leaves out inputs made of them alone.

    Method: Slipstream, arXiv 2404.04270. Two things must be connected: the training data through
    `apply`, and the steps through `callback` (in `fit`) or `step` (in a loop of your own). Without
    steps no window ever ends and nothing is skipped; a warning says so.

    Args:
        embeddings: the layer whose keys are tracked.
        config: settings; default `SaturationConfig()`.

    Raises:
        ValueError: `embeddings` or `config` is something else.
    """

    def __init__(
        self, embeddings: EmbeddingCollection, config: SaturationConfig | None = None
    ) -> None:
        if not isinstance(embeddings, EmbeddingCollection):
            allowed = "a slipstream_tf.keras.EmbeddingCollection"
            raise invalid("embeddings", embeddings, "Slipstream", allowed)
        config = SaturationConfig() if config is None else config
        if not isinstance(config, SaturationConfig):
            raise invalid("config", config, "Slipstream", "a slipstream_tf.SaturationConfig")
        self._specs = embeddings.specs
        self._config = config
        self._tracker = SaturationTracker(embeddings.store, config, embeddings.specs)
        self._steps = 0

    @property
    def config(self) -> SaturationConfig:
        """The settings."""
        return self._config

    @property
    def tracker(self) -> SaturationTracker:
        """The window loop, with the classifier and the reports."""
        return self._tracker

    @property
    def ledger(self) -> Ledger:
        """What was skipped in the windows that have ended; print it, or use `to_dict`."""
        return Ledger(self._tracker.reports)

    def apply(
        self,
        dataset: tf.data.Dataset,
        batch_size: int | None = None,
        get_keys: Callable[..., Any] | None = None,
        drop_remainder: bool = False,
    ) -> tf.data.Dataset:
        """Leaves out skippable inputs and refills the batches. For training data only.

        Put it last: a `.prefetch(n)` after it makes every new threshold n batches late. Evaluate on
        data that did not go through it.

        An epoch ends earlier than the data's number of batches says. Keras warns then that "your
        input ran out of data"; nothing is lost. Where that number is unknown, Keras holds later
        epochs to the length of the first one: with several epochs, tell it
        (`tf.data.experimental.assert_cardinality` before `apply`).

        Args:
            dataset: elements are batches, e.g. `(features, label)`.
            batch_size: inputs of an output batch; default: that of `dataset`, if it is known.
            get_keys: called like a function for `dataset.map`, returns the keys in a format that
                the embedding layer takes. Default: `features["keys"]`, or the features themselves.
            drop_remainder: whether a last batch that is not full is left out.

        Returns:
            The dataset.

        Raises:
            ValueError: as `slipstream_tf.inputs.classifier.skip_inputs`.
        """
        kept = skip_inputs(
            dataset, self._tracker.classifier, self._specs, batch_size, get_keys, drop_remainder
        )
        if self._config.skip == "none":
            return kept
        return self._warn_without_steps(kept)

    def callback(self) -> SaturationCallback:
        """Returns a Keras callback that counts the steps of `fit`; one `fit` at a time."""
        return SaturationCallback(self)

    def step(self, steps: int = 1) -> WindowReport | None:
        """Counts trained steps of a loop of your own; ends the window if it is full.

        Args:
            steps: steps trained since the last call.

        Returns:
            The window's report if one ended, else None.
        """
        self._steps += steps
        return self._tracker.step(steps)

    def end_window(self) -> WindowReport:
        """Ends the present window now, however many steps it had; returns its report."""
        self._steps += 1
        return self._tracker.end_window()

    def _warn_without_steps(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Warns once if two windows' worth of batches went through and no step was counted."""
        limit = 2 * self._config.snapshot_interval

        def check() -> np.int64:
            if self._steps == 0:
                warnings.warn(
                    f"{limit} batches went through Slipstream.apply, but no step was counted: no "
                    "window ends and nothing is skipped. Give `slipstream.callback()` to "
                    "model.fit, or call `slipstream.step()` after each training step.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return np.int64(0)

        def at_limit(index: tf.Tensor, element: Any) -> Any:
            # Python is entered in one batch only.
            tf.cond(
                tf.equal(index, limit),
                lambda: tf.numpy_function(check, [], tf.int64),
                lambda: tf.constant(0, tf.int64),
            )
            return element

        return dataset.enumerate().map(at_limit)
