// What kernels on tables share.
#ifndef SLIPSTREAM_CC_OPS_TF_ONE_TABLE_OP_H_
#define SLIPSTREAM_CC_OPS_TF_ONE_TABLE_OP_H_

#include <algorithm>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/out_of_memory.h"
#include "cc_ops/tf/feature_inputs.h"
#include "cc_ops/tf/table_resource.h"
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

  static absl::Status RequireRank(const tensorflow::OpKernelContext* c, int input, const char* name,
                                  int rank) {
    const tensorflow::TensorShape& shape =
        const_cast<tensorflow::OpKernelContext*>(c)->input(input).shape();
    if (shape.dims() == rank) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has shape ", shape.DebugString(), "; allowed: rank ", rank));
  }
};

template <class T>
absl::Status ReadScalar(tensorflow::OpKernelContext* c, int input, const char* name, T* value) {
  const tensorflow::Tensor& tensor = c->input(input);
  if (tensor.dims() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has shape ", tensor.shape().DebugString(), "; allowed: a scalar"));
  }
  *value = tensor.scalar<T>()();
  return absl::OkStatus();
}

// Copies a vector of the core to output `index`.
template <class T>
absl::Status Output(tensorflow::OpKernelContext* c, int index, const tensorflow::TensorShape& shape,
                    const std::vector<T>& values) {
  tensorflow::Tensor* out = nullptr;
  TF_RETURN_IF_ERROR(c->allocate_output(index, shape, &out));
  std::copy(values.begin(), values.end(), out->flat<T>().data());
  return absl::OkStatus();
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_ONE_TABLE_OP_H_
