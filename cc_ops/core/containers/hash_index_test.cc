#include "cc_ops/core/containers/hash_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/memory/index_memory.h"
#include "cc_ops/core/testing/container_fuzz.h"

namespace slipstream {
namespace {

TEST(HashIndex, EmptyIndexFindsNothing) {
  HashIndex index;
  EXPECT_EQ(index.Find(7), nullptr);
  EXPECT_FALSE(index.Erase(7));
  EXPECT_EQ(index.size(), 0);
}

TEST(HashIndex, AcceptsEveryInt64Key) {
  HashIndex index;
  const std::vector<int64_t> keys = {0, -1, 1, std::numeric_limits<int64_t>::min(),
                                     std::numeric_limits<int64_t>::max()};
  for (size_t i = 0; i < keys.size(); ++i) {
    index.Insert(keys[i], static_cast<uint32_t>(i));
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    ASSERT_NE(index.Find(keys[i]), nullptr);
    EXPECT_EQ(index.Find(keys[i])->index, i);
  }
}

// With few keys in a small index, entries wrap around its end, which backward-shift deletion must
// handle. Many keys make the index grow.
void AgreesWithUnorderedMap(int64_t range) {
  std::mt19937_64 random(1);
  HashIndex index;
  std::unordered_map<int64_t, uint32_t> reference;
  for (int step = 0; step < 200000; ++step) {
    const int64_t key = static_cast<int64_t>(random() % static_cast<uint64_t>(range)) - range / 2;
    HashIndex::Entry* found = index.Find(key);
    ASSERT_EQ(found != nullptr, reference.count(key) == 1) << "key " << key;
    if (random() % 2 == 0) {
      if (found == nullptr) {
        index.Insert(key, static_cast<uint32_t>(step))->count = 2.f;
        reference[key] = static_cast<uint32_t>(step);
      } else {
        ASSERT_EQ(found->index, reference[key]);
        ASSERT_EQ(found->count, 2.f);
      }
    } else {
      ASSERT_EQ(index.Erase(key), reference.erase(key) == 1);
    }
    ASSERT_EQ(index.size(), static_cast<int64_t>(reference.size()));
  }
  for (const auto& [key, expected] : reference) {
    ASSERT_NE(index.Find(key), nullptr);
    EXPECT_EQ(index.Find(key)->index, expected);
  }
}

TEST(HashIndex, FewKeysEqualUnorderedMap) { AgreesWithUnorderedMap(12); }
TEST(HashIndex, ManyKeysEqualUnorderedMap) { AgreesWithUnorderedMap(5000); }

// Returns the longest run of used entries, which bounds the length of a search.
int64_t LongestRun(const HashIndex& index) {
  int64_t longest = 0, run = 0;
  for (const HashIndex::Entry& entry : index.entries()) {
    run = entry.index == HashIndex::kEmpty ? 0 : run + 1;
    longest = std::max(longest, run);
  }
  return longest;
}

TEST(HashIndex, AdversarialKeysDoNotCollide) {
  // With HashKey, which is public, all of these keys would be in one shard and one line.
  constexpr int64_t kKeys = 6000;
  HashIndex index;
  for (int64_t i = 0; i < kKeys; ++i) {
    const int64_t key = fuzz::KeyWithHash(static_cast<uint64_t>(i));
    ASSERT_EQ(ShardOf(key), 0);
    index.Insert(key, static_cast<uint32_t>(i));
  }
  EXPECT_LT(LongestRun(index), kKeys / 8);
}

// Growth of all shards in one step would make that step slow.
TEST(HashIndex, EquallyFilledShardsGrowAtDifferentTimes) {
  std::vector<HashIndex> shards;
  for (int s = 0; s < kNumShards; ++s) shards.emplace_back(nullptr, s);
  constexpr int64_t kKeys = 40000, kStep = 400;  // 1% of the final number of keys.
  for (int64_t begin = 0; begin < kKeys; begin += kStep) {
    int grown = 0;
    for (HashIndex& shard : shards) {
      const size_t before = shard.entries().size();
      for (int64_t key = begin; key < begin + kStep; ++key) {
        shard.Insert(key, static_cast<uint32_t>(key));
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
  for (int64_t key = 0; key < n; ++key) index.Insert(key, 0);
  EXPECT_LE(static_cast<double>(index.entries().size()) * sizeof(HashIndex::Entry) / n, 25.1);
}

// Keys are inserted and erased before and after the index grows.
TEST(HashIndex, GrowingLargeIndexKeepsItsKeys) {
  std::mt19937_64 random(2);
  IndexMemory memory(1);
  HashIndex index(&memory);
  std::vector<int64_t> keys, erased;
  int64_t next = 0;
  while (index.entries().size() < 200000) {
    keys.push_back(next);
    index.Insert(next, static_cast<uint32_t>(next))->count = 3.f;
    ++next;
    if (random() % 3 == 0) {
      std::swap(keys[random() % keys.size()], keys.back());
      ASSERT_TRUE(index.Erase(keys.back()));
      erased.push_back(keys.back());
      keys.pop_back();
    }
  }
  ASSERT_EQ(index.size(), static_cast<int64_t>(keys.size()));
  for (const int64_t key : keys) {
    const HashIndex::Entry* const found = index.Find(key);
    ASSERT_NE(found, nullptr);
    ASSERT_EQ(found->index, static_cast<uint32_t>(key));
    ASSERT_EQ(found->count, 3.f);
  }
  for (const int64_t key : erased) ASSERT_EQ(index.Find(key), nullptr);
}

// A step that waited for all of the memory would be slow.
TEST(HashIndex, LargeIndexPreparesNextEntriesBeforeItGrows) {
  IndexMemory memory(1);
  HashIndex index(&memory);
  int grown = 0;
  for (int64_t key = 0; grown < 3; ++key) {
    const int64_t before = static_cast<int64_t>(index.entries().size());
    const int64_t prepared = index.prepared();
    index.Insert(key, 0);
    const int64_t now = static_cast<int64_t>(index.entries().size());
    if (now == before) {
      // About 125 at a time, in the last hundredth.
      ASSERT_LE(index.prepared(), prepared + 130);
      ASSERT_EQ(index.prepared() > 0, before >= 1 << 16 && key + 1 > before * 4 / 5 - before / 100);
    } else if (before >= 1 << 16) {
      EXPECT_EQ(prepared, now);
      ++grown;
    }
    const int64_t all = now + (index.prepared() > 0 ? now + now / 4 : 0);
    ASSERT_NEAR(static_cast<double>(index.bytes()), static_cast<double>(all * 16), 64);
  }
}

TEST(HashIndex, ErasingKeysDropsPreparedEntries) {
  IndexMemory memory(1);
  HashIndex index(&memory);
  int64_t key = 0;
  for (; index.prepared() == 0; ++key) index.Insert(key, 0);
  const int64_t leaving = static_cast<int64_t>(index.entries().size() / 100) + 1;
  const int64_t bytes_with_next = index.bytes();
  for (int64_t i = 0; i < leaving; ++i) {
    ASSERT_EQ(index.bytes(), bytes_with_next) << i;
    --key;
    ASSERT_TRUE(index.Erase(key));
  }
  EXPECT_EQ(index.prepared(), 0);
  EXPECT_EQ(index.bytes(), static_cast<int64_t>(index.entries().size() * 16));
  // The index prepares its next entries again.
  for (int64_t i = 0; i < leaving; ++i, ++key) index.Insert(key, 0);
  EXPECT_GT(index.prepared(), 0);
}

TEST(HashIndex, HeapIndexPreparesNothing) {
  HashIndex index;
  for (int64_t key = 0; key < 200000; ++key) {
    index.Insert(key, 0);
    ASSERT_EQ(index.bytes(), static_cast<int64_t>(index.entries().size() * 16));
  }
}

}  // namespace
}  // namespace slipstream
