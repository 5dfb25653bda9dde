// The skip score of an example (Slipstream, arXiv 2404.04270, input classifier block).
//
// An example with m lookups is skippable if at least ceil(alpha * m) of its keys have a drift below
// the threshold. This holds if the ceil(alpha * m)-th smallest drift is below the threshold, and
// this drift is the score.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_SCORE_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_SCORE_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/saturation/drift_index.h"

namespace slipstream {

// Returns ceil(alpha * m), at least 1: the number of the m >= 1 lookups that must be saturated. A
// product within rounding error of an integer counts as that integer (0.55 * 100 is 55, not 56).
SLIPSTREAM_HOST_DEVICE inline int64_t RequiredLookups(double alpha, int64_t m) {
  // Relative tolerance: far above the 2^-52 of a product and a rounded alpha, far below the
  // difference of two fractions that a user would write.
  constexpr double kRoundingError = 1e-12;
  const double product = alpha * static_cast<double>(m);
  const double nearest = nearbyint(product);
  const bool is_integer = fabs(product - nearest) <= kRoundingError * product;
  const auto required = static_cast<int64_t>(is_integer ? nearest : ceil(product));
  return required < 1 ? 1 : (required > m ? m : required);
}

// Returns the skip score of one example: the RequiredLookups(alpha, m)-th smallest drift of its m
// lookups. Keys that are not tracked, and examples without lookups, have kUntracked. alpha: in (0,
// 1]. drifts: [m], not NaN; they are reordered.
float SkipScore(double alpha, float* drifts, int64_t m);

// The lookups of multiple examples. Reuse it to avoid allocations.
struct InputLookups {
  void Clear() {
    lookups.clear();
    ends.clear();
  }
  // Ends an example after its lookups were appended.
  void EndInput() { ends.push_back(static_cast<int64_t>(lookups.size())); }

  std::vector<Lookup> lookups;
  std::vector<int64_t> ends;  // [examples]; end of the lookups of each example.
  std::vector<float> drifts;  // Scratch memory of SkipScores.
};

// Computes the skip score of each example with the drifts in `index`. scores: [examples].
void SkipScores(const DriftIndex& index, double alpha, InputLookups* inputs, float* scores);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_SCORE_H_
