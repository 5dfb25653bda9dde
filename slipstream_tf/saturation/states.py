"""States of keys (cold, warming, varying, saturated, probing) and their transitions. Pure NumPy.

In: the states of the window that ends, its drifts, T and the next hot set. Out: the next states.

    cold -> warming -> varying <-> saturated <-> probing, and probing -> varying; any -> cold.

A key whose updates are withheld cannot drift, so its drift alone would never release it: probing
lets it move for one window in `revisit_every`, and decides by what it then did.
"""

import dataclasses
import enum
from typing import Any

import numpy as np

from slipstream_tf.config import Saturation
from slipstream_tf.errors import invalid
from slipstream_tf.hashing import hash_keys

_DTYPES: dict[str, Any] = {
    **{"keys": np.int64, "states": np.uint8, "windows_watched": np.int32, "drift": np.float32}
}


class KeyState(enum.IntEnum):
    """State of a key during a window; fits uint8.

    COLD: not in the hot set. Such keys are not listed in `KeyStates`.
    WARMING: in the hot set, watched for less than `protect_windows` full windows; undecided.
    VARYING: moves; trained like any key.
    SATURATED: hardly moves; what can be saved on it is saved.
    PROBING: found saturated, but trained like a varying key for one window, to be decided on again.
    """

    COLD = 0
    WARMING = 1
    VARYING = 2
    SATURATED = 3
    PROBING = 4


@dataclasses.dataclass(frozen=True, eq=False)
class KeyStates:
    """States of one table's hot keys during one window. Keys that are not listed are cold.

    Attributes:
        keys: int64 [n], ascending, each once.
        states: uint8 [n], values of `KeyState`.
        windows_watched: int32 [n], full windows that the key has been in the hot set.
        drift: float32 [n], last drift measured while the key was free to move; NaN before there
            was one. Not finite: an anomaly (a NaN or infinite row).
    """

    keys: np.ndarray
    states: np.ndarray
    windows_watched: np.ndarray
    drift: np.ndarray

    def __post_init__(self) -> None:
        if np.ndim(self.keys) != 1 or self.keys.dtype != _DTYPES["keys"]:
            given = f"{self.keys.dtype} {np.shape(self.keys)}"
            raise invalid("keys", given, "KeyStates", "int64 [n]")
        is_wrong = self.keys[1:] <= self.keys[:-1]
        if is_wrong.any():
            pair = tuple(self.keys[is_wrong.argmax() :][:2].tolist())
            raise invalid("keys", pair, "KeyStates", "ascending keys, each once")
        for name, dtype in _DTYPES.items():
            values = getattr(self, name)
            if values.shape != self.keys.shape or values.dtype != dtype:
                allowed = f"{np.dtype(dtype).name} of the shape of the keys, {self.keys.shape}"
                raise invalid(name, f"{values.dtype} {values.shape}", "KeyStates", allowed)

    @classmethod
    def empty(cls) -> "KeyStates":
        """Returns the states before the first hot set was chosen: every key is cold."""
        return cls(**{name: np.empty(0, dtype) for name, dtype in _DTYPES.items()})

    @property
    def is_saturated(self) -> np.ndarray:
        """Which keys are saturated, and not probing: bool [n]."""
        return self.states == KeyState.SATURATED

    def take(self, is_taken: np.ndarray) -> "KeyStates":
        """Returns the states of some of the keys, those of a mask bool [n]."""
        fields = dataclasses.fields(self)
        return KeyStates(**{f.name: getattr(self, f.name)[is_taken] for f in fields})

    def counts(self) -> dict[str, int]:
        """Returns the number of keys per state, for the ledger: lower-case name -> keys."""
        hot = [state for state in KeyState if state is not KeyState.COLD]
        return {state.name.lower(): int(np.count_nonzero(self.states == state)) for state in hot}


