// One of the parts that a table's keys fall into.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_SHARD_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_SHARD_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/containers/hash_index.h"
#include "cc_ops/core/memory/index_memory.h"
#include "cc_ops/core/memory/row_arena.h"
#include "cc_ops/core/memory/slab_allocator.h"

namespace slipstream {

// A part of the keys with its own index and rows; touched by one thread at a time.
struct RowShard {
  RowShard(int number, int64_t stride, SlabAllocator* memory, IndexMemory* index_memory)
      : index(index_memory, number), arena(stride, memory) {}
  HashIndex index;
  RowArena arena;
  std::vector<int64_t> last_used;  // by index; LRU tables only
  std::vector<uint8_t> changed;    // by index, while RowStore tracks changes

  // What a lookup reads first; the arena's chunks need this to have come.
  SLIPSTREAM_PREFETCHES void Prefetch() const {
    __builtin_prefetch(&index);
    __builtin_prefetch(&arena);
    __builtin_prefetch(&arena + 1);
  }
};

// Calls fn(shard) for all shards, several at the same time.
template <class Fn>
void ForEachShard(const Parallel& parallel, const Fn& fn) {
  parallel.run(parallel.threads, [&](int task) {
    const TaskRange range = RangeOf(task, parallel.threads, kNumShards);
    for (int64_t s = range.begin; s < range.end; ++s) fn(static_cast<int>(s));
  });
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_SHARD_H_
