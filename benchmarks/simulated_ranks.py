"""Runs slipstream-train and counts gradient rows as if multiple ranks shared each batch.

The tables of the process split each batch evenly among simulated ranks. Each rank defers gradients
separately, in as much memory as one process has for them.

    python benchmarks/simulated_ranks.py RANKS --data=generated --watch
"""

from __future__ import annotations

import dataclasses
import sys

from slipstream_tf.cli.train import entry_point
from slipstream_tf.ops.update_policy import UpdatePolicy
from slipstream_tf.tables.native import NativeStore


def train(ranks: int) -> None:
    """Runs slipstream-train with the arguments of this process; does not return.

    Args:
        ranks: number of simulated ranks, 2 to 64.
    """
    set_update_policy = NativeStore.set_update_policy

    def set_with_ranks(store: NativeStore, table: str, policy: UpdatePolicy) -> None:
        max_rows = ranks * policy.max_rows
        set_update_policy(store, table, dataclasses.replace(policy, ranks=ranks, max_rows=max_rows))

    NativeStore.set_update_policy = set_with_ranks  # type: ignore[method-assign]
    entry_point()


if __name__ == "__main__":
    train(int(sys.argv.pop(1)))
