#include "cc_ops/core/base/row_codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cc_ops/core/base/bfloat16.h"
#include "cc_ops/core/base/float16.h"

namespace slipstream {
namespace {

constexpr RowDtype kAll[] = {RowDtype::kFloat32, RowDtype::kBfloat16, RowDtype::kFloat16,
                             RowDtype::kInt8};

std::vector<float> ThereAndBack(const std::vector<float>& values, int64_t dim, RowDtype dtype,
                                RowRounding rounding = RowRounding::kNearest) {
  const int64_t n = static_cast<int64_t>(values.size()) / dim;
  std::vector<int64_t> keys(static_cast<size_t>(n));
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i) * 7 - 3;
  const auto bytes = static_cast<size_t>(n * EncodedBytes(dtype, dim));
  // An odd address, because rows may start at any address.
  std::vector<uint8_t> encoded(bytes + 2, 0xee);
  EncodeRows(values.data(), keys.data(), n, dim, dtype, rounding, encoded.data() + 1);
  EXPECT_EQ(encoded.back(), 0xee);
  std::vector<float> back(values.size(), 42.f);
  DecodeRows(encoded.data() + 1, n, dim, dtype, back.data());
  return back;
}

std::vector<float> Normal(int64_t n, float deviation, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.f, deviation);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& value : values) value = normal(random);
  return values;
}

TEST(RowCodec, ErrorsAreAtMostHalfStep) {
  for (const RowDtype dtype : kAll) {
    for (const int64_t dim : {1, 3, 16, 64, 100}) {
      const std::vector<float> values = Normal(40 * dim, .01f, 1);
      const std::vector<float> back = ThereAndBack(values, dim, dtype);
      for (int64_t i = 0; i < 40; ++i) {
        float largest = 0;
        for (int64_t j = 0; j < dim; ++j)
          largest = std::max(largest, std::fabs(values[i * dim + j]));
        for (int64_t j = 0; j < dim; ++j) {
          const float value = values[i * dim + j];
          const float allowed = dtype == RowDtype::kFloat32    ? 0.f
                                : dtype == RowDtype::kBfloat16 ? std::fabs(value) / 256
                                : dtype == RowDtype::kFloat16  ? std::fabs(value) / 2048 + 3e-8f
                                                               : largest / 254 * 1.00001f;
          EXPECT_NEAR(back[i * dim + j], value, allowed);
        }
      }
    }
  }
}

TEST(RowCodec, HalfRoundTripsAndFloatsRoundToNearest) {
  for (uint32_t half = 0; half < 0x10000u; ++half) {
    const float value = FromFloat16(static_cast<uint16_t>(half));
    const uint16_t again = RoundToFloat16(value);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(FromFloat16(again)));
      continue;
    }
    EXPECT_EQ(again, half);
    const uint32_t magnitude = half & 0x7fffu;
    if (magnitude >= 0x7bffu) continue;
    // The value by definition of the format. The midpoint to the next value rounds to even.
    const float exponent = magnitude < 0x400u ? 1.f : static_cast<float>(magnitude >> 10);
    const float mantissa = static_cast<float>(magnitude & 0x3ffu) + (magnitude < 0x400u ? 0 : 1024);
    EXPECT_EQ(std::fabs(value), std::ldexp(mantissa, static_cast<int>(exponent) - 25));
    const float next = FromFloat16(static_cast<uint16_t>(half + 1));
    const uint32_t even = half + (half & 1u);
    EXPECT_EQ(RoundToFloat16((value + next) / 2), even) << half;
    EXPECT_EQ(RoundToFloat16(std::nextafter((value + next) / 2, value)), half);
    EXPECT_EQ(RoundToFloat16(std::nextafter((value + next) / 2, next)), half + 1);
  }
  EXPECT_EQ(FromFloat16(RoundToFloat16(1e9f)), 65504.f);
  EXPECT_EQ(FromFloat16(RoundToFloat16(-1e9f)), -65504.f);
  EXPECT_EQ(FromFloat16(RoundToFloat16(1e-9f)), 0.f);
}

