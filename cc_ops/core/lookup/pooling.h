// Combiners: pool the rows of an example into one vector.
#ifndef SLIPSTREAM_CC_OPS_CORE_LOOKUP_POOLING_H_
#define SLIPSTREAM_CC_OPS_CORE_LOOKUP_POOLING_H_

#include <cmath>
#include <cstdint>

#include "cc_ops/core/lookup/feature_view.h"

namespace slipstream {

enum class Combiner { kSum, kMean, kSqrtn };

// Returns whether the vector of an example is the plain sum of its rows, so that no row needs a
// factor.
inline bool IsUnscaled(const FeatureView& f, Combiner combiner) {
  const bool one_key = f.row_splits == nullptr && f.width == 1;
  return f.weights == nullptr && (combiner == Combiner::kSum || one_key);
}

// Returns the factor by which the weighted sum of an example is multiplied: 1 for kSum, 1 / sum(w)
// for kMean, 1 / sqrt(sum(w^2)) for kSqrtn, with the weights w of its keys; 0 if the divisor is 0.
inline float BagFactor(const FeatureView& f, Combiner combiner, int64_t example) {
  if (combiner == Combiner::kSum) return 1.f;
  float sum = 0.f;
  for (int64_t p = f.begin(example); p < f.end(example); ++p) {
    if (!f.is_key(p)) continue;
    const float w = f.weights == nullptr ? 1.f : f.weights[p];
    sum += combiner == Combiner::kMean ? w : w * w;
  }
  const float divisor = combiner == Combiner::kMean ? sum : std::sqrt(sum);
  return divisor == 0.f ? 0.f : 1.f / divisor;
}

// Writes the pooled vector ([dim]) of one example to `out`.
//
//   row_of(position)    Returns the row ([dim]) of the key at a position of FeatureView::keys.
//   scale_of(position)  Returns the factor of this row; not called if `is_unscaled`.
//
// An example without keys gets zeros.
template <class RowOf, class ScaleOf>
void PoolExample(const FeatureView& f, int64_t example, int64_t dim, bool is_unscaled,
                 const RowOf& row_of, const ScaleOf& scale_of, float* __restrict__ out) {
  bool is_first = true;
  for (int64_t p = f.begin(example); p < f.end(example); ++p) {
    if (!f.is_key(p)) continue;
    const float* __restrict__ row = row_of(p);
    if (is_unscaled) {
      if (is_first) {
        for (int64_t j = 0; j < dim; ++j) out[j] = row[j];
      } else {
        for (int64_t j = 0; j < dim; ++j) out[j] += row[j];
      }
    } else {
      const float scale = scale_of(p);
      if (is_first) {
        for (int64_t j = 0; j < dim; ++j) out[j] = scale * row[j];
      } else {
        for (int64_t j = 0; j < dim; ++j) out[j] += scale * row[j];
      }
    }
    is_first = false;
  }
  if (is_first) {
    for (int64_t j = 0; j < dim; ++j) out[j] = 0.f;
  }
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_LOOKUP_POOLING_H_
