"""Selects the reader for a data set's path."""

import math
import os
from typing import Any

from slipstream_tf.data.readers import generator
from slipstream_tf.data.readers.avazu import AvazuReader
from slipstream_tf.data.readers.criteo import CriteoReader
from slipstream_tf.data.spec import Reader

DESCRIPTION = "Criteo TSV (.tsv, .txt, also .gz), Avazu CSV (.csv, also .gz), or 'generated:COUNT'"
GENERATED_FIELDS = 26  # The number of Criteo's fields.
_READERS = {".tsv": CriteoReader, ".txt": CriteoReader, ".csv": AvazuReader}


def open_data(
    data: str | os.PathLike[str],
    part: str,
    batch_size: int,
    *,
    strict: bool = False,
    hold_out: bool = False,
) -> Reader:
    """Opens a part of a data set; the name determines the format.

    For Parquet files use `readers.parquet.ParquetReader`, which takes column names. For folders of
    `slipstream-prepare` use `readers.prepared.PreparedReader`.

    Args:
        data: Path of a file, or `"generated:COUNT"` for synthetic examples.
            `"generated:COUNT:KEYS:RATE"` also sets the number of keys of the largest field and the
            click rate.
        part: `"train"`, `"valid"` or `"test"`. In text files, every tenth run of lines is the test
            part (see `readers.text.TextReader`), and another run of each ten may be for validation.
        batch_size: Number of examples in a batch.
        strict: Whether the first malformed line of a text file raises an error.
        hold_out: Whether to exclude the examples of `"valid"` from `"train"`.

    Returns:
        The reader.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the format is unknown.
    """
    name = os.fspath(data)
    if name == "generated" or name.startswith("generated:"):
        return open_generated(name, part, batch_size)
    if not os.path.exists(name):
        raise FileNotFoundError(f"There is no data file {name!r}. Expected {DESCRIPTION}.")
    reader = _READERS.get(os.path.splitext(name.removesuffix(".gz"))[1])
    if reader is None:
        raise ValueError(
            f"The format of {name!r} is unknown. Expected {DESCRIPTION}. Convert other formats "
            "with slipstream-prepare."
        )
    return reader(name, batch_size, part=part, strict=strict, hold_out=hold_out)


def open_generated(name: str, part: str, batch_size: int, fraction: float = 1.0) -> Reader:
    """Opens generated data by its name.

    Args:
        name: `"generated"`, optionally with numbers, as in `open_data`.
        part: `"train"`, `"valid"` or `"test"`.
        batch_size: Number of examples in a batch.
        fraction: Factor of the number of examples in the name, which is rounded up.
    """
    parsed = generator.parse_name(name)
    assert parsed is not None, name
    sizes = generator.default_cardinalities(GENERATED_FIELDS, parsed.largest)
    law: dict[str, Any] = {"cardinalities": sizes, "click_rate": parsed.click_rate}
    return generator.GeneratedReader(math.ceil(parsed.examples * fraction), part, batch_size, **law)
