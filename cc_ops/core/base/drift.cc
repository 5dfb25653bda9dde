#include "cc_ops/core/base/drift.h"

#include <algorithm>
#include <cmath>

#include "cc_ops/core/base/float_bits.h"
#include "cc_ops/core/base/simd_clones.h"

namespace slipstream {
namespace {

// The bit patterns of non-negative floats are ordered like their values, with NaN above infinity.
// An integer maximum therefore keeps a NaN, which std::max and std::fmax would drop.
SLIPSTREAM_ALWAYS_INLINE float MaxAbsDifference(const float* a, const float* b, int64_t dim) {
  uint32_t largest = 0;
  for (int64_t j = 0; j < dim; ++j) {
    largest = std::max(largest, BitsOf(std::fabs(a[j] - b[j])));
  }
  return FloatOf(largest);
}

// Four partial sums let the compiler use vector registers without reordering additions.
constexpr int64_t kLanes = 4;

template <typename Term>
SLIPSTREAM_ALWAYS_INLINE double SumOverRow(int64_t dim, Term term) {
  double lanes[kLanes] = {0, 0, 0, 0};
  int64_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(j + lane);
  }
  double sum = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  for (; j < dim; ++j) sum += term(j);
  return sum;
}

SLIPSTREAM_ALWAYS_INLINE double DistanceL2(const float* a, const float* b, int64_t dim) {
  return std::sqrt(SumOverRow(dim, [a, b](int64_t j) {
    const double difference = static_cast<double>(a[j]) - static_cast<double>(b[j]);
    return difference * difference;
  }));
}

}  // namespace

DriftMetric DriftMetricNamed(const std::string& name) {
  return name == "l2" ? DriftMetric::kL2 : DriftMetric::kLinf;
}

SLIPSTREAM_SIMD_CLONES void RowDrift(const float* current, const float* snapshot, int64_t begin,
                                     int64_t end, int64_t dim, DriftMetric metric, float* drift) {
  for (int64_t row = begin; row < end; ++row) {
    const float* a = current + row * dim;
    const float* b = snapshot + row * dim;
    switch (metric) {
      case DriftMetric::kLinf:
        drift[row] = MaxAbsDifference(a, b, dim);
        break;
      case DriftMetric::kL2:
        drift[row] = static_cast<float>(DistanceL2(a, b, dim));
        break;
    }
  }
}

}  // namespace slipstream
