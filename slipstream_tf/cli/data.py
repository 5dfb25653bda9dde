"""Opens the data that `--data` names. In: a path or a name. Out: readers of both parts."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING, Any

from slipstream_tf.cli.flag_set import UsageError
from slipstream_tf.cli.quiet import import_tensorflow
from slipstream_tf.cli.settings import Settings

if TYPE_CHECKING:
    from slipstream_tf.cli.session import Parts

GENERATED = "generated"
_MOVIELENS_FILE = "ml-1m.zip"
_DEFAULT_GENERATED, _LEAST_GENERATED = 400_000, 100
_SAMPLE_BYTES = 1 << 20
DATA_HELP = (
    "a file or folder: Criteo TSV (.tsv, .txt, .gz), Avazu CSV (.csv), globo or Frappe .npz, "
    f"Parquet, MovieLens {_MOVIELENS_FILE}; or 'generated' or 'generated:COUNT', inputs drawn from "
    "a fixed seed"
)


def name_of(data: str) -> str:
    """Returns the name of a data set, e.g. "globo", which its preset goes by.

    Args:
        data: value of --data.

    Raises:
        UsageError: there is no such file, or no reader for it.
    """
    if _generated_count(data) is not None:
        return GENERATED
    if not os.path.exists(data):
        raise UsageError(
            f"Invalid flag --data={data}: no such file or folder. Allowed: {DATA_HELP}."
        )
    if os.path.basename(data) == _MOVIELENS_FILE:
        return "movielens"
    import_tensorflow()
    from slipstream_tf.inputs.readers import registry

    try:
        return registry.open_data(data, part="train", batch_size=1).spec.name
    except (ValueError, OSError) as error:
        raise UsageError(f"Invalid flag --data={data}: {error}") from None


def open_parts(settings: Settings) -> Parts:
    """Opens the training part and the test part.

    Args:
        settings: of the run.

    Returns:
        The readers.

    Raises:
        UsageError: the data cannot be opened.
    """
    from slipstream_tf.cli.session import Parts

    start = time.perf_counter()
    try:
        train, test = (_open(settings, part) for part in ("train", "test"))
    except (ValueError, OSError) as error:
        raise UsageError(f"Invalid flag --data={settings.data}: {error}") from None
    num_inputs = train.spec.num_inputs
    if num_inputs is None:
        num_inputs = _estimated_inputs(settings.data)
    return Parts(train, test, num_inputs, time.perf_counter() - start)


def _open(settings: Settings, part: str) -> Any:
    data, batch_size = settings.data, settings.batch_size
    count = _generated_count(data)
    if count is not None:
        from slipstream_tf.cli.generated import open_generated

        return open_generated(count, part, batch_size, settings.seed)
    if os.path.basename(data) == _MOVIELENS_FILE:
        from slipstream_tf.cli.movielens import open_movielens

        return open_movielens(data, part, batch_size, settings.seed)
    from slipstream_tf.inputs.readers import registry

    options = {} if settings.split is None else {"split": settings.split}
    return registry.open_data(
        data, part=part, batch_size=batch_size, strict=settings.strict, **options
    )


def _generated_count(data: str) -> int | None:
    """Inputs of "generated" or "generated:COUNT"; None for other data."""
    if data != GENERATED and not data.startswith(GENERATED + ":"):
        return None
    text = data[len(GENERATED) + 1 :]
    if data == GENERATED:
        return _DEFAULT_GENERATED
    if not text.isdecimal() or int(text) < _LEAST_GENERATED:
        raise UsageError(
            f"Invalid flag --data={data}. Allowed: {GENERATED}:COUNT with an integer COUNT >= "
            f"{_LEAST_GENERATED}."
        )
    return int(text)


def _estimated_inputs(path: str) -> int | None:
    """Inputs of the training part of a text file, from its size and its first lines.

    An estimate is enough: it places the warm-up and the progress bar's end. None where the file is
    compressed or more than one.
    """
    if not os.path.isfile(path) or path.endswith(".gz"):
        return None
    with open(path, "rb") as file:
        sample = file.read(_SAMPLE_BYTES)
    lines = sample.count(b"\n")
    if not lines:
        return None
    return math.ceil(os.path.getsize(path) * lines / len(sample) * 0.9)
