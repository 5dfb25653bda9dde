"""Tests of `engine.states`: the transition table and properties of arbitrary histories."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_tf.engine.states import (
    KeyState,
    KeyStates,
    deciding_drifts,
    effective_drifts,
    next_states,
)

COLD, WARMING, VARYING, SATURATED, PROBING = KeyState
NAN, INF = float("nan"), float("inf")


def one_key(state: KeyState, drift: float) -> KeyStates:
    return KeyStates(
        np.array([7], np.int64),
        np.array([state], np.uint8),
        np.array([drift], np.float32),
    )


def advance(states, hot, drifts, threshold, window, *, revisit_every=0, are_masked=False):
    """Applies `next_states` to drifts (key -> drift).

    Keys of `states` without a drift count as evicted.
    """
    keys = np.array(sorted(drifts), np.int64)
    measured = np.array([drifts[key] for key in keys.tolist()], np.float32)
    deciding = deciding_drifts(states, keys, measured, are_masked=are_masked)
    hot_keys = np.array(sorted(hot), np.int64)
    return next_states(hot_keys, keys, deciding, threshold, window, revisit_every)


def as_rows(states: KeyStates) -> list[tuple]:
    columns = (getattr(states, field.name).tolist() for field in dataclasses.fields(states))
    # As text, because NaN is not equal to NaN.
    return [tuple(map(repr, row)) for row in zip(*columns, strict=True)]


# T is 2, the key is 7 and window 9 ends. The columns are: state before, last free drift,
# are_masked, measured drift, state after, last free drift after.
TRANSITIONS = [
    (WARMING, NAN, False, 1.9, SATURATED, 1.9),
    (WARMING, NAN, False, 2.0, VARYING, 2.0),
    (WARMING, NAN, False, NAN, VARYING, NAN),
    (WARMING, NAN, True, 1.0, SATURATED, 1.0),
    (VARYING, 5.0, False, 1.9, SATURATED, 1.9),
    (VARYING, 1.0, False, 2.5, VARYING, 2.5),
    (VARYING, 5.0, True, 0.0, SATURATED, 0.0),
    (VARYING, 5.0, False, INF, VARYING, INF),
    (SATURATED, 1.0, False, 1.5, SATURATED, 1.5),
    (SATURATED, 1.0, False, 1.9, SATURATED, 1.9),
    (SATURATED, 1.0, False, 2.0, VARYING, 2.0),
    (SATURATED, 1.0, False, NAN, VARYING, NAN),
    (SATURATED, 1.0, True, 0.0, SATURATED, 1.0),  # The drift of a masked row is no evidence.
    (SATURATED, 1.0, True, 9.0, SATURATED, 1.0),
    (SATURATED, 1.9, True, 0.0, SATURATED, 1.9),
    (SATURATED, 2.0, True, 0.0, VARYING, 2.0),  # T has decreased.
    (SATURATED, 1.0, True, INF, VARYING, INF),
    (PROBING, 1.0, False, 1.9, SATURATED, 1.9),
    (PROBING, 1.0, True, 1.9, SATURATED, 1.9),
    (PROBING, 1.0, True, 2.0, VARYING, 2.0),
    (PROBING, 1.0, False, NAN, VARYING, NAN),
]


@pytest.mark.parametrize(
    ("before", "last", "are_masked", "measured", "after", "drift"), TRANSITIONS
)
def test_transition_gives_expected_state(before, last, are_masked, measured, after, drift):
    result = advance(one_key(before, last), [7], {7: measured}, 2.0, 9, are_masked=are_masked)
    assert as_rows(result) == as_rows(one_key(after, drift))


@pytest.mark.parametrize("before", [WARMING, VARYING, SATURATED, PROBING])
def test_state_of_cold_or_evicted_key_is_dropped(before):
    states = one_key(before, 1.0)
    assert advance(states, [8], {7: 1.0}, 2.0, 9).keys.tolist() == [8]
    entered = one_key(WARMING, NAN)
    assert as_rows(advance(states, [7], {}, 2.0, 9)) == as_rows(entered)
    assert as_rows(advance(KeyStates.empty(), [7], {}, 2.0, 9)) == as_rows(entered)


@pytest.mark.parametrize("before", [WARMING, VARYING, SATURATED, PROBING])
@pytest.mark.parametrize("threshold", [0.0, 1e-60])  # As a float32, 1e-60 is 0.
def test_no_key_is_saturated_without_threshold(before, threshold):
    result = advance(one_key(before, 0.0), [7], {7: 0.0}, threshold, 9)
    assert result.states.tolist() == [VARYING]
    assert effective_drifts(result, threshold).tolist() == [0.0]


def test_threshold_beyond_float32_is_accepted():
    result = advance(one_key(VARYING, 0.0), [7], {7: 3e38}, 1e300, 9)
    assert result.states.tolist() == [SATURATED]
    assert advance(result, [7], {7: 3e38}, 3.1e38, 10).states.tolist() == [SATURATED]
    assert advance(result, [7], {7: INF}, 1e300, 10).states.tolist() == [VARYING]


def test_key_warms_up_for_one_window():
    states, seen = KeyStates.empty(), []
    for window in range(3):
        states = advance(states, [7], dict.fromkeys(states.keys, 0.1), 1.0, window)
        seen.append(states.states[0])
    assert seen == [WARMING, SATURATED, SATURATED]


def test_masked_key_stays_masked_without_probes():
    states = one_key(SATURATED, 1.0)
    for window in range(9, 200):
        states = advance(states, [7], {7: 0.0}, 2.0, window, are_masked=True)
        assert (states.states[0], states.drift[0]) == (SATURATED, 1.0)


def test_probes_of_many_keys_are_spread_evenly():
    keys = range(100_000)  # Consecutive keys, which the hash must scatter.
    states = advance(KeyStates.empty(), keys, {}, 1.0, 0)
    for window in range(1, 13):
        states = advance(states, keys, dict.fromkeys(keys, 0.5), 1.0, window, revisit_every=10)
        assert 9_500 < states.counts()["probing"] < 10_500
        assert sum(states.counts().values()) == len(keys)


histories = st.lists(
    st.tuples(
        st.sets(st.integers(-8, 8), max_size=12),  # The next hot set.
        st.sets(st.integers(-8, 8), max_size=3),  # Evicted keys.
        st.lists(
            st.sampled_from([0.0, 0.5, 1.0, 1.4, 1.6, 9.0, NAN, INF]), min_size=17, max_size=17
        ),
        st.sampled_from([0.0, 0.5, 1.0, 1.25]),  # The threshold T.
    ),
    min_size=1,
    max_size=12,
)
settings = st.fixed_dictionaries(
    {
        "revisit_every": st.sampled_from([0, 1, 2, 3]),
        "are_masked": st.booleans(),
    }
)


def run(history, settings):
    """Returns (window, states before, drifts, threshold, new states) per window."""
    states, steps = KeyStates.empty(), []
    for window, (hot, evicted, values, threshold) in enumerate(history):
        drifts = {int(key): values[key + 8] for key in states.keys if int(key) not in evicted}
        before, states = states, advance(states, hot, drifts, threshold, window, **settings)
        steps.append((window, before, drifts, threshold, states))
    return steps


def reference(before, hot, drifts, threshold, settings, probes):
    """Implements the transition rules for one key at a time."""
    rows = {
        row[0]: row[1:] for row in zip(*(a.tolist() for a in vars(before).values()), strict=True)
    }
    result = []
    for key in sorted(hot):
        if key not in rows or key not in drifts:
            result.append((key, WARMING, NAN))
            continue
        state, last = rows[key]
        drift = drifts[key]
        if settings["are_masked"] and state == SATURATED and np.isfinite(drift):
            drift = last
        if drift < threshold:
            result.append((key, PROBING if key in probes else SATURATED, drift))
        else:
            result.append((key, VARYING, drift))
    return result


@given(history=histories, settings=settings)
def test_transitions_equal_rules_per_key(history, settings):
    for _, before, drifts, threshold, after in run(history, settings):
        probes = set(after.keys[after.states == PROBING].tolist())
        hot = after.keys.tolist()
        expected = reference(before, hot, drifts, threshold, settings, probes)
        rows = [(k, int(s), repr(np.float32(d))) for k, s, d in expected]
        columns = (getattr(after, field.name).tolist() for field in dataclasses.fields(after))
        assert [(*row[:2], repr(np.float32(row[2]))) for row in zip(*columns, strict=True)] == rows


@given(history=histories, settings=settings)
def test_invariants_hold_for_random_histories(history, settings):
    for _, _, _, threshold, states in run(history, settings):
        has_run = np.isin(states.states, [SATURATED, PROBING])
        assert np.isfinite(states.drift[has_run]).all()
        effective = effective_drifts(states, threshold)
        assert effective.dtype == np.float32 and (effective >= 0).all()
        assert ((effective < np.float32(threshold)) == (states.states == SATURATED)).all()


@given(history=histories, settings=settings)
def test_advance_does_not_change_its_arguments(history, settings):
    for window, before, drifts, threshold, after in run(history, settings):
        kept = as_rows(before)
        again = advance(before, after.keys.tolist(), drifts, threshold, window, **settings)
        assert as_rows(again) == as_rows(after)
        assert as_rows(before) == kept


@given(
    keys=st.sets(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
    revisit_every=st.integers(1, 12),
    are_masked=st.booleans(),
    first=st.integers(0, 1000),
)
def test_saturated_key_probes_once_per_probe_interval(keys, revisit_every, are_masked, first):
    states, probing = advance(KeyStates.empty(), keys, {}, 1.0, first), []
    for window in range(first + 1, first + 1 + 3 * revisit_every):
        drifts = dict.fromkeys(states.keys, 0.5)
        states = advance(
            states, keys, drifts, 1.0, window, revisit_every=revisit_every, are_masked=are_masked
        )
        probing.append(states.states == PROBING)
        assert np.isin(states.states, [SATURATED, PROBING]).all()
    for start in range(2 * revisit_every + 1):
        assert (np.sum(probing[start : start + revisit_every], axis=0) == 1).all()


def test_deciding_drifts_are_last_unmasked_drifts():
    states = KeyStates(
        np.array([1, 2, 3, 4, 5], np.int64),
        np.array([WARMING, VARYING, SATURATED, PROBING, SATURATED], np.uint8),
        np.array([NAN, 9.0, 0.5, 0.6, 0.7], np.float32),
    )
    keys, drift = np.array([5, 4, 3, 2, 1]), np.array([NAN, 0.1, 0.2, 0.3, 0.4], np.float32)
    deciding = deciding_drifts(states, keys, drift, are_masked=True)
    np.testing.assert_array_equal(deciding, np.array([NAN, 0.1, 0.5, 0.3, 0.4], np.float32))
    np.testing.assert_array_equal(deciding_drifts(states, keys, drift, are_masked=False), drift)
    assert deciding.dtype == np.float32


def test_effective_drifts_exclude_non_saturated_keys_from_skipping():
    states = KeyStates(
        np.arange(6),
        np.array([WARMING, WARMING, VARYING, SATURATED, SATURATED, PROBING], np.uint8),
        np.array([NAN, 0.5, 3.0, 0.5, 1.5, 0.5], np.float32),
    )
    assert effective_drifts(states, 2.0).tolist() == [INF, 2.0, 3.0, 0.5, 1.5, 2.0]


def test_keys_are_counted_per_state():
    states = advance(KeyStates.empty(), [3, 1], {}, 1.0, 0)
    states = advance(states, [1, 2, 3], {1: 0.5, 3: 2.0}, 1.0, 1)
    assert states.counts() == {"warming": 1, "varying": 1, "saturated": 1, "probing": 0}
    assert [states.keys[states.states == s].tolist() for s in (WARMING, VARYING, SATURATED)] == [
        [2],
        [3],
        [1],
    ]
    assert sum(KeyStates.empty().counts().values()) == 0
    assert advance(KeyStates.empty(), [], {}, 1.0, 0).keys.size == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hot_keys": np.array([2, 1])}, r"Invalid `keys`: \(2, 1\)"),
        ({"hot_keys": np.array([1, 1])}, r"Invalid `keys`: \(1, 1\)"),
        ({"hot_keys": np.array([1.0])}, "Invalid `keys`: 'float64"),
    ],
)
def test_invalid_arguments_raise(changes, message):
    arguments = {
        "hot_keys": np.array([7]),
        "drifted_keys": np.array([7]),
        "drift": np.ones(1, np.float32),
        "threshold": 1.0,
        "window": 3,
        "revisit_every": 0,
    }
    with pytest.raises(ValueError, match=message):
        next_states(**{**arguments, **changes})


def test_states_of_wrong_length_raise():
    with pytest.raises(ValueError, match="Invalid `states`"):
        dataclasses.replace(one_key(VARYING, 1.0), states=np.zeros(2, np.uint8))
    with pytest.raises(ValueError, match="Invalid `drift`"):
        dataclasses.replace(one_key(VARYING, 1.0), drift=np.zeros(1))
