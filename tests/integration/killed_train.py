"""slipstream-train that kills itself, as the tests of resuming need it.

    killed_train.py SIGNAL STEP FLAGS...

SIGKILL comes after a step and before the checkpoint that may be due then; so does SIGTERM, which
lets that be written.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from slipstream_tf.cli import train
from slipstream_tf.cli.checkpoints import RunCheckpoints


def main() -> None:
    """Runs until the step."""
    by, at = signal.Signals[sys.argv.pop(1)], int(sys.argv.pop(1))
    end_step = RunCheckpoints.after_step

    def after_step(self: RunCheckpoints, step: int, notes: Any) -> None:
        # Steps may be called several at once.
        if step >= at:
            os.kill(os.getpid(), by)
        end_step(self, step, notes)

    RunCheckpoints.after_step = after_step  # type: ignore[method-assign]
    train.entry_point()


if __name__ == "__main__":
    main()
