"""The callback of `model.fit` that commits an elastic training."""

from typing import Any

import keras

from slipstream_tf.distributed.elastic import ElasticState


class ElasticCallback(keras.callbacks.Callback):
    """Counts the steps of `fit` for an `ElasticState`, which commits every so many; the last one.

    Args:
        state: of the training, restored.
    """

    def __init__(self, state: ElasticState) -> None:
        super().__init__()
        self._state, self._before = state, 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Notes where the optimizer's steps begin."""
        self._before = int(self.model.optimizer.iterations)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts a step, or those of an execution."""
        now = self._before + 1
        if self.model.steps_per_execution > 1:
            now = int(self.model.optimizer.iterations)
        steps, self._before = now - self._before, now
        self._state.after_step(steps)
