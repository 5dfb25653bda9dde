"""Decides the threshold T, the next hot set and the key states.

The functions compute decisions from the findings of all ranks, without side effects except for
warnings. `tracker` carries out the decisions and stores the `WindowReport`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from slipstream_tf.engine.hot_set import Candidates, choose_hot_keys
from slipstream_tf.engine.report import WindowReport, drift_histogram, drift_quantiles
from slipstream_tf.engine.settings import EngineSettings
from slipstream_tf.engine.states import KeyStates, next_states, search_keys
from slipstream_tf.engine.steering import Steering, WindowWork
from slipstream_tf.engine.tracked_table import Measured, for_each
from slipstream_tf.policies.threshold import ThresholdResult, find_threshold, fixed_threshold


def sampled_drifts(
    window: Mapping[str, np.ndarray], keys: Sequence[np.ndarray], drifts: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the drifts of the hot keys in the sampled examples.

    There may be millions of hot keys, therefore the classifier receives only the sampled keys.

    Args:
        window: Result of `ops.classifier.InputClassifier.export_window`, with the "tables" and
            "keys" of the lookups of the sampled examples.
        keys: For each table, int64 [n], ascending.
        drifts: For each table, float32 [n], aligned with its keys.

    Returns:
        Arguments for `InputClassifier.reservoir_scores`: the table index of each key, int32 [m],
        keys int64 [m], and drifts float32 [m]. Each key of a table occurs once.
    """
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for table, (hot, drift) in enumerate(zip(keys, drifts, strict=True)):
        sampled = np.unique(window["keys"][window["tables"] == table])
        indices, is_hot = search_keys(hot, sampled)
        sampled = sampled[is_hot]
        found.append((np.full(sampled.size, table, np.int32), sampled, drift[indices[is_hot]]))
    tables, sampled, drift = (np.concatenate(part) for part in zip(*found, strict=True))
    return tables, sampled, drift


def threshold_of_keys(
    settings: EngineSettings, scores: np.ndarray, steering: Steering
) -> ThresholdResult:
    """Returns T: the configured threshold, or a quantile of the scores.

    The quantile is at the target fraction. T is 0 if no policy depends on the saturation of keys.

    Args:
        settings: Settings of the engine.
        scores: float32 [n], skip scores by drift of the window's sampled examples.
        steering: The fraction to save on in the next window.
    """
    if not settings.goes_by_keys:
        return fixed_threshold(0.0)
    if settings.saturated.threshold is not None:
        return fixed_threshold(settings.saturated.threshold)
    # The steered fraction belongs to the predicted losses, therefore T uses the key fraction.
    fraction = settings.key_fraction if settings.examples.pilot_settings else steering.fraction
    return find_threshold(scores, fraction, settings.saturated.max_threshold)


@dataclasses.dataclass(frozen=True, eq=False)
class Findings(WindowWork):
    """Measurements of a window over all ranks.

    Sequences have one entry per tracked table.

    Attributes:
        inputs, rows, losses: Counts of examples, counts of gradient rows, and losses; see
            `WindowWork`.
        window: Number of the window, from 0.
        states: States of the hot keys during the window.
        measured: Drifts of the hot keys.
        scores: float32 [n], skip scores by drift of the sampled examples.
        predicted_losses: float32 [m], predicted-loss scores of the sampled examples, or None
            without a pilot.
        policies: States of the policies during the window, by class name.
        candidates: Keys that may be hot in the next window, or None if no hot set is needed.
    """

    window: int
    states: Sequence[KeyStates]
    measured: Sequence[Measured]
    scores: np.ndarray
    predicted_losses: np.ndarray | None
    policies: Mapping[str, Mapping[str, Any]]
    candidates: Sequence[Candidates] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """Decisions for the next window.

    Attributes:
        found: T.
        policies: States of the policies, by class name.
        states: States of the next hot keys, table by table, or None if no hot set is needed.
    """

    found: ThresholdResult
    policies: Mapping[str, Mapping[str, Any]]
    states: Sequence[KeyStates] | None


