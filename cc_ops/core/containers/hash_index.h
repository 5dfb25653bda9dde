// Open-addressing index of one shard: key -> index of its row, with the key's
// decayed access count beside it (16 bytes an entry, four to a cache line).
#ifndef SLIPSTREAM_CC_OPS_CORE_CONTAINERS_HASH_INDEX_H_
#define SLIPSTREAM_CC_OPS_CORE_CONTAINERS_HASH_INDEX_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/memory/index_memory.h"

namespace slipstream {

// Every int64 is a legal key. Linear probing from the start of a cache line, so that most keys are
// found in the one line that was prefetched; erasing shifts entries back, so there are no
// tombstones. Not thread-safe: a shard has one owner at a time.
class HashIndex {
 public:
  static constexpr uint32_t kEmpty = 0xffffffffu;
  struct Entry {
    int64_t key = 0;
    uint32_t index = kEmpty;  // kEmpty: the entry is free
    float count = 0.f;        // decayed number of lookups
  };

  // Entries of a cache line; every capacity is a multiple of it.
  static constexpr uint64_t kLine = 64 / sizeof(Entry);

  using Entries = std::vector<Entry, IndexAllocator<Entry>>;

  // memory: where entries lie; it must outlive the index, which also gets ready to grow, so that no
  // step waits for much fresh memory. Null: on the heap, and nothing is prepared. shard: its
  // number among indexes that fill up alike, so that each grows at another size, not all in one
  // step.
  explicit HashIndex(IndexMemory* memory = nullptr, int shard = 0)
      : entries_(IndexAllocator<Entry>(memory)),
        next_(IndexAllocator<Entry>(memory)),
        shard_(static_cast<uint64_t>(shard)) {}

  int64_t size() const { return size_; }
  const Entries& entries() const { return entries_; }
  Entries& entries() { return entries_; }
  // Entries of its next, larger memory that are ready.
  int64_t prepared() const { return static_cast<int64_t>(next_.size()); }
  int64_t bytes() const {
    return static_cast<int64_t>((entries_.capacity() + next_.capacity()) * sizeof(Entry));
  }

  SLIPSTREAM_PREFETCHES void Prefetch(uint64_t hash) const {
    if (!entries_.empty()) __builtin_prefetch(&entries_[Home(hash)]);
  }

  // The entry of `key`, whose hash is its KeyedHash; nullptr if it has none. Valid until the next
  // Insert or Erase.
  Entry* Find(int64_t key, uint64_t hash) {
    if (entries_.empty()) return nullptr;
    for (uint64_t line = Home(hash);; line = NextLine(line)) {
      Entry* const found = FindInLine(line, key);
      if (found != nullptr) return found;
      // Entries before a used one, back to its home, are in use.
      if (entries_[line + kLine - 1].index == kEmpty) return nullptr;
    }
  }
  // The same if the entry is in the line that Prefetch gets, where most are. If it isn't,
  // prefetches the next one and returns nullptr.
  Entry* FindAtHome(int64_t key, uint64_t hash) {
    if (entries_.empty()) return nullptr;
    const uint64_t line = Home(hash);
    Entry* const found = FindInLine(line, key);
    if (found == nullptr) __builtin_prefetch(&entries_[NextLine(line)]);
    return found;
  }
  const Entry* Find(int64_t key, uint64_t hash) const {
    return const_cast<HashIndex*>(this)->Find(key, hash);
  }
  Entry* Find(int64_t key) { return Find(key, KeyedHash(key)); }
  const Entry* Find(int64_t key) const { return Find(key, KeyedHash(key)); }

  // Adds a key that is not there yet. May move all entries. Throws
  // std::bad_alloc, leaving the index as it was.
  Entry* Insert(int64_t key, uint32_t index);

  // Removes a key; false if it was not there.
  bool Erase(int64_t key);

 private:
  // The first entry of a line.
  static uint64_t HomeIn(uint64_t hash, uint64_t capacity) {
    return ScaleHash(hash, capacity) & ~(kLine - 1);
  }
  uint64_t Home(uint64_t hash) const { return HomeIn(hash, entries_.size()); }
  uint64_t NextLine(uint64_t line) const {
    return line + kLine == entries_.size() ? 0 : line + kLine;
  }
  // All of a line's entries without a branch between them: where in it a key is, nobody can
  // predict.
  Entry* FindInLine(uint64_t line, int64_t key) {
    Entry* const entries = &entries_[line];
    uint32_t found = 0;
    for (uint64_t j = 0; j < kLine; ++j) {
      found |= static_cast<uint32_t>((entries[j].key == key) & (entries[j].index != kEmpty)) << j;
    }
    return found == 0 ? nullptr : entries + __builtin_ctz(found);
  }
  uint64_t Next(uint64_t i) const { return i + 1 == entries_.size() ? 0 : i + 1; }
  // Whether so many keys are so near to the most that next entries are to be prepared.
  bool IsDue(uint64_t keys) const;
  // Has a part of the next entries ready for so many keys, all of them for the most that may be.
  // Fresh memory may take longer than all else that an insertion does. Does nothing without any.
  void Prepare(uint64_t keys);
  void DropPrepared();
  void Grow();
  Entry* Put(Entries* entries, const Entry& entry) const;

  Entries entries_;
  Entries next_;  // free ones, which take the place of entries_ when it grows
  uint64_t shard_;
  int64_t size_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_CONTAINERS_HASH_INDEX_H_
