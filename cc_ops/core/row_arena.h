// Memory of one shard's rows: values and optimizer slots of a row side by side.
#ifndef SLIPSTREAM_CC_OPS_CORE_ROW_ARENA_H_
#define SLIPSTREAM_CC_OPS_CORE_ROW_ARENA_H_

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace slipstream {

// Rows are numbered by slot and never move: chunk c holds kFirstChunk << c rows,
// so growing allocates one chunk and copies nothing. Chunks are 64-byte aligned.
class RowArena {
 public:
  // stride: floats from one row to the next, at least 1.
  explicit RowArena(int64_t stride) : stride_(stride) {}

  float* Row(uint32_t slot) const {
    const int chunk = ChunkOf(slot);
    return chunks_[chunk].get() + (slot - FirstSlot(chunk)) * stride_;
  }

  // A slot for a new row, its memory uninitialised. Throws std::bad_alloc.
  uint32_t Allocate() {
    if (!free_.empty()) {
      const uint32_t slot = free_.back();
      free_.pop_back();
      return slot;
    }
    if (next_ == 0xfffffff0u) throw std::bad_alloc();
    const size_t chunk = static_cast<size_t>(ChunkOf(next_));
    if (chunk == chunks_.size()) {
      const size_t bytes = (kFirstChunk << chunk) * static_cast<size_t>(stride_) * sizeof(float);
      const size_t rounded = (bytes + 63) / 64 * 64;
      std::unique_ptr<float[], Free> memory(static_cast<float*>(std::aligned_alloc(64, rounded)));
      if (memory == nullptr) throw std::bad_alloc();
      chunks_.push_back(std::move(memory));
    }
    return next_++;
  }

  void Release(uint32_t slot) { free_.push_back(slot); }

  void Clear() {
    chunks_.clear();
    free_.clear();
    next_ = 0;
  }

  // Slots handed out so far, released ones included.
  uint32_t num_slots() const { return next_; }
  int64_t bytes() const {
    return static_cast<int64_t>((kFirstChunk << chunks_.size()) - kFirstChunk) * stride_ *
           static_cast<int64_t>(sizeof(float));
  }

 private:
  static constexpr uint64_t kFirstChunk = 16;
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  static int ChunkOf(uint32_t slot) { return 63 - __builtin_clzll(slot / kFirstChunk + 1); }
  static uint64_t FirstSlot(int chunk) { return (kFirstChunk << chunk) - kFirstChunk; }

  int64_t stride_;
  std::vector<std::unique_ptr<float[], Free>> chunks_;
  std::vector<uint32_t> free_;
  uint32_t next_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_ROW_ARENA_H_
