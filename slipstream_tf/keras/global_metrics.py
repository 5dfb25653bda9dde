"""Metrics of an epoch over the examples of all ranks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from slipstream_tf._utils.agreement import gather_json
from slipstream_tf._utils.comm import Communicator

State = list[np.ndarray]


class GlobalMetrics:
    """Replaces the metrics of an epoch by metrics over all ranks.

    The state of most metrics is a sum over examples, for example of losses and weights or of true
    positives. This class sums the states over the ranks, and computes the metrics from the sums.

    Metrics with a state that is not a sum remain local, with a warning. They have variables that
    are not numeric, that do not start at 0, or that Keras would not sum over replicas
    (`aggregation` of `add_variable`).
    """

    def __init__(self, comm: Communicator):
        """Creates an object for the given ranks."""
        self._comm = comm
        self._trained: State | None = None
        self._has_warned = False

    def keep_training_state(self, model: Any) -> None:
        """Saves the metric states of training before the validation.

        Keras uses the same metric objects for both.

        Args:
            model: A Keras model that `fit` is about to evaluate.
        """
        self._trained = _state_of(model)

    def forget(self) -> None:
        """Discards the saved state of an interrupted `fit`."""
        self._trained = None

    def put_into(self, logs: dict[str, Any], model: Any) -> None:
        """Replaces the local metrics in `logs` by metrics over all ranks.

        All ranks must call it. A rank that did not evaluate receives the validation metrics of the
        other ranks.

        Args:
            logs: Logs of the finished epoch, modified in place.
            model: A Keras model. The states of its metrics are unchanged.
        """
        now, trained = _state_of(model), self._trained
        self._trained = None
        metrics = list(_metrics_of(model))
        layout = [[m.name, [list(v.shape) for v in m.variables]] for m in metrics]
        gathered = gather_json(self._comm, [trained is not None, layout], "slipstream.metrics")
        if any(other != layout for _, other in gathered):
            self._warn("The models of the ranks have different metrics")
            return
        others = [metric for metric in metrics if not _is_sum(metric)]
        if others:
            names = [metric.name for metric in others]
            self._warn(f"The states of the metrics {names} cannot be summed over the ranks")
        self._replace(logs, "", model, others, now if trained is None else trained)
        if any(has_evaluated for has_evaluated, _ in gathered):
            own = [np.zeros_like(part) for part in now] if trained is None else now
            self._replace(logs, "val_", model, others, own)
        _assign(model, now)

    def _replace(
        self, logs: dict[str, Any], prefix: str, model: Any, others: list[Any], own: State
    ) -> None:
        """Replaces the values of all metrics except `others` in the logs.

        Args:
            logs: Logs of the epoch, modified in place.
            prefix: "" for training, "val_" for validation.
            model: The Keras model.
            others: Metrics whose state is not a sum, which remain local.
            own: State of all metrics on this rank.
        """
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
        # If neither condition holds, a custom train_step created these logs. They stay as they
        # are, because they may contain anything.
        if is_absent or all(key in logs for key in results):
            alone = {prefix + metric.name for metric in others}
            logs.update({key: value for key, value in results.items() if key not in alone})

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logging.warning(
                "%s. The logs of each rank contain local values of these metrics, and callbacks "
                "that monitor them may decide differently on each rank. Use the same metrics on "
                "all ranks, and monitor only metrics that are sums or means over examples.",
                reason,
            )


def _metrics_of(model: Any) -> Iterator[Any]:
    """Yields each metric once, including the metrics of `compile`."""
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
    """Returns whether the state of a metric is a sum over examples.

    It resets the metric, because a sum starts at 0.
    """
    metric.reset_state()
    for variable in metric.variables:
        # Old releases of Keras 3 have no `aggregation` and sum all variables.
        if getattr(variable, "aggregation", "sum") != "sum":
            return False
        value = np.array(tf.convert_to_tensor(variable))
        if value.dtype.kind not in "fiu" or value.any():
            return False
    return True


def _number(value: Any) -> Any:
    array = np.asarray(tf.convert_to_tensor(value))
    return array.item() if array.ndim == 0 else array
