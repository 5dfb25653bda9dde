"""The manifest of a checkpoint: what it is of, and which files make it whole. Plain JSON.

In: a checkpoint's folder. Out: a `Manifest` whose entries are sound, and what is wrong with the
files that it names. It is written last, so that a folder without one is none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from slipstream_tf.checkpoint import disk
from slipstream_tf.checkpoint.array_file import MAGIC
from slipstream_tf.checkpoint.errors import CheckpointError, CheckpointMismatchError

FORMAT = 3
_WITHOUT_CHECKSUM = 2
NAME = "manifest.json"
_FILE = re.compile(r"rank-(0|[1-9]\d*)/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_READ_BYTES = 1 << 20
_SAVE_AGAIN = "Restore another checkpoint; this one was changed after it was written."


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        checkpoint: its identity, which its files repeat: files of two are never mixed.
        step: how far training was.
        world_size: ranks that saved it.
        placement: "replicated", "sharded" or, of tables in SOK, "spread".
        tables: per table "name", "dim", "dtype", "slots" (values per row), "rule" (class name of
            the update rule, or None) and "rows" (of all ranks).
        files: name below the folder -> {"bytes"} and, unless its blocks have checksums, "sha256".
        positions: of each rank, where it was in its input, as the program gave it; JSON.
        rng: of each rank, likewise, the state of its random numbers.
        saturation: in short, what the saturation engine knew; None: there was no engine.
        versions: "slipstream_tf" and "tensorflow" that wrote it.
    """

    checkpoint: str
    step: int
    world_size: int
    placement: str
    tables: list[dict[str, Any]]
    files: dict[str, dict[str, Any]]
    positions: list[Any]
    rng: list[Any]
    saturation: dict[str, Any] | None
    versions: dict[str, str]

    def write(self, folder: Path) -> None:
        """Writes it into a folder, and waits until it is on the disk."""
        values = sealed({"format": FORMAT, **dataclasses.asdict(self)})
        disk.write_text(folder / NAME, json.dumps(values, indent=1) + "\n")


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is written of a manifest: its values with a checksum of them all."""
    others = {name: value for name, value in values.items() if name != "checksum"}
    text = json.dumps(others, sort_keys=True, separators=(",", ":"))
    return {**others, "checksum": hashlib.sha256(text.encode()).hexdigest()}


_KINDS: dict[str, type] = {
    "checkpoint": str,
    "step": int,
    "world_size": int,
    "placement": str,
    "tables": list,
    "files": dict,
    "positions": list,
    "rng": list,
    "versions": dict,
}

# Of an entry of `tables` and of `files`.
_TABLE_KINDS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "dim": int,
    "dtype": str,
    "slots": int,
    "rule": (str, type(None)),
    "rows": int,
}
_FILE_KINDS: dict[str, type | tuple[type, ...]] = {"bytes": int, "sha256": str}


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint; its files are not looked at.

    Raises:
        CheckpointMismatchError: it is of another format.
        CheckpointError: it is missing or damaged, or names a file outside the folder.
    """
    path = folder / NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        found = values.pop("format")
    except FileNotFoundError:
        raise CheckpointError(path, "is missing", "Restore another checkpoint.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"is damaged ({type(error).__name__}: {error})"
        raise CheckpointError(path, problem, _SAVE_AGAIN) from error
    if found not in (FORMAT, _WITHOUT_CHECKSUM):
        remedy = "Restore it with the version of slipstream_tf that wrote it"
        versions = values.get("versions")
        if isinstance(versions, dict):
            remedy += f", {versions.get('slipstream_tf')}"
        problem = f"its format is {found!r}, this version reads {_WITHOUT_CHECKSUM} and {FORMAT}"
        raise CheckpointMismatchError(path, problem, remedy + ".")
    if found == FORMAT:
        told = values.pop("checksum", None)
        if told != sealed({"format": found, **values})["checksum"]:
            raise CheckpointError(path, "is damaged (has another checksum)", _SAVE_AGAIN)
    for name, kind in _KINDS.items():
        if not isinstance(values.get(name), kind):
            problem = f"is damaged (`{name}` is {values.get(name)!r})"
            raise CheckpointError(path, problem, _SAVE_AGAIN)
    for name, entry in values["files"].items():
        if not _FILE.fullmatch(name):
            problem = f"names {name!r}; allowed: files in folders rank-0, rank-1, ... beside it"
            raise CheckpointError(path, problem, _SAVE_AGAIN)
        if not _has_kinds(entry, _FILE_KINDS) or "bytes" not in entry:
            problem = f"is damaged (`files` has {entry!r} for {name!r})"
            raise CheckpointError(path, problem, _SAVE_AGAIN)
    for entry in values["tables"]:
        if not _has_kinds(entry, _TABLE_KINDS) or set(entry) != set(_TABLE_KINDS):
            problem = f"is damaged (`tables` has {entry!r})"
            raise CheckpointError(path, problem, _SAVE_AGAIN)
    names = {field.name for field in dataclasses.fields(Manifest)}
    if values["world_size"] < 1 or values["step"] < 0 or set(values) != names:
        problem = f"is damaged (has {sorted(values)}, {values['world_size']} ranks)"
        raise CheckpointError(path, problem, _SAVE_AGAIN)
    return Manifest(**values)


def require_whole(folder: Path, manifest: Manifest, parts: Collection[str] = ()) -> None:
    """Raises CheckpointError unless all files are there, of their sizes.

    Args:
        folder: of the checkpoint.
        manifest: of it.
        parts: folders in it whose files are read and compared with their checksums, but for files
            of checked blocks, which are compared as they are read.
    """
    for name, entry in manifest.files.items():
        path = folder / name
        if path.is_symlink() or path.parent.is_symlink():
            raise CheckpointError(path, "is a link", _SAVE_AGAIN)
        if not path.is_file():
            raise CheckpointError(path, "is missing")
        size = path.stat().st_size
        if size != entry["bytes"]:
            problem = f"has {size} bytes, not {entry['bytes']}"
            raise CheckpointError(path, problem, offset=min(size, entry["bytes"]))
        if "sha256" in entry and name.split("/")[0] in parts and entry_of(path) != entry:
            raise CheckpointError(path, "has another checksum than when it was written")


def _has_kinds(entry: Any, kinds: Mapping[str, type | tuple[type, ...]]) -> bool:
    """Whether an entry is an object of some of these values, of their kinds, and no others."""
    return isinstance(entry, dict) and all(
        name in kinds and isinstance(value, kinds[name]) for name, value in entry.items()
    )


def entry_of(path: Path) -> dict[str, Any]:
    """Returns what a manifest says of a file."""
    digest, size = hashlib.sha256(), path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return {"bytes": size}
        file.seek(0)
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return {"bytes": size, "sha256": digest.hexdigest()}
