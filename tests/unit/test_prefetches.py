"""Tests that functions that only prefetch are always inlined.

GCC considers such a function free of effects and removes calls that it does not inline. Loops would
then wait for memory, and no result would show it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "cc_ops"
SOURCES = sorted(path for path in CORE.rglob("*") if path.suffix in (".cc", ".h"))
# A lambda or a void function: the specifiers before and after it, and its body.
LAMBDA = re.compile(r"()\[[^\[\]]*\]\s*\([^()]*\)\s*(\w*)\s*\{([^{}]*)\}")
FUNCTION = re.compile(r"(\w*)\s+void\s+\w+\([^()]*\)\s*(\w*)\s*\{([^{}]*)\}")
INLINED = {"SLIPSTREAM_LAMBDA_INLINE", "SLIPSTREAM_PREFETCHES", "SLIPSTREAM_ALWAYS_INLINE"}


def not_inlined(text: str) -> list[str]:
    """Returns functions that only prefetch and are not forced inline."""
    found = []
    for match in (*LAMBDA.finditer(text), *FUNCTION.finditer(text)):
        before, behind, body = match.groups()
        statements = [line for line in body.split(";") if line.strip()]
        only = statements and all(re.search("refetch\\w*\\(", line) for line in statements)
        if only and not INLINED & {before, behind}:
            found.append(match.group())
    return found


def test_prefetch_only_functions_are_always_inlined() -> None:
    found = {path.name: not_inlined(path.read_text()) for path in SOURCES}
    assert len(found) > 100
    assert {name: parts for name, parts in found.items() if parts} == {}


@pytest.mark.parametrize(
    "text",
    [
        "VisitRows(keys, [](const Row& row) { __builtin_prefetch(row.row); });",
        "auto ahead = [&](int i) {\n  if (i < n) rows.Prefetch(i);\n};",
        "inline void Prefetch(int i) const { __builtin_prefetch(&rows[i]); }",
    ],
)
def test_missing_always_inline_is_detected(text: str) -> None:
    assert not_inlined(text)


def test_functions_with_other_work_need_no_always_inline() -> None:
    assert not not_inlined("[&](int i) { rows.Prefetch(i + 8); sum += rows[i]; }")
