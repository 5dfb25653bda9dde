"""Damaged table files yield their original content or raise an error."""

from __future__ import annotations

import os
import random
import time
import tracemalloc
from pathlib import Path

import numpy as np

from slipstream_tf.checkpoint import array_file
from slipstream_tf.checkpoint.array_file import ArrayFile, CheckpointError

SECONDS = float(os.environ.get("SLIPSTREAM_FUZZ_SECONDS", "0")) / 8
CASES = 500
MAX_BYTES = 4 << 20


def groups(rows: int) -> dict[str, dict[str, np.ndarray]]:
    keys = np.arange(rows, dtype=np.int64)
    values = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)
    return {"rows": {"keys": keys, "values": values}, "held": {"keys": keys[: rows // 2]}}


def damaged(content: bytes, other: bytes, random_: random.Random) -> bytes:
    """Returns the content with one to four random damages."""
    for _ in range(random_.choice((1, 1, 2, 4))):
        begin, end = sorted(random_.randrange(len(content) + 1) for _ in range(2))
        end = min(end, begin + random_.choice((1, 4, 8, 200)))
        part = random_.choice(
            (
                b"",
                bytes(end - begin),
                b"\xff" * (end - begin),
                random_.randbytes(end - begin),
                content[begin:end] * 2,
                other[begin:end],
            )
        )
        content = content[:begin] + part + content[end:]
    return content


def test_spliced_file_raises_or_reads_original_content(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    array_file.write(path, "me", {"n": 1}, groups(40), block_rows=8)
    array_file.write(other, "you", {"n": 2}, groups(30), block_rows=8)
    whole, another, expected = path.read_bytes(), other.read_bytes(), groups(40)
    random_, case, end = random.Random(0), 0, time.monotonic() + SECONDS
    tracemalloc.start()
    while case < CASES or time.monotonic() < end:
        case += 1
        path.write_bytes(damaged(whole, another, random_))
        tracemalloc.reset_peak()
        try:
            file = ArrayFile(path, "me")
            found = {group: file.read(group) for group in file.groups}
        except CheckpointError as error:
            assert str(path) in str(error)
            continue
        finally:
            assert tracemalloc.get_traced_memory()[1] < MAX_BYTES, f"case {case}"
        assert path.read_bytes() == whole, f"case {case}: a damage was not found"
        for group, columns in expected.items():
            for name, array in columns.items():
                np.testing.assert_array_equal(found[group][name], array)
    tracemalloc.stop()
