// Row drift: how far embedding rows have moved from their snapshot.
//
// Method: Slipstream, arXiv 2404.04270, snapshot block (metric kLinf).
#ifndef CC_OPS_CORE_DRIFT_H_
#define CC_OPS_CORE_DRIFT_H_

#include <cstdint>
#include <string>

namespace slipstream {

enum class DriftMetric {
  kLinf,      // max_j |a_j - b_j|
  kL2,        // ||a - b||
  kRelative,  // ||a - b|| / (||b|| + epsilon)
};

// The metric that ops call "linf", "l2" or "relative".
DriftMetric DriftMetricNamed(const std::string& name);

// Writes the drift of rows [begin, end).
//
//   current, snapshot  [rows, dim], row-major, both owned by the caller.
//   metric             see DriftMetric.
//   epsilon            read by kRelative only; positive.
//   drift              [rows], owned by the caller; only [begin, end) is written.
//
// A row with a NaN in `current` or `snapshot`, or with an infinity, has a non-finite drift, so it
// never compares as "below a threshold". Sums are accumulated in double and in a fixed order: the
// result of a row does not depend on [begin, end). Rows of dimension 0 have drift 0.
void RowDrift(const float* current, const float* snapshot, int64_t begin, int64_t end, int64_t dim,
              DriftMetric metric, double epsilon, float* drift);

// Net squared drift over the sum of squared update lengths: about 1 for a random walk, about n for
// n equal updates in one direction. 0 for a row that is where it was; infinite for one that moved
// without an update, as an import replaced it; not finite where an argument is not.
//
//   net                 l2 distance from the snapshot.
//   squares_of_updates  sum of squared update lengths since then.
float SignalOfDrift(float net, float squares_of_updates);

}  // namespace slipstream

#endif  // CC_OPS_CORE_DRIFT_H_
