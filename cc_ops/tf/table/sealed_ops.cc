// Registrations of the ops that checkpoint tables with rows on disk.
#include "cc_ops/tf/base/shapes.h"
#include "tensorflow/core/framework/op.h"

namespace slipstream {

REGISTER_OP("SlipstreamTableSeal")
    .Input("handle: resource")
    .Output("files: variant")
    .Output("names: string")
    .Output("file_of: int32")
    .Output("offsets: int64")
    .Output("pages: int64")
    .Output("counts: float")
    .Output("steps: int64")
    .Output("block: int64")
    .Output("last_used: int64")
    .SetIsStateful()
    .SetShapeFn(Shapes("[] -> [], [f], [b], [b], [b], [r], [2], [2], [u]"))
    .Doc(R"doc(
Writes all changed rows of a table to disk and returns their positions.

Rows that are on disk and unchanged are not written again.

handle: Scalar. A table whose rows spill to disk.
files: Scalar. Keeps the files in their present state for SlipstreamSaveSealedFile.
names: [f]. A unique name for each file.
file_of: [b]. Index of the file of each block of rows.
offsets: [b]. Position of each block in its file, in bytes.
pages: [b]. Number of the block's first page. The page repeats this number.
counts: [b * rows of a block]. Decayed access counts. -1: the row is in another block or removed.
steps: [2]. Number of updates and of lookups so far.
block: [2]. Pages of a block, rows of a block.
last_used: [b * rows of a block] as in SlipstreamTableExport, or [0].
)doc");

REGISTER_OP("SlipstreamSaveSealedFile")
    .Input("files: variant")
    .Input("index: int64")
    .Input("path: string")
    .Attr("copies: bool = false")
    .Output("is_saved: bool")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [], [] -> []"))
    .Doc(R"doc(
Gives a sealed file a path, and waits until the file is on disk.

files: Scalar, from SlipstreamTableSeal.
index: Scalar. Index of the file.
path: Scalar. No file may exist there.
copies: Whether the file is copied. Otherwise the op asks the file system for a hard link, which it
  may refuse.
is_saved: Scalar. Whether the file has the path.
)doc");

REGISTER_OP("SlipstreamReadSealedRows")
    .Input("path: string")
    .Input("offsets: int64")
    .Input("pages: int64")
    .Attr("pages_of_block: int >= 1")
    .Attr("dim: int >= 1")
    .Attr("slots: int >= 0")
    .Attr("dtype: {'float32', 'bfloat16', 'float16'} = 'float32'")
    .Attr("slot_dtype: {'float32', 'bfloat16'} = 'float32'")
    .Output("keys: int64")
    .Output("rows: float")
    .Output("row_slots: float")
    .SetIsStateful()
    .SetShapeFn(Shapes("[], [b], [b] -> [n], [n, dim], [n, slots]"))
    .Doc(R"doc(
Reads blocks of a file that SlipstreamSaveSealedFile saved.

path: Scalar.
offsets: [b]. As returned by SlipstreamTableSeal.
pages: [b]. As returned by SlipstreamTableSeal.
pages_of_block: Pages per block.
dim: Values per row.
slots: Optimizer values per row.
dtype: Data type of the rows.
slot_dtype: Data type of the slots.
keys: [n]. Keys of all rows of the blocks, including rows with a count of -1.
rows: [n, dim].
row_slots: [n, slots].
)doc");

}  // namespace slipstream
