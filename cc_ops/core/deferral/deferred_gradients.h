// Deferred gradients of one shard: a sum per key, oldest first.
#ifndef SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_GRADIENTS_H_
#define SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_GRADIENTS_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/containers/hash_index.h"
#include "cc_ops/core/memory/index_memory.h"

namespace slipstream {

// The number of a gradient stays valid until it is removed. Not thread-safe: a
// shard has one owner at a time.
class DeferredGradients {
 public:
  static constexpr uint32_t kNone = 0xffffffffu;

  // dim: values of a sum, at least 1.
  explicit DeferredGradients(int64_t dim) : dim_(dim) {}

  int64_t size() const { return index_of_.size(); }
  int64_t bytes() const;

  // The index of a key's gradient, or kNone. hash: its KeyedHash.
  uint32_t Find(int64_t key, uint64_t hash) const {
    const HashIndex::Entry* entry = index_of_.Find(key, hash);
    return entry == nullptr ? kNone : entry->index;
  }
  uint32_t Find(int64_t key) const { return Find(key, KeyedHash(key)); }

  // What all of these read first.
  SLIPSTREAM_PREFETCHES void Prefetch() const {
    __builtin_prefetch(&index_of_);
    __builtin_prefetch(&sums_);
    __builtin_prefetch(&free_);
  }
  // What Find reads.
  SLIPSTREAM_PREFETCHES void PrefetchFind(uint64_t hash) const { index_of_.Prefetch(hash); }
  // What is read and written of a gradient.
  SLIPSTREAM_PREFETCHES void Prefetch(uint32_t index) const {
    constexpr int64_t kCacheLine = 16;
    __builtin_prefetch(&since_[index], 1);
    __builtin_prefetch(&nodes_[index], 1);
    const float* const sum = sums_.data() + static_cast<int64_t>(index) * dim_;
    for (int64_t j = 0; j < dim_; j += kCacheLine) __builtin_prefetch(sum + j, 1);
  }

  // Adds a key that has none, as the youngest, its values undefined. Throws std::bad_alloc, leaving
  // all as it was. Moves the sums.
  uint32_t Insert(int64_t key, int64_t step);

  void Remove(uint32_t index);
  void Clear();

  float* Sum(uint32_t index) { return sums_.data() + static_cast<int64_t>(index) * dim_; }
  int64_t key(uint32_t index) const { return nodes_[index].key; }
  // The update in which the sum began.
  int64_t since(uint32_t index) const { return since_[index]; }

  // From the oldest to the youngest; kNone after the last.
  uint32_t oldest() const { return first_ < by_age_.size() ? by_age_[first_] : kNone; }
  uint32_t next(uint32_t index) const {
    const size_t i = InUseFrom(nodes_[index].order + 1);
    return i < by_age_.size() ? by_age_[i] : kNone;
  }

 private:
  struct Node {
    int64_t key;
    uint32_t order;  // its index in `by_age_`; of a free node: the next free one
  };

  // The first entry of `by_age_` from i on that is in use, or their number.
  size_t InUseFrom(size_t i) const {
    while (i < by_age_.size() && by_age_[i] == kNone) ++i;
    return i;
  }
  // Has room for one more entry. Throws std::bad_alloc, changing no order.
  void ReserveEntry();

  int64_t dim_;
  HashIndex index_of_;  // key -> index in `nodes_`
  std::vector<Node> nodes_;
  std::vector<int64_t> since_;                      // apart: most steps read nothing else of a node
  std::vector<float, IndexAllocator<float>> sums_;  // in whole cache lines
  // Indices from the oldest to the youngest, kNone where one has left. Of a linked list a removal
  // would have to fetch the neighbours.
  std::vector<uint32_t> by_age_;
  size_t first_ = 0;  // entry of the oldest
  uint32_t free_ = kNone;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_GRADIENTS_H_
