"""What one window's end found: a frozen record that can be had as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

DRIFT_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


@dataclasses.dataclass(frozen=True)
class WindowReport:
    """One window, from its first step to its end.

    Attributes:
        window: number of the window, from 0.
        step: trained steps since the start, at the window's end.
        is_warming_up: whether the window began within the warm-up, when nothing is skipped.
        hot_keys: keys whose drift over this window was asked for; 0 in the first window.
        snapshot_bytes: bytes of those keys' snapshots.
        evicted: hot keys that the store no longer holds; they have no drift.
        anomalies: hot keys whose drift is not finite (a NaN or infinite row); never saturated.
        drift_quantiles: quantile (0 to 1) -> drift, of the finite drifts; empty without any.
        threshold: T as found at this window's end; 0 if no input was hot.
        is_threshold_capped: whether `max_threshold` lowered T.
        is_skipping: whether inputs may be skipped in the next window (not while warming up, nor
            with skip="none", when T is what it would have been).
        saturated_keys: hot keys with a drift below T.
        inputs_seen: inputs classified in this window.
        inputs_skipped: inputs left out in this window.
        hot_inputs: inputs with a finite skip score under the drifts of the window before.
        next_hot_keys: keys of the next window's hot set.
        hot_set_overlap: share of the next hot set that was in this window's, 0 to 1.
        seconds: time that the window's end took.
    """

    window: int
    step: int
    is_warming_up: bool
    hot_keys: int
    snapshot_bytes: int
    evicted: int
    anomalies: int
    drift_quantiles: Mapping[float, float]
    threshold: float
    is_threshold_capped: bool
    is_skipping: bool
    saturated_keys: int
    inputs_seen: int
    inputs_skipped: int
    hot_inputs: int
    next_hot_keys: int
    hot_set_overlap: float
    seconds: float

    @property
    def saturated_share(self) -> float:
        """Saturated keys as a share of the hot keys, 0 to 1."""
        return _share(self.saturated_keys, self.hot_keys)

    @property
    def skipped_share(self) -> float:
        """Skipped inputs as a share of the inputs seen, 0 to 1."""
        return _share(self.inputs_skipped, self.inputs_seen)

    @property
    def hot_input_share(self) -> float:
        """Hot inputs as a share of the inputs seen, 0 to 1."""
        return _share(self.hot_inputs, self.inputs_seen)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields and shares as JSON-serialisable values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["drift_quantiles"] = {f"{q:g}": v for q, v in self.drift_quantiles.items()}
        for share in ("saturated_share", "skipped_share", "hot_input_share"):
            values[share] = getattr(self, share)
        return values


def drift_quantiles(drift: np.ndarray) -> Mapping[float, float]:
    """Quantiles of the finite values of `drift`, float32 [n]; empty without any."""
    finite = drift[np.isfinite(drift)]
    if not finite.size:
        return MappingProxyType({})
    values = np.quantile(finite, DRIFT_QUANTILES)
    return MappingProxyType(dict(zip(DRIFT_QUANTILES, map(float, values), strict=True)))


def random_shares(reports: Iterable[WindowReport]) -> tuple[float, ...]:
    """Shares for `SaturationConfig(skip="random")`, the control run of the run that reported.

    Args:
        reports: of a run with skip="inputs" and the same warm-up and window length.

    Returns:
        The share that was skipped in each window that began after the warm-up; (0.0,) if none did.
    """
    return tuple(r.skipped_share for r in reports if not r.is_warming_up) or (0.0,)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
