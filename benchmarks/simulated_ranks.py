"""Runs slipstream-train with gradient rows counted for simulated ranks.

The tables of the process split each batch evenly among simulated ranks. Each simulated rank defers
gradients separately and has the deferral memory of one process.

    python benchmarks/simulated_ranks.py RANKS --data=generated --watch
"""

from __future__ import annotations

import sys
from pathlib import Path

from slipstream_tf.cli.train import entry_point
from slipstream_tf.tables.native import NativeStore

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from rank_simulation import simulate_ranks


def train(ranks: int) -> None:
    """Runs slipstream-train with the arguments of this process. Does not return.

    Args:
        ranks: The number of simulated ranks, 2 to 64.
    """
    simulate_ranks(NativeStore, ranks)
    entry_point()


if __name__ == "__main__":
    train(int(sys.argv.pop(1)))
