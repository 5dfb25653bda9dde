// Memory for the rows of one shard, addressed by index.
#ifndef SLIPSTREAM_CC_OPS_CORE_MEMORY_ROW_ARENA_H_
#define SLIPSTREAM_CC_OPS_CORE_MEMORY_ROW_ARENA_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/memory/slab_allocator.h"

namespace slipstream {

// Opaque type of an encoded row in memory; table/row_layout.h defines the contents.
class StoredRow;

// Numbers rows by index and never moves them: growing allocates one chunk and copies nothing.
// Chunk sizes double from kFirstChunk to kLargestChunk rows. The small first chunks keep the memory
// of small arenas low; the limit keeps the unused part of the last chunk small.
class RowArena {
 public:
  // stride: bytes from one row to the next, at least 4. `memory` owns the rows and must outlive the
  // arena.
  RowArena(int64_t stride, SlabAllocator* memory)
      : stride_(static_cast<size_t>(stride)), memory_(memory) {}

  // Returns the row with an index that Allocate has returned.
  StoredRow* Row(uint32_t index) const {
    const Address address = AddressOf(index);
    return reinterpret_cast<StoredRow*>(chunks_[address.chunk] + address.row * stride_);
  }

  // One more than the largest index that was ever returned.
  uint32_t end() const { return next_; }

  // Prefetches the addresses of the first chunks.
  SLIPSTREAM_PREFETCHES void PrefetchChunks() const { __builtin_prefetch(chunks_.data()); }

  // Returns the index of an uninitialized row. Throws std::bad_alloc (strong exception guarantee).
  uint32_t Allocate() {
    if (free_ != kNone) {
      const uint32_t index = free_;
      std::memcpy(&free_, static_cast<void*>(Row(index)), sizeof(free_));
      return index;
    }
    if (next_ == 0xfffffff0u) throw std::bad_alloc();
    const size_t chunk = AddressOf(next_).chunk;
    if (chunk == chunks_.size()) {
      if (chunk == chunks_.capacity()) chunks_.reserve(2 * chunk + 8);
      const uint64_t rows = chunk < kDoublings ? kFirstChunk << chunk : kLargestChunk;
      chunks_.push_back(static_cast<char*>(memory_->Allocate(rows * stride_)));
    }
    return next_++;
  }

  // Frees a row; Allocate reuses its index. Needs no memory for a list, because a free row contains
  // the index of the row that was freed before it.
  void Release(uint32_t index) noexcept {
    std::memcpy(static_cast<void*>(Row(index)), &free_, sizeof(free_));
    free_ = index;
  }

 private:
  static constexpr uint32_t kNone = 0xffffffffu;
  static constexpr int kFirstBits = 4, kLargestBits = 10;
  static constexpr uint64_t kFirstChunk = 1 << kFirstBits, kLargestChunk = 1 << kLargestBits;
  static constexpr size_t kDoublings = kLargestBits - kFirstBits;

  struct Address {
    size_t chunk;
    size_t row;  // Number of the row within its chunk.
  };
  // Computed without branches, because the chunk of an index is unpredictable. The index of
  // the first row of a chunk, plus kFirstChunk, is a multiple of the number of rows of the chunk.
  static Address AddressOf(uint32_t index) {
    const uint64_t shifted = index + kFirstChunk;
    const int bits = std::min(63 - __builtin_clzll(shifted), kLargestBits);
    return {static_cast<size_t>(bits - kFirstBits - 1) + static_cast<size_t>(shifted >> bits),
            static_cast<size_t>(shifted & ((uint64_t{1} << bits) - 1))};
  }

  size_t stride_;
  SlabAllocator* memory_;
  std::vector<char*> chunks_;
  uint32_t free_ = kNone;  // Index of the row that was released last.
  uint32_t next_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_MEMORY_ROW_ARENA_H_
