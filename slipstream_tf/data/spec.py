"""Defines the `Reader` protocol, the format of its batches, and names of settings.

A reader returns a `tf.data.Dataset` of `(features, label)`. `features["keys"]` is int64
[batch, fields], or a dictionary with RaggedTensors if a field is a list. `features["dense"]` is
float32 [batch, num_dense], with NaN for missing numbers, and only exists if there are dense
columns. `label` is float32 [batch].
"""

import dataclasses
import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from absl import logging

from slipstream_tf._utils.keys import MISSING_KEY as MISSING_KEY

if TYPE_CHECKING:
    import tensorflow as tf

AUTO = "auto"
FORMATS = (AUTO, "criteo", "avazu", "csv", "json", "parquet")
"""Formats of the files that `slipstream-prepare` reads. `AUTO` detects the format."""

SHARD_COMPRESSIONS = ("snappy", "zstd", "none")
"""Compressions of the shards that `slipstream-prepare` writes."""

RUNS, RANDOM, TIME = "runs", "random", "time"
SPLITS = (RUNS, RANDOM, TIME)
"""Divisions of the rows into parts, see `split.Split`."""

SKIPPABLE = "skippable"
"""Name of the feature, bool [batch], that is True if an example could have been skipped."""

OFFSET = "log_odds_offset"
"""Name of the feature, float32 [batch], that is added to the predicted log-odds in training. It is
the shift of the log-odds that subsampling causes."""

FRACTION_OF_STEP = "fraction_of_step"
"""Name of the feature, float32 [batch], that scales a rank's loss. All its values are the number of
examples in this rank's batch divided by the mean over the ranks."""

NOTES = (SKIPPABLE, OFFSET, FRACTION_OF_STEP)
"""Names of features that describe an example to the engine and are not inputs of the model."""

PARTS = ("train", "valid", "test")
"""Parts of a data set. If the data has no separate validation part, "valid" consists of some
examples of "train" (one of ten runs of 100). They stay in "train" unless a reader has
`hold_out=True`."""


class BadLineError(ValueError):
    """Raised by a strict reader at a malformed line.

    The message contains the file, the line number and the value.
    """


@dataclasses.dataclass
class BadLines:
    """Counts the malformed lines (or rows) of one pass over the data.

    Attributes:
        strict: Whether to raise `BadLineError` at the first malformed line.
        count: Number of malformed lines so far.
        first: `"file:line: reason"` of the first malformed line, or None.
    """

    strict: bool = False
    count: int = 0
    first: str | None = None

    def add(self, path: str, line: int, reason: str) -> None:
        """Counts a malformed line.

        Args:
            path: Path of the file.
            line: Line number, from 1.
            reason: Description of the error, with the value and the allowed values.

        Raises:
            BadLineError: If `strict` is True.
        """
        message = f"{path}:{line}: {reason}"
        if self.strict:
            raise BadLineError(message)
        self.count += 1
        self.first = self.first or message

    def report(self) -> None:
        """Logs a warning if there were malformed lines.

        Call it once at the end of a pass.
        """
        if self.count:
            logging.warning(
                "Skipped %d malformed lines. First error: %s. Correct these lines to use them.",
                *(self.count, self.first),
            )

    def reset(self) -> None:
        """Resets the counts for a new pass."""
        self.count, self.first = 0, None


@dataclasses.dataclass(frozen=True)
class DenseScale:
    """Describes how models scale a dense column; see `models.Standardization`.

    Example:

    >>> slip.data.DenseScale(mean=20.0, std=5.0, has_missing=True)
    DenseScale(mean=20.0, std=5.0, has_missing=True)

    Attributes:
        mean: Number that becomes 0. 0 keeps the numbers.
        std: Difference from `mean` that becomes 1, above 0. 1 keeps the numbers.
        has_missing: Whether the training data has missing numbers in the column.
    """

    mean: float = 0.0
    std: float = 1.0
    has_missing: bool = False


@dataclasses.dataclass(frozen=True)
class DataSpec:
    """Describes the features of a data set.

    Example:

    >>> spec = slip.data.DataSpec("clicks", fields=("user", "item"), num_dense=1)
    >>> len(spec.fields)
    2

    Attributes:
        name: Name of the data set.
        fields: Names of the categorical fields, in the order of the key columns.
        num_dense: Number of dense columns.
        num_examples: Number of examples in the selected part, or None if it is unknown before
            reading.
        tables: Name of the table of each field, or empty if each field has a table of its own name.
        scales: The scale of each dense column, or empty if the data has no statistics or its format
            defines the numbers.
    """

    name: str
    fields: tuple[str, ...]
    num_dense: int = 0
    num_examples: int | None = None
    tables: tuple[str, ...] = ()
    scales: tuple[DenseScale, ...] = ()

    @property
    def features(self) -> dict[str, str]:
        """Table of each field, by field: the argument `features` of an `EmbeddingCollection`."""
        return dict(zip(self.fields, self.tables or self.fields, strict=True))


def require_columns(
    wanted: Sequence[str], names: Sequence[str], file: str, details: str = "", advice: str = ""
) -> None:
    """Raises ValueError unless each wanted column occurs exactly once in a file.

    Args:
        wanted: Names of the required columns.
        names: Names of the file's columns.
        file: Name of the file, for the error message.
        details: Text for the error message after the column names, for example the delimiter.
        advice: Sentence about missing columns for the end of the error message.
    """
    columns = f"the file has the columns {list(names)}{details}."
    missing = [name for name in wanted if name not in names]
    if missing:
        is_one = len(missing) == 1
        found = ", ".join(repr(name) + _similar(name, names) for name in missing)
        raise ValueError(
            f"{file}: the column{'' if is_one else 's'} {found} {'is' if is_one else 'are'} "
            f"missing. Expected {'it' if is_one else 'each'} once; {columns} {advice}".rstrip()
        )
    for name in wanted:
        if names.count(name) != 1:
            found = f"the column {name!r} occurs {names.count(name)} times"
            raise ValueError(f"{file}: {found}. Expected it once; {columns}")


def _similar(name: str, names: Sequence[str]) -> str:
    """Returns a note with the closest column name, or an empty string."""
    by_lower = {other.strip().lower(): other for other in names}
    found = difflib.get_close_matches(name.strip().lower(), by_lower, n=1)
    return f" (similar: {by_lower[found[0]]!r})" if found else ""


class Reader(Protocol):
    """Reads one part of a data set in batches.

    Attributes:
        spec: Description of the features.
        bad_lines: Counts of the malformed lines that the last iteration skipped.
    """

    @property
    def spec(self) -> DataSpec: ...

    @property
    def bad_lines(self) -> BadLines: ...

    def in_batches_of(self, batch_size: int) -> "Reader":
        """Returns a reader of the same examples with another batch size."""
        ...

    def dataset(self) -> "tf.data.Dataset":
        """Returns a finite dataset of batches; each iteration starts from the beginning."""
        ...
