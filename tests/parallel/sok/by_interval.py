"""Deferral by interval on native tables, as a reference for SOK tests."""

from __future__ import annotations

import dataclasses

import slipstream_tf as slip
from slipstream_tf.policies.base import Tables


class DeferGradients(slip.DeferGradients):
    """A `DeferGradients` that also accepts an `Interval` on native tables."""

    def require_fit(self, tables: Tables) -> None:
        """Checks only the memory, as for tables that are not native."""
        super().require_fit(dataclasses.replace(tables, are_native=False))
