// The one open-addressing table: entries of one array, found by the hash of their key. What an
// entry is, its type says; a shard's index of rows is a HashIndex instead.
#ifndef SLIPSTREAM_CC_OPS_CORE_CONTAINERS_FLAT_TABLE_H_
#define SLIPSTREAM_CC_OPS_CORE_CONTAINERS_FLAT_TABLE_H_

#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/memory/page_memory.h"

namespace slipstream {

// Reads a table's entries, which the table owns, or a copy of them in GPU memory. An entry type is
// trivially copied; on GPUs one load gets it if it is aligned to its size. It has
//   Entry()                         which is free
//   bool is_free() const
//   Key                             what it is looked up by: a key, with what tells it from others
//   static uint64_t Hash(Key, uint64_t seed)
//   bool Is(Key) const              whether it is the key's; asked of free ones, too
//   static constexpr int64_t kLine  1: probing is linear; else how many entries, those of a cache
//                                   line, are read together; of a free one Is must be false then
template <class E>
struct FlatTableView {
  using Entry = E;
  using Key = typename E::Key;
  static constexpr int64_t kLine = E::kLine;

  const Entry* entries = nullptr;  // [capacity], some of them free: probes end
  int64_t capacity = 0;            // 0; or a power of two, with lines a multiple of kLine
  uint64_t seed = 0;               // of the hash; see KeyedHash

  int64_t bytes() const { return capacity * static_cast<int64_t>(sizeof(Entry)); }

  // Where probing begins: with lines, the first entry of one. The table is not empty.
  SLIPSTREAM_HOST_DEVICE int64_t Home(uint64_t hash) const {
    if constexpr (kLine == 1) {
      return static_cast<int64_t>(hash & (static_cast<uint64_t>(capacity) - 1));
    } else {
      return kLine * static_cast<int64_t>(ScaleHash(hash, static_cast<uint64_t>(capacity / kLine)));
    }
  }

  SLIPSTREAM_HOST_DEVICE int64_t HomeOf(const Key& key) const {
    return Home(Entry::Hash(key, seed));
  }

  // The index of the key's entry; if it is not in the table, that of a free one: the first where
  // probing is linear. The table is not empty.
  SLIPSTREAM_HOST_DEVICE int64_t Probe(int64_t home, const Key& key) const {
    if constexpr (kLine == 1) {
      for (int64_t i = home;; i = (i + 1) & (capacity - 1)) {
        const Entry entry = entries[i];
        if (entry.Is(key) || entry.is_free()) return i;
      }
    } else {
      for (int64_t line = home;; line = line + kLine == capacity ? 0 : line + kLine) {
        // Where in a line a key is, nobody can predict: no branch between its entries.
        int64_t found = -1;
        for (int64_t i = line; i < line + kLine; ++i) found = entries[i].Is(key) ? i : found;
        if (found >= 0) return found;
        // A line's free entries are its last ones; a key is no further than the first of them.
        if (entries[line + kLine - 1].is_free()) return line + kLine - 1;
      }
    }
  }

  // The key's entry; a free one if it is not in the table.
  SLIPSTREAM_HOST_DEVICE Entry Find(const Key& key) const {
    return capacity == 0 ? Entry() : entries[Probe(HomeOf(key), key)];
  }
};

// Owns the entries. Grows only when it is told. Not thread-safe.
template <class E>
class FlatTable {
 public:
  using Entry = E;
  using Key = typename E::Key;

  // A power of two, from 16.
  static int64_t PowerOfTwo(int64_t least) {
    int64_t capacity = 16;
    while (capacity < least) capacity *= 2;
    return capacity;
  }

  int64_t capacity() const { return capacity_; }
  // How many entries there is memory for.
  int64_t reserved() const { return static_cast<int64_t>(memory_.size() / sizeof(Entry)); }
  // Valid until memory is taken again.
  FlatTableView<Entry> view() const { return {begin(), capacity_, kHashSeed}; }
  Entry* begin() const { return reinterpret_cast<Entry*>(memory_.data()); }
  Entry* end() const { return begin() + capacity_; }

  // Takes another capacity; the entries are uninitialised. Keeps its memory if that is enough.
  // Throws std::bad_alloc, changing nothing.
  void ResetUninitialized(int64_t capacity) {
    const size_t bytes = static_cast<size_t>(capacity) * sizeof(Entry);
    if (bytes > memory_.size()) memory_ = PageMemory(bytes);
    capacity_ = capacity;
  }
  // The same, all entries are free.
  void Reset(int64_t capacity) {
    ResetUninitialized(capacity);
    std::uninitialized_fill(begin(), end(), Entry());
  }

  // The key's entry or the free one that is to become it. There is a free one.
  Entry* Probe(const Key& key) const { return begin() + view().Probe(view().HomeOf(key), key); }

  // Frees an entry: those behind it move up. Entries have a `Key key() const`.
  void Erase(Entry* entry) {
    const int64_t mask = capacity_ - 1;
    int64_t hole = entry - begin();
    for (int64_t i = (hole + 1) & mask; !begin()[i].is_free(); i = (i + 1) & mask) {
      // An entry may move back to the hole unless its home lies behind the hole.
      const int64_t home = view().HomeOf(begin()[i].key());
      if (((i - home) & mask) < ((i - hole) & mask)) continue;
      begin()[hole] = begin()[i];
      hole = i;
    }
    begin()[hole] = Entry();
  }

  // Replaces the content by entry_of(i) for keys[i], at most half full; of one key the first
  // counts, and a free entry does not. ResourceExhausted, changing nothing, if there is no memory.
  //   what: names the table in the message.   size: gets the number of different keys.
  template <class EntryOf>
  Status Build(const std::string& what, const Key* keys, int64_t n, const EntryOf& entry_of,
               int64_t* size) {
    FlatTable built;
    const int64_t capacity = n == 0 ? 0 : PowerOfTwo(2 * n);
    try {
      built.Reset(capacity);
    } catch (const std::bad_alloc&) {
      return ResourceExhausted(what + " of " + std::to_string(n) + " keys needs " +
                               std::to_string(capacity * static_cast<int64_t>(sizeof(Entry))) +
                               " bytes, which cannot be allocated");
    }
    *size = 0;
    for (int64_t i = 0; i < n; ++i) {
      Entry* const entry = built.Probe(keys[i]);
      if (!entry->is_free()) continue;
      *entry = entry_of(i);
      *size += !entry->is_free();
    }
    *this = std::move(built);
    return OkStatus();
  }

 private:
  PageMemory memory_;
  int64_t capacity_ = 0;
};

// The entry of a key that stands elsewhere: its number in a list of keys.
template <class Number>
struct KeyNumber {
  struct Key {
    const int64_t* list;  // not empty
    int64_t key;
  };
  static constexpr int64_t kLine = 1;

  Number number = -1;  // negative: free

  static uint64_t Hash(const Key& key, uint64_t seed) { return KeyedHash(key.key, seed); }
  bool is_free() const { return number < 0; }
  bool Is(const Key& key) const { return !is_free() && key.list[number] == key.key; }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_CONTAINERS_FLAT_TABLE_H_
