#include "cc_ops/core/containers/key_set.h"

#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace slipstream {
namespace {

constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();

KeySet SetOf(const std::vector<int64_t>& keys) {
  KeySet set;
  EXPECT_TRUE(set.Build(keys.data(), static_cast<int64_t>(keys.size())).ok());
  return set;
}

TEST(KeySet, NewSetIsEmpty) {
  const KeySet set;
  EXPECT_EQ(set.size(), 0);
  for (int64_t key : {kLowest, int64_t{-1}, int64_t{0}, kHighest}) EXPECT_FALSE(set.Contains(key));
}

TEST(KeySet, AcceptsEveryInt64Key) {
  const std::vector<int64_t> keys = {kLowest, kLowest + 1, -1, 0, 1, kHighest};
  const KeySet all = SetOf(keys);
  EXPECT_EQ(all.size(), 6);
  for (int64_t key : keys) EXPECT_TRUE(all.Contains(key)) << key;
  for (int64_t absent : keys) {
    std::vector<int64_t> others;
    for (int64_t key : keys) {
      if (key != absent) others.push_back(key);
    }
    EXPECT_FALSE(SetOf(others).Contains(absent)) << absent;
  }
}

TEST(KeySet, DuplicateKeyCountsOnce) {
  const KeySet set = SetOf({7, kLowest, 7, kLowest, 7});
  EXPECT_EQ(set.size(), 2);
  EXPECT_TRUE(set.Contains(7));
  EXPECT_TRUE(set.Contains(kLowest));
}

TEST(KeySet, BuildReplacesTheContent) {
  KeySet set = SetOf({1, 2, kLowest});
  const int64_t other = 3;
  ASSERT_TRUE(set.Build(&other, 1).ok());
  EXPECT_TRUE(set.Contains(3));
  for (int64_t key : {int64_t{1}, int64_t{2}, kLowest}) EXPECT_FALSE(set.Contains(key)) << key;
  ASSERT_TRUE(set.Build(nullptr, 0).ok());
  EXPECT_EQ(set.size(), 0);
  EXPECT_FALSE(set.Contains(3));
}

TEST(KeySet, EqualsAStandardSet) {
  for (int64_t n : {7, 8, 9, 1000, 4096}) {
    std::set<int64_t> expected;
    std::vector<int64_t> keys;
    for (int64_t i = 0; i < n; ++i) {
      keys.push_back((i * 7919) % (3 * n) - n);
      expected.insert(keys.back());
    }
    const KeySet set = SetOf(keys);
    EXPECT_EQ(set.size(), static_cast<int64_t>(expected.size()));
    for (int64_t key = -2 * n; key < 3 * n; ++key) {
      EXPECT_EQ(set.Contains(key), expected.count(key) > 0) << n << " " << key;
    }
  }
}

}  // namespace
}  // namespace slipstream
