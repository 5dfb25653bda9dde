"""Runs slipstream-train and kills it at a step, for tests of resuming.

    killed_train.py SIGNAL STEP FLAGS...

The signal is sent after the step and before the checkpoint that may be due then. SIGTERM lets
slipstream-train write that checkpoint. SIGKILL does not.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from slipstream_tf.cli import train
from slipstream_tf.cli.checkpoints import RunCheckpoints


def main() -> None:
    """Runs slipstream-train until it reaches the step."""
    by, at = signal.Signals[sys.argv.pop(1)], int(sys.argv.pop(1))
    end_step = RunCheckpoints.after_step

    def after_step(self: RunCheckpoints, step: int, notes: Any) -> None:
        # One call may report multiple steps.
        if step >= at:
            os.kill(os.getpid(), by)
        end_step(self, step, notes)

    RunCheckpoints.after_step = after_step  # type: ignore[method-assign]
    train.entry_point()


if __name__ == "__main__":
    main()
