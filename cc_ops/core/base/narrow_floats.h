// Conversion of floats to 16 or 24 bits with stochastic rounding, and back.
//
// All functions are inlined into functions that are compiled for multiple instruction sets.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_NARROW_FLOATS_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_NARROW_FLOATS_H_

#include <cstdint>
#include <cstring>

#include "cc_ops/core/base/float_bits.h"
#include "cc_ops/core/base/simd_clones.h"

namespace slipstream {

// Explicit vectors, because auto-vectorization chooses narrower vectors than the processor has.
template <class Value>
struct VectorOf16 {
  typedef Value Type __attribute__((vector_size(16 * sizeof(Value))));
};
using Floats16 = VectorOf16<float>::Type;
using Ints16 = VectorOf16<int32_t>::Type;
using Bits16 = VectorOf16<uint32_t>::Type;
using Halves16 = VectorOf16<uint16_t>::Type;

template <class To, class From>
SLIPSTREAM_ALWAYS_INLINE To SameBits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Below, `Bits` is uint32_t or Bits16.

// A bijection on 32 bits (the finalizer of MurmurHash3).
template <class Bits>
SLIPSTREAM_ALWAYS_INLINE Bits Mix32(Bits x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// Decorrelates the random bits of the values in a row.
template <class Bits>
SLIPSTREAM_ALWAYS_INLINE Bits SpreadIndex(Bits index) {
  return index * 0x9e3779b1u;
}

// Returns 16 uniform random bits for value `index` of a row. One hash serves two values that are 16
// apart, so that every second vector needs no hash.
inline uint32_t ChanceOf(uint32_t seed, uint32_t index) {
  const uint32_t both = Mix32(SpreadIndex(index / 32 * 16 + index % 16) + seed);
  return index / 16 % 2 == 0 ? both & 0xffffu : both >> 16;
}

// Each of the following structs rounds floats to a 16-bit type and converts them back.
//
// Round rounds floats, given as bits, to one of their two neighbors in the type. Over uniform
// 16-bit values of `chance`, the mean of the result is the input. Representable values do not
// change. Values beyond the largest become infinite; infinities and NaNs are preserved. The result
// is in the lower 16 + kMore bits, where kMore is 0 or 8 additional bits of precision. Only the
// upper 16 - kMore bits of `chance` matter. Widen converts a result of Round back to the bits of a
// float.
struct Bfloat16Rounding {
  template <int kMore, class Bits>
  static SLIPSTREAM_ALWAYS_INLINE Bits Round(Bits bits, Bits chance) {
    return (bits + (chance >> kMore)) >> (16 - kMore);
  }
  template <int kMore, class Bits>
  static SLIPSTREAM_ALWAYS_INLINE Bits Widen(Bits narrow) {
    return narrow << (16 - kMore);
  }
};

struct Float16Rounding {
  static SLIPSTREAM_ALWAYS_INLINE uint32_t Min(uint32_t a, uint32_t b) { return a < b ? a : b; }
  static SLIPSTREAM_ALWAYS_INLINE Bits16 Min(Bits16 a, uint32_t b) {
    return a < b ? a : b + Bits16{};
  }
  // Returns value >= minimum as a mask: all bits set if true.
  static SLIPSTREAM_ALWAYS_INLINE uint32_t AtLeast(uint32_t value, uint32_t minimum) {
    return 0u - static_cast<uint32_t>(value >= minimum);
  }
  static SLIPSTREAM_ALWAYS_INLINE Bits16 AtLeast(Bits16 value, uint32_t minimum) {
    return SameBits<Bits16>(value >= minimum);
  }
  // Convert a float to multiples of 1 / per_unit, plus `parts` times `part`, rounded down; and
  // back. Valid below 2^20 multiples; larger results are not used.
  static SLIPSTREAM_ALWAYS_INLINE uint32_t ToSteps(uint32_t bits, float per_unit, uint32_t parts,
                                                   float part) {
    const float more = static_cast<float>(static_cast<int32_t>(parts)) * part;
    return static_cast<uint32_t>(static_cast<int32_t>(FloatOf(bits) * per_unit + more));
  }
  static SLIPSTREAM_ALWAYS_INLINE Bits16 ToSteps(Bits16 bits, float per_unit, Bits16 parts,
                                                 float part) {
    const Floats16 more = __builtin_convertvector(SameBits<Ints16>(parts), Floats16) * part;
    return SameBits<Bits16>(
        __builtin_convertvector(SameBits<Floats16>(bits) * per_unit + more, Ints16));
  }
  static SLIPSTREAM_ALWAYS_INLINE uint32_t FromSteps(uint32_t steps, float unit) {
    return BitsOf(static_cast<float>(static_cast<int32_t>(steps)) * unit);
  }
  static SLIPSTREAM_ALWAYS_INLINE Bits16 FromSteps(Bits16 steps, float unit) {
    return SameBits<Bits16>(__builtin_convertvector(SameBits<Ints16>(steps), Floats16) * unit);
  }

  template <int kMore, class Bits>
  static SLIPSTREAM_ALWAYS_INLINE Bits Round(Bits bits, Bits chance) {
    constexpr int kDropped = 13 - kMore;
    constexpr uint32_t kMinNormal = 113u << 23, kInfinity = 0x7c00u << kMore;
    chance >>= 16 - kDropped;
    const Bits magnitude = bits & 0x7fffffffu;
    // Halves below the smallest normal are 2^-24 apart. There are fewer than 2^(10 + kMore) of
    // them, which together with the random bits fit in a float. Larger values would overflow the
    // integer and are masked.
    const Bits is_normal = AtLeast(magnitude, kMinNormal);
    constexpr float kPerUnit = kMore == 0 ? 0x1p24f : 0x1p32f;
    constexpr float kPart = 1.f / static_cast<float>(1 << kDropped);
    const Bits small = ToSteps(magnitude & ~is_normal, kPerUnit, chance, kPart);
    const Bits normal = Min((magnitude - (112u << 23) + chance) >> kDropped, kInfinity);
    return (bits >> (16 - kMore) & (0x8000u << kMore)) | (small & ~is_normal) |
           (normal & is_normal);
  }
  // Creates no subnormal float as an intermediate, because threads may flush subnormals to 0.
  template <int kMore, class Bits>
  static SLIPSTREAM_ALWAYS_INLINE Bits Widen(Bits narrow) {
    constexpr uint32_t kSign = 0x8000u << kMore, kInfinity = 0x7c00u << kMore;
    constexpr uint32_t kMinNormal = 0x400u << kMore;
    const Bits magnitude = narrow & (kSign - 1), is_normal = AtLeast(magnitude, kMinNormal);
    // Map the largest exponent of a half (infinity, NaN) to the largest exponent of a float.
    const Bits beyond = AtLeast(magnitude, kInfinity) & (112u << 23);
    const Bits large = (magnitude << (13 - kMore)) + (112u << 23) + beyond;
    constexpr float kUnit = kMore == 0 ? 0x1p-24f : 0x1p-32f;
    return (FromSteps(magnitude, kUnit) & ~is_normal) | (large & is_normal) |
           (narrow & kSign) << (16 - kMore);
  }
};

// Decodes n halves at any address to floats.
template <class Rounding>
SLIPSTREAM_ALWAYS_INLINE void ReadHalves(const uint8_t* bytes, int64_t n, float* values) {
  const int64_t whole = n / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) {
    Halves16 halves;
    std::memcpy(&halves, bytes + 2 * i, sizeof(halves));
    const Bits16 wide = Rounding::template Widen<0>(__builtin_convertvector(halves, Bits16));
    std::memcpy(values + i, &wide, sizeof(wide));
  }
  for (int64_t i = whole; i < n; ++i) {
    uint16_t half;
    std::memcpy(&half, bytes + 2 * i, sizeof(half));
    values[i] = FloatOf(Rounding::template Widen<0>(static_cast<uint32_t>(half)));
  }
}

// Encodes n floats as halves. Value i uses random number first + i of the row's `seed`; `first`
// must be a multiple of 32.
template <class Rounding>
SLIPSTREAM_ALWAYS_INLINE void WriteHalves(const float* values, int64_t n, uint32_t seed,
                                          int64_t first, uint8_t* bytes) {
  constexpr Bits16 kCount = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto write = [&](int64_t i, Bits16 chance) SLIPSTREAM_LAMBDA_INLINE {
    Bits16 bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    const Halves16 halves =
        __builtin_convertvector(Rounding::template Round<0>(bits, chance), Halves16);
    std::memcpy(bytes + 2 * i, &halves, sizeof(halves));
  };
  const int64_t whole = n / 16 * 16;
  for (int64_t i = 0; i < whole; i += 32) {
    const Bits16 index = kCount + static_cast<uint32_t>((first + i) / 2);
    const Bits16 both = Mix32(SpreadIndex(index) + seed);
    write(i, both & 0xffffu);
    if (i + 16 < whole) write(i + 16, both >> 16);
  }
  for (int64_t i = whole; i < n; ++i) {
    const uint32_t chance = ChanceOf(seed, static_cast<uint32_t>(first + i));
    const auto half = static_cast<uint16_t>(Rounding::template Round<0>(BitsOf(values[i]), chance));
    std::memcpy(bytes + 2 * i, &half, sizeof(half));
  }
}

// A 24-bit value is stored as the nearest 16-bit half and its lowest 8 bits. These replace the
// lowest 8 bits of a float slot (the lender), which then has 24 bits, too. Rounding to the nearest
// half may round up, therefore the lowest 8 bits count as -128 to 127.
constexpr uint32_t kLentBits = 0xffu, kHalfOfLent = 0x80u;

template <class Rounding>
SLIPSTREAM_ALWAYS_INLINE void ReadBorrowed(const uint8_t* halves, const uint8_t* words, int64_t n,
                                           float* values, float* lenders) {
  const auto read = [&](int64_t i, auto half, auto word) SLIPSTREAM_LAMBDA_INLINE {
    std::memcpy(&half, halves + 2 * i, sizeof(half));
    std::memcpy(&word, words + 4 * i, sizeof(word));
    decltype(word) wide;
    if constexpr (sizeof(word) == sizeof(uint32_t)) {
      wide = half;
    } else {
      wide = __builtin_convertvector(half, Bits16);
    }
    wide = (wide << 8) + (word & kLentBits) - ((word & kHalfOfLent) << 1);
    wide = Rounding::template Widen<8>(wide);
    std::memcpy(values + i, &wide, sizeof(wide));
    word &= ~kLentBits;
    std::memcpy(lenders + i, &word, sizeof(word));
  };
  const int64_t whole = n / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) read(i, Halves16{}, Bits16{});
  for (int64_t i = whole; i < n; ++i) read(i, uint16_t{0}, uint32_t{0});
}

