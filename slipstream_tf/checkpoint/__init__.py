"""Checkpoints of a job: the manager that saves and restores them, and their file format.

A checkpoint is a folder with a manifest and, for each rank and table, a file of checked blocks.
It contains no pickle, and nothing in it is ever executed.
"""

from slipstream_tf.checkpoint.array_file import CheckpointError, CheckpointMismatchError
from slipstream_tf.checkpoint.manager import JobCheckpoints, SavedJob
from slipstream_tf.checkpoint.store_state import tables_by_name

__all__ = [
    "CheckpointError",
    "CheckpointMismatchError",
    "JobCheckpoints",
    "SavedJob",
    "tables_by_name",
]
