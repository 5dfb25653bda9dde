"""The JSON manifest of a checkpoint: metadata and files.

It is written last, therefore a folder without a manifest is not a checkpoint.
"""

import dataclasses
import hashlib
import json
import os
import re
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from slipstream_tf._utils import disk
from slipstream_tf.checkpoint.array_file import MAGIC, CheckpointError, CheckpointMismatchError
from slipstream_tf.checkpoint.spilled import has_rows

FORMAT = 5
NAME = "manifest.json"
PLACEMENTS = ("replicated", "sharded", "spread")
_FILE = re.compile(r"rank-(0|[1-9]\d{0,8})/[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", re.ASCII)
_SHARD = re.compile(r"\.data-(\d{5})-of-(\d{5})", re.ASCII)
_READ_BYTES = 1 << 20
_MAX_BYTES = 64 << 20
_SAVE_AGAIN = "Restore another checkpoint, because this one was changed after it was written."


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The metadata and the files of a checkpoint.

    Attributes:
        checkpoint: The identity of the checkpoint, a random string. The files of its tables and
            engine repeat it, so that files of two checkpoints are never mixed.
        step: The number of trained steps.
        world_size: The number of ranks that saved it.
        placement: "replicated", "sharded", or "spread" for tables in SOK.
        tables: An entry per table: "name", "dim", "dtype", "slots" (values per row), "rule" (the
            class name of the update rule, or None) and "rows" (on all ranks).
        files: Path below the folder -> {"bytes": size, "sha256": checksum}. Files with checksummed
            blocks have no "sha256".
        positions: The position of each rank in its input, as JSON from the program.
        rng: The state of random numbers of each rank, as JSON from the program.
        saturation: A summary of the saturation engine, or None without an engine.
        versions: The versions of "slipstream_tf" and "tensorflow" that wrote the checkpoint.
    """

    checkpoint: str
    step: int
    world_size: int
    placement: str
    tables: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    files: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    positions: list[Any] = dataclasses.field(default_factory=list)
    rng: list[Any] = dataclasses.field(default_factory=list)
    saturation: dict[str, Any] | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Writes the manifest and waits until it is on disk."""
        values = sealed({"format": FORMAT, **vars(self)})
        # One line per field. `indent` would be slow, because positions can be long.
        lines = (f" {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
        disk.write_text(folder / NAME, "{\n" + ",\n".join(lines) + "\n}\n")


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a manifest with a new checksum."""
    others = {name: value for name, value in values.items() if name != "checksum"}
    text = json.dumps(others, sort_keys=True, separators=(",", ":"))
    return {**others, "checksum": hashlib.sha256(text.encode()).hexdigest()}


_KINDS: dict[str, type] = {
    name: typing.get_origin(hint) or hint
    for name, hint in typing.get_type_hints(Manifest).items()
    if name != "saturation"
}
# Types of the fields in an entry of `tables` and of `files`.
_TABLE_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("name", "dtype"), str),
    **dict.fromkeys(("dim", "slots", "rows"), int),
    "rule": (str, type(None)),
}
_FILE_KINDS: dict[str, type | tuple[type, ...]] = {"bytes": int, "sha256": str}


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint, without checking its files.

    Raises:
        CheckpointMismatchError: If the manifest has another format.
        CheckpointError: If the manifest is missing or damaged, or names a file outside the folder.
    """
    path = folder / NAME
    try:
        values = json.loads(_text_of(path))
        found = values.pop("format")
        stored = values.pop("checksum", None)
        checksum = sealed({"format": found, **values})["checksum"]
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"the manifest is damaged ({type(error).__name__}: {error})"
        raise CheckpointError(path, problem, _SAVE_AGAIN) from error
    if found != FORMAT:
        remedy = "Restore the checkpoint with the version of slipstream_tf that wrote it"
        versions = values.get("versions")
        if isinstance(versions, dict):
            remedy += f" ({versions.get('slipstream_tf')})"
        problem = f"the manifest has format {found!r}; this version reads format {FORMAT}"
        raise CheckpointMismatchError(path, problem, remedy + ".")
    if stored != checksum:
        raise CheckpointError(path, "the manifest does not match its checksum", _SAVE_AGAIN)
    for problem in _problems(values):
        raise CheckpointError(path, problem, _SAVE_AGAIN)
    return Manifest(**values)


def _problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields the problems of a manifest.

    The caller must stop at the first problem, because later checks rely on earlier ones.
    """
    for name, kind in _KINDS.items():
        if not _is(values.get(name), kind):
            yield f"the manifest has `{name}` {values.get(name)!r}; expected type {kind.__name__}"
    for name, entry in values["files"].items():
        if not _FILE.fullmatch(name):
            yield f"the manifest lists {name!r}; expected files in folders rank-0, rank-1, ..."
        if not _has_kinds(entry, _FILE_KINDS) or "bytes" not in entry:
            kinds = "expected integer `bytes` and, optionally, text `sha256`"
            yield f"the manifest has the entry {entry!r} for file {name!r}; {kinds}"
    for entry in values["tables"]:
        if not _has_kinds(entry, _TABLE_KINDS) or set(entry) != set(_TABLE_KINDS):
            kinds = f"expected valid values of {sorted(_TABLE_KINDS)}"
            yield f"the manifest has the entry {entry!r} in `tables`; {kinds}"
    size, names = values["world_size"], {field.name for field in dataclasses.fields(Manifest)}
    if size < 1 or values["step"] < 0 or set(values) != names:
        details = f"`world_size` {size}, `step` {values['step']} and the missing or unknown fields"
        wanted = "expected `world_size` >= 1, `step` >= 0 and no such fields"
        yield f"the manifest has {details} {sorted(set(values) ^ names)}; {wanted}"
    # Check that all fields describe the same number of ranks before any field is used.
    with_files = {int(name.partition("/")[0].removeprefix("rank-")) for name in values["files"]}
    if len(with_files) != size or max(with_files) != size - 1:
        ranks = sorted(with_files)[:9]
        yield f"the manifest has files of ranks {ranks}; expected all {size} ranks (`world_size`)"
    positions, rng, placement = values["positions"], values["rng"], values["placement"]
    if len(positions) != size or len(rng) != size:
        details = f"{len(positions)} entries in `positions` and {len(rng)} in `rng`"
        yield f"the manifest has {details}; expected {size} each (`world_size`)"
    if placement not in PLACEMENTS:
        yield f"the manifest has `placement` {placement!r}; expected one of {PLACEMENTS}"


def _text_of(path: Path) -> str:
    if not path.is_file():
        is_other = os.path.lexists(path)
        problem = "the path is not a regular file" if is_other else "the file is missing"
        raise CheckpointError(path, problem, "Restore another checkpoint.")
    size = path.stat().st_size
    if size > _MAX_BYTES:
        problem = f"the file has {size} bytes; expected at most {_MAX_BYTES}"
        raise CheckpointError(path, problem, _SAVE_AGAIN)
    return path.read_text(encoding="utf-8")


def require_whole(folder: Path, manifest: Manifest, parts: Collection[str] = ()) -> None:
    """Raises CheckpointError unless all files exist with their recorded sizes.

    Args:
        folder: The folder of the checkpoint.
        manifest: The manifest of the checkpoint.
        parts: Subfolders with files to read and compare with their checksums. Files of checksummed
            blocks are excluded, because reading them checks each block.
    """
    for name, entry in manifest.files.items():
        path = folder / name
        if path.is_symlink() or path.parent.is_symlink():
            problem = "the file or its folder is a symbolic link"
            raise CheckpointError(path, problem, _SAVE_AGAIN)
        if not path.is_file():
            raise CheckpointError(path, "the file is missing")
        size = path.stat().st_size
        if size != entry["bytes"]:
            problem = f"the file has {size} bytes; expected {entry['bytes']} as in the manifest"
            raise CheckpointError(path, problem, offset=min(size, entry["bytes"]))
        if "sha256" in entry and name.split("/")[0] in parts and entry_of(path) != entry:
            raise CheckpointError(path, "the file does not match its checksum in the manifest")


def require_named(folder: Path, manifest: Manifest, prefix: str) -> None:
    """Raises CheckpointError unless the manifest lists a complete `tf.train.Checkpoint`.

    TensorFlow must not read a file without a verified checksum.

    Args:
        folder: The folder of the checkpoint.
        manifest: The manifest of the checkpoint.
        prefix: The prefix of the files, for example "rank-0/state".
    """
    found = {n.removeprefix(prefix): e for n, e in manifest.files.items() if n.startswith(prefix)}
    shards = [match.groups() for match in map(_SHARD.fullmatch, found) if match]
    wanted = [(f"{i:05d}", shards[0][1]) for i in range(len(shards))] if shards else None
    if ".index" not in found or sorted(shards) != wanted or len(shards) != int(shards[0][1]):
        problem = f"the manifest lists only the suffixes {sorted(found)} of {prefix!r}"
        problem += "; expected .index and all parts of .data"
        raise CheckpointError(folder / NAME, problem, _SAVE_AGAIN)
    for end, entry in found.items():
        if "sha256" not in entry:
            problem = f"the manifest has no checksum of {prefix + end!r}"
            raise CheckpointError(folder / NAME, problem, _SAVE_AGAIN)


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _has_kinds(entry: Any, kinds: Mapping[str, type | tuple[type, ...]]) -> bool:
    """Returns whether an entry has only known fields with valid types."""
    return isinstance(entry, dict) and all(
        name in kinds and _is(value, kinds[name]) for name, value in entry.items()
    )


def entry_of(path: Path) -> dict[str, Any]:
    """Returns the manifest entry of a file, as in `Manifest.files`."""
    digest, size = hashlib.sha256(), path.stat().st_size
    if has_rows(path.name):
        return {"bytes": size}
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return {"bytes": size}
        file.seek(0)
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return {"bytes": size, "sha256": digest.hexdigest()}
