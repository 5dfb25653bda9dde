"""States of keys and their transitions, in NumPy.

The transitions are:

    cold -> warming -> varying <-> saturated <-> probing, and probing -> varying; any -> cold.

A key is saturated if its drift is below the threshold T of the window. A key with masked or
deferred updates cannot drift and would stay saturated forever. Therefore a saturated key is probed
in one of `Saturation.revisit_every` windows: it is trained like a varying key, and the drift over
that window decides its next state.
"""

import dataclasses
import enum
from typing import Any

import numpy as np

from slipstream_tf._utils.errors import invalid
from slipstream_tf._utils.hashing import hash_keys

_DTYPES: dict[str, Any] = {"keys": np.int64, "states": np.uint8, "drift": np.float32}


class KeyState(enum.IntEnum):
    """State of a key during a window; fits uint8.

    COLD: The key is not in the hot set. `KeyStates` does not list cold keys.
    WARMING: The key entered the hot set for this window. Its drift has not been measured yet.
    VARYING: The drift was at least T, or not finite. The key is trained normally.
    SATURATED: The drift was below T. Policies may skip examples of the key, or mask or defer its
    gradients.
    PROBING: The key is saturated, but is trained like a varying key for one window to measure its
    drift again.
    """

    COLD = 0
    WARMING = 1
    VARYING = 2
    SATURATED = 3
    PROBING = 4


@dataclasses.dataclass(frozen=True, eq=False)
class KeyStates:
    """States of the hot keys of one table during one window.

    Keys that are not listed are cold.

    Attributes:
        keys: int64 [n], ascending and unique.
        states: uint8 [n], values of `KeyState`.
        drift: float32 [n], the last drift that was measured while the gradients of the key were
            applied, or NaN before the first measurement. An infinite value or a NaN from a
            measurement is an anomaly: the row contains a NaN or an infinity.
    """

    keys: np.ndarray
    states: np.ndarray
    drift: np.ndarray

    def __post_init__(self) -> None:
        if np.ndim(self.keys) != 1 or self.keys.dtype != _DTYPES["keys"]:
            given = f"{self.keys.dtype} {np.shape(self.keys)}"
            raise invalid("keys", given, "KeyStates", "int64 values of shape [n]")
        is_wrong = self.keys[1:] <= self.keys[:-1]
        if is_wrong.any():
            pair = tuple(self.keys[is_wrong.argmax() :][:2].tolist())
            raise invalid("keys", pair, "KeyStates", "unique keys in ascending order")
        for name, dtype in _DTYPES.items():
            values = getattr(self, name)
            if values.shape != self.keys.shape or values.dtype != dtype:
                allowed = f"{np.dtype(dtype).name} values of shape {self.keys.shape}, as `keys`"
                raise invalid(name, f"{values.dtype} {values.shape}", "KeyStates", allowed)

    @classmethod
    def empty(cls) -> "KeyStates":
        """Returns the states before the first hot set: all keys are cold."""
        return cls(**{name: np.empty(0, dtype) for name, dtype in _DTYPES.items()})

    @property
    def is_saturated(self) -> np.ndarray:
        """Whether each key is saturated and not probing: bool [n]."""
        return self.states == KeyState.SATURATED

    def take(self, is_taken: np.ndarray) -> "KeyStates":
        """Returns the states of the keys that the mask bool [n] selects."""
        fields = dataclasses.fields(self)
        return KeyStates(**{f.name: getattr(self, f.name)[is_taken] for f in fields})

    def counts(self) -> dict[str, int]:
        """Returns the number of keys per state, by lower-case name."""
        hot = [state for state in KeyState if state is not KeyState.COLD]
        return {state.name.lower(): int(np.count_nonzero(self.states == state)) for state in hot}


