// Open-addressing hash index of one shard: key -> index of its row in the arena, and access count.
//
// An entry has 16 bytes, therefore a cache line has four. Probing is linear and starts at the first
// entry of a line, so that most keys are found in one line, which callers prefetch. Erasing shifts
// entries back, therefore there are no tombstones. Every int64 is a valid key.
//
// The index grows when it is 80% full: it doubles up to 4096 entries and then grows by a quarter.
// Large indexes initialize their next memory in small parts before they need it, so that no
// training step waits for fresh pages.
#ifndef SLIPSTREAM_CC_OPS_CORE_CONTAINERS_HASH_INDEX_H_
#define SLIPSTREAM_CC_OPS_CORE_CONTAINERS_HASH_INDEX_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/memory/index_memory.h"

namespace slipstream {

// Not thread-safe: only one thread at a time touches a shard.
class HashIndex {
 public:
  static constexpr uint32_t kEmpty = 0xffffffffu;
  struct Entry {
    int64_t key = 0;
    uint32_t index = kEmpty;  // Number of the row within its shard; kEmpty if the entry is free.
    float count = 0.f;        // Decayed number of accesses.
  };

  // Number of entries in a cache line. Every capacity is a multiple.
  static constexpr uint64_t kLine = 64 / sizeof(Entry);

  using Entries = std::vector<Entry, IndexAllocator<Entry>>;

  // memory: allocates the entries, and must outlive the index. Null uses the heap and disables the
  // preparation of the next entries. shard: number of the shard. Indexes of other shards grow at
  // other sizes, so that the indexes of a table do not all grow in one training step.
  explicit HashIndex(IndexMemory* memory = nullptr, int shard = 0)
      : entries_(IndexAllocator<Entry>(memory)),
        next_(IndexAllocator<Entry>(memory)),
        shard_(static_cast<uint64_t>(shard)) {}

  int64_t size() const { return size_; }
  const Entries& entries() const { return entries_; }
  Entries& entries() { return entries_; }
  // Number of prepared entries of the next, larger memory.
  int64_t prepared() const { return static_cast<int64_t>(next_.size()); }
  int64_t bytes() const {
    return static_cast<int64_t>((entries_.capacity() + next_.capacity()) * sizeof(Entry));
  }

  // Prefetches the line that Find reads first. hash: KeyedHash of the key.
  SLIPSTREAM_PREFETCHES void Prefetch(uint64_t hash) const {
    if (!entries_.empty()) __builtin_prefetch(&entries_[Home(hash)]);
  }

  // Returns the entry of `key`, or nullptr. `hash` must be KeyedHash(key). Valid until the next
  // Insert or Erase.
  Entry* Find(int64_t key, uint64_t hash) {
    if (entries_.empty()) return nullptr;
    for (uint64_t line = Home(hash);; line = NextLine(line)) {
      Entry* const found = FindInLine(&entries_[line], key);
      if (found != nullptr) return found;
      // If the last entry of a line is free, the key is not in a later line.
      if (entries_[line + kLine - 1].index == kEmpty) return nullptr;
    }
  }
  // Same, but only looks at the line that Prefetch loads. If the key is not in this line,
  // prefetches the next line and returns nullptr; the key may be in a later line then.
  Entry* FindAtHome(int64_t key, uint64_t hash) {
    if (entries_.empty()) return nullptr;
    const uint64_t line = Home(hash);
    Entry* const found = FindInLine(&entries_[line], key);
    if (found == nullptr) __builtin_prefetch(&entries_[NextLine(line)]);
    return found;
  }
  const Entry* Find(int64_t key, uint64_t hash) const {
    return const_cast<HashIndex*>(this)->Find(key, hash);
  }
  Entry* Find(int64_t key) { return Find(key, KeyedHash(key)); }
  const Entry* Find(int64_t key) const { return Find(key, KeyedHash(key)); }

  // Parts of Find, for callers that keep the addresses of lines. HomeIn returns the first entry of
  // the line that Find reads first, in an index of this capacity. FindInLine returns the entry of
  // `key` in a line, or nullptr.
  static uint64_t HomeIn(uint64_t hash, uint64_t capacity) {
    return ScaleHash(hash, capacity) & ~(kLine - 1);
  }
  static Entry* FindInLine(Entry* line, int64_t key) {
    // Compare all keys without branches, because the position is unpredictable. Free entries have
    // the key 0 and are at the end of the line.
    uint32_t found = 0;
    for (uint64_t j = 0; j < kLine; ++j) found |= static_cast<uint32_t>(line[j].key == key) << j;
    if (found == 0) return nullptr;
    Entry* const entry = line + __builtin_ctz(found);
    return entry->index == kEmpty ? nullptr : entry;
  }

  // Inserts an absent key with a count of 0 and returns its entry. Note: invalidates other pointers
  // to entries. Throws std::bad_alloc (strong exception guarantee).
  Entry* Insert(int64_t key, uint32_t index);

  // Removes a key. Returns false if it was absent.
  bool Erase(int64_t key);

 private:
  uint64_t Home(uint64_t hash) const { return HomeIn(hash, entries_.size()); }
  uint64_t NextLine(uint64_t line) const {
    return line + kLine == entries_.size() ? 0 : line + kLine;
  }
  uint64_t Next(uint64_t i) const { return i + 1 == entries_.size() ? 0 : i + 1; }
  // Returns whether an index with `keys` keys is so full that its next entries must be prepared.
  bool IsDue(uint64_t keys) const;
  // Initializes a part of the next entries in proportion to `keys`; all of them when the index is
  // full. Fresh memory may take longer than the rest of an insertion. An allocation failure is
  // ignored.
  void Prepare(uint64_t keys);
  void DropPrepared();
  void Grow();
  Entry* Put(Entries* entries, const Entry& entry) const;

  Entries entries_;
  Entries next_;  // Free entries that replace entries_ when the index grows.
  uint64_t shard_;
  int64_t size_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_CONTAINERS_HASH_INDEX_H_
