"""Metrics of an epoch over the examples of all ranks.

In: a model and the ranks. Out: logs with the values over all examples.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from slipstream_tf._utils.agreement import gather_json
from slipstream_tf._utils.comm import Communicator

State = list[np.ndarray]


class GlobalMetrics:
    """Puts the metrics of all ranks into an epoch's logs.

    A metric's state is a sum over examples (of losses and weights, of true positives, ...). The
    states of the ranks are summed; what the metrics make of the sums is their value over the
    examples of all.

    Left alone, with a warning, are metrics whose state is no sum: of which Keras itself would not
    sum the variables over replicas (`aggregation` of `add_variable`), or whose variables are no
    numbers, or do not start at 0.
    """

    def __init__(self, comm: Communicator):
        """Takes the ranks."""
        self._comm = comm
        self._trained: State | None = None
        self._has_warned = False

    def keep_training_state(self, model: Any) -> None:
        """Remembers the state after an epoch's last step; Keras evaluates with the same metrics.

        Args:
            model: a Keras model, about to be evaluated in `fit`.
        """
        self._trained = _state_of(model)

    def forget(self) -> None:
        """Drops what a `fit` that broke off has left."""
        self._trained = None

    def put_into(self, logs: dict[str, Any], model: Any) -> None:
        """Replaces this rank's values by those of all ranks; a collective.

        A rank that did not evaluate gets the others' values, too.

        Args:
            logs: of an epoch that has ended; changed in place.
            model: a Keras model; its metrics keep their state.
        """
        now, trained = _state_of(model), self._trained
        self._trained = None
        metrics = list(_metrics_of(model))
        layout = [[m.name, [list(v.shape) for v in m.variables]] for m in metrics]
        gathered = gather_json(self._comm, [trained is not None, layout], "slipstream.metrics")
        if any(other != layout for _, other in gathered):
            self._warn("The ranks' models have different metrics")
            return
        others = [metric for metric in metrics if not _is_sum(metric)]
        if others:
            self._warn(f"The states of the metrics {[m.name for m in others]} are no sums")
        self._replace(logs, "", model, others, now if trained is None else trained)
        if any(has_evaluated for has_evaluated, _ in gathered):
            own = [np.zeros_like(part) for part in now] if trained is None else now
            self._replace(logs, "val_", model, others, own)
        _assign(model, now)

    def _replace(
        self, logs: dict[str, Any], prefix: str, model: Any, others: list[Any], own: State
    ) -> None:
        """Puts in the values of the metrics that are not among `others`."""
        is_sum = [m not in others for m in _metrics_of(model) for _ in m.variables]
        parts = [part for part, sums in zip(own, is_sum, strict=True) if sums]
        flat = np.concatenate([np.zeros(0), *(np.ravel(part) for part in parts)])
        with tf.device("CPU:0"):
            name = f"slipstream.metrics.{prefix or 'train'}"
            total = self._comm.sum(tf.constant(flat, tf.float64), "control", name).numpy()
        pieces = iter(np.split(total, np.cumsum([part.size for part in parts])))
        totals = [
            next(pieces).reshape(part.shape).astype(part.dtype) if sums else part
            for part, sums in zip(own, is_sum, strict=True)
        ]
        _assign(model, totals)
        results = {
            prefix + key: _number(value) for key, value in model.get_metrics_result().items()
        }
        is_absent = not any(key.startswith(prefix) for key in logs)
        # Else a train_step of the model's own made the logs, of what is not known here.
        if is_absent or all(key in logs for key in results):
            alone = {prefix + metric.name for metric in others}
            logs.update({key: value for key, value in results.items() if key not in alone})

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logging.warning(
                "%s: they stay each rank's own in the logs, and callbacks that act on them may act "
                "differently on each rank.",
                reason,
            )


def _metrics_of(model: Any) -> Iterator[Any]:
    """Yields each metric once, those of `compile` one by one."""
    seen = set()
    for metric in model.metrics:
        inner = getattr(metric, "metrics", None)
        for single in inner if isinstance(inner, list) else [metric]:
            if id(single) not in seen:
                seen.add(id(single))
                yield single


def _state_of(model: Any) -> State:
    return [np.array(tf.convert_to_tensor(v)) for m in _metrics_of(model) for v in m.variables]


def _assign(model: Any, state: State) -> None:
    variables = [variable for metric in _metrics_of(model) for variable in metric.variables]
    for variable, value in zip(variables, state, strict=True):
        variable.assign(value)


def _is_sum(metric: Any) -> bool:
    """Whether a metric's state is a sum over examples; resets the metric to see where it starts."""
    metric.reset_state()
    for variable in metric.variables:
        # Old releases of Keras 3 do not say, and sum all.
        if getattr(variable, "aggregation", "sum") != "sum":
            return False
        value = np.array(tf.convert_to_tensor(variable))
        if value.dtype.kind not in "fiu" or value.any():
            return False
    return True


def _number(value: Any) -> Any:
    array = np.asarray(tf.convert_to_tensor(value))
    return array.item() if array.ndim == 0 else array
