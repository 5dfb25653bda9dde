"""What a checkpoint is made of: a manifest, and a file of checked blocks per rank and table.

`distributed.JobCheckpoints` writes and restores them. Nothing here needs TensorFlow but
`store_state` and `store_parts`, and nothing in a checkpoint is ever executed: there is no pickle
in it.
"""

from slipstream_tf.checkpoint.by_name import tables_by_name
from slipstream_tf.checkpoint.errors import CheckpointError, CheckpointMismatchError
from slipstream_tf.checkpoint.manifest import Manifest, read_manifest

__all__ = [
    "CheckpointError",
    "CheckpointMismatchError",
    "Manifest",
    "read_manifest",
    "tables_by_name",
]
