// Deferred gradients of one shard: a sum per key, oldest first.
#ifndef SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_GRADIENTS_H_
#define SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_GRADIENTS_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/containers/hash_index.h"

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

  // The index of a key's gradient, or kNone.
  uint32_t Find(int64_t key) const {
    const HashIndex::Entry* entry = index_of_.Find(key);
    return entry == nullptr ? kNone : entry->index;
  }

  // Adds a key that has none, as the youngest, its values undefined. Throws std::bad_alloc, leaving
  // all as it was. Moves the sums.
  uint32_t Insert(int64_t key, int64_t step);

  void Remove(uint32_t index);
  void Clear();

  float* Sum(uint32_t index) { return sums_.data() + static_cast<int64_t>(index) * dim_; }
  int64_t key(uint32_t index) const { return nodes_[index].key; }
  // The update in which the sum began.
  int64_t since(uint32_t index) const { return nodes_[index].since; }

  // From the oldest to the youngest; kNone after the last.
  uint32_t oldest() const { return oldest_; }
  uint32_t next(uint32_t index) const { return nodes_[index].next; }

 private:
  struct Node {
    int64_t key;
    int64_t since;
    uint32_t previous, next;  // by age; `next` also chains free nodes
  };

  int64_t dim_;
  HashIndex index_of_;  // key -> index in `nodes_`
  std::vector<Node> nodes_;
  std::vector<float> sums_;
  uint32_t oldest_ = kNone, youngest_ = kNone, free_ = kNone;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_DEFERRAL_DEFERRED_GRADIENTS_H_
