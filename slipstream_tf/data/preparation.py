"""Prepares data: parses a source in threads, writes shards, counts keys and hot inputs.

What an interrupted preparation has written is not written again; the folder ends with the same
bytes.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from slipstream_tf._utils.errors import require_choice, require_integer
from slipstream_tf._utils.memory import require_room
from slipstream_tf.data import shards as shard_files
from slipstream_tf.data import statistics as stats
from slipstream_tf.data.readers.prepared import MANIFEST, is_prepared, read_manifest
from slipstream_tf.data.sources import Block, ParsedRows, Position, Source
from slipstream_tf.data.spec import PARTS, BadLineError, BadLines
from slipstream_tf.telemetry.run_record import write_json

_LOCK = ".lock"
_BLOCKS_AHEAD = 2  # Beyond one for each thread.

Progress = Callable[[str, int, int, int], None]
"""Takes (what is done, done so far, all of it, rows read by now); called often."""


class OtherPreparation(ValueError):
    """The folder holds data that was prepared from something else, or in another way."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How data is prepared.

    Attributes:
        shard_rows: rows of the original files per shard, both parts together.
        compression: of the shards; one of `shards.COMPRESSIONS`.
        dim: values per embedding row, of which hot keys have a snapshot.
        hot_budget_bytes: bytes of all snapshots.
        count_bytes: memory for the counts of keys; beyond it they are approximate.
        threads: that parse.
        strict: make the first malformed row an error instead of leaving it out.
        overwrite: replace what the folder holds from another preparation.
    """

    shard_rows: int = 1_000_000
    compression: str = "snappy"
    dim: int = 16
    hot_budget_bytes: int = 256 << 20
    count_bytes: int = 2 << 30
    threads: int = 2
    strict: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("shard_rows", "dim", "hot_budget_bytes", "threads"):
            require_integer(name, getattr(self, name), 1, None, "Options")
        require_integer("count_bytes", self.count_bytes, 1 << 20, None, "Options")
        require_room("count_bytes", self.count_bytes, self.count_bytes, "counts of keys", "Options")
        require_choice("compression", self.compression, shard_files.COMPRESSIONS, "Options")


def prepare(
    source: Source,
    paths: list[str],
    folder: str,
    options: Options | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes a source's inputs as Parquet shards, and statistics of them.

    Args:
        source: of the inputs.
        paths: its files; the folder is bound to their names and sizes.
        folder: for prepared.json, train/, valid/, test/, statistics.json and counts.parquet. What a
            preparation of the same source left there is gone on with.
        options: how; default: `Options()`.
        progress: told now and then how far it is.

    Returns:
        The content of statistics.json.

    Raises:
        OtherPreparation: the folder holds another preparation, and may not be overwritten.
        BadLineError: a malformed row, and `strict` is set.
        ValueError: a file is damaged, or nothing can be read from the files at all.
        BlockingIOError: another process prepares into this folder.
        OSError: a file cannot be read or written.
    """
    options = options or Options()
    files = [{"name": os.path.basename(path), "bytes": os.path.getsize(path)} for path in paths]
    kept = {"shard_rows": options.shard_rows, "compression": options.compression}
    described = {**source.describe(), "files": files, **kept}
    manifest = shard_files.make_manifest(source.name, source.columns, described)
    os.makedirs(folder, exist_ok=True)
    with _locked(folder):
        manifest = _begun(folder, manifest, options.overwrite)
        first = _first_bad_line(manifest)
        if options.strict and first is not None:
            raise BadLineError(first)
        if manifest["is_complete"]:
            found = stats.read_statistics(folder)
            hot, limit = found.get("hot", {}), found.get("count_bytes")
            counted = (hot.get("dim"), hot.get("budget_bytes"), limit)
            if counted == (options.dim, options.hot_budget_bytes, options.count_bytes):
                return found
        counts = stats.KeyCounts(source.columns.keys, options.count_bytes // stats.BYTES_PER_KEY)
        begun = _Preparation(folder, manifest, counts, options, progress or (lambda *_: None))
        begun.recount()
        if not manifest["is_complete"]:
            begun.write_shards(source)
        return begun.write_statistics()


def _begun(folder: str, manifest: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """Returns the manifest to go on with, and leaves in the folder what it names.

    From here on the folder is one of prepared data: whatever it has beside is from a run that was
    broken off, or from what is replaced.
    """
    found = None
    if is_prepared(folder):
        found = _same(folder, manifest, overwrite)
    else:
        for name in sorted(os.listdir(folder)):
            if not name.startswith((".", f"{MANIFEST}.")):
                raise OtherPreparation(f"{folder}: no prepared data, but it holds {name!r}")
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


def _same(folder: str, manifest: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The folder's manifest if it is of the same preparation; None if it may be overwritten.

    What wrote no input (files without one, or a wrong schema) leaves the folder to whoever puts
    that right, and nothing to go on behind: mended files may be of the same size.
    """
    try:
        found = read_manifest(folder)
    except ValueError as error:
        if not overwrite:
            raise OtherPreparation(str(error)) from None
        return None
    if not any(shard[part] for shard in found["shards"] for part in PARTS):
        return None
    same = ("name", "columns", "source")
    if all(found.get(name) == manifest[name] for name in same):
        return found
    if not overwrite:
        other = [name for name in same if found.get(name) != manifest[name]]
        if other == ["source"]:
            before, now = found["source"], manifest["source"]
            other = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        raise OtherPreparation(
            f"{folder}: prepared from something else, or in another way ({', '.join(other)} differ)"
        )
    return None


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    with open(os.path.join(folder, _LOCK), "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{folder}: another process prepares into it") from None
        yield


@dataclasses.dataclass
class _Preparation:
    """A preparation that is under way.

    Attributes:
        folder: of the prepared data.
        manifest: of the folder; it names the shards that are whole.
        counts: of the keys of these shards.
        options: how data is prepared.
        told: how far it is.
    """

    folder: str
    manifest: dict[str, Any]
    counts: stats.KeyCounts
    options: Options
    told: Progress

    def recount(self) -> None:
        """Counts the keys of the shards that are whole."""
        shards = self.manifest["shards"]
        total = sum(shard["train"]["inputs"] for shard in shards if shard["train"])
        done = 0
        for shard in shards:
            done += self.count(shard)
            self.told("counting keys", done, total, done)

    def count(self, shard: Mapping[str, Any]) -> int:
        """Counts the keys of a shard; returns its training inputs."""
        inputs = 0
        for table in shard_files.training_tables(self.folder, shard, list(self.counts.fields)):
            for field in self.counts.fields:
                self.counts.add(field, stats.field_keys(table[field])[0])
            inputs += len(table)
        return inputs

    def write_shards(self, source: Source) -> None:
        """Writes the shards that are not there yet, and counts their keys meanwhile."""
        folder, manifest, options = self.folder, self.manifest, self.options
        bad_lines = BadLines(options.strict)
        shards = manifest["shards"]
        start = Position(**shards[-1]["end"]) if shards else Position()
        blocks = source.blocks(start, options.shard_rows)
        rows = 0

        def piece_of(item: tuple[Block, ParsedRows]) -> tuple[int, int]:
            start = item[0].start
            return start.file, start.row // options.shard_rows

        with (
            _workers(1) as counter,
            contextlib.closing(_parsed(source, blocks, options.threads)) as all_parsed,
        ):
            calls = []
            for _, piece in itertools.groupby(all_parsed, piece_of):
                number, end = len(shards), start
                kept = source.columns, options.compression
                with shard_files.ShardWriter(folder, number, *kept) as writer:
                    for block, parsed in piece:
                        for row, reason in parsed.reasons.items():
                            path, line = source.line(block, row)
                            bad_lines.add(path, line, reason)
                            writer.add_bad_line(f"{path}:{line}: {reason}")
                        writer.add(parsed, source.parts(block))
                        rows, end = rows + block.num_rows, block.end
                        self.told("preparing", block.done, source.size, rows)
                    shards.append(writer.close(end))
                    shard_files.write_manifest(folder, manifest)
                calls.append(counter.submit(self.count, shards[-1]))
            for call in calls:
                call.result()
        totals = _totals(manifest)
        if not sum(totals["inputs"].values()):
            first = _first_bad_line(manifest) or "the files have no rows"
            raise ValueError(f"No input could be read: {first}")
        manifest["is_complete"] = True
        shard_files.write_manifest(folder, manifest)

    def write_statistics(self) -> dict[str, Any]:
        """Writes counts.parquet and statistics.json; returns the content of the latter."""
        folder, manifest, counts, options = self.folder, self.manifest, self.counts, self.options
        fields = tuple(counts.fields)
        counted = [field.result() for field in counts.fields.values()]
        described = {
            name: stats.describe_field(field, *pair)
            for (name, field), pair in zip(counts.fields.items(), counted, strict=True)
        }
        stats.write_counts(folder, fields, counted)
        hot_keys, hot_lookups = stats.choose_hot(counted, options.dim, options.hot_budget_bytes)
        hot = dict(zip(fields, hot_keys, strict=True))
        totals = _totals(manifest)
        train_shards = [shard for shard in manifest["shards"] if shard["train"] is not None]

        def count(shard: Mapping[str, Any]) -> int:
            tables = shard_files.training_tables(folder, shard, fields)
            return sum(int(stats.hot_rows(table, hot).sum()) for table in tables)

        num_hot = done = 0
        with _workers(options.threads) as workers:
            for shard, inputs in zip(train_shards, workers.map(count, train_shards), strict=True):
                num_hot += inputs
                done += shard["train"]["inputs"]
                self.told("finding hot inputs", done, totals["inputs"]["train"], done)
        lookups = sum(field.lookups for field in counts.fields.values())
        train = totals["inputs"]["train"]
        statistics = {
            "name": manifest["name"],
            **totals,
            "count_bytes": options.count_bytes,
            "fields": described,
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
def _workers(threads: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Threads that are done, with nothing left to do, when the context is left."""
    executor = concurrent.futures.ThreadPoolExecutor(threads)
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def _parsed(
    source: Source, blocks: Iterator[Block], threads: int
) -> Generator[tuple[Block, ParsedRows], None, None]:
    """Yields blocks with their inputs, in order; some are parsed ahead, in threads."""
    waiting: collections.deque[tuple[Block, Any]] = collections.deque()
    with _workers(threads) as workers:
        for block in blocks:
            waiting.append((block, workers.submit(source.parse, block)))
            while len(waiting) > threads + _BLOCKS_AHEAD:
                done, future = waiting.popleft()
                yield done, future.result()
        for done, future in waiting:
            yield done, future.result()


def _totals(manifest: Mapping[str, Any]) -> dict[str, Any]:
    shards = manifest["shards"]
    counted = {
        what: {part: sum(shard[part][what] for shard in shards if shard[part]) for part in PARTS}
        for what in ("inputs", "clicks")
    }
    return {
        **counted,
        "bad_lines": sum(shard["bad_lines"] for shard in shards),
        "first_bad_line": _first_bad_line(manifest),
        "shards": len(shards),
    }


def _first_bad_line(manifest: Mapping[str, Any]) -> str | None:
    lines = (shard["first_bad_line"] for shard in manifest["shards"])
    return next((line for line in lines if line is not None), None)
