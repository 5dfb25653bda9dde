// Utilities for all kernels: statuses of the core as TensorFlow statuses, threads for the core, and
// checked inputs.
#ifndef SLIPSTREAM_CC_OPS_TF_BASE_KERNEL_VALUES_H_
#define SLIPSTREAM_CC_OPS_TF_BASE_KERNEL_VALUES_H_

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {

// Returns a status of the core as a TensorFlow status with the same code and message.
absl::Status ToAbsl(const Status& status);

// Returns the framework's threads of this device, for functions of the core.
Parallel ParallelOf(tensorflow::OpKernelContext* context);

// The size that a letter represents in the shapes of CheckInputs, for example {'d', 16}.
struct KnownSize {
  char name;
  int64_t size;
};

// Returns InvalidArgument, with the name of the input, unless the inputs from `first` on have the
// shapes in `text`, for example "keys: [n], sums: [n, d], steps: [2]". A letter is the same size
// everywhere, and ? is any size. known: sizes of letters that the caller knows. table: the name of
// the table for the error, or null.
absl::Status CheckInputs(tensorflow::OpKernelContext* context, int first, const char* text,
                         std::initializer_list<KnownSize> known = {},
                         const std::string* table = nullptr);

// Reads an input that must be a scalar. Returns InvalidArgument, with `name`, if it is not.
template <class T>
absl::Status ReadScalar(tensorflow::OpKernelContext* c, int input, const char* name, T* value) {
  const tensorflow::Tensor& tensor = c->input(input);
  if (tensor.dims() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " has shape ", tensor.shape().DebugString(), "; expected a scalar"));
  }
  *value = tensor.scalar<T>()();
  return absl::OkStatus();
}

// Reads an attribute in each call. Use it only in ops that do not run in every step, because it
// takes longer than reading the attribute in the constructor.
template <class T>
absl::Status ReadAttribute(tensorflow::OpKernelContext* c, const char* name, T* value) {
  return tensorflow::GetNodeAttr(c->op_kernel().def(), name, value);
}

// Allocates output `index` and returns its memory, row-major.
template <class T>
absl::Status Allocate(tensorflow::OpKernelContext* c, int index,
                      const tensorflow::TensorShape& shape, T** values) {
  tensorflow::Tensor* out = nullptr;
  TF_RETURN_IF_ERROR(c->allocate_output(index, shape, &out));
  *values = out->flat<T>().data();
  return absl::OkStatus();
}

// Copies a vector of the core to output `index`.
template <class T>
absl::Status Output(tensorflow::OpKernelContext* c, int index, const tensorflow::TensorShape& shape,
                    const std::vector<T>& values) {
  T* out = nullptr;
  TF_RETURN_IF_ERROR(Allocate(c, index, shape, &out));
  std::copy(values.begin(), values.end(), out);
  return absl::OkStatus();
}

// Outputs a vector as a tensor of rank 1.
template <class T>
absl::Status Output(tensorflow::OpKernelContext* c, int index, const std::vector<T>& values) {
  return Output(c, index, tensorflow::TensorShape({static_cast<int64_t>(values.size())}), values);
}

// Outputs a value as a scalar.
template <class T>
absl::Status OutputScalar(tensorflow::OpKernelContext* c, int index, T value) {
  T* out = nullptr;
  TF_RETURN_IF_ERROR(Allocate(c, index, {}, &out));
  *out = value;
  return absl::OkStatus();
}

// Returns the values of an input in host memory, row-major.
template <class T>
const T* Data(tensorflow::OpKernelContext* c, int input) {
  return c->input(input).flat<T>().data();
}
template <class T>
std::vector<T> ValuesOf(tensorflow::OpKernelContext* c, int input) {
  const T* data = Data<T>(c, input);
  return {data, data + c->input(input).NumElements()};
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_BASE_KERNEL_VALUES_H_
