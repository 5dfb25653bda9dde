"""Readers of click data, and tools to prepare click logs.

`preparation.prepare` converts published or logged files to a folder of Parquet shards with
statistics. Read it with `slipstream-train --data` or `readers.prepared.PreparedReader`.
"""

from slipstream_tf.data.spec import DataSpec, DenseScale

__all__ = ["DataSpec", "DenseScale"]
