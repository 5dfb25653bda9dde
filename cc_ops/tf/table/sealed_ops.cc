// Registrations of the ops that checkpoint tables whose rows spill to the disk.
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
Writes all rows of a table to the disk, but for those that are there as they are, and tells where.

handle: scalar, of a table whose rows spill.
files: scalar, keeps the files as they are; see SlipstreamSaveSealedFile.
names: [f], of each file, that no other has.
file_of: [b], of each block of rows, the index of its file.
offsets: [b], where it begins there, bytes.
pages: [b], the number of its first page, which the page repeats.
counts: [b * rows of a block], decayed access counts; -1: the row is in another block, or gone.
steps: [2]: updates, lookups so far.
block: [2]: pages of a block, rows of a block.
last_used: [b * rows of a block], as of SlipstreamTableExport; else [0].
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
Gives a sealed file a path, and waits until it is on the disk.

files: scalar.
index: scalar, of the file.
path: scalar; nothing is there.
copies: whether it is read and written; else the file system is asked to give the file one name
  more, and may refuse.
is_saved: scalar, whether it did.
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

path: scalar.
offsets: [b].
pages: [b].
pages_of_block: pages of a block.
dim: values of a row.
slots: of the optimizer, values of a row.
dtype: of the rows.
slot_dtype: of the slots.
keys: [n], of all rows of the blocks, whether they count or not.
rows: [n, dim].
row_slots: [n, slots].
)doc");

}  // namespace slipstream
