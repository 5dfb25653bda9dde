// Memory of one shard's rows: values and optimizer slots of a row side by side.
#ifndef SLIPSTREAM_CC_OPS_CORE_ROW_ARENA_H_
#define SLIPSTREAM_CC_OPS_CORE_ROW_ARENA_H_

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "cc_ops/core/slab_allocator.h"

namespace slipstream {

// Rows are numbered by slot and never move: chunk c holds kFirstChunk << c rows,
// so growing allocates one chunk and copies nothing.
class RowArena {
 public:
  // stride: floats from one row to the next, at least 1. `memory` owns the rows
  // and must outlive the arena.
  RowArena(int64_t stride, SlabAllocator* memory) : stride_(stride), memory_(memory) {}

  float* Row(uint32_t slot) const {
    const int chunk = ChunkOf(slot);
    return chunks_[chunk] + (slot - FirstSlot(chunk)) * stride_;
  }

  // A slot for a new row, its memory uninitialised. Throws std::bad_alloc, changing nothing.
  uint32_t Allocate() {
    if (free_ != kNone) {
      const uint32_t slot = free_;
      std::memcpy(&free_, Row(slot), sizeof(free_));
      return slot;
    }
    if (next_ == 0xfffffff0u) throw std::bad_alloc();
    const size_t chunk = static_cast<size_t>(ChunkOf(next_));
    if (chunk == chunks_.size()) {
      chunks_.reserve(chunk + 1);
      const size_t bytes = (kFirstChunk << chunk) * static_cast<size_t>(stride_) * sizeof(float);
      chunks_.push_back(static_cast<float*>(memory_->Allocate(bytes)));
    }
    return next_++;
  }

  // Needs no memory: a row that is free holds the slot of the one that became so before it.
  void Release(uint32_t slot) noexcept {
    std::memcpy(Row(slot), &free_, sizeof(free_));
    free_ = slot;
  }

 private:
  static constexpr uint32_t kNone = 0xffffffffu;
  static constexpr uint64_t kFirstChunk = 16;
  static int ChunkOf(uint32_t slot) { return 63 - __builtin_clzll(slot / kFirstChunk + 1); }
  static uint64_t FirstSlot(int chunk) { return (kFirstChunk << chunk) - kFirstChunk; }

  int64_t stride_;
  SlabAllocator* memory_;
  std::vector<float*> chunks_;
  uint32_t free_ = kNone;  // released last
  uint32_t next_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_ROW_ARENA_H_
