"""What a reader's batches hold, the contract of readers, and how bad lines are counted.

A reader gives a `tf.data.Dataset` of `(features, label)`: features["keys"] is int64
[batch, fields] (or a dictionary with RaggedTensors, where a field is a list), features["dense"]
float32 [batch, num_dense] if there are dense columns, label float32 [batch].
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import tensorflow as tf
from absl import logging

MISSING_KEY = -2
"""The key of a missing categorical value; -1 is the padding of bags, and other keys are values."""

SKIPPABLE = "skippable"
"""Name of the feature, bool [batch], that tells which inputs of a batch could have been skipped."""

OFFSET = "log_odds_offset"
"""Name of the feature, float32 [batch], that is added to the log-odds of a prediction in training:
what thinning has shifted them by."""

SHARE = "share_of_step"
"""Name of the feature, float32 [batch], the same for all: inputs of this rank's batch over the mean
of the ranks'."""

NOTES = (SKIPPABLE, OFFSET, SHARE)
"""Names of features that say something of an example, and are none of what a model takes."""

PARTS = ("train", "valid", "test")
"""Without a validation part of its own, data's is a tenth of the training part, which has it all
the same unless it is held out."""


class BadLineError(ValueError):
    """A malformed line in a strict reader; the message names file, line and value."""


@dataclasses.dataclass
class BadLines:
    """Tally of one pass over the data.

    Attributes:
        strict: raise BadLineError at the first bad line.
        count: bad lines so far.
        first: "file:line: reason" of the first one, or None.
    """

    strict: bool = False
    count: int = 0
    first: str | None = None

    def add(self, path: str, line: int, reason: str) -> None:
        """Notes a bad line.

        Args:
            path: file it is in.
            line: its number, from 1.
            reason: what is wrong with it, with the value and what is allowed.

        Raises:
            BadLineError: `strict` is set.
        """
        message = f"{path}:{line}: {reason}"
        if self.strict:
            raise BadLineError(message)
        self.count += 1
        self.first = self.first or message

    def report(self) -> None:
        """Logs the tally, if there is anything to say. Called once at the end of a pass."""
        if self.count:
            logging.warning(
                "%d malformed lines were left out. The first: %s", self.count, self.first
            )

    def reset(self) -> None:
        """Starts a new pass."""
        self.count, self.first = 0, None


@dataclasses.dataclass(frozen=True)
class DataSpec:
    """Shape of a data set.

    Attributes:
        name: of the data set.
        fields: names of the categorical fields, in the order of the key columns.
        num_dense: dense columns.
        num_examples: inputs of the part that is read, or None if only reading it would tell.
    """

    name: str
    fields: tuple[str, ...]
    num_dense: int = 0
    num_examples: int | None = None


def require_columns(wanted: Sequence[str], names: Sequence[str], file: str, told: str = "") -> None:
    """Raises ValueError unless each wanted column is once among a file's columns.

    Args:
        wanted: names of the columns that are used.
        names: of the file's columns.
        file: for the message.
        told: how columns were told apart, behind their names.
    """
    for name in wanted:
        if names.count(name) != 1:
            number = names.count(name) or "no"
            columns = f"It has the columns {list(names)}{told}."
            raise ValueError(f"{file}: {number} column {name!r}. {columns}")


class Reader(Protocol):
    """Reads one part of a data set in batches.

    Attributes:
        spec: what the batches hold.
        bad_lines: lines left out in the last iteration.
    """

    @property
    def spec(self) -> DataSpec: ...

    @property
    def bad_lines(self) -> BadLines: ...

    def in_batches_of(self, batch_size: int) -> "Reader":
        """Returns a reader of the same inputs in batches of another size."""
        ...

    def dataset(self) -> tf.data.Dataset:
        """Returns a finite dataset of batches; each iteration over it starts anew."""
        ...
