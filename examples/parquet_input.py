"""Trains from Parquet files of any size with pyarrow.

Run: python examples/parquet_input.py [FOLDER]

FOLDER contains Parquet files with the columns user, item, price and click. Without it, the example
writes small files first. It trains on all files except the last. It prints the estimated savings of
two policies and the AUC on the last file.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Iterator

import keras
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import tensorflow as tf

import slipstream_tf as slip

BATCH_SIZE = 256
KEYS, NUMBERS, LABEL = ["user", "item"], ["price"], "click"


def write_shards(folder: pathlib.Path, shards: int = 4, rows: int = 20_000) -> None:
    """Writes generated clicks.

    The distribution of keys is skewed, and each key changes the click probability.
    """
    for shard in range(shards):
        generator = np.random.default_rng(shard)
        users, items = (generator.zipf(1.3, rows) % size for size in (5_000, 2_000))
        price = generator.lognormal(size=rows).astype(np.float32)
        logit = 2 * np.sin(users) + 2 * np.sin(items) - 0.5 * np.log(price) - 0.5
        clicks = generator.random(rows) < 1 / (1 + np.exp(-logit))
        columns = {"user": users, "item": items, "price": price, "click": clicks.astype(np.int8)}
        pyarrow.parquet.write_table(pa.table(columns), folder / f"clicks-{shard:03d}.parquet")


def open_shards(paths: list[pathlib.Path], batch_size: int) -> tf.data.Dataset:
    """Returns a dataset that streams Parquet files.

    Only a few record batches of the required columns are in memory at a time.

    Args:
        paths: Paths of the files.
        batch_size: Number of examples per batch.

    Returns:
        Batches of ({"keys": int64 [n, 2], "dense": float32 [n, 1]}, label float32 [n, 1]).
    """
    data = pyarrow.dataset.dataset([str(path) for path in paths])

    def read() -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
        for batch in data.to_batches(columns=[*KEYS, *NUMBERS, LABEL], batch_size=8192):
            column = {name: batch[name].to_numpy() for name in batch.schema.names}
            keys = np.stack([column[name] for name in KEYS], axis=1).astype(np.int64)
            # Prices span orders of magnitude, so use their logarithms.
            dense = np.log1p(np.stack([column[name] for name in NUMBERS], axis=1))
            yield {"keys": keys, "dense": dense.astype(np.float32)}, column[LABEL][:, None]

    signature = (
        {
            "keys": tf.TensorSpec([None, len(KEYS)], tf.int64),
            "dense": tf.TensorSpec([None, len(NUMBERS)], tf.float32),
        },
        tf.TensorSpec([None, 1], tf.float32),
    )
    dataset = tf.data.Dataset.from_generator(read, output_signature=signature)
    steps = -(-data.count_rows() // batch_size)
    # A generator has no known cardinality. The engine needs it, because the default warm-up is a
    # fraction of the planned steps.
    known = tf.data.experimental.assert_cardinality(steps)
    return dataset.rebatch(batch_size).apply(known).prefetch(2)


def main() -> None:
    """Trains on all files except the last; tests on the last."""
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else made)
        if len(sys.argv) == 1:
            write_shards(folder)
        *paths, last = sorted(folder.glob("*.parquet"))
        keras.utils.set_random_seed(0)
        embeddings = slip.keras.EmbeddingCollection(
            [slip.Table(name, dim=16) for name in KEYS],
            optimizer="adagrad",
        )
        model = slip.models.DLRM(embeddings, len(NUMBERS), bottom=[32, 16], top=[32, 1])
        policies = [slip.DeferGradients(), slip.SkipExamples(slip.PredictedLoss())]
        slipstream = slip.Slipstream(embeddings, policies, dry_run=True)
        model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["AUC"])
        train = slipstream.apply(open_shards(paths, BATCH_SIZE), batch_size=BATCH_SIZE)
        model.fit(train, shuffle=False, callbacks=[slipstream.callback()], verbose=0)
        print(slipstream.report())
        _, auc = model.evaluate(open_shards([last], 4096), verbose=0)
        print(f"test AUC {auc:.4f} on {last.name}")


if __name__ == "__main__":
    main()
