"""States of keys (cold, warming, varying, saturated, probing) and their transitions. Pure NumPy.

In: the drifts of the window that ends, T and the next hot set. Out: the next states.

    cold -> warming -> varying <-> saturated <-> probing, and probing -> varying; any -> cold.

A key whose updates are withheld cannot drift, so that it would stay saturated. Probing lets it move
for one window in `revisit_every`; the drift over that window decides its next state.
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

    COLD: not in the hot set. Such keys are not listed in `KeyStates`.
    WARMING: entered the hot set for this window, so that its drift has not been measured yet.
    VARYING: its drift was at least T; trained like any key.
    SATURATED: its drift was below T; policies may skip its examples or mask or defer its gradients.
    PROBING: saturated, but trained like a varying key for one window, to measure its drift again.
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
        drift: float32 [n], last drift measured while the key was free to move; NaN before there
            was one. Not finite: an anomaly (a NaN or infinite row).
    """

    keys: np.ndarray
    states: np.ndarray
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
    hot_keys: np.ndarray,
    drifted_keys: np.ndarray,
    drift: np.ndarray,
    threshold: float,
    window: int,
    probes_every: int,
) -> KeyStates:
    """Finds the states of the window after the one that ends.

    Call it at the end of full windows only: a short one shows little drift of any key.

    - A key that enters the hot set is warming for one window.
    - After that, a key whose drift over the window was below T is saturated; any other key varies.
    - Each `probes_every` windows, at windows that differ by the key's hash, a saturated key is
      probing for one window: it trains like a varying key, so that its drift can be measured even
      where its updates are masked.
    - A drift that is not finite makes a key varying, whatever its state. With T = 0 no key is
      saturated.
    - A key whose updates are masked stays saturated until a probe measures a drift of at least T,
      or until T falls to the key's last free drift, because `deciding_drifts` repeats that drift.
    - A key that leaves the hot set, or was evicted, is forgotten; if it comes back, it warms again.

    An example with m lookups, all of them saturated or probing, has no probing lookup with
    probability (1 - 1/probes_every)**m only: 0.9**26 is 6%. Where examples are skipped,
    `probes_every` should be well above the lookups of an example.

    Args:
        hot_keys: int64 [m], ascending: the next window's hot set.
        drifted_keys: int64 [k], ascending: keys of the window's hot set that still have a row.
        drift: float32 [k], at least 0, along `drifted_keys`: from `deciding_drifts`.
        threshold: T, at least 0; compared as float32, as the classifier does.
        window: number of the window that ends, from 0.
        probes_every: windows from probe to probe of a saturated key; 0: no probes.

    Returns:
        The states of the hot keys during window + 1.

    Raises:
        ValueError: hot keys are not ascending, or occur twice.
    """
    source, is_known = _find(drifted_keys, hot_keys)
    drift = _take(drift, source, is_known, np.nan)
    # Comparisons with NaN are false, and an infinite drift is not below an infinite T.
    is_saturated = drift < _as_float32(threshold)
    states = np.where(is_known, np.uint8(KeyState.VARYING), np.uint8(KeyState.WARMING))
    states = np.where(is_saturated, np.uint8(KeyState.SATURATED), states)
    if probes_every:
        saturated = np.flatnonzero(is_saturated)
        is_due = _is_probed(hot_keys[saturated], window + 1, probes_every)
        states[saturated[is_due]] = KeyState.PROBING
    return KeyStates(hot_keys, states, drift)


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

    They make "drift below T" mean "saturated" exactly: keys that are not saturated get at least T,
    because a probing key may have drifted less. A varying key keeps its own drift instead of +inf:
    any value from T on decides alike, but an example is hot only if its score is finite, and the
    target share is a fraction of the hot examples.

    Args:
        states: states during the window that begins.
        threshold: T that the states were found with.

    Returns:
        float32 [n], along `states.keys`; +inf where there was no finite drift yet.
    """
    known = np.where(np.isfinite(states.drift), states.drift, np.float32(np.inf))
    return np.where(states.is_saturated, known, np.maximum(known, _as_float32(threshold)))


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
