"""Damages a checkpoint directory at random: bytes, files, folders, links, manifests.

Each function receives the directory and a random generator and returns a description of the damage.
The damages do not depend on the checks of the loader.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream_tf.checkpoint.manifest import sealed

MANIFEST = "manifest.json"
ODD_NAMES = (
    *("state.index", "state.data-00000-of-00001", "state.data-00001-of-00002", "table-000"),
    *("table-001", "table-2", "engine", "own.index", "other", "manifest.json", "rank-0"),
)
ODD_FOLDERS = ("rank-0", "rank-1", "rank-2", "rank-01", "rank-x", "rank-0 ")
ODD_CHECKPOINTS = (
    *("checkpoint-000001", "checkpoint-000002", "checkpoint-000003", "checkpoint-0000001"),
    *("checkpoint-999999999999999999999999", "checkpoint-3", "checkpoint-000004.partial"),
)
ODD_PATHS = (
    *("../x", "/etc/passwd", "rank-0/../rank-0/engine", "rank-0/..", "rank-0", "rank-0/", ""),
    *("rank-0/" + "a" * 300, "rank-" + "9" * 5000 + "/engine", "rank-99999999999/engine"),
    *("rank-2/engine", "rank-0/engine\n", "rank-0/.hidden", "rank-0/\ud800", "rank-0/nothing"),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 4, 2**31, 2**40, 2**63, -(2**63), 10**300, 0.5, 1e308),
    *(float("nan"), float("inf"), "", "x", "1", "\ud800", "a" * 100_000, *ODD_PATHS),
    *("replicated", "sharded", "spread", "Adagrad", "Adam", "float32", "a", "b"),
    *([], {}, [None], [[]], [{}], {"": {}}, {"bytes": 0}, {"bytes": -1}, list(range(50))),
)

Change = Callable[[Path, random.Random], str]


def damage(directory: Path, draw: random.Random) -> str:
    """Damages a checkpoint directory one to three times and returns a description."""
    reported = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        change = draw.choice(CHANGES)
        # An earlier change may have removed all files of this kind, or made one unreadable as text.
        with contextlib.suppress(OSError, IndexError, UnicodeDecodeError, shutil.Error):
            reported.append(f"{change.__name__} {change(directory, draw)}")
    return "; ".join(reported)


def files_of(directory: Path) -> list[Path]:
    """Returns all regular files in order, without links and pipes."""
    found: list[Path] = []
    for folder, _, names in os.walk(directory):
        found += [Path(folder) / name for name in names]
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def folders_of(directory: Path) -> list[Path]:
    """Returns all folders below the directory in order."""
    found: list[Path] = []
    for folder, names, _ in os.walk(directory):
        found += [Path(folder) / name for name in names]
    return sorted(path for path in found if not path.is_symlink())


def bytes_changed(directory: Path, draw: random.Random) -> str:
    """Flips, cuts, inserts, doubles or zeroes bytes of a file.

    The inserted bytes may be a part of another file.
    """
    path = draw.choice(files_of(directory))
    content, other = path.read_bytes(), draw.choice(files_of(directory)).read_bytes()
    for _ in range(draw.choice((1, 1, 3))):
        begin = draw.randrange(len(content) + 1)
        end = min(len(content), begin + draw.choice((0, 1, 1, 4, 100, 10**6)))
        part = draw.choice(
            (
                b"",
                bytes(end - begin),
                bytes(byte ^ 1 << draw.randrange(8) for byte in content[begin : begin + 1]),
                draw.randbytes(end - begin),
                draw.randbytes(3),
                content[begin:end] * 2,
                other[begin:end],
            )
        )
        content = content[:begin] + part + content[end:]
    path.write_bytes(content)
    return str(path)


def file_removed(directory: Path, draw: random.Random) -> str:
    path = draw.choice(files_of(directory))
    path.unlink()
    return str(path)


def file_renamed(directory: Path, draw: random.Random) -> str:
    path = draw.choice(files_of(directory))
    new = path.with_name(draw.choice(ODD_NAMES))
    path.rename(new)
    return f"{path} to {new.name}"


def file_copied(directory: Path, draw: random.Random) -> str:
    """Copies a file to a new name or over another file.

    The other file may belong to another checkpoint.
    """
    path, other = draw.choice(files_of(directory)), draw.choice(files_of(directory))
    new = draw.choice((other, path.with_name(draw.choice(ODD_NAMES)), other.parent / path.name))
    if new != path:
        shutil.copyfile(path, new)
    return f"{path} to {new}"


def files_exchanged(directory: Path, draw: random.Random) -> str:
    """Exchanges two files: any two, or two with the same name."""
    path = draw.choice(files_of(directory))
    others = files_of(directory)
    if draw.random() < 0.7:
        others = [other for other in others if other.name == path.name and other != path]
    other, aside = draw.choice(others), directory / "aside"
    path.rename(aside)
    other.rename(path)
    aside.rename(other)
    return f"{path} and {other}"


def folder_changed(directory: Path, draw: random.Random) -> str:
    """Removes, empties, renames, copies, or replaces a folder."""
    path = draw.choice(folders_of(directory))
    what = draw.choice(("remove", "empty", "rename", "copy", "file"))
    names = ODD_CHECKPOINTS if path.parent == directory else ODD_FOLDERS
    new = path.with_name(draw.choice(names))
    if what == "rename":
        path.rename(new)
    elif what == "copy":
        shutil.copytree(path, new)
    else:
        shutil.rmtree(path)
        if what == "empty":
            path.mkdir()
        elif what == "file":
            path.write_bytes(b"content")
    return f"{what} {path} {new.name}"


def folders_exchanged(directory: Path, draw: random.Random) -> str:
    """Exchanges two folders of the same depth."""
    path = draw.choice(folders_of(directory))
    depth = len(path.parts)
    others = [f for f in folders_of(directory) if f != path and len(f.parts) == depth]
    other, aside = draw.choice(others), directory / "aside"
    path.rename(aside)
    other.rename(path)
    aside.rename(other)
    return f"{path} and {other}"


def put_in_its_place(directory: Path, draw: random.Random) -> str:
    """Replaces a file or folder by another type of file.

    A file becomes a folder, link or pipe. A folder becomes a link.
    """
    path = draw.choice(files_of(directory) + folders_of(directory))
    whole = directory.parent / "linked to"
    kind = draw.choice(("folder", "same", "dangling", "loop", "zero", "pipe", "other"))
    if path.is_dir():
        kind = draw.choice(("same", "dangling", "loop", "other"))
    if whole.exists():
        (shutil.rmtree if whole.is_dir() else os.unlink)(whole)
    other = draw.choice(files_of(directory))
    path.rename(whole)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        targets = {"same": whole, "dangling": "nowhere", "loop": path, "zero": "/dev/zero"}
        path.symlink_to(targets.get(kind, other))
    return f"{kind} {path}"


def manifest_edited(directory: Path, draw: random.Random) -> str:
    """Edits the values of a manifest.

    The checksum is updated in most cases, so that the loader sees the edited values.
    """
    path = draw.choice([p for p in files_of(directory) if p.name == MANIFEST])
    text = path.read_text()
    if draw.random() < 0.05:
        depth = draw.choice((900, 5000, 200_000))
        opening, closing = draw.choice((("[", "]"), ('{"a":', "}")))
        nested = opening * depth + "1" + closing * depth
        path.write_text(text.replace('"step": ', f'"nested": {nested}, "step": '))
        return f"{path} nested {depth} deep"
    try:
        values, reported = json.loads(text), []
    except ValueError:
        return f"{path}, which is damaged already"
    for _ in range(draw.choice((1, 1, 2))):
        reported.append(edited(values, draw))
    is_sealed = draw.random() < 0.7
    values = sealed(values) if is_sealed and isinstance(values, dict) else values
    path.write_text(json.dumps(values))
    return f"{path}{' and sealed' * is_sealed}: {', '.join(reported)}"


def edited(values: Any, draw: random.Random) -> str:
    """Changes one value in nested lists and dictionaries and returns a description."""
    places: list[tuple[Any, Any, str]] = []

    def walk(value: Any, name: str) -> None:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key, f"{name}/{key}"))
            if isinstance(part, (dict, list)):
                walk(part, f"{name}/{key}")

    walk(values, "")
    # Choose top-level values often, because files and tables have far more values.
    top = [place for place in places if place[0] is values]
    parent, key, name = draw.choice(top if draw.random() < 0.4 else places)
    what = draw.choice(("put", "put", "put", "remove", "rename", "double", "count", "move"))
    if what == "put":
        parent[key] = copy.deepcopy(draw.choice(ODD_VALUES))
    elif what == "remove":
        del parent[key]
    elif what == "rename":
        new = draw.choice((*ODD_PATHS, *map(str, parent)))
        if isinstance(parent, dict):
            parent[new] = parent.pop(key)
        else:
            parent.reverse()
    elif what == "double" and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[key]))
    elif what == "double":
        parent[draw.choice(ODD_PATHS)] = copy.deepcopy(parent[key])
    elif what == "count" and isinstance(parent[key], int):
        parent[key] += draw.choice((-1, 1))
    else:
        parent[key] = copy.deepcopy(draw.choice(places)[0])
    return f"{what} {name[:60]}"


CHANGES: tuple[Change, ...] = (
    *(bytes_changed, bytes_changed, bytes_changed),
    *(file_removed, file_renamed, file_copied, file_copied, files_exchanged, files_exchanged),
    *(folder_changed, folders_exchanged, put_in_its_place, put_in_its_place),
    *(manifest_edited, manifest_edited, manifest_edited, manifest_edited),
)