def next_states(
    hot_keys: np.ndarray,
    drifted_keys: np.ndarray,
    drift: np.ndarray,
    threshold: float,
    window: int,
    revisit_every: int,
) -> KeyStates:
    """Finds the states during the window after the window that ends.

    Call this function only at the end of full windows, because in a short window no key drifts
    much.

    - A key that enters the hot set is warming for one window.
    - After that, a key with a drift below T over the window is saturated. Any other key is
      varying.
    - Every `revisit_every` windows a saturated key is probing for one window. The window depends on
      the hash of the key. A probing key is trained like a varying key, so that its drift can be
      measured even if updates are masked.
    - A key with a drift that is not finite is varying, whatever its previous state. With T = 0 no
      key is saturated.
    - A key with masked updates stays saturated until a probe measures a drift of at least T, or
      until T falls to its last measured drift, because `deciding_drifts` repeats that drift.
    - A key that leaves the hot set or is evicted is forgotten. If it returns, it is warming again.

    Note: an example with m lookups, all saturated or probing, has no probing lookup only with
    probability (1 - 1/revisit_every)**m. For example, 0.9**26 is 6%. If examples are skipped,
    `revisit_every` should be well above the number of lookups per example.

    Args:
        hot_keys: int64 [m], ascending: the hot set of the next window.
        drifted_keys: int64 [k], ascending: keys of the current hot set that still have a row.
        drift: float32 [k], at least 0, from `deciding_drifts`.
        threshold: T, at least 0. It is compared in float32, as in the classifier.
        window: Number of the window that ends, from 0.
        revisit_every: Number of windows between probes of a saturated key. 0 disables probes.

    Returns:
        The states of the hot keys during window + 1.

    Raises:
        ValueError: Hot keys are not ascending, or a key occurs twice.
    """
    source, is_known = _find(drifted_keys, hot_keys)
    drift = _take(drift, source, is_known, np.nan)
    # NaN drifts compare false, and an infinite drift is not below an infinite T.
    is_saturated = drift < _as_float32(threshold)
    states = np.where(is_known, np.uint8(KeyState.VARYING), np.uint8(KeyState.WARMING))
    states = np.where(is_saturated, np.uint8(KeyState.SATURATED), states)
    if revisit_every:
        saturated = np.flatnonzero(is_saturated)
        is_due = _is_probed(hot_keys[saturated], window + 1, revisit_every)
        states[saturated[is_due]] = KeyState.PROBING
    return KeyStates(hot_keys, states, drift)


def _is_probed(keys: np.ndarray, window: int, revisit_every: int) -> np.ndarray:
    """Returns which saturated keys are probing in a window, bool [n]."""
    mixed, every = hash_keys(keys), np.uint64(revisit_every)
    # Equals mixed % every, which is slower in NumPy.
    return mixed - mixed // every * every == np.uint64(window % revisit_every)


def deciding_drifts(
    previous: KeyStates, drifted_keys: np.ndarray, drift: np.ndarray, *, are_masked: bool
) -> np.ndarray:
    """Returns the drifts that determine T and the next key states.

    These are the measured drifts, except for keys that were saturated while their updates were
    masked or deferred. The measured drift of such a key is about 0 and has no meaning, therefore
    the last drift measured with updates is used. A measured drift that is not finite is always
    used, because it shows a broken row.

    Args:
        previous: States during the window that ends.
        drifted_keys: int64 [k], a subset of the keys of `previous`, in any order.
        drift: float32 [k], the measured drifts.
        are_masked: Whether updates of saturated keys were masked or deferred.

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
    """Returns the drifts for the input classifier, which skips scores below T.

    For the classifier, "drift below T" must be equivalent to "saturated". Therefore keys that are
    not saturated get a drift of at least T, because the drift of a probing key may be lower. A
    varying key keeps its finite drift instead of infinity: an example only counts as hot if its
    score is finite, and the target is a fraction of the hot examples.

    Args:
        states: States during the window that begins.
        threshold: The T from which the states were computed.

    Returns:
        float32 [n], aligned with `states.keys`, and +inf for keys without a finite drift.
    """
    known = np.where(np.isfinite(states.drift), states.drift, np.float32(np.inf))
    return np.where(states.is_saturated, known, np.maximum(known, _as_float32(threshold)))


def _find(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray | slice, np.ndarray]:
    """Finds keys in an ascending array.

    Args:
        keys: int64 [n], ascending.
        wanted: int64 [m].

    Returns:
        Positions in `keys`, or a full slice if both arrays are equal, and whether each key was
        found.
    """
    if np.array_equal(keys, wanted):
        return slice(None), np.ones(keys.shape, bool)
    return search_keys(keys, wanted)


def search_keys(keys: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Finds keys in an ascending array.

    Args:
        keys: int64 [n], ascending.
        wanted: int64 [m].

    Returns:
        Positions in `keys`, int64 [m], valid for keys that were found, and whether each key was
        found, bool [m].
    """
    positions = np.searchsorted(keys, wanted)
    if not keys.size:
        return positions, np.zeros(positions.shape, bool)
    positions = np.minimum(positions, keys.size - 1)
    return positions, keys[positions] == wanted


def _take(
    values: np.ndarray, source: np.ndarray | slice, is_known: np.ndarray, other: float
) -> np.ndarray:
    """Returns values[source] for known keys and `other` elsewhere; may be a view."""
    if is_known.all():
        return values[source]
    taken = np.full(is_known.shape, other, values.dtype)
    if isinstance(source, slice):
        np.copyto(taken, values, where=is_known)
    else:
        taken[is_known] = values[source[is_known]]
    return taken


def _as_float32(value: float) -> np.float32:
    """Returns the nearest float32, or +inf above the largest."""
    with np.errstate(over="ignore"):
        return np.float32(value)
