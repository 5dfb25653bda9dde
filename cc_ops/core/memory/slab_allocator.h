// Memory for a table's rows, taken from the system in large slabs: huge pages
// where the system has them, so that random rows cost fewer TLB misses.
#ifndef SLIPSTREAM_CC_OPS_CORE_MEMORY_SLAB_ALLOCATOR_H_
#define SLIPSTREAM_CC_OPS_CORE_MEMORY_SLAB_ALLOCATOR_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace slipstream {

// Blocks live as long as the allocator. Thread-safe.
class SlabAllocator {
 public:
  // A block of `bytes`, aligned to 64. Throws std::bad_alloc, changing nothing.
  void* Allocate(size_t bytes);

  // Taken from the system so far; pages never touched cost no memory.
  int64_t bytes() const;

 private:
  struct Free {
    Free() : alignment{} {}
    explicit Free(std::align_val_t of_memory) : alignment(of_memory) {}
    std::align_val_t alignment;
    void operator()(char* p) const { ::operator delete(p, alignment); }
  };

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<char, Free>> slabs_;
  char* next_ = nullptr;  // free part of the last slab
  size_t left_ = 0;
  size_t total_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_MEMORY_SLAB_ALLOCATOR_H_
