// The embedding table as a TensorFlow resource, and shared parts of its kernels.
#ifndef SLIPSTREAM_CC_OPS_TF_TABLE_TABLE_RESOURCE_H_
#define SLIPSTREAM_CC_OPS_TF_TABLE_TABLE_RESOURCE_H_

#include <atomic>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/table/embedding_table.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/resource_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace slipstream {

using SharedLock = std::shared_lock<std::shared_mutex>;
using ExclusiveLock = std::unique_lock<std::shared_mutex>;

class TableResource : public tensorflow::ResourceBase {
 public:
  explicit TableResource(const TableOptions& options) : table_(options) {}

  EmbeddingTable* table() { return &table_; }

  // Frees the memory of the rows. The table cannot be used afterwards. Waits for kernels that hold
  // the mutex of the table.
  void Release();
  // Returns FailedPrecondition after Release.
  absl::Status CheckNotReleased() const;

  std::string DebugString() const override {
    return absl::StrCat("EmbeddingTable '", table_.options().name, "', dim ", table_.dim());
  }

 private:
  EmbeddingTable table_;
  std::atomic<bool> is_released_{false};
};

using TableResources = std::vector<tensorflow::core::RefCountPtr<TableResource>>;

// Returns the tables of the inputs "handles", which must be distinct. `resources` keeps them alive.
absl::Status ReadTables(tensorflow::OpKernelContext* context, TableResources* resources,
                        std::vector<EmbeddingTable*>* tables);

// Returns the data type in an attribute. The registration allows no other name.
absl::Status ReadRowDtype(tensorflow::OpKernelConstruction* context, const char* attribute,
                          RowDtype* dtype);

// Turns a function on the table of input 0 into a function for ResourceKernel. If memory runs out,
// the error names the table.
template <absl::Status (*kRun)(tensorflow::OpKernelContext*, EmbeddingTable*)>
absl::Status OnTable(tensorflow::OpKernelContext* context, TableResource* resource) try {
  TF_RETURN_IF_ERROR(resource->CheckNotReleased());
  return kRun(context, resource->table());
} catch (const std::bad_alloc&) {
  const SharedLock lock(resource->table()->mutex());
  return ToAbsl(OutOfMemory("running " + context->op_kernel().type_string(), {resource->table()}));
}

// CheckInputs with the name of the table in the error. The letter d is the dim of the table.
inline absl::Status CheckInputs(tensorflow::OpKernelContext* context, int first, const char* text,
                                const EmbeddingTable& table) {
  return CheckInputs(context, first, text, {{'d', table.dim()}, {'s', table.slots_per_row()}},
                     &table.options().name);
}

}  // namespace slipstream

// Registers a CPU kernel of the op "SlipstreamTable" name. kRun: a function as for OnTable.
#define SLIPSTREAM_TABLE_KERNEL(name, kRun) \
  SLIPSTREAM_CPU_KERNEL("SlipstreamTable" name, ResourceKernel<OnTable<kRun>>)

#endif  // SLIPSTREAM_CC_OPS_TF_TABLE_TABLE_RESOURCE_H_
