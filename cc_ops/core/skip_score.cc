#include "cc_ops/core/skip_score.h"

#include <algorithm>
#include <cmath>

namespace slipstream {
namespace {

// Relative; far above the 2^-52 of one product and one rounded alpha, far below any step
// between two shares that somebody would write down.
constexpr double kRoundingError = 1e-12;

}  // namespace

int64_t RequiredLookups(double alpha, int64_t m) {
  const double product = alpha * static_cast<double>(m);
  const double nearest = std::nearbyint(product);
  const bool is_integer = std::abs(product - nearest) <= kRoundingError * product;
  const int64_t required = static_cast<int64_t>(is_integer ? nearest : std::ceil(product));
  return std::clamp<int64_t>(required, 1, m);
}

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
