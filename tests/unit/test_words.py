"""Words that the project has given up do not come back in the C++ sources.

Looked at are identifiers, names of ops and attributes, their documentation, and messages.

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
    "HasCopy": "HasReplica",
    "HeldCounts": "UpdateCounts",
    "HeldSums": "DeferredBuffers",
    "HoldRule": "DeferralRule",
    "MakeRoomFor": "EvictFor",
    "Mark": "SetFlags",
    "MarkRows": "SetFlags",
    "MarkedRow": "ShardFlags",
    "Marks": "Flags",
    "PendingUpdates": "DeferredContents",
    "Place": "Processor of a test, Address of a row; Put for the verb",
    "ProbeFrozen": "ProbeKeys",
    "Publish": "SetReplicated",
    "PublishedRows": "ReplicaHolders",
    "RowFate": "Decision",
    "RowMark": "RowFlag",
    "RowParcels": "SendBuffer",
    "Serve": "Pull",
    "ServeRows": "PullRows",
    "SlotsOf": "IndicesOf, EntriesOf",
    "StoreCopies": "StoreReplicas",
    "TableShard": "RowShard, ShardFlags or ShardUpdates",
    "Travelled": "SquaredUpdateLengths",
    "fate": "decision",
    "frozen": "read_only",
    "gives_all": "nothing: a row that is as it starts is told by its key",
    "has_slot": "has_index",
    "held": "deferred",
    "holds": "is_valid",
    "kFrozen": "kReadOnlyReplica",
    "kKept": "kRefreshedReplica",
    "kTellsWay": "kReturnsDelta",
    "left_alone": "without_gradient",
    "lets_go": "flushes",
    "makes_room": "evict",
    "makes_rows": "create_missing",
    "mark": "flag",
    "marked": "flagged",
    "marks": "flags",
    "parcels": "send buffer, rows",
    "passed_over": "ignored_rank",
    "pending": "deferred",
    "place": "index, or what it is of",
    "places": "indices",
    "published": "replicated",
    "serve": "pull",
    "served": "pulled",
    "travelled": "squared update length",
    "unique_slot": "unique_index",
    "way": "squared update length, delta",
}
# Retired in names of ops and attributes, their documentation, and messages, as words.
RETIRED_IN_TEXTS = {
    "asked for": "requested",
    "counts update": "advance_step",
    "fate": "decision",
    "frozen": "read-only replica",
    "held": "deferred",
    "hold": "defer; have",
    "keep copies": "have replicas",
    "keeps": "refreshed",
    "kept copy": "refreshed replica",
    "let go": "evict, flush",
    "makes room": "evict",
    "makes rows": "create_missing",
    "marked": "flagged",
    "marks": "flags",
    "parcels": "send buffer",
    "passed over": "ignored",
    "pending": "deferred",
    "place": "index, bucket",
    "places": "indices, buckets",
    "publish": "set replicated",
    "published": "replicated",
    "serve": "pull",
    "served": "pulled",
    "travelled": "squared update length",
}
# Comments, and texts: the names of ops and of their attributes among them.
_NO_CODE = re.compile(r'//[^\n]*|R"doc\(.*?\)doc"|"(?:[^"\\\n]|\\.)*"', re.DOTALL)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_TEXT = re.compile(r'//[^\n]*|#include[^\n]*|(R"doc\(.*?\)doc"|"(?:[^"\\\n]|\\.)*")', re.DOTALL)
_WORD_END = re.compile(r"(?<=[a-z])(?=[A-Z])|[\W_]+")


def retired_in(text: str) -> set[str]:
    """Returns the retired words among the identifiers of C++ code."""
    return set(_IDENTIFIER.findall(_NO_CODE.sub("", text))) & RETIRED.keys()


def retired_in_texts(text: str) -> set[str]:
    """Returns the retired words in the strings of C++ code."""
    texts = "".join(found[1] or "" for found in _TEXT.finditer(text))
    words = f" {_WORD_END.sub(' ', texts).lower()} "
    return {word for word in RETIRED_IN_TEXTS if f" {word} " in words}


def test_retired_words_are_in_no_cpp_source() -> None:
    files = [p for p in (ROOT / "cc_ops").rglob("*") if p.suffix in (".h", ".cc")]
    assert len(files) > 100
    found = {}
    for path in files:
        text = path.read_text(encoding="utf-8")
        if words := {
            **{word: RETIRED[word] for word in retired_in(text)},
            **{word: RETIRED_IN_TEXTS[word] for word in retired_in_texts(text)},
        }:
            found[str(path.relative_to(ROOT))] = words
    assert found == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("RowMark row = kKept;", {"RowMark", "kKept"}),
        ('// RowMark\nconst char* x = "kKept";', set()),
        ("RowMarks kKeptRows;", set()),
    ],
)
def test_the_search_reads_code_alone(text: str, words: set[str]) -> None:
    assert retired_in(text) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('REGISTER_OP("SlipstreamServeRows").Attr("makes_rows: bool")', {"serve", "makes rows"}),
        ('R"doc(\nkeys: those that are asked\n  for.\n)doc"', {"asked for"}),
        ('// "held"\n#include "held.h"\nint held;', set()),
        ('"preserved placeholder"', set()),
    ],
)
def test_the_search_reads_texts_alone(text: str, words: set[str]) -> None:
    assert retired_in_texts(text) == words
