#include "cc_ops/core/exchange/float_packing.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cc_ops/core/base/float_bits.h"

namespace slipstream {
namespace {

template <class Bits>
void ExpectRoundTrip(const std::vector<Bits>& values) {
  const int64_t n = static_cast<int64_t>(values.size());
  std::vector<uint8_t> packed = {7};
  PackFloats(values.data(), n, &packed);
  // A bit for each block, at worst.
  EXPECT_LE(packed.size() - 1, values.size() * sizeof(Bits) + values.size() / 128 + 1);
  EXPECT_GE(static_cast<int64_t>(packed.size()) - 1, LeastPackedBytes<Bits>(n));
  std::vector<Bits> unpacked(values.size());
  int64_t used = 0;
  // Something may follow.
  const int64_t bytes = static_cast<int64_t>(packed.size()) - 1;
  packed.push_back(255);
  const Status status = UnpackFloats(packed.data() + 1, bytes + 1, n, unpacked.data(), &used);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(used, bytes);
  EXPECT_EQ(unpacked, values);
}

uint32_t Special(uint32_t n) {
  const float values[] = {0.f,
                          -0.f,
                          1.f,
                          std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::denorm_min(),
                          std::numeric_limits<float>::max()};
  return BitsOf(values[n % 7]);
}

TEST(PackFloats, GivesEveryBitBack) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<uint32_t> values(random() % 70);
    std::vector<uint16_t> halves;
    const int kind = round % 3;
    std::normal_distribution<float> normal(0.f, std::ldexp(1.f, static_cast<int>(random() % 90)));
    for (uint32_t& value : values) {
      const uint32_t any = static_cast<uint32_t>(random());
      value = kind == 0 ? any : kind == 1 ? BitsOf(normal(random)) : Special(any % 11);
      halves.push_back(static_cast<uint16_t>(value >> 16));
    }
    ExpectRoundTrip(values);
    ExpectRoundTrip(halves);
  }
}

TEST(PackFloats, TakesFewerBitsForValuesOfLikeMagnitude) {
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal;
  std::vector<uint32_t> values;
  std::vector<uint16_t> halves;
  for (int row = 0; row < 1000; ++row) {
    const float scale = std::exp(normal(random));
    for (int i = 0; i < 16; ++i) {
      values.push_back(BitsOf(scale * normal(random)));
      halves.push_back(static_cast<uint16_t>(values.back() >> 16));
    }
  }
  std::vector<uint8_t> packed;
  PackFloats(values.data(), static_cast<int64_t>(values.size()), &packed);
  EXPECT_LT(packed.size(), .86 * 4 * static_cast<double>(values.size()));
  packed.clear();
  PackFloats(halves.data(), static_cast<int64_t>(halves.size()), &packed);
  EXPECT_LT(packed.size(), .72 * 2 * static_cast<double>(halves.size()));
}

TEST(UnpackFloats, RefusesDamage) {
  std::vector<uint32_t> values;
  for (int i = 0; i < 40; ++i) values.push_back(BitsOf(1.f + static_cast<float>(i)));
  std::vector<uint8_t> packed;
  PackFloats(values.data(), 40, &packed);
  std::vector<uint32_t> unpacked(400);
  int64_t used = 0;
  const int64_t bytes = static_cast<int64_t>(packed.size());
  for (int64_t end = 0; end < bytes; ++end) {
    // Apart, so that a sanitizer finds what is read behind the end.
    const std::vector<uint8_t> cut(packed.begin(), packed.begin() + end);
    EXPECT_FALSE(UnpackFloats(cut.data(), end, 40, unpacked.data(), &used).ok()) << end;
  }
  EXPECT_FALSE(UnpackFloats(packed.data(), bytes, 400, unpacked.data(), &used).ok());
  std::mt19937_64 random(3);
  for (int round = 0; round < 2000; ++round) {
    std::vector<uint8_t> wrong = packed;
    for (int i = 0; i < 3; ++i) wrong[random() % wrong.size()] = static_cast<uint8_t>(random());
    const Status status = UnpackFloats(wrong.data(), bytes, 40, unpacked.data(), &used);
    if (status.ok()) {
      EXPECT_LE(used, bytes);
    }
  }
}

}  // namespace
}  // namespace slipstream
