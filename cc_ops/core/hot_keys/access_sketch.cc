#include "cc_ops/core/hot_keys/access_sketch.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace slipstream {

void AddAccesses(const AccessSketch& sketch, const int64_t* keys, const uint32_t* accesses,
                 int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t added = accesses == nullptr ? 1 : accesses[i];
    for (int row = 0; row < AccessSketch::kRows; ++row) *sketch.Counter(row, keys[i]) += added;
  }
}

void DecayAccesses(const AccessSketch& sketch, uint64_t factor) {
  for (int64_t c = 0; c < sketch.NumCounters(); ++c) {
    sketch.counters[c] = Decayed(sketch.counters[c], factor);
  }
}

void EstimateAccesses(const AccessSketch& sketch, const int64_t* keys, int64_t n,
                      int64_t* estimates) {
  for (int64_t i = 0; i < n; ++i) estimates[i] = sketch.Estimate(keys[i]);
}

void TopAccessed(const AccessSketch& sketch, const int64_t* candidates, int64_t n, int64_t k,
                 int64_t* top_keys, int64_t* top_estimates) {
  std::vector<int64_t> estimates(static_cast<size_t>(n)), order(static_cast<size_t>(n));
  EstimateAccesses(sketch, candidates, n, estimates.data());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int64_t a, int64_t b) {
    return estimates[a] != estimates[b] ? estimates[a] > estimates[b] : a < b;
  });
  for (int64_t i = 0; i < k; ++i) {
    top_keys[i] = candidates[order[i]];
    top_estimates[i] = estimates[order[i]];
  }
}

}  // namespace slipstream
