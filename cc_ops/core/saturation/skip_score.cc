#include "cc_ops/core/saturation/skip_score.h"

#include <algorithm>
#include <limits>

namespace slipstream {

float SkipScore(double alpha, float* drifts, int64_t m) {
  if (m == 0) return DriftIndex::kUntracked;
  constexpr int64_t kFew = 8;
  const int64_t required = RequiredLookups(alpha, m), may_move = m - required;
  if (may_move >= kFew) {
    std::nth_element(drifts, drifts + (required - 1), drifts + m);
    return drifts[required - 1];
  }
  // The largest ones, descending: no branch on a drift, which nobody can predict.
  float largest[kFew];
  std::fill_n(largest, kFew, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < m; ++i) {
    float next = drifts[i];
    for (int64_t j = 0; j <= may_move; ++j) {
      const float smaller = std::min(largest[j], next);
      largest[j] = std::max(largest[j], next);
      next = smaller;
    }
  }
  return largest[may_move];
}

float SkipScore(const DriftIndex& index, double alpha, const Lookup* lookups, int64_t m,
                std::vector<float>* scratch) {
  scratch->resize(static_cast<size_t>(m));
  index.Find(lookups, m, scratch->data());
  return SkipScore(alpha, scratch->data(), m);
}

}  // namespace slipstream
