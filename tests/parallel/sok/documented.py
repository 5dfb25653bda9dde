"""Runs the code blocks of docs/sok.md that are marked `python`, in order.

A block marked `text` contains the output of the `python` block before it.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path

import horovod.tensorflow as hvd

PAGE = Path(__file__).resolve().parents[3] / "docs" / "sok.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main() -> None:
    hvd.init()
    printed, count = "", 0
    with tempfile.TemporaryDirectory() as own:
        names = {"__name__": "documented", "folder": hvd.broadcast_object(own)}
        for match in BLOCK.finditer(PAGE.read_text()):
            kind, text = match.groups()
            line = PAGE.read_text()[: match.start()].count("\n") + 1
            if kind == "text":
                assert text in printed, f"the block at line {line} prints {printed!r}"
                continue
            # Line numbers in errors are the line numbers of the page.
            code = compile("\n" * line + text, str(PAGE), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, names)
            printed, count = out.getvalue(), count + 1
    assert count >= 5
    reports = names["slipstream"].tracker.reports
    assert sum(report.tables[0].rows.deferred for report in reports) > 0
    assert names["rows"].shape == (3, 16)
    assert len(names["written"]) == len(names["values"]) > 0
    print("all checks passed")


if __name__ == "__main__":
    main()
