#include "cc_ops/core/deferral/deferred_sums.h"

#include <algorithm>

#include "cc_ops/core/base/hash.h"

namespace slipstream {

int64_t DeferredSums::bytes() const {
  return index_.bytes() + static_cast<int64_t>(nodes_.capacity() * sizeof(Node)) +
         static_cast<int64_t>(sums_.capacity() * sizeof(float));
}

uint32_t DeferredSums::Insert(int64_t key, uint64_t hash, int64_t step) {
  uint32_t place = free_;
  if (place == kNone) {
    if (nodes_.size() == nodes_.capacity()) {
      // Both grow by a quarter, so that little is allocated in vain.
      const size_t wanted = nodes_.size() + nodes_.size() / 4 + 1;
      sums_.reserve(wanted * static_cast<size_t>(dim_));
      nodes_.reserve(wanted);
    }
    place = static_cast<uint32_t>(nodes_.size());
    index_.Insert(key, hash, place);
    nodes_.push_back({});
    sums_.resize(nodes_.size() * static_cast<size_t>(dim_));
  } else {
    index_.Insert(key, hash, place);
    free_ = nodes_[place].next;
  }
  nodes_[place] = {key, step, youngest_, kNone};
  (youngest_ == kNone ? oldest_ : nodes_[youngest_].next) = place;
  youngest_ = place;
  return place;
}

void DeferredSums::Remove(uint32_t place) {
  Node& node = nodes_[place];
  index_.Erase(node.key, HashKey(node.key));
  (node.previous == kNone ? oldest_ : nodes_[node.previous].next) = node.next;
  (node.next == kNone ? youngest_ : nodes_[node.next].previous) = node.previous;
  node.next = free_;
  free_ = place;
}

void DeferredSums::Clear() { *this = DeferredSums(dim_); }

}  // namespace slipstream