def next_states(
    previous: KeyStates,
    hot_keys: np.ndarray,
    drifted_keys: np.ndarray,
    drift: np.ndarray,
    threshold: float,
    window: int,
    saturation: Saturation,
    probes_every: int,
    are_masked: bool,
) -> KeyStates:
    """Finds the states of the window after the one that ends.

    Call it at the end of full windows only: a short one shows little drift of any key.

    - A key that enters the hot set is warming. Nothing is decided on it before `protect_windows`
      full windows; then it is saturated if its drift is below T, else varying.
    - A saturated key stays so until its drift exceeds release * T, so that noise around T does not
      make it come and go.
    - Each `probes_every` windows, at windows that differ by the key's hash, a saturated key is
      probing for one window. At its end drift < T decides, without hysteresis: the probe
      is the one honest look at a key whose updates may be withheld. Kept wrongly, it misses
      `probes_every` windows of updates; released wrongly, it trains for a window until it is
      decided on again.
    - A drift that is not finite makes a key varying, whatever its state. With T = 0 no key is
      saturated.
    - With `are_masked`, a saturated key's drift is taken as in `deciding_drifts`: what it was when
      the key could move. It stays saturated until its next probe, or until T falls so far that
      release * T is below that drift.
    - A key that leaves the hot set, or was evicted, is forgotten; should it come back, it warms.

    An input with m lookups, all of them saturated or probing, has none that is probing with
    probability (1 - 1/probes_every)**m only: 0.9**26 is 6%. Where inputs are skipped,
    `probes_every` should be well above the lookups of an input.

    Args:
        previous: states during the window that ends.
        hot_keys: int64 [m], ascending: the next window's hot set.
        drifted_keys: int64 [k], keys of `previous` that still have a row, in any order; the
            others were evicted.
        drift: float32 [k], their drifts over the window that ends.
        threshold: T, at least 0; compared as float32, as the classifier does.
        window: number of the window that ends, from 0.
        saturation: its release and protect_windows decide beside drift and T.
        probes_every: windows from probe to probe of a saturated key; 0: no probes.
        are_masked: whether updates of saturated keys were withheld in the window that ends.

    Returns:
        The states of the hot keys during window + 1.

    Raises:
        ValueError: hot keys are not ascending, or occur twice.
    """
    limit = _as_float32(threshold)
    before = _aligned_with(hot_keys, previous, drifted_keys, drift, are_masked)
    watched = before.windows_watched + np.int32(1)
    is_watched_long = watched >= min(saturation.protect_windows, int(np.iinfo(np.int32).max))
    is_saturated = is_watched_long & _is_low(before, limit, saturation.release)
    states = np.where(is_watched_long, np.uint8(KeyState.VARYING), np.uint8(KeyState.WARMING))
    states = np.where(is_saturated, np.uint8(KeyState.SATURATED), states)
    if probes_every:
        saturated = np.flatnonzero(is_saturated)
        is_due = _is_probed(hot_keys[saturated], window + 1, probes_every)
        states[saturated[is_due]] = KeyState.PROBING
    return KeyStates(hot_keys, states, watched, before.drift)


def _aligned_with(
    hot_keys: np.ndarray,
    previous: KeyStates,
    drifted_keys: np.ndarray,
    drift: np.ndarray,
    are_masked: bool,
) -> KeyStates:
    """What is known of the hot keys from the window that ends; new and evicted ones are cold."""
    positions, _ = _find(previous.keys, drifted_keys)
    survives = np.zeros(previous.keys.size, bool)
    survives[positions] = True
    last_drift = previous.drift.copy()
    last_drift[positions] = deciding_drifts(previous, drifted_keys, drift, are_masked=are_masked)
    source, is_known = _find(previous.keys, hot_keys)
    is_known &= _take(survives, source, is_known, False)
    return KeyStates(
        hot_keys,
        _take(previous.states, source, is_known, KeyState.COLD),
        _take(previous.windows_watched, source, is_known, -1),
        _take(last_drift, source, is_known, np.nan),
    )


