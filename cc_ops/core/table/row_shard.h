// One of the 64 parts into which a table divides its keys.
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

// A subset of a table's keys with its index and rows. While a thread changes it, no other thread
// uses it.
struct RowShard {
  RowShard(int number, int64_t stride, SlabAllocator* memory, IndexMemory* index_memory)
      : index(index_memory, number), arena(stride, memory) {}
  HashIndex index;
  RowArena arena;
  std::vector<int64_t> last_used;  // Last access by index; empty unless RowStore::tracks_use.
  // Whether a row changed, by index; used while RowStore tracks changes (TakeChanges).
  std::vector<uint8_t> changed;
  // Whether all rows are in range (ValueRange). Once false, it stays false until all rows are
  // replaced, and updates of the table are checked (checked_update.h).
  bool is_in_range = true;

  // Prefetches the members that a lookup reads first.
  SLIPSTREAM_PREFETCHES void Prefetch() const {
    __builtin_prefetch(&index);
    __builtin_prefetch(&arena);
    __builtin_prefetch(&arena + 1);
  }
};

// Calls fn(shard) for all shards, in parallel.
template <class Fn>
void ForEachShard(const Parallel& parallel, const Fn& fn) {
  parallel.run(parallel.threads, [&](int task) {
    const TaskRange range = RangeOf(task, parallel.threads, kNumShards);
    for (int64_t s = range.begin; s < range.end; ++s) fn(static_cast<int>(s));
  });
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_SHARD_H_
