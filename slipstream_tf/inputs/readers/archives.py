"""Files in .zip archives, whose sizes are compared with the archive before anything is read."""

from __future__ import annotations

import zipfile
from typing import IO

# Deflate makes no content smaller than this part of itself.
_LARGEST_RATIO = 1032


def open_entry(
    archive: zipfile.ZipFile, name: str, archive_bytes: int, most: int | None = None
) -> IO[bytes]:
    """Opens a file in an archive.

    Args:
        archive: that is read.
        name: of the file in it.
        archive_bytes: size of the archive.
        most: bytes that the content may have, or None: as many as the archive can hold.

    Returns:
        The content; its checksum is compared when the last byte is read.

    Raises:
        KeyError: there is no such file.
        ValueError: it is compressed in a way that does not bound its size, or its size cannot be
            or is too large.
    """
    info = archive.getinfo(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(
            f"{name} is compressed by method {info.compress_type}; allowed: stored (0) or "
            "deflated (8)"
        )
    compressed = min(info.compress_size, archive_bytes)
    if info.compress_size > archive_bytes or info.file_size > _LARGEST_RATIO * compressed:
        raise ValueError(
            f"{name} is said to have {info.file_size} bytes from {info.compress_size} in an "
            f"archive of {archive_bytes}, which cannot be"
        )
    if most is not None and info.file_size > most:
        raise ValueError(f"{name} has {info.file_size} bytes; allowed: {most}")
    return archive.open(info)
