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
Writes all changed rows of a table to disk and returns the positions of all rows.

The files consist of blocks, a block of pages, and a page of rows. Rows that are on disk and
unchanged are not written again.

handle: Scalar. A table whose rows spill to disk.
files: Scalar. Keeps the files in their current state for SlipstreamSaveSealedFile.
names: [f]. A unique name for each file.
file_of: [b]. Index of the file of each block, in `names`.
offsets: [b]. Position of each block in its file, in bytes.
pages: [b]. Number of the block's first page. The page contains the same number, so that
  SlipstreamReadSealedRows detects misplaced pages.
counts: [b * rows of a block]. Decayed access count of each row of each block. -1: the place is
  unused, or contains an old version of a row that is now elsewhere or removed.
steps: [2]. Number of updates and of lookups so far.
block: [2]. Pages of a block, rows of a block.
last_used: [b * rows of a block]. Last access of each row, as in SlipstreamTableExport, or [0].
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
Saves a sealed file at a path, and waits until it is on disk.

files: Scalar, from SlipstreamTableSeal.
index: Scalar. Index of the file in `names` of SlipstreamTableSeal.
path: Scalar. No file may exist there.
copies: Whether the file is copied. Otherwise the op creates a hard link, which not every file
  system supports.
is_saved: Scalar. False if the link could not be created, for example because the file system does
  not support it. Then run the op with `copies`.
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

path: Scalar. Path of the file.
offsets: [b]. Positions of the blocks in the file, as returned by SlipstreamTableSeal.
pages: [b]. Number of the first page of each block, as returned by SlipstreamTableSeal.
pages_of_block: Pages per block.
dim: Values per row.
slots: Optimizer values per row.
dtype: Data type of the rows in the file.
slot_dtype: Data type of the slots in the file.
keys: [n], n = b * rows of a block. Keys of all rows of the blocks, in the order of `counts` of
  SlipstreamTableSeal. Ignore the keys, rows and slots where the count is -1.
rows: [n, dim].
row_slots: [n, slots]. Values of the optimizer.
)doc");

}  // namespace slipstream
