// Deferred gradients as arrays for a checkpoint.
#ifndef SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_CONTENTS_H_
#define SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_CONTENTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc_ops/core/base/status.h"

namespace slipstream {

struct DeferredContents {
  static constexpr int64_t kMaxAge = int64_t{1} << 48;  // Longer than any training.

  std::vector<int64_t> keys;   // [n]
  std::vector<int64_t> ages;   // [n]; steps since the sum began.
  std::vector<int32_t> ranks;  // [n] for tables: the simulated rank of each sum; else empty.
  std::vector<float> sums;     // [n, dim]

  int64_t size() const { return static_cast<int64_t>(keys.size()); }
  // Appends a deferred gradient, except its rank. sum: [dim].
  void Add(int64_t key, int64_t age, const float* sum, int64_t dim) {
    keys.push_back(key);
    ages.push_back(age);
    sums.insert(sums.end(), sum, sum + dim);
  }
};

// Returns InvalidArgument with the first age that is negative or above kMaxAge, or the first sum
// that is not finite. The arrays must have the right lengths. of: the owner, for example " of table
// 't'".
Status CheckDeferred(const DeferredContents& contents, int64_t dim, const std::string& of);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_CONTENTS_H_
