"""checkpoint.background: work beside the caller, whose error comes once and later."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slipstream_tf.checkpoint.background import Background


def test_an_error_is_raised_once_by_wait() -> None:
    work, may_go = Background(), threading.Event()

    def fail() -> None:
        may_go.wait()
        raise OSError("disk full")

    work.start(fail)
    assert work.is_busy
    may_go.set()
    with pytest.raises(OSError, match="disk full"):
        work.wait()
    work.wait()
    assert not work.is_busy


def test_a_process_ends_after_its_work(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib\n"
        "from slipstream_tf.checkpoint.background import Background\n"
        "def work():\n"
        "    time.sleep(0.3)\n"
        "    pathlib.Path(sys.argv[1]).write_text('done')\n"
        "Background().start(work)\n"
    )
    path = tmp_path / "result"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    assert path.read_text() == "done"
