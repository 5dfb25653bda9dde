"""Words that the project has given up do not come back in the sources.

Looked at are identifiers, names of ops and attributes, their documentation, and messages.

The words in use, and what each means, are in docs/glossary.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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
    "RowFate": "Decision",
    "RowMark": "RowFlag",
    "RowParcels": "SendBuffer",
    "Serve": "Pull",
    "ServeRows": "PullRows",
    "SlotsOf": "IndicesOf, EntriesOf",
    "TableShard": "RowShard, ShardFlags or ShardUpdates",
    "fate": "decision",
    "frozen": "saturated",
    "gives_all": "nothing: a row that is as it starts is told by its key",
    "has_slot": "has_index",
    "held": "deferred",
    "holds": "is_valid",
    "kFrozen": "kSaturated",
    "kKept": "kSaturated",
    "kTellsWay": "kReturnsDelta",
    "left_alone": "without_gradient",
    "lets_go": "flushes",
    "makes_room": "evict",
    "makes_rows": "create_missing",
    "mark": "flag",
    "marked": "flagged",
    "marks": "flags",
    "parcels": "send buffer, rows",
    "passed_over": "ignored",
    "pending": "deferred",
    "place": "index, or what it is of",
    "places": "indices",
    "published": "replicated",
    "serve": "pull",
    "served": "pulled",
    "unique_slot": "unique_index",
    "way": "delta",
}
# Retired in names of ops and attributes, their documentation, and messages, as words.
RETIRED_IN_TEXTS = {
    "asked for": "requested",
    "counts update": "advance_step",
    "fate": "decision",
    "frozen": "saturated",
    "held": "deferred",
    "hold": "defer; have",
    "keep copies": "have replicas",
    "kept copy": "replica",
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


# The Python sources. A retired word as a part of an identifier -> what stands for it.
RETIRED_PARTS = {
    "asked": "requested (of keys) or target (of benchmarks)",
    "fate": "decision",
    "freeze": "saturate",
    "frozen": "saturated",
    "held": "deferred",
    "heirs": "assigned",
    "judge": "decide",
    "judged": "decided",
    "judges": "decides",
    "kept_copies": "replicas",
    "kept_copy": "replica",
    "let_go": "flush",
    "lets_go": "flushes",
    "makes_room": "evict",
    "makes_rows": "create_missing",
    "mark_rows": "set_flags",
    "marked": "flagged, or what is meant",
    "marks": "flags",
    "parcel": "send_buffer",
    "parcels": "send_buffers",
    "passed_over": "what is meant: left_out, ignored, not_counted",
    "pending": "deferred",
    "publish": "what is done with replicas, or their holders",
    "publishes": "what is done with replicas, or their holders",
    "serve_rows": "pull_rows",
    "served_rows": "pulled_rows",
    "unmarked": "without_flags",
}
# In texts of errors.
RETIRED_PHRASES = {
    r"(?:held|holds?|kept) back": "deferred",
    r"held (?:sums?|gradients?|rows?)": "deferred",
    r"pending (?:sums?|gradients?|rows?|updates?)": "deferred",
    r"published rows?": "rows that were sent",
    r"(?:frozen|kept) cop(?:y|ies)": "replica",
    r"marked rows?|marks? of rows?|row marks?": "row flags",
    r"parcels?": "send buffer",
    r"lets? go of": "flush",
    r"passed over": "what is meant",
    r"asked for": "requested",
    r"makes? room": "evicts",
}
# Of the standard library: gc.freeze is Python's word.
FOREIGN = {"FrozenInstanceError", "freeze"}
_PARTS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")


def identifiers_of(tree: ast.AST) -> Iterator[str]:
    """Yields the identifiers of Python code; names of tests are texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield from (name for name in (node.name, node.asname) if name)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if not node.name.startswith("test_"):
                yield node.name
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            # Those of a dataclass and of pytest are not ours.
            foreign = {"dataclass": "frozen", "param": "marks"}.get(called)
            names = (keyword.arg for keyword in node.keywords)
            yield from (name for name in names if name and name != foreign)


def retired_parts_in(text: str) -> dict[str, str]:
    """Returns the identifiers of Python code that have a retired word -> what stands for it."""
    found = {}
    for name in identifiers_of(ast.parse(text)):
        if name in FOREIGN:
            continue
        parts = f"_{'_'.join(part.lower() for part in _PARTS.findall(name))}_"
        retired = next((word for word in RETIRED_PARTS if f"_{word}_" in parts), None)
        if retired is not None:
            found[name] = RETIRED_PARTS[retired]
    return found


def retired_phrases_in(text: str) -> dict[str, str]:
    """Returns the retired phrases in what Python code raises -> what stands for them."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id in ("allowed", "message")
            for target in node.targets
        )
        if not is_text and not isinstance(node, ast.Raise):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                for phrase, word in RETIRED_PHRASES.items():
                    if match := re.search(rf"\b(?:{phrase})\b", part.value):
                        found[match[0]] = word
    return found


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize(
    ("find", "folders"),
    [(retired_parts_in, ("slipstream_tf", "tests")), (retired_phrases_in, ("slipstream_tf",))],
    ids=["identifiers", "messages"],
)
def test_retired_words_are_not_in_python(find, folders) -> None:
    files = python_files(*folders)
    assert len(files) > 100
    found = {
        str(path.relative_to(ROOT)): words
        for path in files
        if (words := find(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("held = counts.held", {"held"}),
        ("counts = Counts(held=1, held_rows=2)", {"held", "held_rows"}),
        ("class Counts:\n    held: int\n    asked: int", {"held", "asked"}),
        ("def f(heldRows, withheld): ...", {"heldRows"}),
        ("class RowParcels: ...", {"RowParcels"}),
        ("def test_rows_are_held(): ...", set()),
        ("@dataclass(frozen=True)\nclass A: ...", set()),
        ("import frozen_rows as rows\nfrom a import b as parcels", {"frozen_rows", "parcels"}),
        ("pytest.param(1, marks=pytest.mark.slow)", set()),
        ("mark_rows(marks=1)", {"mark_rows", "marks"}),
        ("# held\nx = 'held'", set()),
    ],
)
def test_the_search_reads_python_identifiers_alone(text: str, names: set[str]) -> None:
    assert retired_parts_in(text).keys() == names


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("raise ValueError(f'{x} rows are held back')", {"held back"}),
        ("allowed = 'no published rows'", {"published rows"}),
        ("raise invalid('a', 1, 'place', 'what is held')", set()),
        ("print('held back')", set()),
    ],
)
def test_the_search_reads_messages_of_errors(text: str, phrases: set[str]) -> None:
    assert retired_phrases_in(text).keys() == phrases
