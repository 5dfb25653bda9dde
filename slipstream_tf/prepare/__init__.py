"""Click data of any form to Parquet shards and their statistics; see `preparation.prepare`.

In: files as they were published or logged. Out: a folder that `slipstream-train --data` and
`inputs.readers.prepared.PreparedReader` read.
"""
