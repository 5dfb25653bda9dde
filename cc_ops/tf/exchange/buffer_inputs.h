// Reads send buffers from op inputs.
#ifndef SLIPSTREAM_CC_OPS_TF_EXCHANGE_BUFFER_INPUTS_H_
#define SLIPSTREAM_CC_OPS_TF_EXCHANGE_BUFFER_INPUTS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "cc_ops/core/exchange/send_buffer.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/table/table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {

// Reads the inputs sizes, keys and, with `has_values`, values, starting at input `first`. of_rank:
// number of sizes per rank, which is the number of tables.
inline absl::Status ReadBuffer(tensorflow::OpKernelContext* c, int first, int64_t of_rank,
                               bool has_values, SendBufferView* view) {
  TF_RETURN_IF_ERROR(CheckInputs(c, first, "sizes: [?, r], keys: [?]", {{'r', of_rank}}));
  const tensorflow::TensorShape& sizes = c->input(first).shape();
  view->ranks = static_cast<int>(sizes.dim_size(0));
  view->sizes = Data<int64_t>(c, first);
  view->keys = Data<int64_t>(c, first + 1);
  view->num_keys = c->input(first + 1).NumElements();
  if (has_values) {
    TF_RETURN_IF_ERROR(CheckInputs(c, first + 2, "values: [?]"));
    view->values = Data<float>(c, first + 2);
    view->num_values = c->input(first + 2).NumElements();
  }
  return absl::OkStatus();
}

// The inputs "handles", and the buffer for these tables in the inputs after them.
struct TablesAndBuffer {
  absl::Status Read(tensorflow::OpKernelContext* c, bool has_values) {
    TF_RETURN_IF_ERROR(ReadTables(c, &resources, &tables));
    const auto num_tables = static_cast<int>(tables.size());
    return ReadBuffer(c, num_tables, num_tables, has_values, &buffer);
  }

  TableResources resources;
  std::vector<EmbeddingTable*> tables;
  SendBufferView buffer;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_EXCHANGE_BUFFER_INPUTS_H_
