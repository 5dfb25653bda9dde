// Memory for the rows of a table, allocated in large slabs of huge pages, so that random accesses
// cause fewer TLB misses.
#ifndef SLIPSTREAM_CC_OPS_CORE_MEMORY_SLAB_ALLOCATOR_H_
#define SLIPSTREAM_CC_OPS_CORE_MEMORY_SLAB_ALLOCATOR_H_

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "cc_ops/core/memory/page_memory.h"

namespace slipstream {

// Allocates blocks that are freed only together, when the allocator is destroyed. Thread-safe.
class SlabAllocator {
 public:
  // Returns a block of `bytes`, aligned to 64. Throws std::bad_alloc (strong exception guarantee).
  void* Allocate(size_t bytes);

  // Bytes allocated from the system. Pages that were never touched need no physical memory.
  int64_t bytes() const;

 private:
  mutable std::mutex mutex_;
  std::vector<PageMemory> slabs_;
  char* next_ = nullptr;  // Free part of the last slab.
  size_t left_ = 0;
  size_t total_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_MEMORY_SLAB_ALLOCATOR_H_
