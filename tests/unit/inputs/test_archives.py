"""inputs.readers.arrays: what may be in an archive."""

from __future__ import annotations

import io
import zipfile

import pytest

from slipstream_tf.inputs.readers import arrays

METHODS = {"stored": zipfile.ZIP_STORED, "deflated": zipfile.ZIP_DEFLATED, "lzma": zipfile.ZIP_LZMA}


def archive_of(content: bytes, method: int) -> tuple[zipfile.ZipFile, int]:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("a", content)
    return zipfile.ZipFile(file), len(file.getvalue())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("content", [b"", b"a text", bytes(1 << 22)], ids=len)
def test_whatever_was_compressed_is_read(method, content):
    archive, size = archive_of(content, METHODS[method])
    assert arrays.open_entry(archive, "a", size).read() == content


@pytest.mark.parametrize("method", METHODS)
def test_sizes_that_cannot_be_are_refused(method):
    archive, size = archive_of(bytes(1000), METHODS[method])
    archive.getinfo("a").file_size = 1 << 40
    with pytest.raises(ValueError, match="which cannot be"):
        arrays.open_entry(archive, "a", size)


def test_other_methods_are_refused():
    archive, size = archive_of(bytes(1000), zipfile.ZIP_BZIP2)
    with pytest.raises(
        ValueError, match=r"method 12; allowed: stored \(0\), deflated \(8\) or LZMA"
    ):
        arrays.open_entry(archive, "a", size)
