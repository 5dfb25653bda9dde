// Row drift: the distance of embedding rows from their snapshot, a copy from the start of a window.
//
// Method: Slipstream, arXiv 2404.04270, snapshot block (metric kLinf).
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_DRIFT_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_DRIFT_H_

#include <cstdint>
#include <string>

namespace slipstream {

enum class DriftMetric {
  kLinf,  // max_j |a_j - b_j|
  kL2,    // ||a - b||
};

// Returns the metric that ops call "linf" or "l2".
DriftMetric DriftMetricNamed(const std::string& name);

// Writes the drift of rows [begin, end).
//
//   current, snapshot  [rows, dim], row-major, both owned by the caller.
//   metric             See DriftMetric.
//   drift              [rows], owned by the caller; only [begin, end) is written.
//
// A row with a NaN or an infinity in `current` or `snapshot` has a non-finite drift, so that it
// never compares as below a threshold. Sums are accumulated in double in a fixed order, therefore
// the result for a row does not depend on [begin, end). Rows of dimension 0 have drift 0.
void RowDrift(const float* current, const float* snapshot, int64_t begin, int64_t end, int64_t dim,
              DriftMetric metric, float* drift);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_DRIFT_H_
