// Remembered losses: input id -> loss at its last visit, the window of that visit, and
// how often the input was skipped since, within a byte budget.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_LOSS_MEMORY_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_LOSS_MEMORY_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/containers/flat_table.h"

namespace slipstream {

// A table of 16 bytes an entry, at most 4/5 full. Any int64 is a legal id. Not thread-safe.
class LossMemory {
 public:
  static constexpr uint32_t kLargestWindow = (1u << 24) - 2;
  static constexpr uint32_t kLargestSkips = 127;

  struct Entry {
    using Key = int64_t;
    static constexpr int64_t kLine = 1;

    int64_t id = 0;
    float loss = 0.f;
    uint32_t window : 24;       // of the visit; later ones count as kLargestWindow
    uint32_t skips : 7;         // since the visit; stays at kLargestSkips
    uint32_t has_returned : 1;  // whether it was made to be visited after its skips before
    Entry() : window(kFree), skips(0), has_returned(0) {}

    static uint64_t Hash(int64_t id, uint64_t seed) { return KeyedHash(id, seed); }
    bool is_free() const { return window == kFree; }
    bool Is(int64_t other) const { return id == other; }
    int64_t key() const { return id; }
  };

  // InvalidArgument for a budget that cannot hold the smallest array.
  static Status ValidateBudget(int64_t budget_bytes);

  // budget_bytes: of the entries, valid; 0: nothing is remembered.
  explicit LossMemory(int64_t budget_bytes);

  // The entry of an id, or nullptr. Valid until the next Record.
  Entry* Find(int64_t id);

  // Remembers the loss of a visit in `window` and that no skip followed. A loss that is not
  // finite makes the input forgotten. Where the budget is full, the memory keeps to a
  // sample of the ids, drawn by their hashes: an input in it is there in every epoch,
  // whatever the order. Others are forgotten.
  void Record(int64_t id, float loss, int64_t window);

  int64_t size() const { return size_; }
  int64_t bytes() const { return table_.view().bytes(); }

  // Ids whose hash is above it are not remembered; the largest number at first.
  uint64_t largest_hash() const { return largest_hash_; }
  void set_largest_hash(uint64_t hash) { largest_hash_ = hash; }

  // All entries, by id.
  std::vector<Entry> Export() const;
  // Replaces everything by entries with different ids; those that do not fit are left out.
  void Import(const std::vector<Entry>& entries);

 private:
  static constexpr uint32_t kFree = (1u << 24) - 1;
  static constexpr int64_t kSmallest = 16;

  bool IsFull() const { return (size_ + 1) * 5 > table_.capacity() * 4; }
  bool IsInSample(int64_t id) const { return HashKey(id) <= largest_hash_; }
  // Gets a free entry for one more id, which may have left the sample by then.
  void Grow();
  void Rebuild(int64_t capacity);

  int64_t most_entries_;                  // a power of two, or 0
  uint64_t largest_hash_ = ~uint64_t{0};  // of an id in the sample
  FlatTable<Entry> table_;
  int64_t size_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_LOSS_MEMORY_H_
