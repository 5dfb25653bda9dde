#include "cc_ops/core/deferral/deferred_gradients.h"

namespace slipstream {

int64_t DeferredGradients::bytes() const {
  return index_of_.bytes() + static_cast<int64_t>(nodes_.capacity() * sizeof(Node)) +
         static_cast<int64_t>(since_.capacity() * sizeof(int64_t)) +
         static_cast<int64_t>(sums_.capacity() * sizeof(float)) +
         static_cast<int64_t>(by_age_.capacity() * sizeof(uint32_t));
}

void DeferredGradients::ReserveEntry() {
  const size_t entries = by_age_.size();
  if (entries < by_age_.capacity()) return;
  // Compact if a quarter of the entries is unused; otherwise grow by a quarter.
  if (entries == 0 || static_cast<size_t>(size()) >= entries - entries / 4) {
    by_age_.reserve(entries + entries / 4 + 1);
    return;
  }
  size_t kept = 0;
  for (size_t i = first_; i < entries; i = InUseFrom(i + 1)) {
    nodes_[by_age_[i]].order = static_cast<uint32_t>(kept);
    by_age_[kept++] = by_age_[i];
  }
  by_age_.resize(kept);
  first_ = 0;
}

uint32_t DeferredGradients::Insert(int64_t key, int64_t step) {
  ReserveEntry();
  uint32_t index = free_;
  if (index == kNone) {
    if (nodes_.size() == nodes_.capacity()) {
      // Grow all by a quarter, so that little memory is unused.
      const size_t wanted = nodes_.size() + nodes_.size() / 4 + 1;
      sums_.reserve(wanted * static_cast<size_t>(dim_));
      since_.reserve(wanted);
      nodes_.reserve(wanted);
    }
    index = static_cast<uint32_t>(nodes_.size());
    index_of_.Insert(key, index);
    nodes_.push_back({});
    since_.push_back(0);
    sums_.resize(nodes_.size() * static_cast<size_t>(dim_));
  } else {
    index_of_.Insert(key, index);
    free_ = nodes_[index].order;
  }
  nodes_[index] = {key, static_cast<uint32_t>(by_age_.size())};
  since_[index] = step;
  by_age_.push_back(index);
  return index;
}

void DeferredGradients::Remove(uint32_t index) {
  Node& node = nodes_[index];
  index_of_.Erase(node.key);
  by_age_[node.order] = kNone;
  first_ = InUseFrom(first_);
  node.order = free_;
  free_ = index;
}

void DeferredGradients::Clear() { *this = DeferredGradients(dim_); }

}  // namespace slipstream
