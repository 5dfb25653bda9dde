#include "cc_ops/core/exchange/key_packing.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

namespace slipstream {
namespace {

constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

std::vector<int64_t> RoundTrip(const std::vector<int64_t>& sizes, const std::vector<int64_t>& keys,
                               size_t* bytes = nullptr) {
  std::vector<uint8_t> packed;
  std::vector<int64_t> ends, unpacked;
  const int64_t parcels = static_cast<int64_t>(sizes.size());
  PackKeys(sizes.data(), parcels, keys.data(), &packed, &ends);
  EXPECT_EQ(ends.size(), sizes.size());
  if (bytes != nullptr) *bytes = packed.size();
  const Status status = UnpackKeys(sizes.data(), parcels, packed.data(),
                                   static_cast<int64_t>(packed.size()), &unpacked);
  EXPECT_TRUE(status.ok()) << status.message();
  return unpacked;
}

TEST(PackKeys, GivesTheKeysBack) {
  const std::vector<int64_t> extremes = {kLeast, kMost, 0, -1, 1, kMost, kLeast, kLeast, 63, 64};
  EXPECT_EQ(RoundTrip({4, 0, 6}, extremes), extremes);
  EXPECT_EQ(RoundTrip({}, {}), std::vector<int64_t>());
  EXPECT_EQ(RoundTrip({0, 0}, {}), std::vector<int64_t>());
  std::mt19937_64 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> sizes, keys;
    for (int parcel = 0; parcel < 4; ++parcel) {
      sizes.push_back(static_cast<int64_t>(random() % 20));
      for (int64_t i = 0; i < sizes.back(); ++i) {
        keys.push_back(static_cast<int64_t>(random() >> (random() % 64)) * (random() % 2 ? 1 : -1));
      }
    }
    EXPECT_EQ(RoundTrip(sizes, keys), keys);
  }
}

TEST(PackKeys, TakesAByteForAscendingNeighbours) {
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < 1000; ++i) keys.push_back(1000000 + 50 * i);
  size_t bytes = 0;
  RoundTrip({1000}, keys, &bytes);
  EXPECT_LE(bytes, 1003u);
}

TEST(UnpackKeys, RefusesDamage) {
  std::vector<uint8_t> packed;
  std::vector<int64_t> ends, keys;
  const int64_t sizes[] = {2}, more[] = {3}, fewer[] = {1}, negative[] = {-1};
  const int64_t given[] = {5, 1000};
  PackKeys(sizes, 1, given, &packed, &ends);
  const int64_t bytes = static_cast<int64_t>(packed.size());
  EXPECT_FALSE(UnpackKeys(more, 1, packed.data(), bytes, &keys).ok());
  EXPECT_FALSE(UnpackKeys(fewer, 1, packed.data(), bytes, &keys).ok());
  EXPECT_FALSE(UnpackKeys(negative, 1, packed.data(), bytes, &keys).ok());
  EXPECT_FALSE(UnpackKeys(sizes, 1, packed.data(), bytes - 1, &keys).ok());
  const std::vector<uint8_t> endless(20, 0xff);
  EXPECT_FALSE(UnpackKeys(fewer, 1, endless.data(), 20, &keys).ok());
  const int64_t huge[] = {kMost};
  EXPECT_FALSE(UnpackKeys(huge, 1, packed.data(), bytes, &keys).ok());
}

}  // namespace
}  // namespace slipstream
