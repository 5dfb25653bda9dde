"""Deferring by interval on native tables, which the tests of SOK compare with."""

from __future__ import annotations

import dataclasses

import slipstream_tf as slip
from slipstream_tf.policies.base import Tables


class DeferGradients(slip.DeferGradients):
    """A `DeferGradients` that takes an `Interval` on native tables, too."""

    def require_fit(self, tables: Tables) -> None:
        """Checks the memory only."""
        super().require_fit(dataclasses.replace(tables, are_native=False))
