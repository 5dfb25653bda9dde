"""Simulated ranks: one process defers gradients as multiple ranks would.

Tests and benchmarks/simulated_ranks.py share this module.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def simulate_ranks(store: Any, ranks: int) -> None:
    """Makes a native store treat each batch as one of so many ranks; call it before training.

    Args:
        store: a `NativeStore`, or the class for all its stores. Policies set later get these ranks.
        ranks: number of ranks, 2 to 64. Each has an even part of every batch and defers gradients
            separately, in as much memory as one process has for them.
    """
    set_update_policy = store.set_update_policy

    def set_with_ranks(*arguments: Any) -> None:
        # The method of a class has the store as its first argument.
        *store_and_table, policy = arguments
        max_rows = ranks * policy.max_rows
        policy = dataclasses.replace(policy, ranks=ranks, max_rows=max_rows)
        set_update_policy(*store_and_table, policy)

    store.set_update_policy = set_with_ranks
