// Limits for the dimension of rows.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_ROW_DIM_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_ROW_DIM_H_

#include <cstdint>
#include <string>

#include "cc_ops/core/base/status.h"

namespace slipstream {

constexpr int64_t kMaxDim = 65536;

// Returns InvalidArgument unless dim is in [1, kMaxDim]. `owner` is appended to "dim" in the
// message and may be empty.
inline Status ValidateDim(int64_t dim, const std::string& owner) {
  if (dim >= 1 && dim <= kMaxDim) return OkStatus();
  return InvalidArgument("dim" + owner + " is " + std::to_string(dim) +
                         "; expected an integer from 1 to " + std::to_string(kMaxDim));
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_ROW_DIM_H_
