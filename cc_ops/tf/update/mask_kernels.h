// Shared checks of the CPU and GPU kernels that mask gradients.
#ifndef SLIPSTREAM_CC_OPS_TF_UPDATE_MASK_KERNELS_H_
#define SLIPSTREAM_CC_OPS_TF_UPDATE_MASK_KERNELS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/tf/containers/key_table_kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace slipstream {

// Checks the shapes of inputs 1 and 2 of SlipstreamMaskGradients.
inline absl::Status CheckGradients(const tensorflow::Tensor& keys,
                                   const tensorflow::Tensor& gradients) {
  if (keys.dims() != 1 || gradients.dims() < 1 || gradients.dim_size(0) != keys.dim_size(0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("keys and gradients have shapes ", keys.shape().DebugString(), " and ",
                     gradients.shape().DebugString(), "; expected [n] and [n, ...]"));
  }
  return absl::OkStatus();
}

// Returns the number of values per row; 1 for gradients of rank 1.
inline int64_t RowSize(const tensorflow::Tensor& gradients) {
  int64_t size = 1;
  for (int d = 1; d < gradients.dims(); ++d) size *= gradients.dim_size(d);
  return size;
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_UPDATE_MASK_KERNELS_H_
