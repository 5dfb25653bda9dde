#include "cc_ops/core/table/row_initializer.h"

#include <algorithm>
#include <cmath>

#include "cc_ops/core/base/hash.h"

namespace slipstream {
namespace {

// Returns a uniform number in [0, 1) with 24 bits, which a float represents exactly.
float UnitFloat(uint64_t bits) { return static_cast<float>(bits >> 40) * 0x1p-24f; }

// Returns a number from the standard normal distribution: the Box-Muller transform.
double StandardNormal(uint64_t bits) {
  // 1 - u keeps the argument of the logarithm above zero.
  const double u = 1.0 - static_cast<double>(bits >> 40) * 0x1p-24;
  const double v = static_cast<double>((bits >> 16) & 0xffffff) * 0x1p-24;
  return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v);
}

}  // namespace

double RowInitializer::MaxMagnitude() const {
  const double first = std::fabs(static_cast<double>(a)),
               second = std::fabs(static_cast<double>(b));
  switch (kind) {
    case Kind::kZeros:
      return 0.;
    case Kind::kConstant:
      return first;
    case Kind::kUniform:
      // Fill computes the difference of the bounds.
      return std::max({first, second, std::fabs(static_cast<double>(b) - static_cast<double>(a))});
    case Kind::kNormal:
      // The smallest argument of the logarithm is 2^-24.
      return first + std::sqrt(48. * std::log(2.)) * second;
    case Kind::kTruncatedNormal:
      return first + 2. * second;
  }
  return 0.;
}

void RowInitializer::Fill(int64_t key, int64_t dim, float* row) const {
  switch (kind) {
    case Kind::kZeros:
      std::fill(row, row + dim, 0.f);
      return;
    case Kind::kConstant:
      std::fill(row, row + dim, a);
      return;
    case Kind::kUniform:
    case Kind::kNormal:
    case Kind::kTruncatedNormal:
      break;
  }
  // A counter-based generator: element j is a hash of (seed, key, j).
  const uint64_t stream = Mix64(Mix64(seed) ^ HashKey(key));
  for (int64_t j = 0; j < dim; ++j) {
    uint64_t bits = Mix64(stream + static_cast<uint64_t>(j) * 0xd1342543de82ef95ULL);
    if (kind == Kind::kUniform) {
      row[j] = a + UnitFloat(bits) * (b - a);
    } else {
      double z = StandardNormal(bits);
      while (kind == Kind::kTruncatedNormal && std::abs(z) > 2.0) {
        bits = Mix64(bits);
        z = StandardNormal(bits);
      }
      row[j] = static_cast<float>(a + b * z);
    }
  }
}

}  // namespace slipstream
