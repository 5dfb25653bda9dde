"""Shared fixtures of the data tests: small input files and their preparation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream_tf.data.opening import open_source
from slipstream_tf.data.preparation import Options, prepare
from slipstream_tf.data.readers.avazu import HEADER


def _criteo_lines(count: int, seed: int = 0, bad: tuple[int, ...] = ()) -> list[str]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    counts = rng.integers(-2, 5_000, (count, 13))
    keys = (rng.pareto(1.0, (count, 26)) * 20).astype(np.int64)
    lines = []
    for row in range(count):
        columns = [str(labels[row])]
        columns += ["" if value % 7 == 0 else str(value) for value in counts[row].tolist()]
        columns += ["" if value % 11 == 3 else f"{value:08x}" for value in keys[row].tolist()]
        lines.append("\t".join(columns) if row not in bad else "1\t2")
    return lines


def _avazu_lines(count: int) -> list[str]:
    rows = [
        f"{i},{i % 3 % 2},141021{i % 24:02d},1005," + ",".join(f"v{i * k % 31}" for k in range(20))
        for i in range(count)
    ]
    return [HEADER.decode(), *rows]


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def _run(
    paths: Any,
    folder: Path,
    schema: Any = None,
    kind: str = "auto",
    progress: Any = None,
    **options: Any,
) -> Any:
    several = paths if isinstance(paths, list) else [paths]
    source, files = open_source([str(path) for path in several], kind, schema)
    return prepare(source, files, str(folder), Options(**options), progress)


@pytest.fixture
def criteo_lines() -> Callable[..., list[str]]:
    """Returns a function that makes Criteo lines, malformed at indices `bad`."""
    return _criteo_lines


@pytest.fixture
def avazu_lines() -> Callable[[int], list[str]]:
    """Returns a function that makes a header and lines in Avazu format."""
    return _avazu_lines


@pytest.fixture
def digests() -> Callable[[Path], dict[str, str]]:
    """Returns a function that maps a folder's files to their digests."""
    return _digests


@pytest.fixture
def run_prepare() -> Callable[..., Any]:
    """Returns a function that prepares files and returns the statistics."""
    return _run
