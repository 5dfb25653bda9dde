"""Simulated ranks: one process defers gradients as multiple ranks would."""

from __future__ import annotations

import dataclasses
from typing import Any

from slipstream_tf.ops.update_policy import UpdatePolicy


def simulate_ranks(store: Any, ranks: int) -> None:
    """Makes a native store treat each batch as one of so many ranks; call it before training.

    Args:
        store: a `NativeStore`, whose later policies get these ranks.
        ranks: number of ranks. Each has an even part of every batch and defers gradients
            separately, in as much memory as one process has for them.
    """
    set_update_policy = store.set_update_policy

    def set_with_ranks(table: str, policy: UpdatePolicy) -> None:
        max_rows = ranks * policy.max_rows
        set_update_policy(table, dataclasses.replace(policy, ranks=ranks, max_rows=max_rows))

    store.set_update_policy = set_with_ranks
