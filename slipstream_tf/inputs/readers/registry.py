"""Finds the reader for a data set by its path and opens one part of it."""

import math
import os
from typing import Any

from slipstream_tf.inputs.readers import generator
from slipstream_tf.inputs.readers.arrays import array_names
from slipstream_tf.inputs.readers.avazu import AvazuReader
from slipstream_tf.inputs.readers.criteo import CriteoReader
from slipstream_tf.inputs.readers.frappe import FrappeReader
from slipstream_tf.inputs.readers.globo import GloboReader
from slipstream_tf.inputs.spec import Reader

DESCRIPTION = (
    "Criteo TSV (.tsv, .txt, also .gz), Avazu CSV (.csv, also .gz), globo or Frappe .npz, or "
    "'generated:COUNT'"
)
GENERATED_FIELDS = 26  # as Criteo's


def open_data(
    data: str | os.PathLike[str],
    part: str,
    batch_size: int,
    *,
    split: str = "random",
    strict: bool = False,
    seed: int = 0,
    hold_out: bool = False,
    **globo: Any,
) -> Reader:
    """Opens a part of a data set, recognised by its name and content.

    Parquet files need column names: use `readers.parquet.ParquetReader`.

    Args:
        data: path of a file, or "generated:COUNT" for inputs drawn from a fixed law
            ("generated:COUNT:KEYS:RATE": with at most so many keys a field, and such a click rate).
        part: "train", "valid" or "test". Text files have no parts of their own: of ten runs of
            lines one is the test part (see `readers.text.TextReader`), and one may be for
            validation.
        batch_size: inputs of a batch.
        split: "random" or "time", of the globo task; of no effect elsewhere.
        strict: make the first malformed line of a text file an error.
        seed: of the order of the training part of Frappe and of globo's random split, and of
            generated inputs.
        hold_out: whether "valid" is left out of "train", where it is a tenth of it.
        **globo: negatives and law, of the globo task alone; see `readers.globo.GloboReader`.

    Returns:
        The reader.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is none of the known data sets.
    """
    name = os.fspath(data)
    if name == "generated" or name.startswith("generated:"):
        return open_generated(name, part, batch_size, seed)
    if not os.path.exists(name):
        raise FileNotFoundError(f"No data file {name!r}. Known data: {DESCRIPTION}.")
    stem = name.removesuffix(".gz")
    lines: dict[str, Any] = {"part": part, "strict": strict, "hold_out": hold_out}
    if stem.endswith((".tsv", ".txt")):
        return CriteoReader(name, batch_size, **lines)
    if stem.endswith(".csv"):
        return AvazuReader(name, batch_size, **lines)
    if name.endswith(".npz"):
        of_globo = {"split": split, "hold_out": hold_out, **globo}
        return _open_arrays(name, part, batch_size, seed, of_globo)
    raise ValueError(f"No reader for {name!r}. Known data: {DESCRIPTION}.")


def open_generated(name: str, part: str, batch_size: int, seed: int, share: float = 1.0) -> Reader:
    """Opens generated data by its name; `share` of as many inputs as the name says."""
    parsed = generator.parse_name(name)
    assert parsed is not None, name
    sizes = generator.default_cardinalities(GENERATED_FIELDS, parsed.largest)
    law: dict[str, Any] = {"seed": seed, "cardinalities": sizes, "click_rate": parsed.click_rate}
    return generator.GeneratedReader(math.ceil(parsed.examples * share), part, batch_size, **law)


def _open_arrays(
    name: str, part: str, batch_size: int, seed: int, of_globo: dict[str, Any]
) -> Reader:
    names = array_names(name)
    options: dict[str, Any] = {"batch_size": batch_size, "part": part}
    if "click_ts" in names:
        # On the time split the order of time is the point; on the random one it would make the
        # last weeks' articles weigh most.
        is_shuffled = part == "train" and of_globo["split"] == "random"
        shuffle_seed = seed if is_shuffled else None
        return GloboReader(name, shuffle_seed=shuffle_seed, **options, **of_globo)
    if not any(array.endswith("_x") for array in names):
        raise ValueError(
            f"{name!r} has no array of globo ('click_ts', ...) or Frappe ('train_x', ...); found "
            f"{list(names)}. Known data: {DESCRIPTION}."
        )
    shuffle_seed = seed if part == "train" else None
    return FrappeReader(name, shuffle_seed=shuffle_seed, **options)
