// The input `wire_dtype`: the data type of rows in messages.
#ifndef SLIPSTREAM_CC_OPS_TF_EXCHANGE_ROW_DTYPE_H_
#define SLIPSTREAM_CC_OPS_TF_EXCHANGE_ROW_DTYPE_H_

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/base/row_codec.h"
#include "cc_ops/core/exchange/steady_lengths.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {

#define SLIPSTREAM_WIRE_DTYPE_DOC                                                     \
  "wire_dtype: Scalar. Data type of the values: 0 float32, 1 bfloat16, 2 float16, 3 " \
  "int8 with one scale per row.\n"

// Chooses message lengths separately for each data type, because messages of different types differ
// in length.
using LengthsByDtype = std::array<SteadyLengths, kRowDtypes>;

// Reads the input wire_dtype, which is input `index`. Returns InvalidArgument for an unknown
// number.
inline absl::Status ReadRowDtype(tensorflow::OpKernelContext* c, int index, RowDtype* dtype) {
  int32_t number = 0;
  TF_RETURN_IF_ERROR(ReadScalar(c, index, "wire_dtype", &number));
  if (number < 0 || number >= kRowDtypes) {
    return absl::InvalidArgumentError(
        absl::StrCat("wire_dtype is ", number, "; expected an integer from 0 to ", kRowDtypes - 1));
  }
  *dtype = static_cast<RowDtype>(number);
  return absl::OkStatus();
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_EXCHANGE_ROW_DTYPE_H_