// Encodes values and lenders. Pair i uses random number first + i of the row's `seed`; `first` must
// be a multiple of 32.
template <class Rounding>
SLIPSTREAM_ALWAYS_INLINE void WriteBorrowed(const float* values, const float* lenders, int64_t n,
                                            uint32_t seed, int64_t first, uint8_t* halves,
                                            uint8_t* words) {
  constexpr Bits16 kCount = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto write = [&](int64_t i, auto half, auto chance) SLIPSTREAM_LAMBDA_INLINE {
    decltype(chance) value, word;
    std::memcpy(&value, values + i, sizeof(value));
    std::memcpy(&word, lenders + i, sizeof(word));
    // Value and lender use different bits of `chance`.
    value = Rounding::template Round<8>(value, chance);
    word = ((word + (chance & kLentBits)) & ~kLentBits) | (value & kLentBits);
    std::memcpy(words + 4 * i, &word, sizeof(word));
    value = (value + kHalfOfLent) >> 8;
    if constexpr (sizeof(value) == sizeof(uint32_t)) {
      half = static_cast<uint16_t>(value);
    } else {
      half = __builtin_convertvector(value, Halves16);
    }
    std::memcpy(halves + 2 * i, &half, sizeof(half));
  };
  const int64_t whole = n / 16 * 16;
  for (int64_t i = 0; i < whole; i += 32) {
    const Bits16 index = kCount + static_cast<uint32_t>((first + i) / 2);
    const Bits16 both = Mix32(SpreadIndex(index) + seed);
    write(i, Halves16{}, both & 0xffffu);
    if (i + 16 < whole) write(i + 16, Halves16{}, both >> 16);
  }
  for (int64_t i = whole; i < n; ++i) {
    write(i, uint16_t{0}, ChanceOf(seed, static_cast<uint32_t>(first + i)));
  }
}

// Pass this number as `chance` to round to the nearest.
constexpr uint32_t kToNearest = 0x8000u;

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_NARROW_FLOATS_H_
