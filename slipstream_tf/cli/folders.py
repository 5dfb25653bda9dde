"""Output folders of the programs. In: the value of a flag. Out: a folder that can be written."""

from __future__ import annotations

import os

from slipstream_tf.cli.flag_set import UsageError

_ALLOWED = "Allowed: a folder that can be made and written."


def make_output(path: str, flag: str = "output") -> None:
    """Makes an output folder before the work, not after hours of it.

    Args:
        path: of the folder; it may be there already.
        flag: that names it, without dashes.

    Raises:
        UsageError: it cannot be made, or not be written.
    """
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UsageError(f"Invalid flag --{flag}={path}: {error.strerror}. {_ALLOWED}") from None
    if not os.access(path, os.W_OK):
        raise UsageError(f"Invalid flag --{flag}={path}: it cannot be written. {_ALLOWED}")
