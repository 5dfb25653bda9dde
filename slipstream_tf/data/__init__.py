"""Readers of click data, and tools to prepare click logs.

The preparation writes Parquet shards and statistics.

`preparation.prepare` converts published or logged files to a folder of prepared data. Read it with
`slipstream-train --data` or `readers.prepared.PreparedReader`.
"""

from slipstream_tf.data.spec import DataSpec

__all__ = ["DataSpec"]
