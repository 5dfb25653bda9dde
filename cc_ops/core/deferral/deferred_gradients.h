// The deferred gradients of one shard of a table: one sum of gradients per key, ordered by age.
//
// A sum is addressed by an index, which it keeps until it is removed. Then the index and its memory
// are reused. The order by age makes the scan for expired sums proportional to their number.
#ifndef SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_GRADIENTS_H_
#define SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_GRADIENTS_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/containers/hash_index.h"
#include "cc_ops/core/memory/index_memory.h"

namespace slipstream {

// Not thread-safe: only one thread at a time touches a shard.
class DeferredGradients {
 public:
  static constexpr uint32_t kNone = 0xffffffffu;

  // dim: number of values of a sum, at least 1.
  explicit DeferredGradients(int64_t dim) : dim_(dim) {}

  int64_t size() const { return index_of_.size(); }
  int64_t bytes() const;

  // Returns the index of the sum of a key, or kNone. `hash` must be KeyedHash(key).
  uint32_t Find(int64_t key, uint64_t hash) const {
    const HashIndex::Entry* entry = index_of_.Find(key, hash);
    return entry == nullptr ? kNone : entry->index;
  }
  uint32_t Find(int64_t key) const { return Find(key, KeyedHash(key)); }

  // Prefetches the members that all functions read first.
  SLIPSTREAM_PREFETCHES void Prefetch() const {
    __builtin_prefetch(&index_of_);
    __builtin_prefetch(&sums_);
    __builtin_prefetch(&free_);
  }
  // Prefetches the memory that Find reads.
  SLIPSTREAM_PREFETCHES void PrefetchFind(uint64_t hash) const { index_of_.Prefetch(hash); }
  // Prefetches the sum with this index.
  SLIPSTREAM_PREFETCHES void Prefetch(uint32_t index) const {
    constexpr int64_t kCacheLine = 16;
    __builtin_prefetch(&since_[index], 1);
    __builtin_prefetch(&nodes_[index], 1);
    const float* const sum = sums_.data() + static_cast<int64_t>(index) * dim_;
    for (int64_t j = 0; j < dim_; j += kCacheLine) __builtin_prefetch(sum + j, 1);
  }

  // Adds a sum with undefined values for an absent key, as the youngest sum, and returns its index.
  // step: number of the update, which never decreases. Note: invalidates pointers returned by Sum.
  // Throws std::bad_alloc (strong exception guarantee).
  uint32_t Insert(int64_t key, int64_t step);

  void Remove(uint32_t index);
  void Clear();

  // Returns the values of a sum: [dim].
  float* Sum(uint32_t index) { return sums_.data() + static_cast<int64_t>(index) * dim_; }
  int64_t key(uint32_t index) const { return nodes_[index].key; }
  // The update in which the sum began.
  int64_t since(uint32_t index) const { return since_[index]; }

  // Return the index of the oldest sum, and of the sum that is next in age; kNone after the last.
  uint32_t oldest() const { return first_ < by_age_.size() ? by_age_[first_] : kNone; }
  uint32_t next(uint32_t index) const {
    const size_t i = InUseFrom(nodes_[index].order + 1);
    return i < by_age_.size() ? by_age_[i] : kNone;
  }

 private:
  struct Node {
    int64_t key;
    uint32_t order;  // Index in `by_age_`; for a free node, the next free node.
  };

  // Returns the first used entry of `by_age_` from i on, or the number of entries.
  size_t InUseFrom(size_t i) const {
    while (i < by_age_.size() && by_age_[i] == kNone) ++i;
    return i;
  }
  // Makes room for one more entry. Throws std::bad_alloc; the order is unchanged then.
  void ReserveEntry();

  int64_t dim_;
  HashIndex index_of_;  // Key -> index in `nodes_`.
  std::vector<Node> nodes_;
  std::vector<int64_t> since_;  // Separate from `nodes_`, because most steps read no other field.
  std::vector<float, IndexAllocator<float>> sums_;  // In whole cache lines.
  // Indices from the oldest to the youngest; kNone where one was removed. Removal from a linked
  // list would have to load the neighbors.
  std::vector<uint32_t> by_age_;
  size_t first_ = 0;  // Position of the oldest in `by_age_`.
  uint32_t free_ = kNone;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_GRADIENTS_H_
