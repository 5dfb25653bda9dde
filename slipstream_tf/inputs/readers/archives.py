"""Files in .zip archives, whose sizes are compared with the archive before anything is read."""

from __future__ import annotations

import zipfile
from typing import IO

# What is made of a byte at most, by method: LZMA needs some 0.3 bits for 273 bytes.
_LARGEST_RATIO = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032, zipfile.ZIP_LZMA: 8192}


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
    largest_ratio = _LARGEST_RATIO.get(info.compress_type)
    if largest_ratio is None:
        raise ValueError(
            f"{name} is compressed by method {info.compress_type}; allowed: stored (0), deflated "
            "(8) or LZMA (14)"
        )
    compressed = min(info.compress_size, archive_bytes)
    if info.compress_size > archive_bytes or info.file_size > largest_ratio * compressed:
        raise ValueError(
            f"{name} is said to have {info.file_size} bytes from {info.compress_size} in an "
            f"archive of {archive_bytes}, which cannot be"
        )
    if most is not None and info.file_size > most:
        raise ValueError(f"{name} has {info.file_size} bytes; allowed: {most}")
    return archive.open(info)