def _is_low(before: KeyStates, limit: np.float32, release: float) -> np.ndarray:
    """Whether drifts are below T or, of saturated keys, at most release * T: bool [n]."""
    # Comparisons with NaN are false. An infinite drift is not below an infinite T either.
    may_stay = before.is_saturated & (before.drift <= _as_float32(release * float(limit)))
    return ((before.drift < limit) | may_stay) & np.isfinite(before.drift) & (limit > 0.0)


def _is_probed(keys: np.ndarray, window: int, revisit_every: int) -> np.ndarray:
    """Whether saturated keys are probing in a window: bool [n]."""
    mixed, every = hash_keys(keys), np.uint64(revisit_every)
    # As mixed % every, which NumPy is slower at.
    return mixed - mixed // every * every == np.uint64(window % revisit_every)


def deciding_drifts(
    previous: KeyStates, drifted_keys: np.ndarray, drift: np.ndarray, *, are_masked: bool
) -> np.ndarray:
    """The drifts that decide on keys at a window's end, and that T is to be found from.

    That is the measured drift, except for keys that were saturated while updates were withheld:
    their drift of about 0 says nothing, so it is the last one measured while they could move.
    A measured drift that is not finite stands in any case: it tells of a broken row.

    Args:
        previous: states during the window that ends.
        drifted_keys: int64 [k], some of their keys, in any order.
        drift: float32 [k], the measured drifts.
        are_masked: whether updates of saturated keys were withheld.

    Returns:
        float32 [k].
    """
    positions, _ = _find(previous.keys, drifted_keys)
    deciding = np.array(drift, np.float32)
    if are_masked:
        could_not_move = previous.is_saturated[positions] & np.isfinite(deciding)
        np.copyto(deciding, previous.drift[positions], where=could_not_move)
    return deciding


def effective_drifts(states: KeyStates, threshold: float) -> np.ndarray:
    """The drifts to give to the input classifier, whose rule is: skip score < T.

    They make "drift below T" mean "saturated" exactly: saturated keys get at most the float32
    before T (hysteresis lets them drift more), all other keys at least T (a probing or a protected
    key may drift less). Varying keys keep their own drift and do not become +inf: any value from T
    on decides alike, but a finite score is what counts an input as hot, of which the target is a
    share, so hot inputs must not shrink to the skippable ones.

    Args:
        states: states during the window that begins.
        threshold: T, the one that they were found with.

    Returns:
        float32 [n], along `states.keys`; +inf where there was no finite drift yet.
    """
    limit = _as_float32(threshold)
    highest_below = np.nextafter(limit, np.float32(0.0))
    known = np.where(np.isfinite(states.drift), states.drift, np.float32(np.inf))
    is_saturated = states.is_saturated & (limit > 0.0)
    return np.where(is_saturated, np.minimum(known, highest_below), np.maximum(known, limit))


def _find(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray | slice, np.ndarray]:
    """Positions in `keys` (ascending) of the wanted keys, or all, and whether they are there."""
    if np.array_equal(keys, wanted):
        return slice(None), np.ones(keys.shape, bool)
    return search_keys(keys, wanted)


def search_keys(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds keys among others.

    Args:
        keys: int64 [n], ascending.
        wanted: int64 [m].

    Returns:
        Positions in `keys`, int64 [m], valid where found; and whether they are there, bool [m].
    """
    positions = np.searchsorted(keys, wanted)
    if not keys.size:
        return positions, np.zeros(positions.shape, bool)
    positions = np.minimum(positions, keys.size - 1)
    return positions, keys[positions] == wanted


def _take(
    values: np.ndarray, source: np.ndarray | slice, is_known: np.ndarray, other: float
) -> np.ndarray:
    """values[source] where known, `other` elsewhere; of the values' type; may be a view."""
    if is_known.all():
        return values[source]
    taken = np.full(is_known.shape, other, values.dtype)
    if isinstance(source, slice):
        np.copyto(taken, values, where=is_known)
    else:
        taken[is_known] = values[source[is_known]]
    return taken


def _as_float32(value: float) -> np.float32:
    """The nearest float32; +inf beyond the largest."""
    with np.errstate(over="ignore"):
        return np.float32(value)
