"""A checkpoint of the first edition is refused; a SavedModel of it needs TensorFlow alone.

data/edition_1.tar.gz was written by commit 2e6f060: ten steps of `thread_jobs.Job` in one process,
and a layer with two tables. `expected.npz` has the outputs of that commit.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from thread_jobs import Job

from slipstream_tf.checkpoint import CheckpointMismatchError
from slipstream_tf.distributed import SingleProcess

ARCHIVE = Path(__file__).parent / "data" / "edition_1.tar.gz"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Gives the folder of all that was written."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    return tmp_path / "edition_1"


def test_a_checkpoint_of_the_first_edition_is_refused(written: Path) -> None:
    job = Job(SingleProcess(), "native", written / "checkpoints")
    with pytest.raises(CheckpointMismatchError, match=r"this version reads 4\. Restore it"):
        job.checkpoints.restore()


def test_a_saved_model_of_the_first_edition_is_served(written: Path) -> None:
    model = tf.saved_model.load(str(written / "saved_model"))
    inputs = {"a": tf.range(20, dtype=tf.int64), "b": 3 * tf.range(20, dtype=tf.int64)}
    outputs = keras.tree.flatten(model.serve(inputs))
    with np.load(written / "expected.npz") as expected:
        assert len(outputs) == 2
        for place, output in enumerate(outputs):
            np.testing.assert_allclose(output, expected[f"output.{place}"], rtol=1e-6, atol=1e-6)
