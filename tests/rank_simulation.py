"""Simulated ranks: one process defers gradients as multiple ranks would.

Tests and benchmarks/simulated_ranks.py share this module.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def simulate_ranks(store: Any, ranks: int) -> None:
    """Makes a native store defer gradients like `ranks` ranks.

    Call it before training.

    Args:
        store: A `NativeStore`, or the class, which affects all its stores. The change applies to
            policies that are set after this call.
        ranks: Number of ranks, 2 to 64. Each rank has an equal part of every batch and defers
            gradients separately. Each rank has as much memory for deferred gradients as one
            process.
    """
    set_update_policy = store.set_update_policy

    def set_with_ranks(*arguments: Any) -> None:
        # If `store` is the class, the first argument is the instance.
        *store_and_table, policy = arguments
        max_rows = ranks * policy.max_rows
        policy = dataclasses.replace(policy, ranks=ranks, max_rows=max_rows)
        set_update_policy(*store_and_table, policy)

    store.set_update_policy = set_with_ranks
