// What every kernel needs: statuses of the core as TensorFlow's, its threads for the core, and
// checked scalars and vectors.
#ifndef SLIPSTREAM_CC_OPS_TF_BASE_KERNEL_VALUES_H_
#define SLIPSTREAM_CC_OPS_TF_BASE_KERNEL_VALUES_H_

#include <algorithm>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {

absl::Status ToAbsl(const Status& status);

// The framework's threads of this device, for the core.
Parallel ParallelOf(tensorflow::OpKernelContext* context);

// InvalidArgument that names the input if its rank is another.
absl::Status RequireRank(tensorflow::OpKernelContext* context, int input, const char* name,
                         int rank);

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

template <class T>
absl::Status OutputScalar(tensorflow::OpKernelContext* c, int index, T value) {
  tensorflow::Tensor* out = nullptr;
  TF_RETURN_IF_ERROR(c->allocate_output(index, tensorflow::TensorShape({}), &out));
  out->scalar<T>()() = value;
  return absl::OkStatus();
}

// The values of a tensor in host memory, row-major.
template <class T>
std::vector<T> ValuesOf(const tensorflow::Tensor& tensor) {
  const T* data = tensor.flat<T>().data();
  return {data, data + tensor.NumElements()};
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_BASE_KERNEL_VALUES_H_
