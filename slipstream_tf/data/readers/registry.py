"""Finds the reader for a data set by its path and opens one part of it."""

import math
import os
from typing import Any

from slipstream_tf.data.readers import generator
from slipstream_tf.data.readers.avazu import AvazuReader
from slipstream_tf.data.readers.criteo import CriteoReader
from slipstream_tf.data.spec import Reader

DESCRIPTION = "Criteo TSV (.tsv, .txt, also .gz), Avazu CSV (.csv, also .gz), or 'generated:COUNT'"
GENERATED_FIELDS = 26  # as Criteo's
_READERS = {".tsv": CriteoReader, ".txt": CriteoReader, ".csv": AvazuReader}


def open_data(
    data: str | os.PathLike[str],
    part: str,
    batch_size: int,
    *,
    strict: bool = False,
    hold_out: bool = False,
) -> Reader:
    """Opens a part of a data set, recognised by its name.

    Parquet files need column names: use `readers.parquet.ParquetReader`. Folders of
    `slipstream-prepare` have a reader of their own: `readers.prepared.PreparedReader`.

    Args:
        data: path of a file, or "generated:COUNT" for inputs drawn from a fixed law
            ("generated:COUNT:KEYS:RATE": with at most so many keys a field, and such a click rate).
        part: "train", "valid" or "test". Text files have no parts of their own: of ten runs of
            lines one is the test part (see `readers.text.TextReader`), and one may be for
            validation.
        batch_size: inputs of a batch.
        strict: make the first malformed line of a text file an error.
        hold_out: whether "valid" is left out of "train", where it is a tenth of it.

    Returns:
        The reader.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is none of the known data sets.
    """
    name = os.fspath(data)
    if name == "generated" or name.startswith("generated:"):
        return open_generated(name, part, batch_size)
    if not os.path.exists(name):
        raise FileNotFoundError(f"No data file {name!r}. Known data: {DESCRIPTION}.")
    reader = _READERS.get(os.path.splitext(name.removesuffix(".gz"))[1])
    if reader is None:
        raise ValueError(f"No reader for {name!r}. Known data: {DESCRIPTION}.")
    return reader(name, batch_size, part=part, strict=strict, hold_out=hold_out)


def open_generated(name: str, part: str, batch_size: int, share: float = 1.0) -> Reader:
    """Opens generated data by its name; `share` of as many inputs as the name says."""
    parsed = generator.parse_name(name)
    assert parsed is not None, name
    sizes = generator.default_cardinalities(GENERATED_FIELDS, parsed.largest)
    law: dict[str, Any] = {"cardinalities": sizes, "click_rate": parsed.click_rate}
    return generator.GeneratedReader(math.ceil(parsed.examples * share), part, batch_size, **law)
