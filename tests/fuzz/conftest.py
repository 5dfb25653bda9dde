"""Adds this folder to `sys.path` for helper modules, which `importlib` mode does not do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