def decide(
    settings: EngineSettings, findings: Findings, steering: Steering, threads: int = 1
) -> Decision:
    """Decides T, policy states and key states for the next window.

    Args:
        settings: Settings of the engine.
        findings: Measurements of the window that ends.
        steering: The fraction to save on.
        threads: Number of tables to process at the same time.
    """
    found = threshold_of_keys(settings, findings.scores, steering)
    policies = {}
    for policy in settings.policies:
        name = type(policy).__name__
        before = findings.policies[name]
        policies[name] = policy.next_state(before, findings.predicted_losses, steering.fraction)
    if findings.candidates is None:
        return Decision(found, policies, None)

    def advance(hot_keys: np.ndarray, measured: Measured) -> KeyStates:
        return next_states(
            hot_keys,
            measured.keys,
            measured.deciding,
            found.threshold,
            findings.window,
            settings.revisit_every,
        )

    hot_keys = choose_hot_keys(findings.candidates, settings.snapshot_bytes)
    states = for_each(advance, threads, hot_keys, findings.measured)
    return Decision(found, policies, states)


def _value_of_skipped(settings: EngineSettings, findings: Findings, steering: Steering) -> float:
    """Returns the value of a skipped example, in average examples.

    The estimate of the policy has priority over the estimate from the recorded losses.
    """
    policy = settings.examples
    state = findings.policies.get(type(policy).__name__, {})
    own = policy.value_of_skipped(state, findings.predicted_losses)
    return steering.value if own is None else own


def describe(
    settings: EngineSettings,
    findings: Findings,
    steering: Steering,
    decision: Decision,
    **fields: Any,
) -> WindowReport:
    """Returns the report of a window that has ended.

    Args:
        settings: Settings of the engine.
        findings: Measurements of the window.
        steering: The fraction to save on in the next window.
        decision: Decisions for the next window.
        **fields: The remaining fields of the report.
    """
    drift = np.concatenate([measured.drift for measured in findings.measured])
    finite = np.sort(drift[np.isfinite(drift)])
    return WindowReport(
        window=findings.window,
        hot_keys=sum(states.keys.size for states in findings.states),
        evicted=sum(measured.evicted for measured in findings.measured),
        anomalies=drift.size - finite.size,
        drift_quantiles=drift_quantiles(finite),
        drift_histogram=drift_histogram(finite),
        threshold=decision.found.threshold,
        is_threshold_capped=decision.found.is_capped,
        policies=decision.policies,
        target_fraction=steering.fraction,
        log_loss=findings.losses.mean_loss,
        auc=findings.losses.auc,
        auc_loss_plan=steering.plan,
        predicted_cost=steering.predicted_cost,
        skippable_value=_value_of_skipped(settings, findings, steering),
        **dataclasses.asdict(findings.inputs),
        **fields,
    )


def warn_of_first_window(
    settings: EngineSettings, warmup_steps: int | None, rows_offered: int, examples_seen: int
) -> None:
    """Warns after the first window about settings that prevent all skipping.

    Args:
        settings: Settings of the engine.
        warmup_steps: Length of the warm-up, or None if unknown.
        rows_offered: Number of gradient rows in the window.
        examples_seen: Number of classified examples, from which T is found.
    """
    if not settings.policies:
        return
    if warmup_steps is None:
        logging.warning(
            "The warm-up does not end because it is a fraction of the planned steps, and their "
            "number is unknown. During the warm-up, no policy takes effect. Pass "
            "Window(planned_steps=...), a number of steps as Window(warmup=...), or data of known "
            "length (tf.data.experimental.assert_cardinality)."
        )
    if (
        settings.goes_by_keys
        and settings.saturated.threshold is None
        and rows_offered > 0
        and not examples_seen
    ):
        logging.warning(
            "Gradients were applied, but no example passed through Slipstream.apply. The threshold "
            "is computed from these examples, therefore it stays 0 and no key is saturated. Call "
            "slipstream.apply(...) at the end of the training pipeline, or pass "
            "Saturation(threshold=...)."
        )


def log_anomalies(
    window: int, step: int, tables: Sequence[str], measured: Sequence[Measured]
) -> None:
    """Warns about hot keys with a drift that is not finite.

    Args:
        window: Number of the window that ends.
        step: Number of trained steps.
        tables: Names of the tracked tables.
        measured: Drifts of their hot keys.
    """
    for table, found in zip(tables, measured, strict=True):
        broken = found.keys[~np.isfinite(found.drift)]
        if broken.size:
            logging.warning(
                "Window %d, step %d: %d hot keys of table %r have a drift that is not finite and "
                "count as varying, for example key %d. Reduce the learning rate or clip gradients.",
                *(window, step, broken.size, table, broken[0]),
            )
