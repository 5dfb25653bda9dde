"""Trains a table on disk and checks bounded memory and disk use.

    python benchmarks/spill_soak.py --spill=/local/disk --minutes=60

The set of hot keys changes every minute, and rows expire after a long time without access. A
checkpoint every few minutes keeps files of rows, and two checkpoints are kept. At the end, the last
checkpoint is restored into a table in memory and compared row by row.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import summary
import tensorflow as tf
from absl import app, flags
from larger_than_memory_case import resident_bytes

import slipstream_tf as slip
from slipstream_tf.distributed import CheckpointManager, SingleProcess
from slipstream_tf.ops.features import FeatureSpec, pack
from slipstream_tf.tables import NativeStore

_SPILL = flags.DEFINE_string(
    "spill", None, "Folder on a local disk for spilled rows.", required=True
)
_MINUTES = flags.DEFINE_float("minutes", 60.0, "Minutes of the run.", lower_bound=0.1)
_MEMORY = flags.DEFINE_string("memory", "100MB", "Memory for rows, such as 100MB.")
_STEP = flags.DEFINE_float("step_seconds", 0.05, "Minimum seconds per step.", lower_bound=0.0)
_CHECKPOINT = flags.DEFINE_float("checkpoint_minutes", 2.0, "Minutes between checkpoints.")
_SAMPLE = flags.DEFINE_float(
    "sample_seconds", 5.0, "Seconds between samples of memory and disk usage."
)
_WARM_UP = flags.DEFINE_float("warm_up_minutes", 15.0, "Minutes before memory is checked.")

_DIM, _BATCH, _FEATURES, _KEYS, _LIFE = 32, 1024, 8, 4_000_000, 4_000
_KEEP = 2
# Limits from the documentation: at most five thirds of the rows and their keys, plus three files,
# each 1/64 of all rows.
MAX_DISK, MAX_SLOPE = 5 / 3 + 3 / 64, 32.0


def table_of(memory: str | None) -> slip.Table:
    """Returns the table with this memory limit, or in memory."""
    storage = slip.Storage()
    if memory is not None:
        storage = slip.Storage(memory=memory, spill=_SPILL.value)
    retention = slip.Retention(expire_after=_LIFE)
    return slip.Table("t", _DIM, storage=storage, retention=retention)


def distinct_bytes(folder: Path) -> int:
    """Returns the bytes of a folder; hard links count once."""
    found = {}
    # Folders can be removed during the iteration.
    for path in (Path(root, name) for root, _, names in os.walk(folder) for name in names):
        try:
            status = path.stat()
        except OSError:
            continue
        found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def main(arguments: Sequence[str]) -> None:
    """Trains and samples; prints and writes the results."""
    if len(arguments) > 1:
        raise app.UsageError(f"Invalid argument {arguments[1]!r}. Expected --flag=value.")
    store = NativeStore([table_of(_MEMORY.value)], slip.optimizers.Adagrad(0.01, 0.1))
    specs = [FeatureSpec(f"f{i}", "t") for i in range(_FEATURES)]
    gradient = tf.random.stateless_normal([_BATCH, _FEATURES, _DIM], [0, 0])

    @tf.function
    def train(now: tf.Tensor, following: tf.Tensor) -> None:
        store.prefetch_rows(pack(following, specs))
        rows, plan = store.lookup(pack(now, specs), training=True, stacked=True)
        with tf.control_dependencies(rows):
            store.apply_gradients(plan, [gradient])

    def draw(step: int) -> tf.Tensor:
        random = np.random.default_rng(step)
        spread = random.random((_BATCH, _FEATURES))
        ranks = np.floor(_KEYS**spread).astype(np.int64)
        return tf.constant((ranks * 2654435761 + step // 1200 * 104729) % _KEYS + step * 20)

    with tempfile.TemporaryDirectory(dir=_SPILL.value) as folder:
        saved = Path(folder, "saved")
        job = CheckpointManager(
            saved, tf.train.Checkpoint(), SingleProcess(), store, max_to_keep=_KEEP
        )
        begin = last_sample = last_saved = time.monotonic()
        end = begin + _MINUTES.value * 60
        samples: list[tuple[float, float, float, float, float, int]] = []
        step, saves, times = 0, 0, []
        batch = draw(0)
        while (now := time.monotonic()) < end:
            following = draw(step + 1)
            train(batch, following)
            batch, step = following, step + 1
            if now - last_saved >= _CHECKPOINT.value * 60:
                start = time.perf_counter()
                job.save(step)
                times.append(time.perf_counter() - start)
                last_saved, saves = now, saves + 1
            if now - last_sample >= _SAMPLE.value:
                spilled = store.spill_statistics("t")
                rows = spilled.rows_on_disk + spilled.rows_in_memory
                samples.append(
                    (
                        (now - begin) / 60,
                        resident_bytes() / 2**20,
                        spilled.disk_bytes / max(1, rows * (8 * _DIM + 8)),
                        (distinct_bytes(saved) if saved.exists() else 0) / 1e9,
                        rows / 1e6,
                        len(os.listdir("/proc/self/fd")),
                    )
                )
                last_sample = now
            time.sleep(max(0.0, _STEP.value - (time.monotonic() - now)))
        job.save(step)
        job.wait()
        back = NativeStore([table_of(None)], slip.optimizers.Adagrad(0.01, 0.1))
        checkpoint = tf.train.Checkpoint()
        CheckpointManager(saved, checkpoint, SingleProcess(), back, max_to_keep=_KEEP).restore()
        ours, theirs = store.export_table("t"), back.export_table("t")
        is_same = all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    found = np.array(samples)
    warm = found[found[:, 0] >= min(_WARM_UP.value, _MINUTES.value / 2)]
    slope = float(np.polyfit(warm[:, 0] / 60, warm[:, 1], 1)[0])
    at = [int(i) for i in np.linspace(0, len(found) - 1, 7)]
    columns = [
        summary.column("minute", found[at, 0].tolist(), "{:.0f}"),
        summary.column("MiB resident", found[at, 1].tolist(), "{:,.0f}"),
        summary.column("million rows", found[at, 4].tolist(), "{:.2f}"),
        summary.column("disk bytes / row bytes", found[at, 2].tolist(), "{:.2f}"),
        summary.column("GB of two checkpoints", found[at, 3].tolist(), "{:.2f}"),
        summary.column("open files", found[at, 5].tolist(), "{:.0f}"),
    ]
    claims = {
        "mib_per_hour": summary.claim([slope], MAX_SLOPE),
        "disk_over_rows": summary.claim([float(warm[:, 2].max())], MAX_DISK),
        "restored_rows_differ": summary.claim([0.0 if is_same else 1.0], 0),
        "steps": summary.claim([step]),
        "rows_expired": summary.claim([store.statistics("t").expired_rows]),
        "checkpoints": summary.claim([saves + 1]),
        "seconds_to_save": summary.claim(times or [0.0]),
    }
    part = f"{_MINUTES.value:g} minutes"
    print(summary.write("spill_soak", part, {"": columns}, claims), flush=True)


if __name__ == "__main__":
    app.run(main)
