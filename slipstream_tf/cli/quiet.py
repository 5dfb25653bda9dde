"""Imports TensorFlow without its lines about the machine, which would bury the first real one."""

from __future__ import annotations

import os
import sys
import tempfile

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def import_tensorflow() -> None:
    """Imports TensorFlow; what it logs meanwhile is shown only if the import fails.

    Some of those lines are written before any setting of the log level is looked at. Whoever sets
    TF_CPP_MIN_LOG_LEVEL wants TensorFlow's log and gets all of it.
    """
    if "tensorflow" in sys.modules or _LEVEL in os.environ:
        return
    os.environ[_LEVEL] = "2"
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            import tensorflow  # noqa: F401
        except BaseException:
            log.seek(0)
            os.write(kept, log.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
