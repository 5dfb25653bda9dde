#include "cc_ops/core/base/narrow_floats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <vector>

namespace slipstream {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint32_t kChances = 1 << 16;

template <class Format, int kMoreBits>
struct FormatOf {
  using Rounding = Format;
  static constexpr int kMore = kMoreBits;
};

struct Bfloat16 : FormatOf<Bfloat16Rounding, 0> {
  static constexpr float kLargest = 3.3895314e38f, kMinStep = 1e-40f, kPrecision = 0x1p-7f;
};
struct LentBfloat16 : FormatOf<Bfloat16Rounding, 8> {
  static constexpr float kLargest = 0x1.fffep127f, kMinStep = 1e-40f, kPrecision = 0x1p-15f;
};
struct Float16 : FormatOf<Float16Rounding, 0> {
  static constexpr float kLargest = 65504.f, kMinStep = 0x1p-24f, kPrecision = 0x1p-10f;
};
struct LentFloat16 : FormatOf<Float16Rounding, 8> {
  static constexpr float kLargest = 0x1.ffffcp15f, kMinStep = 0x1p-32f, kPrecision = 0x1p-18f;
};

template <class Format>
float Rounded(float value, uint32_t chance) {
  constexpr int kMore = Format::kMore;
  using Rounding = typename Format::Rounding;
  return FloatOf(
      Rounding::template Widen<kMore>(Rounding::template Round<kMore>(BitsOf(value), chance)));
}

// Rounds to nearest; ties are rounded up.
template <class Rounding>
float Nearest(float value) {
  return FloatOf(
      Rounding::template Widen<0>(Rounding::template Round<0>(BitsOf(value), kToNearest)));
}

template <class Format>
class NarrowFloats : public testing::Test {};
using Formats = testing::Types<Bfloat16, LentBfloat16, Float16, LentFloat16>;
TYPED_TEST_SUITE(NarrowFloats, Formats);

// Values of all magnitudes that rows have.
std::vector<float> Values() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values = {0.f, -0.f, 1.f, -1.f, 6.1e-5f, 6.2e-5f, 5.9e-8f, 1e-9f, 65000.f};
  for (const float deviation : {1e-9f, 1e-7f, 3e-5f, .01f, 1.f, 1000.f}) {
    for (int i = 0; i < 6; ++i) values.push_back(deviation * normal(random));
  }
  return values;
}

TYPED_TEST(NarrowFloats, StochasticRoundingIsUnbiased) {
  for (const float value : Values()) {
    double sum = 0.;
    std::set<float> seen;
    for (uint32_t chance = 0; chance < kChances; ++chance) {
      const float rounded = Rounded<TypeParam>(value, chance);
      seen.insert(rounded);
      sum += rounded;
    }
    ASSERT_LE(seen.size(), 2u) << value;
    const double step = *seen.rbegin() - *seen.begin();
    EXPECT_LE(*seen.begin(), value);
    EXPECT_GE(*seen.rbegin(), value);
    // At least 5 of the 16 random bits matter.
    EXPECT_NEAR(sum / kChances, value, step / 30) << value;
  }
}

TYPED_TEST(NarrowFloats, RepresentableValuesAreUnchanged) {
  for (const float value : Values()) {
    const float rounded = Rounded<TypeParam>(value, 0);
    for (uint32_t chance = 0; chance < kChances; chance += 97) {
      ASSERT_EQ(Rounded<TypeParam>(rounded, chance), rounded) << value;
    }
    EXPECT_EQ(Rounded<TypeParam>(rounded, kChances - 1), rounded) << value;
    EXPECT_EQ(std::signbit(rounded), std::signbit(value));
  }
}

