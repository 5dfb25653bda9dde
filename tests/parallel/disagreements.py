"""Prints the errors of ranks with different settings or rows, for test_programs.py.

Arguments: "tables", "settings" or "rows", and the placement of the tables (empty for the default).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import tensorflow as tf

import slipstream_tf as slip
from slipstream_tf.distributed import Communicator
from slipstream_tf.ops.features import pack

KEYS = np.arange(8)


def make_embeddings(comm: Communicator, placement: str, dim: int) -> Any:
    return slip.keras.EmbeddingCollection(
        [slip.Table("user", dim=4), slip.Table("item", dim=dim)],
        slip.optimizers.SGD(0.1),
        comm=comm,
        **({"placement": placement} if placement else {}),
    )


def differ_in_tables(comm: Communicator, placement: str) -> None:
    make_embeddings(comm, placement, dim=5 if comm.rank == 1 else 4)


def differ_in_settings(comm: Communicator, placement: str) -> None:
    embeddings = make_embeddings(comm, placement, dim=4)
    slip.Slipstream(embeddings, window=slip.Window(20 if comm.rank == 1 else 10))


def differ_in_rows(comm: Communicator, placement: str) -> None:
    """Changes a row on rank 1 in the third window."""
    embeddings = make_embeddings(comm, placement, dim=4)
    slipstream = slip.Slipstream(
        embeddings,
        slip.SkipExamples(slip.RowDrift()),
        window=slip.Window(2, warmup=0),
        saturation=slip.Saturation(threshold=0.5),
    )
    store, specs = embeddings.store, embeddings.specs
    for step in range(8):
        keys = {"item": tf.constant(KEYS), "user": tf.constant(KEYS)}
        pooled, plan = store.lookup(pack(keys, specs), training=True)
        store.apply_gradients(plan, [tf.ones_like(rows) * 0.01 for rows in pooled])
        if step == 4 and comm.rank == 1:
            contents = store.export_table("item")
            contents["rows"][3] += 10.0
            store.import_table("item", contents)
        slipstream.step()


def main() -> None:
    """Prints the error that this rank raises."""
    what, placement = sys.argv[1:3]
    comm = slip.distributed.init()
    differ = {"tables": differ_in_tables, "settings": differ_in_settings, "rows": differ_in_rows}
    try:
        differ[what](comm, placement)
    except (ValueError, RuntimeError) as error:
        print(f"rank {comm.rank}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
