"""Prepares data: writes shards and counts keys and hot examples.

An interrupted preparation continues after the last complete shard. The result has the same bytes as
an uninterrupted preparation.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from slipstream_tf._utils.errors import require_choice, require_integer, require_number
from slipstream_tf._utils.memory import require_room
from slipstream_tf.data import fingerprints, line_counts
from slipstream_tf.data import shards as shard_files
from slipstream_tf.data import statistics as stats
from slipstream_tf.data.dense_statistics import merged_statistics, suspected_kind
from slipstream_tf.data.readers.prepared import MANIFEST, is_prepared, read_manifest, tables_of
from slipstream_tf.data.schema import LOG
from slipstream_tf.data.sources import (
    Block,
    ParsedRows,
    Position,
    Source,
    in_threads,
    workers,
)
from slipstream_tf.data.spec import PARTS, SHARD_COMPRESSIONS, BadLineError, BadLines
from slipstream_tf.data.split import Divider, Split, find_limits
from slipstream_tf.telemetry.run_record import write_json

_LOCK = ".lock"
_EARLY_ROWS = 100_000  # From this number of rows on, too many malformed rows stop a preparation.
_RUNS = Split()

Progress = Callable[[str, int, int, int], None]
"""Callback with (name of the stage, amount done, total amount, rows read so far)."""


class OtherPreparation(ValueError):
    """Raised if a folder contains data of another preparation.

    The source or the settings differ.
    """


@dataclasses.dataclass(frozen=True)
class Options:
    """Configures a preparation.

    Attributes:
        shard_rows: Number of source rows per shard, over all parts.
        compression: Compression of the shards, one of `spec.SHARD_COMPRESSIONS`.
        dim: Number of values per row. It determines the size of a snapshot, the copy of a hot key's
            row.
        hot_budget_bytes: Maximum bytes of all snapshots. It limits the number of hot keys.
        count_bytes: Memory for the counts of keys in bytes, at least 1 MiB. If the counts need
            more, they are approximate.
        threads: Number of threads that parse.
        strict: Whether the first malformed row raises an error. By default, malformed rows are
            skipped and counted.
        max_bad_fraction: Maximum fraction of malformed rows, 0 to 1. More malformed rows raise an
            error, also after any shard from 100,000 rows on.
        overwrite: Whether to replace data of another preparation in the folder.
        split: How the rows are divided into parts.
    """

    shard_rows: int = 1_000_000
    compression: str = "snappy"
    dim: int = 16
    hot_budget_bytes: int = 256 << 20
    count_bytes: int = 2 << 30
    threads: int = 2
    strict: bool = False
    max_bad_fraction: float = 0.1
    overwrite: bool = False
    split: Split = _RUNS

    def __post_init__(self) -> None:
        for name in ("shard_rows", "dim", "hot_budget_bytes", "threads"):
            require_integer(name, getattr(self, name), 1, None, "Options")
        require_integer("count_bytes", self.count_bytes, 1 << 20, None, "Options")
        require_room("count_bytes", self.count_bytes, self.count_bytes, "key counts", "Options")
        require_choice("compression", self.compression, SHARD_COMPRESSIONS, "Options")
        require_number("max_bad_fraction", self.max_bad_fraction, 0.0, 1.0, "Options")


def prepare(
    source: Source,
    paths: list[str],
    folder: str,
    options: Options | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes the examples of a source as Parquet shards, with statistics.

    Args:
        source: Source of the examples.
        paths: Paths of the source's files. Their names and fingerprints are stored in the manifest,
            and a preparation only continues with the same files.
        folder: Folder for prepared.json, train/, valid/, test/, statistics.json and counts.parquet.
            If it contains an incomplete preparation of the same source, the preparation continues.
        options: Settings. Defaults to `Options()`.
        progress: Called regularly to report progress.

    Returns:
        The content of statistics.json.

    Raises:
        OtherPreparation: If the folder contains other data, or a file has changed since, and
            `options.overwrite` is False.
        BadLineError: If a row is malformed and `options.strict` is True.
        TooManyBadLinesError: If more than `options.max_bad_fraction` of the rows are malformed. A
            call with a higher fraction continues, and a call with another source starts from
            scratch.
        ValueError: If a file is damaged or changes while it is read, if the files contain no
            well-formed row, or if the rows cannot be divided.
        BlockingIOError: If another process prepares data in this folder.
        OSError: If a file cannot be read or written.
    """
    options = options or Options()
    files = [{"name": os.path.basename(path), **fingerprints.fingerprint(path)} for path in paths]
    kept = {
        "shard_rows": options.shard_rows,
        "compression": options.compression,
        "split": options.split.describe(),
    }
    described = {**source.describe(), "files": files, **kept}
    manifest = shard_files.make_manifest(source.name, source.columns, described)
    os.makedirs(folder, exist_ok=True)
    with _locked(folder):
        manifest = _begun(folder, manifest, options, paths)
        first = line_counts.first_bad_line(manifest)
        if options.strict and first is not None:
            raise BadLineError(first)
        if manifest["is_complete"]:
            line_counts.require_few_bad_lines(manifest, options.max_bad_fraction)
            found = stats.read_statistics(folder)
            hot, limit = found.get("hot", {}), found.get("count_bytes")
            counted = (hot.get("dim"), hot.get("budget_bytes"), limit)
            is_current = "positive_labels" in found  # Earlier versions did not write all entries.
            wanted = (options.dim, options.hot_budget_bytes, options.count_bytes)
            if is_current and counted == wanted:
                return found
        counts = stats.KeyCounts(source.columns.keys, options.count_bytes // stats.BYTES_PER_KEY)
        begun = _Preparation(folder, manifest, counts, options, progress or (lambda *_: None))
        begun.recount()
        if not manifest["is_complete"]:
            begun.write_shards(source, paths)
        return begun.write_statistics()


def _begun(
    folder: str, manifest: dict[str, Any], options: Options, paths: Sequence[str]
) -> dict[str, Any]:
    """Returns the manifest to continue with, and deletes leftover files.

    Leftover files are shards that the manifest does not list, temporary files and outdated
    statistics. They remain from an interrupted run or from replaced data.

    Raises:
        OtherPreparation: If the folder contains other files or another preparation.
    """
    found = None
    if is_prepared(folder):
        found = _same(folder, manifest, options, paths)
    else:
        for name in sorted(os.listdir(folder)):
            if not name.startswith((".", f"{MANIFEST}.")):
                raise OtherPreparation(f"{folder} contains {name!r}, but no prepared data")
    if found is None:
        shard_files.write_manifest(folder, manifest)
        found = manifest
    named = {shard[part]["file"] for shard in found["shards"] for part in PARTS if shard[part]}
    for part in PARTS:
        for path in Path(folder, part).glob("*"):
            if f"{part}/{path.name}" not in named:
                path.unlink()
    results = (stats.STATISTICS, stats.COUNTS)
    partial = tuple(f"{whole}." for whole in (MANIFEST, *results))
    for path in Path(folder).iterdir():
        is_result = path.name in results and not found["is_complete"]
        if is_result or path.name.startswith(partial):
            path.unlink()
    return found


def _same(
    folder: str, manifest: dict[str, Any], options: Options, paths: Sequence[str]
) -> dict[str, Any] | None:
    """Returns the folder's manifest if its preparation can continue, else None.

    None means that the preparation starts from scratch. This is the case if no example was written,
    or if the folder contains another preparation and `options.overwrite` is True or the other
    preparation ended because of malformed rows.

    Raises:
        OtherPreparation: If the manifest is of another preparation that must not be replaced.
    """
    try:
        found = read_manifest(folder)
    except ValueError as error:
        if not options.overwrite:
            raise OtherPreparation(str(error).removesuffix(".")) from None
        return None
    if not any(shard[part] for shard in found["shards"] for part in PARTS):
        return None
    other = _differences(found, manifest, paths)
    if not other:
        before, now = found["source"]["files"], manifest["source"]["files"]
        times = [[file["modified"] for file in files] for files in (before, now)]
        if times[0] != times[1]:
            # Keep the new times, so that the files are not hashed again in the next run.
            for file, time in zip(before, times[1], strict=True):
                file["modified"] = time
            shard_files.write_manifest(folder, found)
        return found
    is_refused = not found["is_complete"] and (
        line_counts.has_many_bad_lines(found, options.max_bad_fraction)
        or not line_counts.has_positive(found)
    )
    if not (options.overwrite or is_refused):
        raise OtherPreparation(
            f"{folder} contains data of another preparation (different: {', '.join(other)})"
        )
    return None


def _differences(
    found: Mapping[str, Any], manifest: Mapping[str, Any], paths: Sequence[str]
) -> list[str]:
    """Returns the differences between two preparations, for an error message.

    Args:
        found: The manifest in the folder.
        manifest: The new manifest.
        paths: Paths of the files of the new manifest.
    """
    other = [name for name in ("name", "columns") if found.get(name) != manifest[name]]
    before, now = dict(found["source"]), dict(manifest["source"])
    files, new_files = before.pop("files", None), now.pop("files")
    other += [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not isinstance(files, list) or not all(isinstance(file, dict) for file in files):
        return [*other, "files"]
    if [file.get("name") for file in files] != [file["name"] for file in new_files]:
        return [*other, "files"]
    changed = [
        path
        for path, file in zip(paths, files, strict=True)
        if not fingerprints.is_unchanged(path, file)
    ]
    return [*other, f"content of {', '.join(changed)}"] if changed else other


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    with open(os.path.join(folder, _LOCK), "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(
                f"Another process prepares data in {folder}. Wait for it, or pass another folder."
            ) from None
        yield


@dataclasses.dataclass
class _Preparation:
    """Runs a preparation and holds its state.

    Attributes:
        folder: Folder of the prepared data.
        manifest: Manifest of the folder. It lists the complete shards.
        counts: Key counts of these shards.
        options: Settings of the preparation.
        progress: Called to report progress.
    """

    folder: str
    manifest: dict[str, Any]
    counts: stats.KeyCounts
    options: Options
    progress: Progress

    def recount(self) -> None:
        """Counts the keys of the complete shards."""
        shards = self.manifest["shards"]
        total = sum(shard["train"]["inputs"] for shard in shards if shard["train"])
        done = 0
        for shard in shards:
            done += self.count(shard)
            self.progress("counting keys", done, total, done)

    def count(self, shard: Mapping[str, Any]) -> int:
        """Counts the keys of a written shard; returns its number of training examples."""
        inputs = 0
        for table in shard_files.training_tables(self.folder, shard, list(self.counts.fields)):
            self.count_keys(table)
            inputs += len(table)
        return inputs

    def count_keys(self, group: pa.Table) -> None:
        """Counts the keys of a row group."""
        for field in self.counts.fields:
            self.counts.add(field, *stats.field_ids(group[field]))

    def write_shards(self, source: Source, paths: Sequence[str]) -> None:
        """Writes the missing shards. Counts their keys and hashes the files on other threads.

        Args:
            source: The source of the rows.
            paths: Paths of the files to hash.
        """
        folder, manifest, options = self.folder, self.manifest, self.options
        if manifest.get("limits") is None:
            manifest["limits"] = find_limits(options.split, source, options.threads)
        divider = Divider(options.split, source, manifest["limits"])
        bad_lines = BadLines(options.strict)
        shards = manifest["shards"]
        start = Position(**shards[-1]["end"]) if shards else Position()
        blocks = source.blocks(start, options.shard_rows)
        rows = 0

        files = manifest["source"]["files"]
        unhashed = {
            path: file for path, file in zip(paths, files, strict=True) if "crc32" not in file
        }

        def piece_of(item: tuple[Block, ParsedRows]) -> tuple[int, int]:
            start = item[0].start
            return start.file, start.row // options.shard_rows

        with (
            workers(1) as counter,
            _hashing(unhashed) as hashes,
            contextlib.closing(in_threads(source.parse, blocks, options.threads)) as all_parsed,
        ):
            calls: collections.deque[concurrent.futures.Future[None]] = collections.deque()

            def on_group(group: pa.Table) -> None:
                # At most one group waits, so that memory stays small.
                if len(calls) > 1:
                    calls.popleft().result()
                calls.append(counter.submit(self.count_keys, group))

            for _, piece in itertools.groupby(all_parsed, piece_of):
                number, end = len(shards), start
                kept = source.columns, options.compression, on_group
                with shard_files.ShardWriter(folder, number, *kept) as writer:
                    for block, parsed in piece:
                        for row, reason in parsed.reasons.items():
                            path, line = source.line(block, row)
                            bad_lines.add(path, line, reason)
                            writer.add_bad_line(f"{path}:{line}", reason)
                        writer.add(parsed, divider.parts(block, parsed))
                        rows, end = rows + block.num_rows, block.end
                        self.progress("preparing", block.done, source.size, rows)
                    shards.append(writer.close(end))
                    # If the preparation is interrupted, the next run can compare touched files.
                    for path, file in unhashed.items():
                        is_new = hashes[path].done() and "crc32" not in file
                        if is_new and fingerprints.is_same(fingerprints.fingerprint(path), file):
                            file["crc32"] = hashes[path].result()
                    shard_files.write_manifest(folder, manifest)
                if end.id >= _EARLY_ROWS:
                    line_counts.require_few_bad_lines(manifest, options.max_bad_fraction)
            for call in calls:
                call.result()
            for path, file in zip(paths, files, strict=True):
                if path in hashes:
                    file["crc32"] = hashes[path].result()
                if not fingerprints.is_same(fingerprints.fingerprint(path), file):
                    raise ValueError(
                        f"{path} changed while it was read. Pass --overwrite to prepare it again."
                    )
        line_counts.require_few_bad_lines(manifest, options.max_bad_fraction)
        if not sum(line_counts.summed(manifest)["inputs"].values()):
            first = line_counts.first_bad_line(manifest) or "the files have no rows"
            raise ValueError(f"The data contains no well-formed example: {first}")
        line_counts.require_positive(manifest)
        manifest["is_complete"] = True
        shard_files.write_manifest(folder, manifest)

    def describe_dense(self) -> dict[str, Any]:
        """Returns the statistics of each dense column, as written to the shards.

        `"is_log"` is True for logarithms, which are the numbers of the format Criteo, too.
        `"suspected_kind"` is the result of `suspected_kind`.
        """
        schema = self.manifest["source"].get("schema", {"dense": []})
        transforms = {dense["column"]: dense["transform"] for dense in schema["dense"]}
        shards, names = self.manifest["shards"], self.manifest["columns"]["dense"]
        result = {}
        for name, found in merged_statistics(shards, names).items():
            values = dataclasses.asdict(found)
            del values["is_like_ids"]
            result[name] = {
                **values,
                "suspected_kind": suspected_kind(found),
                "is_log": transforms.get(name, LOG) == LOG,
            }
        return result

    def write_statistics(self) -> dict[str, Any]:
        """Writes counts.parquet and statistics.json, and returns the content of the latter."""
        folder, manifest, counts, options = self.folder, self.manifest, self.counts, self.options
        fields = tuple(counts.fields)
        counted = [field.result() for field in counts.fields.values()]
        described = {
            name: stats.describe_field(field, *pair)
            for (name, field), pair in zip(counts.fields.items(), counted, strict=True)
        }
        stats.write_counts(folder, fields, counted)
        tables = tables_of(manifest)
        of_tables = stats.by_table(tables, counted)
        hot_keys, hot_lookups = stats.choose_hot(
            list(of_tables.values()), options.dim, options.hot_budget_bytes
        )
        hot_of = dict(zip(of_tables, hot_keys, strict=True))
        hot = {field: hot_of[table] for field, table in tables.items()}
        totals = line_counts.summed(manifest)
        train_shards = [shard for shard in manifest["shards"] if shard["train"] is not None]

        def count(shard: Mapping[str, Any]) -> int:
            groups = shard_files.training_tables(folder, shard, fields)
            return sum(int(stats.hot_rows(group, hot).sum()) for group in groups)

        num_hot = done = 0
        with workers(options.threads) as pool:
            for shard, inputs in zip(train_shards, pool.map(count, train_shards), strict=True):
                num_hot += inputs
                done += shard["train"]["inputs"]
                self.progress("finding hot examples", done, totals["inputs"]["train"], done)
        lookups = sum(field.lookups for field in counts.fields.values())
        train = totals["inputs"]["train"]
        statistics = {
            "name": manifest["name"],
            **totals,
            "limits": manifest["limits"],
            "positive_labels": line_counts.positive_labels(manifest, totals["labels"]),
            "unused_positive": line_counts.unused_positive(manifest, totals["labels"]),
            "count_bytes": options.count_bytes,
            "fields": described,
            "dense": self.describe_dense(),
            "hot": {
                "dim": options.dim,
                "budget_bytes": options.hot_budget_bytes,
                "keys": sum(len(keys) for keys in hot_keys),
                "lookup_share": hot_lookups / lookups if lookups else None,
                "inputs": num_hot,
                "input_share": num_hot / train if train else None,
            },
        }
        write_json(os.path.join(folder, stats.STATISTICS), statistics)
        return statistics


@contextlib.contextmanager
def _hashing(paths: Iterable[str]) -> Iterator[dict[str, concurrent.futures.Future[int]]]:
    """Hashes files on a thread, and stops at the end of the block."""
    is_over = threading.Event()
    with workers(1) as hasher:
        try:
            cancel = is_over.is_set
            yield {path: hasher.submit(fingerprints.crc32, path, cancel) for path in paths}
        finally:
            is_over.set()
