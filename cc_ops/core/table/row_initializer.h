// How a new key's row starts: a pure function of (seed, key), so independent of
// arrival order and of the number of threads.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_INITIALIZER_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_INITIALIZER_H_

#include <cstdint>

namespace slipstream {

struct RowInitializer {
  enum class Kind { kZeros, kConstant, kUniform, kNormal };
  Kind kind = Kind::kZeros;
  float a = 0.f;  // constant: value; uniform: low; normal: mean
  float b = 0.f;  // uniform: high; normal: standard deviation
  uint64_t seed = 0;

  // Writes `dim` values to `row`.
  void Fill(int64_t key, int64_t dim, float* row) const;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_INITIALIZER_H_
