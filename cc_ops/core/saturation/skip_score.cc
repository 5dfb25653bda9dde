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
  // Keep the largest values, descending, without branches, because drifts are unpredictable.
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

void SkipScores(const DriftIndex& index, double alpha, InputLookups* inputs, float* scores) {
  std::vector<float>& drifts = inputs->drifts;
  drifts.resize(inputs->lookups.size());
  index.Find(inputs->lookups.data(), static_cast<int64_t>(drifts.size()), drifts.data());
  int64_t begin = 0;
  for (const int64_t end : inputs->ends) {
    *scores++ = SkipScore(alpha, drifts.data() + begin, end - begin);
    begin = end;
  }
}

}  // namespace slipstream
