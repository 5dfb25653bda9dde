// How many values a row may have, wherever rows are kept.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_ROW_DIM_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_ROW_DIM_H_

#include <cstdint>
#include <string>

#include "cc_ops/core/base/status.h"

namespace slipstream {

constexpr int64_t kMaxDim = 65536;

// InvalidArgument unless dim is 1 to kMaxDim; `owner` says whose it is, or is empty.
inline Status ValidateDim(int64_t dim, const std::string& owner) {
  if (dim >= 1 && dim <= kMaxDim) return OkStatus();
  return InvalidArgument("dim" + owner + " is " + std::to_string(dim) + "; allowed: 1 to " +
                         std::to_string(kMaxDim));
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_ROW_DIM_H_
