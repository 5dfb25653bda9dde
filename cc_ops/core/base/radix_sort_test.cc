#include "cc_ops/core/base/radix_sort.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace slipstream {
namespace {

struct Item {
  int64_t key;
  int order;
};

TEST(RadixSort, SortsSignedKeysStably) {
  std::mt19937_64 random(1);
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  for (const size_t count : {0u, 1u, 2u, 3u, 5000u}) {
    // Dense keys, which differ only in their low digits, and hashes.
    for (const uint64_t mask : {uint64_t{0xfff}, ~uint64_t{0}}) {
      std::vector<Item> items;
      for (size_t i = 0; i < count; ++i) {
        const auto key = static_cast<int64_t>(random() & mask);
        items.push_back({i % 7 == 0 ? kMin + (key & 3) : key, static_cast<int>(i)});
      }
      std::vector<Item> expected = items;
      std::stable_sort(expected.begin(), expected.end(),
                       [](const Item& a, const Item& b) { return a.key < b.key; });
      RadixSort(&items, [](const Item& item) { return AscendingBits(item.key); });
      ASSERT_EQ(items.size(), expected.size());
      for (size_t i = 0; i < items.size(); ++i) {
        ASSERT_EQ(items[i].key, expected[i].key) << i;
        ASSERT_EQ(items[i].order, expected[i].order) << i;
      }
    }
  }
}

TEST(RadixSort, SortsFloatsInDescendingOrder) {
  std::vector<float> numbers = {1.f, 0.f, std::numeric_limits<float>::max(), 1e-45f, 2.5f, 1.f};
  numbers.push_back(std::numeric_limits<float>::infinity());
  std::vector<float> expected = numbers;
  std::sort(expected.rbegin(), expected.rend());
  RadixSort(&numbers, [](float number) { return DescendingBits(number); });
  EXPECT_EQ(numbers, expected);
}

}  // namespace
}  // namespace slipstream
