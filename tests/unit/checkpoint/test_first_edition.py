"""What the first edition wrote is read: a checkpoint with deferred gradients, and a SavedModel.

data/edition_1.tar.gz was written by commit 2e6f060: ten steps of `thread_jobs.Job` in one process,
and a layer with two tables. `expected.npz` beside them has what that commit read from both.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from thread_jobs import TABLES, Job

from slipstream_tf.distributed import SingleProcess

ARCHIVE = Path(__file__).parent / "data" / "edition_1.tar.gz"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Gives the folder of all that was written."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    return tmp_path / "edition_1"


def test_a_checkpoint_of_the_first_edition_is_restored(written: Path) -> None:
    job = Job(SingleProcess(), "native", written / "checkpoints")
    restored = job.checkpoints.restore()
    assert restored is not None and restored.step == 10
    found = job.found()
    with np.load(written / "expected.npz") as expected:
        deferred = 0
        for table in TABLES:
            for part in ("keys", "rows", "slots", "counts", "steps"):
                was = expected[f"{table.name}.{part}"]
                np.testing.assert_array_equal(found[table.name][part], was)
            for part in ("keys", "ages", "sums"):
                was = expected[f"{table.name}.deferred_{part}"]
                np.testing.assert_array_equal(found[f"{table.name} held"][part], was)
                deferred += len(was)
        assert deferred > 0
        assert np.float32(found["threshold"]) == expected["threshold"]
    job.train(10, 14)


def test_a_saved_model_of_the_first_edition_is_served(written: Path) -> None:
    model = tf.saved_model.load(str(written / "saved_model"))
    inputs = {"a": tf.range(20, dtype=tf.int64), "b": 3 * tf.range(20, dtype=tf.int64)}
    outputs = keras.tree.flatten(model.serve(inputs))
    with np.load(written / "expected.npz") as expected:
        assert len(outputs) == 2
        for place, output in enumerate(outputs):
            np.testing.assert_allclose(output, expected[f"output.{place}"], rtol=1e-6, atol=1e-6)
