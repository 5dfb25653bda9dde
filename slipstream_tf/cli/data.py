"""Opens the data set of the flag `--data`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from slipstream_tf.cli.defaults import DataFacts
from slipstream_tf.cli.flag_set import UsageError, does_nothing, raised_as
from slipstream_tf.cli.program import import_tensorflow
from slipstream_tf.cli.train_flags import DATA_HELP

if TYPE_CHECKING:
    from slipstream_tf.cli.settings import Settings
    from slipstream_tf.data.spec import Reader

GENERATED = "generated"
_MIN_GENERATED = 100
# Test fraction of generated data. Text readers also hold out one in ten runs of lines.
_TEST_FRACTION = 0.1
_SAMPLE_BYTES = 1 << 20
# Ends of the paths of list elements in Parquet files.
_ELEMENT = (".list.element", ".list.item")
_CSV = (".csv", ".csv.gz")  # Ends of the names of Avazu files.


@dataclasses.dataclass(frozen=True)
class Parts:
    """The readers of the parts of a data set, see `slipstream_tf.data.spec.Reader`.

    Attributes:
        train: Reader of the training part.
        valid: Reader of the validation part, or None without early stopping.
        test: Reader of the part for the final evaluation: the test part, or the validation part
            with --evaluate_on=valid.
        num_examples: Number of training examples, possibly estimated. None if it is unknown.
    """

    train: Reader
    valid: Reader | None
    test: Reader
    num_examples: int | None


def facts_of(data: str) -> DataFacts:
    """Returns the properties of a data set that select settings.

    Args:
        data: Value of --data: a path, or the name of a generated data set.

    Raises:
        UsageError: If the file does not exist or no reader supports it.
    """
    if data.partition(":")[0] == GENERATED:
        import_tensorflow()
        from slipstream_tf.data.readers import registry
        from slipstream_tf.data.readers.generator import parse_name

        with _refusing(data):
            parsed = parse_name(data)
        if parsed is not None and parsed.examples >= _MIN_GENERATED:
            return _facts(registry.open_generated(data, "train", 1), parsed.click_rate)
        raise UsageError(
            f"Invalid flag --data={data}. Expected "
            f"{GENERATED}:COUNT[:KEYS[:RATE]] with an integer COUNT >= {_MIN_GENERATED}."
        )
    if not os.path.exists(data):
        raise UsageError(
            f"Invalid flag --data={data}: the path does not exist. Expected {DATA_HELP}."
        )
    manifest = _prepared(data)
    if manifest is not None:
        count, clicks = _counts(manifest, "train")
        valid, valid_clicks = _counts(manifest, "valid")
        columns = manifest["columns"]
        return DataFacts(
            name=manifest["name"],
            fields=len(columns["keys"]),
            num_dense=len(columns["dense"]),
            bags=len(columns["lists"]),
            num_examples=count,
            click_rate=clicks / count if count else None,
            rarer_in_valid=min(valid_clicks, valid - valid_clicks) if valid else None,
            num_bytes=_num_bytes(data, manifest, count),
        )
    if os.path.isdir(data) or data.endswith(".parquet"):
        raise UsageError(
            f"Invalid flag --data={data}: the path was not written by slipstream-prepare. Expected "
            f"{DATA_HELP}. Convert Parquet files with slipstream-prepare --schema."
        )
    import_tensorflow()
    from slipstream_tf.data.readers import registry

    with _refusing(data):
        facts = _facts(registry.open_data(data, part="train", batch_size=1))
        estimated = _estimated_inputs(data, 1 - _TEST_FRACTION)
        return dataclasses.replace(facts, num_examples=estimated)


def _counts(manifest: Mapping[str, Any], part: str) -> tuple[int, int]:
    """Returns the numbers of examples and of clicks in a part of prepared data."""
    files = [shard[part] for shard in manifest["shards"] if shard[part] is not None]
    return sum(file["inputs"] for file in files), sum(file["clicks"] for file in files)


def _num_bytes(data: str, manifest: Mapping[str, Any], count: int) -> int:
    """Returns the size of the training part in memory, see `ParquetReader.in_memory`."""
    import pyarrow.parquet as pq

    columns = manifest["columns"]
    flat = len(columns["keys"]) - len(columns["lists"])
    # int64 keys, float32 numbers and label, int32 offsets of lists.
    per_example = 8 * flat + 4 * (len(columns["dense"]) + 1 + len(columns["lists"]))
    if not columns["lists"]:
        return count * per_example
    elements = 0
    for shard in manifest["shards"]:
        if shard["train"] is not None:
            with _refusing(data):
                found = pq.read_metadata(os.path.join(data, *shard["train"]["file"].split("/")))
            chunks = (
                found.row_group(group).column(index)
                for group in range(found.num_row_groups)
                for index in range(found.num_columns)
            )
            # Flat columns have one value per example, lists one per element.
            elements += sum(c.num_values for c in chunks if c.path_in_schema.endswith(_ELEMENT))
    return count * per_example + 8 * elements


def _facts(reader: Reader, click_rate: float | None = None) -> DataFacts:
    """Returns the properties of the data of a reader without lists."""
    spec = reader.spec
    return DataFacts(
        name=spec.name,
        fields=len(spec.fields),
        num_dense=spec.num_dense,
        num_examples=spec.num_examples,
        click_rate=click_rate,
    )


def open_parts(settings: Settings) -> Parts:
    """Opens the parts of the data set that a run needs.

    Args:
        settings: The settings of the run.

    Returns:
        The readers of the training part and the evaluated parts.

    Raises:
        UsageError: If the data cannot be opened.
    """
    import_tensorflow()
    manifest = _prepared(settings.data)
    if manifest is not None:
        _require_trainable(settings, manifest)
    with _refusing(settings.data):
        _require_header(settings.data)
        _require_evaluated_part(settings)
        train = _open(settings, "train")
        valid = _open(settings, "valid") if settings.early_stopping else None
        test = _open(settings, settings.evaluate_on)
        num_examples = train.spec.num_examples
        if num_examples is None:
            fraction = 2 * _TEST_FRACTION if settings.holds_out else _TEST_FRACTION
            num_examples = _estimated_inputs(settings.data, 1 - fraction)
    return Parts(train, valid, test, num_examples)


def fingerprint_of(data: str, has_time: bool = False) -> dict[str, Any]:
    """Returns values that identify the content of a data set, JSON-serializable.

    Args:
        data: Value of --data.
        has_time: Whether to include the modification time of a file.

    Returns:
        For prepared data, `"files"`, the names and the CRC-32 of its source files, and
        `"manifest"`, a hash of its manifest. For a file, the values of
        `data.fingerprints.fingerprint`. Empty for generated data.
    """
    from slipstream_tf.data import fingerprints

    manifest = _prepared(data)
    if manifest is not None:
        sources = manifest["source"].get("files", ())
        files = [f"{one['name']}, CRC-32 {one.get('crc32', '')}" for one in sources]
        return {"files": files, "manifest": fingerprints.of_manifest(manifest)}
    if not os.path.isfile(data):
        return {}
    with _refusing(data):
        found = fingerprints.fingerprint(data)
    if not has_time:
        del found["modified"]
    return found


def best_auc(reader: Reader) -> float | None:
    """Returns the best reachable AUC of generated data, otherwise None.

    This AUC of the true click probabilities is an upper bound for any model, up to sampling noise.
    """
    from slipstream_tf.data.readers.generator import GeneratedReader
    from slipstream_tf.telemetry.metrics import click_metrics

    if not isinstance(reader, GeneratedReader):
        return None
    return click_metrics(*reader.best_predictions()).auc


def _refusing(data: str) -> contextlib.AbstractContextManager[None]:
    return raised_as(UsageError, f"Invalid flag --data={data}: ")


def _require_trainable(settings: Settings, manifest: Mapping[str, Any]) -> None:
    """Raises `UsageError` if prepared data does not fit the settings, or has only one label."""
    shards = [shard["train"] for shard in manifest["shards"] if shard["train"] is not None]
    if settings.shuffle == "shards" and len(shards) == 1:
        raise does_nothing(
            "shuffle=shards",
            f"two or more shards, but {settings.data} has one. Pass --shuffle=examples, or prepare "
            "the data with a smaller --shard_rows",
        )
    inputs, clicks = (sum(shard[name] for shard in shards) for name in ("inputs", "clicks"))
    if inputs and clicks in (0, inputs):
        raise UsageError(
            f"Invalid flag --data={settings.data}: all {inputs:,} training examples have the label "
            f"{int(clicks > 0)}. Expected examples of both labels, because a model cannot learn "
            "from one. Check `label` in the schema of slipstream-prepare (the column, "
            "`positive_from` or `positive`) and the order of the lines: slipstream-prepare "
            "--split=random mixes them."
        )


def _require_header(data: str) -> None:
    """Raises an error if a CSV file lacks the header of Avazu.

    Readers check the header only when they read the first batch, which is late.
    """
    from slipstream_tf.data.line_source import first_line
    from slipstream_tf.data.readers.avazu import AvazuFormat
    from slipstream_tf.data.readers.text import require_header

    if os.path.isfile(data) and data.endswith(_CSV):
        require_header(AvazuFormat(), data, first_line(data))


def _require_evaluated_part(settings: Settings) -> None:
    """Raises ValueError if a text file has too few lines for the evaluated part."""
    from slipstream_tf.data.readers import text
    from slipstream_tf.data.readers.base import PART_PERIOD, PART_RUN

    data = settings.data
    if not os.path.isfile(data):
        return
    before = PART_RUN * (PART_PERIOD - (2 if settings.evaluate_on == "valid" else 1))
    lines = -1 if data.endswith(_CSV) else 0  # The header of Avazu is no example.
    with text.open_text(data) as (file, _), text.naming_damage(data, lambda: f"after line {lines}"):
        for block, _ in text.whole_lines(file):
            lines += block.count(b"\n") + (not block.endswith(b"\n"))
            if lines > before:
                return
    raise ValueError(
        f"the file has {lines:,} lines, but the part {settings.evaluate_on!r} begins at line "
        f"{before + 1:,}. Divide it with slipstream-prepare {data} --output=FOLDER, which puts "
        "every tenth line of a small file into the test part (others: --split=random, --test)."
    )


def _open(settings: Settings, part: str) -> Reader:
    data, batch_size, hold_out = settings.data, settings.batch_size, settings.holds_out
    if _prepared(data) is not None:
        from slipstream_tf.data.readers.prepared import PreparedReader

        shuffle = settings.shuffle if part == "train" else "none"
        seed = settings.seed if shuffle == "shards" else None
        reader = PreparedReader(data, batch_size, part, hold_out, seed)
        return reader.in_memory(settings.seed) if shuffle == "examples" else reader
    if settings.shuffle != "none":
        raise does_nothing("shuffle", "data that slipstream-prepare wrote")
    from slipstream_tf.data.readers import registry

    if settings.data_name == GENERATED:
        # The seed of the run does not change the generated examples, only the model.
        fraction = 1.0 if part == "train" else _TEST_FRACTION
        return registry.open_generated(data, part, batch_size, fraction)
    return registry.open_data(data, part, batch_size, hold_out=hold_out)


def _prepared(data: str) -> dict[str, Any] | None:
    """Returns the manifest of slipstream-prepare, or None for other data."""
    if not os.path.isdir(data):
        return None
    import_tensorflow()
    from slipstream_tf.data.readers.prepared import is_prepared, read_manifest

    with _refusing(data):
        return read_manifest(data) if is_prepared(data) else None


def _estimated_inputs(path: str, fraction: float) -> int | None:
    """Estimates the number of training examples in a text file.

    The estimate extrapolates from the mean length of the first lines. It is precise enough for its
    uses: the length of the warm-up and of the progress bar.

    Args:
        path: Path of the file.
        fraction: Fraction of the examples that belong to the training part.

    Returns:
        The estimate, or None for a compressed or empty file.
    """
    if path.endswith(".gz"):
        return None
    with open(path, "rb") as file:
        sample = file.read(_SAMPLE_BYTES)
    lines = sample.count(b"\n")
    if not lines:
        return None
    return math.ceil(os.path.getsize(path) * lines / len(sample) * fraction)
