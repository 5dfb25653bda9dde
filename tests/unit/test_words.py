"""Words that the project has given up do not come back as identifiers of the C++ sources.

The words in use, and what each means, are in docs/glossary.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Retired identifier -> what stands for it.
RETIRED = {
    "CopyOptions": "ReplicaOptions",
    "DeferredSums": "DeferredGradients",
    "FateOf": "Decide",
    "HeldCounts": "UpdateCounts",
    "HeldSums": "DeferredBuffers",
    "HoldRule": "DeferralRule",
    "MakeRoomFor": "EvictFor",
    "MarkRows": "SetFlags",
    "MarkedRow": "ShardFlags",
    "PendingUpdates": "DeferredContents",
    "PublishedRows": "ReplicaHolders",
    "RowFate": "Decision",
    "RowMark": "RowFlag",
    "RowParcels": "SendBuffer",
    "ServeRows": "PullRows",
    "StoreCopies": "StoreReplicas",
    "TableShard": "RowShard, ShardFlags or ShardUpdates",
    "gives_all": "nothing: a row that is as it starts is told by its key",
    "kFrozen": "kReadOnlyReplica",
    "kKept": "kRefreshedReplica",
    "kTellsWay": "kReturnsDelta",
    "left_alone": "without_gradient",
    "lets_go": "flushes",
}
# Comments, and texts: the names of ops and of their attributes among them.
_NO_CODE = re.compile(r'//[^\n]*|R"doc\(.*?\)doc"|"(?:[^"\\\n]|\\.)*"', re.DOTALL)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def retired_in(text: str) -> set[str]:
    """Returns the retired words among the identifiers of C++ code."""
    return set(_IDENTIFIER.findall(_NO_CODE.sub("", text))) & RETIRED.keys()


def test_retired_words_are_no_identifiers() -> None:
    files = [p for p in (ROOT / "cc_ops").rglob("*") if p.suffix in (".h", ".cc")]
    assert len(files) > 100
    found = {
        str(path.relative_to(ROOT)): {word: RETIRED[word] for word in words}
        for path in files
        if (words := retired_in(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RowMark mark = kKept;", {"RowMark", "kKept"}),
        ('// RowMark\nconst char* x = "kKept";', set()),
        ("RowMarks kKeptRows;", set()),
    ],
)
def test_the_search_reads_code_alone(text: str, words: set[str]) -> None:
    assert retired_in(text) == words
