"""Click data: readers, and the preparation of any click log as Parquet shards with statistics.

`preparation.prepare` reads published or logged files and writes a folder, which
`slipstream-train --data` and `readers.prepared.PreparedReader` read.
"""

from slipstream_tf.data.spec import MISSING_KEY, BadLineError, BadLines, DataSpec, Reader

__all__ = ["MISSING_KEY", "BadLineError", "BadLines", "DataSpec", "Reader"]
