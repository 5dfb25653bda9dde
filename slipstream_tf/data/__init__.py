"""Click data: readers, and the preparation of any click log as Parquet shards with statistics.

`preparation.prepare` reads published or logged files and writes a folder, which
`slipstream-train --data` and `readers.prepared.PreparedReader` read.
"""

from slipstream_tf.data.spec import DataSpec

__all__ = ["DataSpec"]
