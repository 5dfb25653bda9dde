#include "cc_ops/core/memory/index_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/containers/hash_index.h"

namespace slipstream {
namespace {

TEST(IndexMemory, BlocksOfEqualSizeAreAdjacent) {
  IndexMemory memory(3);
  std::vector<char*> blocks;
  for (int b = 0; b < 3; ++b) {
    blocks.push_back(static_cast<char*>(memory.Allocate(100)));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(blocks[b]) % 64, 0u);
    std::memset(blocks[b], b + 1, 100);
  }
  for (int b = 0; b < 3; ++b) {
    for (int i = 0; i < 100; ++i) EXPECT_EQ(blocks[b][i], b + 1);
  }
  EXPECT_EQ(blocks[1], blocks[0] + 128);
  EXPECT_EQ(blocks[2], blocks[0] + 256);
  // More blocks than announced are allowed.
  char* further = static_cast<char*>(memory.Allocate(100));
  std::memset(further, 9, 100);
  memory.Release(blocks[1], 100);
  EXPECT_EQ(blocks[0][99], 1);
  EXPECT_EQ(blocks[2][0], 3);
  memory.Release(further, 100);
  for (int b : {0, 2}) memory.Release(blocks[b], 100);
}

TEST(IndexMemory, FreedBlocksReturnTheirPages) {
  // Whole pages are returned and read as zeros; neighboring blocks keep theirs.
  constexpr size_t kBytes = size_t{1} << 20;
  IndexMemory memory(4);
  std::vector<char*> blocks;
  for (int b = 0; b < 4; ++b) {
    blocks.push_back(static_cast<char*>(memory.Allocate(kBytes)));
    std::memset(blocks[b], 7, kBytes);
  }
  memory.Release(blocks[2], kBytes);
#if defined(__linux__)
  EXPECT_EQ(blocks[2][kBytes / 2], 0);
#endif
  for (int b : {0, 1, 3}) {
    EXPECT_EQ(blocks[b][0], 7);
    EXPECT_EQ(blocks[b][kBytes - 1], 7);
    memory.Release(blocks[b], kBytes);
  }
}

TEST(IndexMemory, ShardsGrowConcurrently) {
  constexpr int kShards = 8, kKeys = 80000;  // The indexes also prepare their next memory.
  IndexMemory memory(kShards);
  std::vector<HashIndex> shards;
  for (int s = 0; s < kShards; ++s) shards.emplace_back(&memory, 8 * s);
  std::vector<std::thread> threads;
  for (int s = 0; s < kShards; ++s) {
    threads.emplace_back([&shards, s] {
      for (int64_t key = 0; key < kKeys; ++key) {
        shards[s].Insert(key, static_cast<uint32_t>(key * kShards + s));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int s = 0; s < kShards; ++s) {
    for (int64_t key = 0; key < kKeys; ++key) {
      const HashIndex::Entry* found = shards[s].Find(key);
      ASSERT_NE(found, nullptr);
      ASSERT_EQ(found->index, static_cast<uint32_t>(key * kShards + s));
    }
  }
}

}  // namespace
}  // namespace slipstream
