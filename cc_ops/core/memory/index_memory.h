// Memory for the indexes of a table's shards: those of like size lie in one region, in huge pages
// where the system has them, so that random places cost fewer TLB misses.
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

// A shard's index that has outgrown its block takes one that is a quarter larger; shards are of
// like size and do so one after the other. Pages of blocks that are left go back to the system at
// once, a region with its last block. Thread-safe.
class IndexMemory {
 public:
  // blocks: that there will be of each size, within a quarter; more are no error.
  explicit IndexMemory(int blocks) : blocks_(blocks) {}
  IndexMemory(const IndexMemory&) = delete;
  IndexMemory& operator=(const IndexMemory&) = delete;

  // A block, aligned to 64, its memory uninitialised. Throws std::bad_alloc, changing nothing.
  void* Allocate(size_t bytes);
  // bytes: as given to Allocate.
  void Release(void* block, size_t bytes);

 private:
  // Blocks lie in it in the order in which they were taken.
  struct Region {
    PageMemory memory;
    size_t begun = 0;  // bytes of all blocks, left ones too
    int blocks = 0;    // in use
  };

  const int blocks_;
  std::mutex mutex_;
  std::map<size_t, std::vector<Region>> regions_;  // by the bytes of their largest block
};

// For std::vector; without an IndexMemory it takes from the heap.
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
