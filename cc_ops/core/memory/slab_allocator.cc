#include "cc_ops/core/memory/slab_allocator.h"

#include <algorithm>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace slipstream {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmallestSlab = size_t{64} << 10;
constexpr size_t kLargestSlab = size_t{256} << 20;

size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

void* SlabAllocator::Allocate(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bytes = RoundUp(bytes, kAlignment);
  if (bytes > left_) {
    // As much as there is already, so that the number of slabs stays small.
    size_t size = std::max(bytes, std::clamp(total_, kSmallestSlab, kLargestSlab));
    const bool is_huge = size >= kHugePage;
    size = RoundUp(size, is_huge ? kHugePage : kAlignment);
    slabs_.reserve(slabs_.size() + 1);
    const std::align_val_t alignment{is_huge ? kHugePage : kAlignment};
    std::unique_ptr<char, Free> slab(static_cast<char*>(::operator new(size, alignment)),
                                     Free(alignment));
#if defined(__linux__)
    // Only a wish: without huge pages everything works as well.
    if (is_huge) madvise(slab.get(), size, MADV_HUGEPAGE);
#endif
    next_ = slab.get();
    left_ = size;
    total_ += size;
    slabs_.push_back(std::move(slab));
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
