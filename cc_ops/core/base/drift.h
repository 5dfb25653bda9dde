// Row drift: how far embedding rows have moved from their snapshot.
//
// Method: Slipstream, arXiv 2404.04270, snapshot block (metric kLinf).
#ifndef CC_OPS_CORE_DRIFT_H_
#define CC_OPS_CORE_DRIFT_H_

#include <cstdint>
#include <string>

namespace slipstream {

enum class DriftMetric {
  kLinf,  // max_j |a_j - b_j|
  kL2,    // ||a - b||
};

// The metric that ops call "linf" or "l2".
DriftMetric DriftMetricNamed(const std::string& name);

// Writes the drift of rows [begin, end).
//
//   current, snapshot  [rows, dim], row-major, both owned by the caller.
//   metric             see DriftMetric.
//   drift              [rows], owned by the caller; only [begin, end) is written.
//
// A row with a NaN in `current` or `snapshot`, or with an infinity, has a non-finite drift, so it
// never compares as "below a threshold". Sums are accumulated in double and in a fixed order: the
// result of a row does not depend on [begin, end). Rows of dimension 0 have drift 0.
void RowDrift(const float* current, const float* snapshot, int64_t begin, int64_t end, int64_t dim,
              DriftMetric metric, float* drift);

}  // namespace slipstream

#endif  // CC_OPS_CORE_DRIFT_H_
