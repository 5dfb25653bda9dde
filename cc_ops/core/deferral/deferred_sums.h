// Pending updates of one shard: a gradient sum per key, oldest first.
#ifndef SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_SUMS_H_
#define SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_SUMS_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/containers/hash_index.h"

namespace slipstream {

// Places are numbers that stay valid until their sum is removed. Not thread-safe: a
// shard has one owner at a time.
class DeferredSums {
 public:
  static constexpr uint32_t kNone = 0xffffffffu;

  // dim: values of a sum, at least 1.
  explicit DeferredSums(int64_t dim) : dim_(dim) {}

  int64_t size() const { return index_.size(); }
  int64_t bytes() const;

  // The place of a key's sum, or kNone.
  uint32_t Find(int64_t key, uint64_t hash) const {
    const HashIndex::Entry* entry = index_.Find(key, hash);
    return entry == nullptr ? kNone : entry->slot;
  }

  // Adds a key that has no sum, as the youngest, its values undefined. Throws
  // std::bad_alloc, leaving all as it was. Moves the sums.
  uint32_t Insert(int64_t key, uint64_t hash, int64_t step);

  void Remove(uint32_t place);
  void Clear();

  float* Sum(uint32_t place) { return sums_.data() + static_cast<int64_t>(place) * dim_; }
  int64_t key(uint32_t place) const { return nodes_[place].key; }
  // The update in which the sum began.
  int64_t since(uint32_t place) const { return nodes_[place].since; }

  // From the oldest to the youngest; kNone after the last.
  uint32_t oldest() const { return oldest_; }
  uint32_t next(uint32_t place) const { return nodes_[place].next; }

 private:
  struct Node {
    int64_t key;
    int64_t since;
    uint32_t previous, next;  // by age; `next` also chains free places
  };

  int64_t dim_;
  HashIndex index_;  // key -> place
  std::vector<Node> nodes_;
  std::vector<float> sums_;
  uint32_t oldest_ = kNone, youngest_ = kNone, free_ = kNone;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_SUMS_H_
