"""Runs a program of examples/ like `python examples/NAME`, for test_example.py.

Arguments: the file name of the program and its arguments.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / sys.argv[0]), run_name="__main__")
    print("all checks passed")
