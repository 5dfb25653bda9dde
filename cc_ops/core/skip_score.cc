#include "cc_ops/core/skip_score.h"

#include <algorithm>

namespace slipstream {

float SkipScore(const DriftIndex& index, double alpha, const Lookup* lookups, int64_t m,
                std::vector<float>* scratch) {
  if (m == 0 || index.size() == 0) return DriftIndex::kUntracked;
  const int64_t required = RequiredLookups(alpha, m);
  if (required == m) {  // the paper's rule: the largest drift, known at the first untracked key
    float largest = 0.0f;
    for (int64_t i = 0; i < m; ++i) {
      largest = std::max(largest, index.Find(lookups[i]));
      if (largest == DriftIndex::kUntracked) break;
    }
    return largest;
  }
  scratch->clear();
  for (int64_t i = 0; i < m; ++i) {
    const float drift = index.Find(lookups[i]);
    if (drift != DriftIndex::kUntracked) scratch->push_back(drift);
    const int64_t still_possible = static_cast<int64_t>(scratch->size()) + (m - 1 - i);
    if (still_possible < required) return DriftIndex::kUntracked;
  }
  const auto nth = scratch->begin() + (required - 1);
  std::nth_element(scratch->begin(), nth, scratch->end());
  return *nth;
}

}  // namespace slipstream