TYPED_TEST(NarrowFloats, OverflowAndNonFiniteValuesAreNotFinite) {
  for (const uint32_t chance : {0u, 1u, 4096u, kChances - 1}) {
    EXPECT_EQ(Rounded<TypeParam>(TypeParam::kLargest, chance), TypeParam::kLargest);
    EXPECT_EQ(Rounded<TypeParam>(-TypeParam::kLargest, chance), -TypeParam::kLargest);
    EXPECT_EQ(Rounded<TypeParam>(kInfinity, chance), kInfinity);
    EXPECT_EQ(Rounded<TypeParam>(-kInfinity, chance), -kInfinity);
    EXPECT_FALSE(std::isfinite(Rounded<TypeParam>(std::nanf(""), chance)));
    EXPECT_FALSE(std::isfinite(Rounded<TypeParam>(-std::nanf(""), chance)));
  }
  EXPECT_EQ(Rounded<TypeParam>(-std::numeric_limits<float>::max(), kChances - 1), -kInfinity);
}

TYPED_TEST(NarrowFloats, AllNumbersRoundTrip) {
  for (uint32_t chance : {0u, 12345u, kChances - 1}) {
    for (float value = TypeParam::kLargest; value > 2 * TypeParam::kMinStep; value *= .73f) {
      const float low = Rounded<TypeParam>(value, 0);
      EXPECT_EQ(Rounded<TypeParam>(low, chance), low);
      EXPECT_LE(std::fabs(Rounded<TypeParam>(value, chance) - value),
                std::max(value * TypeParam::kPrecision, TypeParam::kMinStep));
    }
  }
}

TYPED_TEST(NarrowFloats, VectorConversionEqualsScalar) {
  using Rounding = typename TypeParam::Rounding;
  std::vector<float> values = Values(), lenders = Values();
  values.insert(values.end(), {kInfinity, -kInfinity, 70000.f, TypeParam::kLargest});
  std::reverse(lenders.begin(), lenders.end());
  lenders.insert(lenders.end(), {1e30f, -1e30f, 3.f, 1e-30f});
  for (const int64_t n : {1, 15, 16, 17, 31, 32, 33, 49}) {
    std::vector<uint8_t> bytes(static_cast<size_t>(2 * n + 3), 0xee);
    std::vector<uint8_t> words(static_cast<size_t>(4 * n + 3), 0xee);
    std::vector<float> back(static_cast<size_t>(n)), halves(back), lent(back);
    if constexpr (TypeParam::kMore == 0) {
      WriteHalves<Rounding>(values.data(), n, 99, 64, bytes.data() + 1);
      ReadHalves<Rounding>(bytes.data() + 1, n, back.data());
    } else {
      WriteBorrowed<Rounding>(values.data(), lenders.data(), n, 99, 64, bytes.data() + 1,
                              words.data() + 1);
      ReadBorrowed<Rounding>(bytes.data() + 1, words.data() + 1, n, back.data(), lent.data());
      ReadHalves<Rounding>(bytes.data() + 1, n, halves.data());
    }
    EXPECT_EQ(bytes[0], 0xee);
    EXPECT_EQ(bytes[2 * n + 1], 0xee);
    EXPECT_EQ(words[0], 0xee);
    EXPECT_EQ(words[4 * n + 1], 0xee);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t chance = ChanceOf(99, static_cast<uint32_t>(64 + i));
      EXPECT_EQ(back[i], Rounded<TypeParam>(values[i], chance)) << values[i];
      if (TypeParam::kMore == 0) continue;
      // Expects the nearest value; above the middle between the largest one and infinity, infinity.
      const float nearest = Nearest<Rounding>(back[i]);
      EXPECT_EQ(halves[i], nearest) << back[i];
      const uint32_t lender = BitsOf(lenders[i]) + (chance & kLentBits);
      EXPECT_EQ(BitsOf(lent[i]), lender & ~kLentBits) << lenders[i];
    }
  }
}

// The random bits of neighbors, and of a value in successive updates, are independent.
TEST(ChanceOf, BitsAreUniformAndIndependent) {
  int ones[16] = {};
  int ups = 0;
  constexpr int kDraws = 1 << 14;
  for (uint32_t i = 0; i < kDraws; ++i) {
    const uint32_t bits = ChanceOf(77, i), next = ChanceOf(78, i);
    for (int b = 0; b < 16; ++b) ones[b] += bits >> b & 1u;
    ups += bits > next;
  }
  for (const int count : ones) EXPECT_NEAR(count, kDraws / 2, 300);
  EXPECT_NEAR(ups, kDraws / 2, 300);
}

}  // namespace
}  // namespace slipstream
