"""Divides the rows of source files into the training, validation and test part."""

import dataclasses
import datetime
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from slipstream_tf._utils.errors import invalid, require_choice, require_integer, require_number
from slipstream_tf._utils.hashing import stream
from slipstream_tf.data.readers.base import PART_PERIOD, PART_RUN
from slipstream_tf.data.sources import TIME as TIME_COLUMN
from slipstream_tf.data.sources import Block, ParsedRows, Position, Source, in_threads
from slipstream_tf.data.spec import RANDOM, RUNS, SPLITS, TIME

_MAX_TIMES = 1 << 24  # Maximum number of times in memory, 128 MiB.


@dataclasses.dataclass(frozen=True)
class Split:
    """Describes how rows are divided into parts.

    Attributes:
        kind: `"runs"` puts every tenth run of 100 rows into the test part, or every tenth row if
            there are fewer than 1,000 rows. `"random"` draws the part of each row. `"time"` puts
            the last rows by time into the test part, and the rows before them into the validation
            part.
        test_fraction: Fraction of the rows in the test part, for `"random"` and `"time"`.
        valid_fraction: Fraction of the rows in the validation part, for `"random"` and `"time"`. 0
            writes no validation part.
        seed: Seed of `"random"`.
        file_parts: Part of each file: "train", "valid" or "test", or None for a file that is
            divided. Missing entries at the end mean None.
    """

    kind: str = RUNS
    test_fraction: float = 0.1
    valid_fraction: float = 0.0
    seed: int = 0
    file_parts: tuple[str | None, ...] = ()

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, SPLITS, "Split")
        require_integer("seed", self.seed, 0, (1 << 63) - 1, "Split")
        for name in ("test_fraction", "valid_fraction"):
            require_number(name, getattr(self, name), 0.0, 1.0, "Split")
        if not self.test_fraction + self.valid_fraction < 1.0:
            both = (self.test_fraction, self.valid_fraction)
            allowed = "a sum below 1, so that the training part has examples"
            raise invalid("test_fraction, valid_fraction", both, "Split", allowed)

    def part_of_file(self, number: int) -> str | None:
        """Returns the part of a whole file, or None if its rows are divided."""
        return self.file_parts[number] if number < len(self.file_parts) else None

    def describe(self) -> dict[str, Any]:
        """Returns the settings that determine the parts, JSON-serializable."""
        fractions = {"test_fraction": self.test_fraction, "valid_fraction": self.valid_fraction}
        found: dict[str, Any] = {"kind": self.kind, "file_parts": list(self.file_parts)}
        if self.kind != RUNS:
            found.update(fractions)
        if self.kind == RANDOM:
            found["seed"] = self.seed
        return found


class Divider:
    """Assigns the rows of a source to parts, by a `Split`.

    Args:
        split: The settings.
        source: The source of the rows.
        limits: Result of `find_limits`.
    """

    def __init__(self, split: Split, source: Source, limits: Mapping[str, Any]) -> None:
        self._split, self._source, self._limits = split, source, limits
        self._run = 1 if limits.get("is_small") else PART_RUN

    def parts(self, block: Block, parsed: ParsedRows) -> Mapping[str, np.ndarray]:
        """Returns masks of the rows of a block by part, bool [rows of the block].

        Args:
            block: The block.
            parsed: Its examples. Malformed rows may be in any part.
        """
        whole = self._split.part_of_file(block.start.file)
        if whole is not None:
            return {whole: np.ones(block.num_rows, bool)}
        if self._split.kind == RUNS:
            return self._source.parts(block, self._run)
        if self._split.kind == RANDOM:
            ids = np.arange(block.start.id, block.end.id, dtype=np.uint64)
            drawn = stream(np.array([self._split.seed], np.uint64), ids)
            position = (drawn >> np.uint64(11)) / 2.0**53
            test_from = 1.0 - self._split.test_fraction
            valid_from = test_from - self._split.valid_fraction
        else:
            position = np.full(block.num_rows, -np.inf)
            position[parsed.is_good] = parsed.table[TIME_COLUMN].to_numpy()
            test_from, valid_from = self._limits["test_from"], self._limits["valid_from"]
        is_test, is_later = position >= test_from, position >= valid_from
        return {"train": ~is_later, "valid": is_later & ~is_test, "test": is_test}


def shown_time(time: float) -> str:
    """Returns a value of the time column as text, microseconds of 1973 to 2096 as date and time."""
    if 1e14 <= time < 4e15:
        moment = datetime.datetime.fromtimestamp(time / 1e6, datetime.timezone.utc)
        return moment.replace(tzinfo=None).isoformat(" ") + " (UTC)"
    return f"{time:.17g}"


def find_limits(split: Split, source: Source, threads: int = 1) -> dict[str, Any]:
    """Computes values that the division needs before the first block.

    Args:
        split: The settings.
        source: The source of the rows. `"time"` reads the time column of all rows that are divided,
            also of rows that are malformed in other columns.
        threads: Number of threads that parse.

    Returns:
        `"is_small"`, whether fewer than 1,000 rows are divided, for `"runs"`. `"test_from"` and
        `"valid_from"`, the first times of these parts, for `"time"`.

    Raises:
        ValueError: If the rows have too few different times for a part that is not empty, or a file
            is damaged.
    """
    blocks = (
        block
        for number in range(len(source.paths))
        if split.part_of_file(number) is None
        for block in source.file_blocks(Position(number), 1 << 62, split.kind == TIME)
    )
    if split.kind == RUNS:
        rows = itertools.accumulate(block.num_rows for block in blocks)
        return {"is_small": not any(count >= PART_RUN * PART_PERIOD for count in rows)}
    if split.kind == RANDOM:
        return {}
    times, stride, count, kept = [np.empty(0)], 1, 0, 0
    for _, found in in_threads(source.parse_times, blocks, threads):
        times.append(found[-count % stride :: stride])
        count, kept = count + len(found), kept + len(times[-1])
        if kept > _MAX_TIMES:
            times, stride = [np.concatenate(times)[::2]], 2 * stride
            kept = len(times[0])
    ordered = np.sort(np.concatenate(times))
    if not len(ordered):
        return {"test_from": 0.0, "valid_from": 0.0}
    fractions = (split.test_fraction, split.test_fraction + split.valid_fraction)
    # A fraction of 0 has no row, not even the last.
    rising = np.append(ordered, np.inf)
    test_from, valid_from = (float(rising[round(len(ordered) * (1.0 - f))]) for f in fractions)
    if valid_from <= ordered[0]:
        raise ValueError(
            f"The rows cannot be divided by time, because too many have the time "
            f"{shown_time(ordered[0])} and the training part would be empty. Expected a column "
            "with more different values, or smaller fractions."
        )
    for part, fraction, start, end in (
        ("test", split.test_fraction, test_from, np.inf),
        ("valid", split.valid_fraction, valid_from, test_from),
    ):
        if fraction and not ((ordered >= start) & (ordered < end)).any():
            equal = stride * int((ordered == start).sum())
            reason = (
                f"{equal:,} of {count:,} rows have the time {shown_time(start)}, at which it begins"
                if equal > 1
                else f"the fraction {fraction:g} of {count:,} rows is too small"
            )
            raise ValueError(
                f"The {part} part by time would be empty, because {reason}. Expected a column with "
                "more different values, or other fractions."
            )
    return {"test_from": test_from, "valid_from": valid_from}
