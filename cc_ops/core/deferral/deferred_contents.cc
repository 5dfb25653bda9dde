#include "cc_ops/core/deferral/deferred_contents.h"

#include <algorithm>
#include <cmath>

namespace slipstream {

Status CheckDeferred(const DeferredContents& contents, int64_t dim, const std::string& of) {
  const auto position = [&](int64_t i) {
    return "[" + std::to_string(i) + "]" + of + " for key " + std::to_string(contents.keys[i]);
  };
  for (int64_t i = 0; i < contents.size(); ++i) {
    if (contents.ages[i] < 0 || contents.ages[i] > contents.kMaxAge) {
      return InvalidArgument("ages" + position(i) + " is " + std::to_string(contents.ages[i]) +
                             "; expected an integer from 0 to " + std::to_string(contents.kMaxAge) +
                             ". No deferred gradient was replaced");
    }
    const float* sum = contents.sums.data() + i * dim;
    const float* bad = std::find_if(sum, sum + dim, [](float v) { return !std::isfinite(v); });
    if (bad != sum + dim) {
      return InvalidArgument("sums" + position(i) + " contains " + std::to_string(*bad) +
                             "; expected finite values. No deferred gradient was replaced");
    }
  }
  return OkStatus();
}

}  // namespace slipstream
