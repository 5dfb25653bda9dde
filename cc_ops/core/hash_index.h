// Open-addressing index of one shard: key -> slot of its row, with the key's
// decayed access count beside it (16 bytes an entry, four to a cache line).
#ifndef SLIPSTREAM_CC_OPS_CORE_HASH_INDEX_H_
#define SLIPSTREAM_CC_OPS_CORE_HASH_INDEX_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/hash.h"
#include "cc_ops/core/index_memory.h"

namespace slipstream {

// Every int64 is a legal key. Linear probing; erasing shifts entries back, so
// there are no tombstones. Not thread-safe: a shard has one owner at a time.
class HashIndex {
 public:
  static constexpr uint32_t kEmpty = 0xffffffffu;
  struct Entry {
    int64_t key = 0;
    uint32_t slot = kEmpty;  // kEmpty: the entry is free
    float count = 0.f;       // decayed number of lookups
  };

  using Entries = std::vector<Entry, IndexAllocator<Entry>>;

  // memory: where entries lie; it must outlive the index. Null: on the heap. shard: of those that
  // fill up alike, which this is; each then grows at another size, not all in one step.
  explicit HashIndex(IndexMemory* memory = nullptr, int shard = 0)
      : entries_(IndexAllocator<Entry>(memory)), shard_(static_cast<uint64_t>(shard)) {}

  int64_t size() const { return size_; }
  const Entries& entries() const { return entries_; }
  Entries& entries() { return entries_; }
  int64_t bytes() const { return static_cast<int64_t>(entries_.capacity() * sizeof(Entry)); }

  void Prefetch(uint64_t hash) const {
    if (!entries_.empty()) __builtin_prefetch(&entries_[Home(hash)]);
  }

  // The entry of `key`, or nullptr. Valid until the next Insert or Erase.
  Entry* Find(int64_t key, uint64_t hash) {
    if (entries_.empty()) return nullptr;
    for (uint64_t i = Home(hash);; i = Next(i)) {
      Entry& entry = entries_[i];
      if (entry.slot == kEmpty) return nullptr;
      if (entry.key == key) return &entry;
    }
  }
  const Entry* Find(int64_t key, uint64_t hash) const {
    return const_cast<HashIndex*>(this)->Find(key, hash);
  }

  // Adds a key that is not there yet. May move all entries. Throws
  // std::bad_alloc, leaving the index as it was.
  Entry* Insert(int64_t key, uint64_t hash, uint32_t slot);

  // Removes a key; false if it was not there.
  bool Erase(int64_t key, uint64_t hash);

 private:
  // Uses the bits below those that chose the shard.
  static uint64_t HomeIn(uint64_t hash, uint64_t capacity) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(hash << kShardBits) * capacity) >>
                                 64);
  }
  uint64_t Home(uint64_t hash) const { return HomeIn(hash, entries_.size()); }
  uint64_t Next(uint64_t i) const { return i + 1 == entries_.size() ? 0 : i + 1; }
  void Grow();
  Entry* Place(Entries* entries, const Entry& entry, uint64_t hash) const;

  Entries entries_;
  uint64_t shard_;
  int64_t size_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_HASH_INDEX_H_
