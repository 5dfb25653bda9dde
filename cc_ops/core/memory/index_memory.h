// Memory for the hash indexes of a table's shards.
//
// Blocks of similar size share a region of huge pages, if the system has huge pages. Random
// accesses then cause fewer TLB misses.
#ifndef SLIPSTREAM_CC_OPS_CORE_MEMORY_INDEX_MEMORY_H_
#define SLIPSTREAM_CC_OPS_CORE_MEMORY_INDEX_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <type_traits>
#include <vector>

#include "cc_ops/core/memory/page_memory.h"

namespace slipstream {

// Allocates blocks for the indexes of one table. An index that outgrows its block takes a block
// that is a quarter larger. The shards of a table have similar sizes and grow one after the other.
// Therefore the blocks of one size fill a region. The pages of a released block return to the
// system immediately, and the region is freed with its last block. Thread-safe.
class IndexMemory {
 public:
  // blocks: expected number of blocks of each size, where sizes that differ by less than a quarter
  // count as one. More blocks are allowed.
  explicit IndexMemory(int blocks) : blocks_(blocks) {}
  IndexMemory(const IndexMemory&) = delete;
  IndexMemory& operator=(const IndexMemory&) = delete;

  // Returns uninitialized memory aligned to 64. Throws std::bad_alloc (strong exception guarantee).
  void* Allocate(size_t bytes);
  // bytes: the argument of Allocate.
  void Release(void* block, size_t bytes);

 private:
  // Memory of multiple blocks, in the order of their allocation.
  struct Region {
    PageMemory memory;
    size_t begun = 0;  // Bytes of all blocks, including released ones.
    int blocks = 0;    // Blocks in use.
  };

  const int blocks_;
  std::mutex mutex_;
  std::map<size_t, std::vector<Region>> regions_;  // By the size of their largest block.
};

// Allocator for std::vector. Without an IndexMemory it uses the heap.
template <class T>
class IndexAllocator {
 public:
  using value_type = T;
  using propagate_on_container_move_assignment = std::true_type;
  using propagate_on_container_swap = std::true_type;

  explicit IndexAllocator(IndexMemory* memory = nullptr) : memory_(memory) {}

  T* allocate(size_t n) {
    const size_t bytes = n * sizeof(T);
    return static_cast<T*>(memory_ != nullptr ? memory_->Allocate(bytes)
                                              : ::operator new(bytes, kAlignment));
  }
  void deallocate(T* p, size_t n) {
    if (memory_ != nullptr) {
      memory_->Release(p, n * sizeof(T));
    } else {
      ::operator delete(p, kAlignment);
    }
  }
  bool operator==(const IndexAllocator& other) const { return memory_ == other.memory_; }
  bool operator!=(const IndexAllocator& other) const { return memory_ != other.memory_; }

 private:
  static constexpr std::align_val_t kAlignment{kLineBytes};
  IndexMemory* memory_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_MEMORY_INDEX_MEMORY_H_
