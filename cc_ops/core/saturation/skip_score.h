// The number that decides whether an input can be skipped (Slipstream, arXiv 2404.04270,
// input classifier block).
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_SCORE_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_SCORE_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/saturation/drift_index.h"

namespace slipstream {

// ceil(alpha * m), at least 1: how many of m >= 1 lookups must be saturated. A product
// within rounding error of an integer is that integer (0.55 * 100 is 55, not 56).
SLIPSTREAM_HOST_DEVICE inline int64_t RequiredLookups(double alpha, int64_t m) {
  // Relative; far above the 2^-52 of one product and one rounded alpha, far below any step
  // between two shares that somebody would write down.
  constexpr double kRoundingError = 1e-12;
  const double product = alpha * static_cast<double>(m);
  const double nearest = nearbyint(product);
  const bool is_integer = fabs(product - nearest) <= kRoundingError * product;
  const auto required = static_cast<int64_t>(is_integer ? nearest : ceil(product));
  return required < 1 ? 1 : (required > m ? m : required);
}

// The skip score of one input: the RequiredLookups(alpha, m)-th smallest of its m lookups' drifts,
// kUntracked for keys that are not tracked; kUntracked for an input without lookups.
//   alpha: in (0, 1].   drifts: [m], not NaN; their order is lost.
float SkipScore(double alpha, float* drifts, int64_t m);

// The lookups of several inputs, one input after the other. Reused, it spares allocations.
struct InputLookups {
  void Clear() {
    lookups.clear();
    ends.clear();
  }
  // Ends an input, whose lookups were appended.
  void EndInput() { ends.push_back(static_cast<int64_t>(lookups.size())); }

  std::vector<Lookup> lookups;
  std::vector<int64_t> ends;  // of each input's lookups
  std::vector<float> drifts;  // scratch of SkipScores
};

// The skip score of each input, whose drifts are those of `index`.
//   scores: [inputs].
void SkipScores(const DriftIndex& index, double alpha, InputLookups* inputs, float* scores);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_SCORE_H_
