#include "cc_ops/core/deferral/deferred_gradients.h"

#include <algorithm>

namespace slipstream {

int64_t DeferredGradients::bytes() const {
  return index_of_.bytes() + static_cast<int64_t>(nodes_.capacity() * sizeof(Node)) +
         static_cast<int64_t>(sums_.capacity() * sizeof(float));
}

uint32_t DeferredGradients::Insert(int64_t key, int64_t step) {
  uint32_t index = free_;
  if (index == kNone) {
    if (nodes_.size() == nodes_.capacity()) {
      // Both grow by a quarter, so that little is allocated in vain.
      const size_t wanted = nodes_.size() + nodes_.size() / 4 + 1;
      sums_.reserve(wanted * static_cast<size_t>(dim_));
      nodes_.reserve(wanted);
    }
    index = static_cast<uint32_t>(nodes_.size());
    index_of_.Insert(key, index);
    nodes_.push_back({});
    sums_.resize(nodes_.size() * static_cast<size_t>(dim_));
  } else {
    index_of_.Insert(key, index);
    free_ = nodes_[index].next;
  }
  nodes_[index] = {key, step, youngest_, kNone};
  (youngest_ == kNone ? oldest_ : nodes_[youngest_].next) = index;
  youngest_ = index;
  return index;
}

void DeferredGradients::Remove(uint32_t index) {
  Node& node = nodes_[index];
  index_of_.Erase(node.key);
  (node.previous == kNone ? oldest_ : nodes_[node.previous].next) = node.next;
  (node.next == kNone ? youngest_ : nodes_[node.next].previous) = node.previous;
  node.next = free_;
  free_ = index;
}

void DeferredGradients::Clear() { *this = DeferredGradients(dim_); }

}  // namespace slipstream
