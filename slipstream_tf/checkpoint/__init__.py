"""Checkpoints of a training job: the manager and the file format.

A checkpoint is a folder with a manifest, the files of a `tf.train.Checkpoint`, and one file of
checksummed blocks per rank and table. It contains no pickle, and no content is ever executed.
"""

from slipstream_tf.checkpoint.array_file import CheckpointError, CheckpointMismatchError
from slipstream_tf.checkpoint.manager import CheckpointManager, SavedJob
from slipstream_tf.checkpoint.store_state import tables_by_name

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "CheckpointMismatchError",
    "SavedJob",
    "tables_by_name",
]
