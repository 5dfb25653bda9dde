// Memory for a table's rows, taken from the system in large slabs: huge pages
// where the system has them, so that random rows cost fewer TLB misses.
#ifndef SLIPSTREAM_CC_OPS_CORE_MEMORY_SLAB_ALLOCATOR_H_
#define SLIPSTREAM_CC_OPS_CORE_MEMORY_SLAB_ALLOCATOR_H_

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "cc_ops/core/memory/page_memory.h"

namespace slipstream {

// Blocks live as long as the allocator. Thread-safe.
class SlabAllocator {
 public:
  // A block of `bytes`, aligned to 64. Throws std::bad_alloc, changing nothing.
  void* Allocate(size_t bytes);

  // Taken from the system so far; pages never touched cost no memory.
  int64_t bytes() const;

 private:
  mutable std::mutex mutex_;
  std::vector<PageMemory> slabs_;
  char* next_ = nullptr;  // free part of the last slab
  size_t left_ = 0;
  size_t total_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_MEMORY_SLAB_ALLOCATOR_H_
