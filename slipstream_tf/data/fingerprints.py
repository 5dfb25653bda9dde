"""Fingerprints of data files, which detect changed content.

A fingerprint contains the size, the modification time, a hash of sampled blocks and, once the whole
file was read, its CRC-32. To compare a file with its fingerprint, the file is read as a whole only
if size and samples are equal and the modification time differs. A change that keeps size,
modification time and all samples is not detected. Fingerprints detect accidents, not attacks.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from typing import Any

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_CHUNK_BYTES = 1 << 18  # Fits into the processor's cache.


def fingerprint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the fingerprint of a file without its CRC-32; reads at most 256 KiB.

    Returns:
        `"bytes"`, the size; `"modified"`, the modification time in nanoseconds; `"sample"`, the
        hash of 64 blocks of 4 KiB at equal distances, or of the whole file if it is smaller.

    Raises:
        OSError: The file cannot be read.
    """
    hashed = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        last = max(0, found.st_size - _SAMPLE_BYTES)
        for number in range(_SAMPLES):
            file.seek(last * number // (_SAMPLES - 1))
            hashed.update(file.read(_SAMPLE_BYTES))
    return {"bytes": found.st_size, "modified": found.st_mtime_ns, "sample": hashed.hexdigest()}


def crc32(path: str | os.PathLike[str], is_cancelled: Callable[[], bool] = lambda: False) -> int:
    """Returns the CRC-32 of a file; takes about half a second per GB.

    Args:
        path: Path of the file.
        is_cancelled: Called for every 256 KiB. If it returns True, the function returns early, with
            a meaningless result.

    Raises:
        OSError: The file cannot be read.
    """
    found, chunk = 0, memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while not is_cancelled() and (count := file.readinto(chunk)):
            found = zlib.crc32(chunk[:count], found)
    return found


def is_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Returns whether two results of `fingerprint` are equal. Other entries are ignored."""
    return all(now[name] == before.get(name) for name in ("bytes", "modified", "sample"))


def is_unchanged(path: str | os.PathLike[str], before: Mapping[str, Any]) -> bool:
    """Returns whether a file has the content of a fingerprint.

    Args:
        path: Path of the file.
        before: Result of `fingerprint` for the earlier file, with its `"crc32"` if it is known. A
            file with another modification time counts as changed if it is not.

    Raises:
        OSError: The file cannot be read.
    """
    now = fingerprint(path)
    if any(now[name] != before.get(name) for name in ("bytes", "sample")):
        return False
    if now["modified"] == before.get("modified"):
        return True
    return before.get("crc32") is not None and crc32(path) == before["crc32"]


def of_manifest(manifest: Mapping[str, Any]) -> str:
    """Returns a hash of a complete manifest of prepared data.

    It is the same for folders that were prepared from files with the same names and content, with
    the same settings. Modification times are ignored, and the texts about malformed lines, because
    they contain the paths of the files.

    Args:
        manifest: Result of `readers.prepared.read_manifest`.
    """
    ignored = ("modified", "first_bad_line", "bad_reasons")
    kept = json.loads(
        json.dumps(manifest),
        object_hook=lambda entry: {k: v for k, v in entry.items() if k not in ignored},
    )
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
