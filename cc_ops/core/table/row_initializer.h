// Computes the initial values of a row.
//
// They are a pure function of (seed, key). Therefore they do not depend on the order in which keys
// arrive, on the number of threads or on evictions.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_INITIALIZER_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_INITIALIZER_H_

#include <cstdint>

namespace slipstream {

struct RowInitializer {
  enum class Kind { kZeros, kConstant, kUniform, kNormal, kTruncatedNormal };
  Kind kind = Kind::kZeros;
  float a = 0.f;  // Constant: value. Uniform: lower bound. Normal and truncated normal: mean.
  // Uniform: upper bound. Normal: standard deviation. Truncated normal: standard deviation of the
  // normal distribution, which is cut off at two standard deviations from the mean.
  float b = 0.f;
  uint64_t seed = 0;

  // Returns the largest magnitude of a value that Fill can write, before rounding to float.
  double MaxMagnitude() const;
  // Writes `dim` values to `row`.
  void Fill(int64_t key, int64_t dim, float* row) const;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_INITIALIZER_H_
