#include "cc_ops/core/memory/slab_allocator.h"

#include <algorithm>

namespace slipstream {
namespace {

constexpr size_t kSmallestSlab = size_t{64} << 10;
constexpr size_t kLargestSlab = size_t{256} << 20;

}  // namespace

void* SlabAllocator::Allocate(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bytes = RoundUp(bytes, kLineBytes);
  if (bytes > left_) {
    // Double the total size, so that there are few slabs.
    slabs_.emplace_back(std::max(bytes, std::clamp(total_, kSmallestSlab, kLargestSlab)));
    next_ = slabs_.back().data();
    left_ = slabs_.back().size();
    total_ += left_;
  }
  void* block = next_;
  next_ += bytes;
  left_ -= bytes;
  return block;
}

int64_t SlabAllocator::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(total_);
}

}  // namespace slipstream
