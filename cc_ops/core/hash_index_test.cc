#include "cc_ops/core/hash_index.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <unordered_map>
#include <vector>

#include "cc_ops/core/hash.h"

namespace slipstream {
namespace {

TEST(HashIndex, EmptyFindsNothing) {
  HashIndex index;
  EXPECT_EQ(index.Find(7, HashKey(7)), nullptr);
  EXPECT_FALSE(index.Erase(7, HashKey(7)));
  EXPECT_EQ(index.size(), 0);
}

TEST(HashIndex, EveryInt64IsAKey) {
  HashIndex index;
  const std::vector<int64_t> keys = {0, -1, 1, std::numeric_limits<int64_t>::min(),
                                     std::numeric_limits<int64_t>::max()};
  for (size_t i = 0; i < keys.size(); ++i) {
    index.Insert(keys[i], HashKey(keys[i]), static_cast<uint32_t>(i));
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    ASSERT_NE(index.Find(keys[i], HashKey(keys[i])), nullptr);
    EXPECT_EQ(index.Find(keys[i], HashKey(keys[i]))->slot, i);
  }
}

// Few keys in a small index wrap around its end all the time: the case that
// backward-shift deletion must get right. Many keys make it grow.
void AgreesWithUnorderedMap(int64_t range) {
  std::mt19937_64 random(1);
  HashIndex index;
  std::unordered_map<int64_t, uint32_t> reference;
  for (int step = 0; step < 200000; ++step) {
    const int64_t key = static_cast<int64_t>(random() % static_cast<uint64_t>(range)) - range / 2;
    const uint64_t hash = HashKey(key);
    HashIndex::Entry* found = index.Find(key, hash);
    ASSERT_EQ(found != nullptr, reference.count(key) == 1) << "key " << key;
    if (random() % 2 == 0) {
      if (found == nullptr) {
        index.Insert(key, hash, static_cast<uint32_t>(step))->count = 2.f;
        reference[key] = static_cast<uint32_t>(step);
      } else {
        ASSERT_EQ(found->slot, reference[key]);
        ASSERT_EQ(found->count, 2.f);
      }
    } else {
      ASSERT_EQ(index.Erase(key, hash), reference.erase(key) == 1);
    }
    ASSERT_EQ(index.size(), static_cast<int64_t>(reference.size()));
  }
  for (const auto& [key, slot] : reference) {
    ASSERT_NE(index.Find(key, HashKey(key)), nullptr);
    EXPECT_EQ(index.Find(key, HashKey(key))->slot, slot);
  }
}

TEST(HashIndex, FewKeysAgreeWithUnorderedMap) { AgreesWithUnorderedMap(12); }
TEST(HashIndex, ManyKeysAgreeWithUnorderedMap) { AgreesWithUnorderedMap(5000); }

// What all grow in one step makes that step long.
TEST(HashIndex, ShardsThatFillAlikeGrowOneAfterTheOther) {
  std::vector<HashIndex> shards;
  for (int s = 0; s < kNumShards; ++s) shards.emplace_back(nullptr, s);
  constexpr int64_t kKeys = 40000, kStep = 400;  // 1% of the keys at the end
  for (int64_t begin = 0; begin < kKeys; begin += kStep) {
    int grown = 0;
    for (HashIndex& shard : shards) {
      const size_t before = shard.entries().size();
      for (int64_t key = begin; key < begin + kStep; ++key) {
        shard.Insert(key, HashKey(key), static_cast<uint32_t>(key));
      }
      grown += shard.entries().size() != before;
    }
    if (begin >= 10000) {
      EXPECT_LE(grown, static_cast<int>(6 * kNumShards * kStep / begin)) << begin;
    }
  }
}

TEST(HashIndex, LargeIndexStaysCompact) {
  HashIndex index;
  const int64_t n = 200000;
  for (int64_t key = 0; key < n; ++key) index.Insert(key, HashKey(key), 0);
  EXPECT_LE(static_cast<double>(index.entries().size()) * sizeof(HashIndex::Entry) / n, 25.1);
}

}  // namespace
}  // namespace slipstream
