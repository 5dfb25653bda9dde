#include "cc_ops/core/base/row_codec.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "cc_ops/core/base/bfloat16.h"
#include "cc_ops/core/base/float16.h"
#include "cc_ops/core/base/float_bits.h"
#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/narrow_floats.h"
#include "cc_ops/core/base/simd_clones.h"

namespace slipstream {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffffu, kInfinity = 0x7f800000u;
constexpr int64_t kScaleBytes = sizeof(float);
constexpr float kSteps = 127.f;
// Rows with smaller magnitudes become 0, because a 127th of the magnitude would be subnormal or
// nearly so.
constexpr float kMinMagnitude = 1e-35f;
// The largest scale for which 128 times the scale is still finite.
constexpr float kMaxScale = 2.6584e36f;

SLIPSTREAM_ALWAYS_INLINE void Store(uint16_t half, uint8_t* out, int64_t i) {
  std::memcpy(out + 2 * i, &half, sizeof(half));
}

SLIPSTREAM_SIMD_CLONES void EncodeBfloat16(const float* values, int64_t n, uint8_t* out) {
  for (int64_t i = 0; i < n; ++i) Store(RoundToBfloat16(values[i]), out, i);
}

SLIPSTREAM_SIMD_CLONES void DecodeBfloat16(const uint8_t* encoded, int64_t n, float* values) {
  ReadHalves<Bfloat16Rounding>(encoded, n, values);
}

SLIPSTREAM_SIMD_CLONES void EncodeFloat16(const float* values, int64_t n, uint8_t* out) {
  for (int64_t i = 0; i < n; ++i) Store(RoundToFloat16(values[i]), out, i);
}

SLIPSTREAM_SIMD_CLONES void DecodeFloat16(const uint8_t* encoded, int64_t n, float* values) {
  ReadHalves<Float16Rounding>(encoded, n, values);
}

// Returns a uniform number in [0, 1) that depends on the value, its index and its row.
SLIPSTREAM_ALWAYS_INLINE float UnitChanceOf(uint32_t bits, uint32_t index, uint32_t row) {
  return static_cast<float>(Mix32(bits ^ (row + SpreadIndex(index))) >> 8) * 0x1p-24f;
}

// Returns x * steps_per_unit + chance, rounded down. The conversion truncates, therefore 128 is
// added.
SLIPSTREAM_ALWAYS_INLINE uint8_t ToInt8(float x, float steps_per_unit, float chance) {
  const auto up = static_cast<int32_t>(x * steps_per_unit + chance + 128.f);
  return static_cast<uint8_t>(std::clamp(up, 1, 255) - 128);
}

// Encodes [n, dim] rows, each after its scale.
template <RowRounding kRounding>
SLIPSTREAM_ALWAYS_INLINE void AllToInt8(const float* values, const int64_t* keys, int64_t n,
                                        int64_t dim, uint8_t* out) {
  for (int64_t i = 0; i < n; ++i, values += dim, out += kScaleBytes + dim) {
    // Compare magnitudes as integers, which orders NaN above all numbers.
    uint32_t largest = 0;
    for (int64_t j = 0; j < dim; ++j) {
      largest = std::max(largest, BitsOf(values[j]) & kMagnitude);
    }
    const bool is_finite = largest < kInfinity, is_zero = FloatOf(largest) < kMinMagnitude;
    const float scale = !is_finite ? std::numeric_limits<float>::quiet_NaN()
                        : is_zero  ? 0.f
                                   : std::min(FloatOf(largest) / kSteps, kMaxScale);
    std::memcpy(out, &scale, sizeof(scale));
    uint8_t* const row = out + kScaleBytes;
    if (!is_finite || is_zero) {
      std::fill_n(row, dim, uint8_t{1});
      continue;
    }
    const float steps_per_unit = kSteps / FloatOf(largest);
    const uint32_t seed = kRounding == RowRounding::kByChance
                              ? static_cast<uint32_t>(HashKey(keys[i]) >> 32) ^ largest
                              : 0;
    for (int64_t j = 0; j < dim; ++j) {
      const float chance = kRounding == RowRounding::kByChance
                               ? UnitChanceOf(BitsOf(values[j]), static_cast<uint32_t>(j), seed)
                               : .5f;
      row[j] = ToInt8(values[j], steps_per_unit, chance);
    }
  }
}

SLIPSTREAM_SIMD_CLONES void EncodeInt8ByChance(const float* values, const int64_t* keys, int64_t n,
                                               int64_t dim, uint8_t* out) {
  AllToInt8<RowRounding::kByChance>(values, keys, n, dim, out);
}

SLIPSTREAM_SIMD_CLONES void EncodeNearestInt8(const float* values, int64_t n, int64_t dim,
                                              uint8_t* out) {
  AllToInt8<RowRounding::kNearest>(values, nullptr, n, dim, out);
}

float ScaleOf(const uint8_t* encoded) {
  float scale = 0;
  std::memcpy(&scale, encoded, sizeof(scale));
  return scale;
}

SLIPSTREAM_SIMD_CLONES void DecodeInt8(const uint8_t* encoded, int64_t n, int64_t dim,
                                       float* values) {
  for (int64_t i = 0; i < n; ++i, values += dim, encoded += kScaleBytes + dim) {
    const float scale = ScaleOf(encoded);
    const uint8_t* const row = encoded + kScaleBytes;
    for (int64_t j = 0; j < dim; ++j) {
      values[j] = static_cast<float>(static_cast<int8_t>(row[j])) * scale;
    }
  }
}

// Returns whether any of n numbers has all exponent bits set, i.e. is infinite or a NaN.
template <class Bits>
bool AnyHas(const uint8_t* encoded, int64_t n, Bits exponent) {
  bool any = false;
  for (int64_t i = 0; i < n; ++i) {
    Bits bits;
    std::memcpy(&bits, encoded + i * static_cast<int64_t>(sizeof(bits)), sizeof(bits));
    any |= (bits & exponent) == exponent;
  }
  return any;
}

}  // namespace

