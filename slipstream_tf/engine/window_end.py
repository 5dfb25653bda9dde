"""What a window's end decides: T, the next hot set, the keys' states; its report and warnings.

In: what a window brought, over all ranks, and how much to skip. Out: decisions for `tracker` to
carry out, and a `WindowReport` of both.
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
    """Picks the drifts of keys that sampled inputs have: a small part of the millions that are hot.

    Args:
        window: "tables" and "keys" of the sampled inputs' lookups, as
            `ops.classifier.InputClassifier.export_window` gives them.
        keys: of each table int64 [n], ascending.
        drifts: of each table float32 [n], along its keys.

    Returns:
        The index of each key's table, int32 [m], keys int64 [m], drifts float32 [m], each key of a
        table once: arguments of `InputClassifier.reservoir_scores`.
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
    """Returns T: as set, or found by share.

    Args:
        settings: of the engine.
        scores: float32 [n], skip scores by drift of the window's sampled examples.
        steering: of the next window.
    """
    if not settings.goes_by_keys:
        return fixed_threshold(0.0)
    if settings.saturated.threshold is not None:
        return fixed_threshold(settings.saturated.threshold)
    # Foreseen losses have a share of their own, which T does not follow.
    share = settings.key_share if settings.examples.pilot_settings else steering.share
    return find_threshold(scores, share, settings.saturated.max_threshold)


@dataclasses.dataclass(frozen=True, eq=False)
class Findings(WindowWork):
    """What a window brought, over all ranks; lists have an entry per tracked table.

    Attributes:
        examples, rows, losses: see `WindowWork`.
        window: its number.
        states: of its hot keys.
        measured: their drifts.
        scores: float32 [n], skip scores by drift of its sampled inputs.
        foreseen: float32 [m], scores by foreseen loss of its sampled examples; None: none are.
        policies: the policies' states in it, by name.
        candidates: keys that may be hot in the next window; None: hot keys are of no use.
    """

    window: int
    states: Sequence[KeyStates]
    measured: Sequence[Measured]
    scores: np.ndarray
    foreseen: np.ndarray | None
    policies: Mapping[str, Mapping[str, Any]]
    candidates: Sequence[Candidates] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """What holds in the next window.

    Attributes:
        found: T.
        policies: the policies' states, by name.
        states: of the next hot keys, table by table; None: there is no hot set.
    """

    found: ThresholdResult
    policies: Mapping[str, Mapping[str, Any]]
    states: Sequence[KeyStates] | None


def decide(
    settings: EngineSettings, findings: Findings, steering: Steering, threads: int = 1
) -> Decision:
    """Decides what holds in the window after the one that ends.

    Args:
        settings: of the engine.
        findings: what the window brought.
        steering: how much to skip.
        threads: so many tables are worked on at once.
    """
    found = threshold_of_keys(settings, findings.scores, steering)
    policies = {}
    for policy in settings.policies:
        name = type(policy).__name__
        before = findings.policies[name]
        policies[name] = policy.next_state(before, findings.foreseen, steering.share)
    if findings.candidates is None:
        return Decision(found, policies, None)

    def advance(hot_keys: np.ndarray, measured: Measured) -> KeyStates:
        return next_states(
            hot_keys,
            measured.keys,
            measured.deciding,
            found.threshold,
            findings.window,
            settings.probes_every,
        )

    hot_keys = choose_hot_keys(findings.candidates, settings.snapshot_bytes)
    states = for_each(advance, threads, hot_keys, findings.measured)
    return Decision(found, policies, states)


def _value_of_skipped(settings: EngineSettings, findings: Findings, steering: Steering) -> float:
    """What a skipped example was worth, by the policy that skips, or by the losses that came in."""
    policy = settings.examples
    state = findings.policies.get(type(policy).__name__, {})
    own = policy.value_of_skipped(state, findings.foreseen)
    return steering.value if own is None else own


def describe(
    settings: EngineSettings,
    findings: Findings,
    steering: Steering,
    decision: Decision,
    **others: Any,
) -> WindowReport:
    """Returns the report of a window that has ended.

    Args:
        settings: of the engine.
        findings: what it brought.
        steering: how much the next one is to skip.
        decision: what holds in the next one.
        **others: fields of the report that follow from none of these.
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
        target_share=steering.share,
        log_loss=findings.losses.mean_loss,
        auc=findings.losses.auc,
        auc_loss_plan=steering.plan,
        predicted_cost=steering.predicted_cost,
        skippable_value=_value_of_skipped(settings, findings, steering),
        **dataclasses.asdict(findings.inputs),
        **others,
    )


def warn_of_first_window(
    settings: EngineSettings, warmup_steps: int | None, rows_offered: int, examples_seen: int
) -> None:
    """Warns at the end of the first window if nothing will ever be skipped.

    Args:
        settings: of the engine.
        warmup_steps: None if the length of the warm-up is not known.
        rows_offered: gradient rows that came in the window.
        examples_seen: examples that were classified; by them T is found.
    """
    if not settings.policies:
        return
    if warmup_steps is None:
        logging.warning(
            "The warm-up is a share of the planned steps, whose number is not known: nothing "
            "is skipped. Give steps to Window(warmup=), its planned_steps, or data whose length is "
            "known (tf.data.experimental.assert_cardinality)."
        )
    if (
        settings.goes_by_keys
        and settings.saturated.threshold is None
        and rows_offered > 0
        and not examples_seen
    ):
        logging.warning(
            "Gradients came in, but no input went through Slipstream.apply: the threshold is "
            "found on examples, so it stays 0 and no key is saturated. Put slipstream.apply(...) "
            "last in the training data's pipeline, or set Saturation(threshold=)."
        )


def log_anomalies(
    window: int, step: int, tables: Sequence[str], measured: Sequence[Measured]
) -> None:
    """Warns of hot keys whose drift is not finite.

    Args:
        window: number of the window that ends.
        step: trained steps.
        tables: names of the tracked tables.
        measured: their drifts.
    """
    for table, found in zip(tables, measured, strict=True):
        broken = found.keys[~np.isfinite(found.drift)]
        if broken.size:
            logging.warning(
                "Window %d, step %d: %d hot keys of table %r have a drift that is not finite "
                "and count as varying. First: key %d.",
                *(window, step, broken.size, table, broken[0]),
            )