TEST(RowCodec, StochasticRoundingIsUnbiased) {
  constexpr int64_t kRows = 40000, kDim = 8;
  std::vector<float> values = Normal(kRows * kDim, 1e-4f, 2);
  // Next to a large value, all other values are within a fraction of a step from 0.
  for (int64_t i = 0; i < kRows; ++i) values[i * kDim] = 1.27f * (1.f + 1e-6f * (i % 100));
  const std::vector<float> back =
      ThereAndBack(values, kDim, RowDtype::kInt8, RowRounding::kByChance);
  const std::vector<float> nearest = ThereAndBack(values, kDim, RowDtype::kInt8);
  for (int64_t j = 1; j < kDim; ++j) {
    double sum = 0, sum_back = 0;
    int64_t differ = 0;
    for (int64_t i = 0; i < kRows; ++i) {
      sum += values[i * kDim + j];
      sum_back += back[i * kDim + j];
      differ += back[i * kDim + j] != nearest[i * kDim + j];
    }
    // The standard deviation of a value is below half a step, .005.
    EXPECT_NEAR(sum_back / kRows, sum / kRows, 4 * .005 / std::sqrt(kRows)) << j;
    EXPECT_GT(differ, 0);
  }
}

TEST(RowCodec, EqualRowsEncodeToEqualBytes) {
  const std::vector<float> values = Normal(1000, 1.f, 3);
  EXPECT_EQ(ThereAndBack(values, 10, RowDtype::kInt8, RowRounding::kByChance),
            ThereAndBack(values, 10, RowDtype::kInt8, RowRounding::kByChance));
}

TEST(RowCodec, ExtremeValuesRoundTrip) {
  const float maximum = std::numeric_limits<float>::max();
  for (const RowRounding rounding : {RowRounding::kNearest, RowRounding::kByChance}) {
    const auto back = [&](const std::vector<float>& row) {
      return ThereAndBack(row, static_cast<int64_t>(row.size()), RowDtype::kInt8, rounding);
    };
    EXPECT_EQ(back({0.f, -0.f}), (std::vector<float>{0.f, 0.f}));
    EXPECT_EQ(back({1e-40f, 0.f})[0], 0.f);
    EXPECT_NEAR(back({1e-30f, 0.f})[0], 1e-30f, 1e-36f);
    EXPECT_NEAR(back({-maximum, maximum})[0] / maximum, -1.f, 1e-2f);
    EXPECT_NEAR(back({-maximum, maximum})[1] / maximum, 1.f, 1e-2f);
    for (int i = 1; i < 2000; ++i) {
      const float value = 1.f / static_cast<float>(i);
      EXPECT_NEAR(back({value, -value})[0], value, value * 1e-6f);
      EXPECT_NEAR(back({value, -value})[1], -value, value * 1e-6f);
    }
  }
}

TEST(RowCodec, DetectsNonFiniteValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const RowDtype dtype : kAll) {
    for (const float bad : {std::nanf(""), infinity, -infinity}) {
      for (size_t bad_index = 0; bad_index < 5; ++bad_index) {
        std::vector<float> row = {1.f, 2.f, -3.f, 65000.f, 0.f};
        std::vector<uint8_t> encoded(static_cast<size_t>(EncodedBytes(dtype, 5)));
        const auto encode = [&] {
          EncodeRows(row.data(), nullptr, 1, 5, dtype, RowRounding::kNearest, encoded.data());
        };
        encode();
        EXPECT_TRUE(EncodedIsFinite(encoded.data(), 5, dtype));
        row[bad_index] = bad;
        encode();
        EXPECT_FALSE(EncodedIsFinite(encoded.data(), 5, dtype));
        std::vector<float> back(5);
        DecodeRows(encoded.data(), 1, 5, dtype, back.data());
        EXPECT_FALSE(std::isfinite(back[bad_index]));
      }
    }
  }
}

TEST(RowCodec, DetectsScaleWithNonFiniteMultiples) {
  const float maximum = std::numeric_limits<float>::max();
  std::vector<uint8_t> encoded(5);
  EncodeRows(&maximum, nullptr, 1, 1, RowDtype::kInt8, RowRounding::kNearest, encoded.data());
  EXPECT_TRUE(EncodedIsFinite(encoded.data(), 1, RowDtype::kInt8));
  for (const float scale : {2.66e36f, 3e38f, -3e38f}) {
    std::memcpy(encoded.data(), &scale, sizeof(scale));
    EXPECT_FALSE(EncodedIsFinite(encoded.data(), 1, RowDtype::kInt8)) << scale;
  }
}

TEST(RowCodec, EmptyInputEncodesToNoBytes) {
  for (const RowDtype dtype : kAll) EXPECT_EQ(EncodedBytes(dtype, 0), 0);
}

}  // namespace
}  // namespace slipstream