int64_t EncodedBytes(RowDtype dtype, int64_t dim) {
  switch (dtype) {
    case RowDtype::kFloat32:
      return 4 * dim;
    case RowDtype::kBfloat16:
    case RowDtype::kFloat16:
      return 2 * dim;
    case RowDtype::kInt8:
      return dim == 0 ? 0 : kScaleBytes + dim;
  }
  return 0;
}

void EncodeRows(const float* values, const int64_t* keys, int64_t n, int64_t dim, RowDtype dtype,
                RowRounding rounding, uint8_t* out) {
  if (n == 0 || dim == 0) return;
  switch (dtype) {
    case RowDtype::kFloat32:
      std::memcpy(out, values, static_cast<size_t>(n * dim) * sizeof(float));
      return;
    case RowDtype::kBfloat16:
      return EncodeBfloat16(values, n * dim, out);
    case RowDtype::kFloat16:
      return EncodeFloat16(values, n * dim, out);
    case RowDtype::kInt8:
      return rounding == RowRounding::kByChance ? EncodeInt8ByChance(values, keys, n, dim, out)
                                                : EncodeNearestInt8(values, n, dim, out);
  }
}

void DecodeRows(const uint8_t* encoded, int64_t n, int64_t dim, RowDtype dtype, float* values) {
  if (n == 0 || dim == 0) return;
  switch (dtype) {
    case RowDtype::kFloat32:
      std::memcpy(values, encoded, static_cast<size_t>(n * dim) * sizeof(float));
      return;
    case RowDtype::kBfloat16:
      return DecodeBfloat16(encoded, n * dim, values);
    case RowDtype::kFloat16:
      return DecodeFloat16(encoded, n * dim, values);
    case RowDtype::kInt8:
      return DecodeInt8(encoded, n, dim, values);
  }
}

bool IsHeldBy(RowDtype dtype, float value) {
  const float magnitude = FloatOf(BitsOf(value) & kMagnitude);
  if (dtype == RowDtype::kFloat16) return magnitude <= FromFloat16(0x7bffu);
  if (dtype == RowDtype::kBfloat16) return magnitude <= FromBfloat16(0x7f7fu);
  return magnitude <= std::numeric_limits<float>::max();
}

const char* NumbersHeldBy(RowDtype dtype) {
  switch (dtype) {
    case RowDtype::kBfloat16:
      return "finite numbers of at most 3.38e38 (bfloat16)";
    case RowDtype::kFloat16:
      return "finite numbers of at most 65504 (float16)";
    default:
      return "finite numbers";
  }
}

bool EncodedIsFinite(const uint8_t* encoded, int64_t dim, RowDtype dtype) {
  switch (dtype) {
    case RowDtype::kFloat32:
      return !AnyHas(encoded, dim, kInfinity);
    case RowDtype::kBfloat16:
      return !AnyHas(encoded, dim, static_cast<uint16_t>(kInfinity >> 16));
    case RowDtype::kFloat16:
      return !AnyHas(encoded, dim, uint16_t{0x7c00});
    case RowDtype::kInt8:
      return dim == 0 || (BitsOf(ScaleOf(encoded)) & kMagnitude) <= BitsOf(kMaxScale);
  }
  return true;
}

}  // namespace slipstream
