#include "cc_ops/core/containers/key_map.h"

#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace slipstream {
namespace {

constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();

TEST(KeyMap, ANewOneIsEmpty) {
  const KeyMap map;
  EXPECT_EQ(map.size(), 0);
  for (int64_t key : {kLowest, int64_t{-1}, int64_t{0}, kHighest}) {
    EXPECT_EQ(map.view().Find(key).index, KeyMapEntry::kNowhere);
    EXPECT_EQ(map.view().Find(key).state, 0u);
  }
}

TEST(KeyMap, EveryInt64IsAKey) {
  const std::vector<int64_t> keys = {kLowest, kLowest + 1, -1, 0, 1, kHighest};
  for (size_t without = 0; without <= keys.size(); ++without) {
    std::vector<int64_t> others = keys;
    if (without < keys.size()) others.erase(others.begin() + static_cast<int64_t>(without));
    KeyMap map;
    ASSERT_TRUE(map.Build(others.data(), nullptr, static_cast<int64_t>(others.size())).ok());
    for (size_t i = 0; i < keys.size(); ++i) {
      const int32_t index = static_cast<int32_t>(i < without ? i : i - 1);
      EXPECT_EQ(map.view().Find(keys[i]).index, i == without ? KeyMapEntry::kNowhere : index);
    }
  }
}

TEST(KeyMap, OfAKeyGivenTwiceTheFirstCounts) {
  const std::vector<int64_t> keys = {7, 8, 7, 9, 8};
  const std::vector<uint8_t> states = {1, 2, 3, 255, 5};
  KeyMap map;
  ASSERT_TRUE(map.Build(keys.data(), states.data(), 5).ok());
  EXPECT_EQ(map.size(), 3);
  EXPECT_EQ(map.view().Find(7).index, 0);
  EXPECT_EQ(map.view().Find(8).state, 2u);
  EXPECT_EQ(map.view().Find(9).index, 3);
  EXPECT_EQ(map.view().Find(9).state, 255u);
}

TEST(KeyMap, BuildReplacesTheContent) {
  const std::vector<int64_t> keys = {1, 2}, others = {2, 3};
  const std::vector<uint8_t> states = {4, 5};
  KeyMap map;
  ASSERT_TRUE(map.Build(keys.data(), states.data(), 2).ok());
  ASSERT_TRUE(map.Build(others.data(), nullptr, 2).ok());
  EXPECT_EQ(map.view().Find(1).index, KeyMapEntry::kNowhere);
  EXPECT_EQ(map.view().Find(2).index, 0);
  EXPECT_EQ(map.view().Find(2).state, 0u);
  ASSERT_TRUE(map.Build(nullptr, nullptr, 0).ok());
  EXPECT_EQ(map.view().Find(2).index, KeyMapEntry::kNowhere);
  EXPECT_EQ(map.size(), 0);
}

TEST(KeyMap, TooManyKeysChangeNothing) {
  const int64_t key = 4;
  KeyMap map;
  ASSERT_TRUE(map.Build(&key, nullptr, 1).ok());
  const Status status = map.Build(&key, nullptr, KeyMap::kMaxKeys + 1);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("2147483648"), std::string::npos) << status.message();
  EXPECT_EQ(map.view().Find(4).index, 0);
}

TEST(KeyMap, EqualsAStandardMap) {
  uint64_t random = 1;
  std::vector<int64_t> keys;
  std::map<int64_t, int32_t> expected;
  for (int32_t i = 0; i < 20000; ++i) {
    random = Mix64(random);
    keys.push_back(static_cast<int64_t>(random % 30000) - 15000);
    expected.emplace(keys.back(), i);
  }
  KeyMap map;
  ASSERT_TRUE(map.Build(keys.data(), nullptr, static_cast<int64_t>(keys.size())).ok());
  EXPECT_EQ(map.size(), static_cast<int64_t>(expected.size()));
  for (int64_t key = -16000; key < 16000; ++key) {
    const auto found = expected.find(key);
    EXPECT_EQ(map.view().Find(key).index,
              found == expected.end() ? KeyMapEntry::kNowhere : found->second);
  }
}

}  // namespace
}  // namespace slipstream
