// What kernels on tables share.
#ifndef SLIPSTREAM_CC_OPS_TF_TABLE_ONE_TABLE_OP_H_
#define SLIPSTREAM_CC_OPS_TF_TABLE_ONE_TABLE_OP_H_

#include <mutex>
#include <new>
#include <shared_mutex>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/table/table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {

using SharedLock = std::shared_lock<std::shared_mutex>;
using ExclusiveLock = std::unique_lock<std::shared_mutex>;

// A kernel on one table, the op's first input.
class OneTableOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(tensorflow::OpKernelContext* c) override {
    // TensorFlow reads the first handle of a tensor without a look at how many there are.
    OP_REQUIRES_OK(c, RequireRank(c, 0, "handle", 0));
    tensorflow::core::RefCountPtr<TableResource> resource;
    OP_REQUIRES_OK(c, tensorflow::LookupResource(c, tensorflow::HandleFromInput(c, 0), &resource));
    EmbeddingTable* table = resource->table();
    try {
      OP_REQUIRES_OK(c, Run(c, table));
    } catch (const std::bad_alloc&) {
      const SharedLock lock(table->mutex());
      OP_REQUIRES_OK(c, ToAbsl(OutOfMemory(absl::StrCat("running ", type_string()), {table})));
    }
  }

 protected:
  virtual absl::Status Run(tensorflow::OpKernelContext* c, EmbeddingTable* table) = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_TABLE_ONE_TABLE_OP_H_
