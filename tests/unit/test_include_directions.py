"""Tests that C++ includes point down and have no cycles.

A file may include files of its folder and of folders earlier in the order. Only tests include
`testing`, and `core` does not include `tf`. The tests run the checker on made-up trees, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "cc_ops"
# Each folder may include the folders before it.
CORE = (
    "base",
    "gpu",
    "memory",
    "containers",
    "spill",
    "update/rules",
    "deferral",
    "table",
    "lookup",
    "update",
    "saturation",
    "hot_keys",
    "exchange",
)
# These two folders may not include each other.
SIDE_BY_SIDE = [{f"{layer}/saturation", f"{layer}/hot_keys"} for layer in ("core", "tf")]
ORDER = [f"core/{room}" for room in CORE] + [f"tf/{room}" for room in CORE]
TESTING = "core/testing"
INCLUDE = re.compile(r'^\s*#\s*include\s*"cc_ops/([^"]+)"', re.MULTILINE)


def room_of(file: str) -> str:
    """Returns the folder of a file, relative to cc_ops."""
    return file.rpartition("/")[0]


def is_test(file: str) -> bool:
    """Returns whether a file belongs only to tests."""
    return file.startswith(f"{TESTING}/") or file.endswith("_test.cc")


def includes_of(root: Path) -> dict[str, list[str]]:
    """Returns the includes of each file; paths are relative to `root`."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.suffix in (".h", ".cc"):
            name = path.relative_to(root).as_posix()
            found[name] = INCLUDE.findall(path.read_text(encoding="utf-8"))
    return found


def upward(includes: Mapping[str, list[str]]) -> Iterator[str]:
    """Yields a line for each include that does not point down."""
    for file, included in includes.items():
        room = room_of(file)
        if room not in ORDER and not file.startswith(f"{TESTING}/"):
            yield f"{file}: the room {room!r} has no place in the order of rooms"
            continue
        for other in included:
            target = room_of(other)
            if other not in includes:
                yield f"{file} includes {other}, which is not there"
            elif is_test(file) or target == room:
                continue
            elif other.startswith(f"{TESTING}/"):
                yield f"{file} includes {other}, which is for tests"
            elif ORDER.index(target) > ORDER.index(room) or {target, room} in SIDE_BY_SIDE:
                yield f"{file} includes {other}, which does not stand below it"


def circles(includes: Mapping[str, list[str]]) -> Iterator[str]:
    """Yields each cycle of files that include each other."""
    done: set[str] = set()
    for start in includes:
        path: list[str] = []

        def walk(file: str, path: list[str]) -> Iterator[str]:
            if file in path:
                yield " > ".join([*path[path.index(file) :], file])
                return
            if file in done:
                return
            for other in includes.get(file, ()):
                yield from walk(other, [*path, file])
            done.add(file)

        yield from walk(start, path)


def test_sources_include_lower_layers_only() -> None:
    includes = includes_of(SOURCES)
    assert "core/table/embedding_table.h" in includes and "core/base/status.h" in includes
    assert list(upward(includes)) == []
    assert list(circles(includes)) == []


BELOW = {
    "core/base/status.h": [],
    "core/memory/slabs.h": ["core/base/status.h"],
    "core/update/rules/sgd.h": ["core/base/status.h"],
    "core/table/table.h": ["core/update/rules/sgd.h", "core/memory/slabs.h"],
    "core/table/table_test.cc": ["core/update/step.h", "core/testing/threads.h"],
    "core/update/step.h": ["core/table/table.h"],
    "core/testing/threads.h": ["core/update/step.h"],
    "tf/table/kernels.cc": ["core/exchange/rows.h"],
    "core/exchange/rows.h": ["core/update/step.h"],
}


def test_checker_accepts_downward_includes() -> None:
    assert list(upward(BELOW)) == list(circles(BELOW)) == []


@pytest.mark.parametrize(
    ("file", "included", "named"),
    [
        ("core/table/table.h", "core/update/step.h", "does not stand below"),
        ("core/update/rules/sgd.h", "core/table/table.h", "does not stand below"),
        ("core/base/status.h", "tf/table/kernels.cc", "does not stand below"),
        ("core/hot_keys/sketch.h", "core/saturation/drift.h", "does not stand below"),
        ("core/saturation/x.h", "core/hot_keys/x.h", "does not stand below"),
        ("core/table/table.h", "core/testing/threads.h", "is for tests"),
        ("core/table/table.h", "core/base/gone.h", "is not there"),
        ("core/attic/x.h", "core/base/status.h", "no place"),
    ],
)
def test_checker_finds_upward_include(file: str, included: str, named: str) -> None:
    tree = {
        **BELOW,
        "core/saturation/drift.h": [],
        "core/hot_keys/x.h": [],
        file: [included],
    }
    found = list(upward(tree))
    assert len(found) == 1 and file in found[0] and named in found[0], found


def test_checker_finds_include_cycle() -> None:
    tree = {"core/table/a.h": ["core/table/b.h"], "core/table/b.h": ["core/table/a.h"]}
    assert list(circles(tree)) == ["core/table/a.h > core/table/b.h > core/table/a.h"]
