// An open-addressing hash table in one array, on the CPU and on GPUs.
//
// The entry type defines the contents. `FlatTable` owns the array, `FlatTableView` reads it. The
// rows of a shard are found by a `HashIndex` instead, because their number grows in training, and a
// HashIndex grows without long pauses.
#ifndef SLIPSTREAM_CC_OPS_CORE_CONTAINERS_FLAT_TABLE_H_
#define SLIPSTREAM_CC_OPS_CORE_CONTAINERS_FLAT_TABLE_H_

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/memory/page_memory.h"

namespace slipstream {

// Reads the entries of a table, or a copy in GPU memory. An entry type must be trivially copyable.
// GPUs read an entry of 16 bytes, aligned to 16, in one load. The type declares:
//
//   Entry()                         Creates a free entry.
//   bool is_free() const
//   Key                             The lookup key, with the data to compare it.
//   static uint64_t Hash(Key, uint64_t seed)
//   bool Is(Key) const              Whether the entry belongs to the key; called on free ones, too.
//   static constexpr int64_t kLine  1: linear probing. Otherwise the number of entries in a cache
//                                   line, which are read together; Is must be false for free ones.
template <class E>
struct FlatTableView {
  using Entry = E;
  using Key = typename E::Key;
  static constexpr int64_t kLine = E::kLine;

  const Entry* entries = nullptr;  // [capacity]; at least one entry is free, so that probes end.
  int64_t capacity = 0;            // A multiple of kLine; with linear probing 0 or a power of two.
  uint64_t seed = 0;               // Seed of the hash; see KeyedHash.

  int64_t bytes() const { return capacity * static_cast<int64_t>(sizeof(Entry)); }

  // Returns the position in `entries` at which the search for a hash starts, which is the first of
  // a line. The table must not be empty.
  SLIPSTREAM_HOST_DEVICE int64_t Home(uint64_t hash) const {
    if constexpr (kLine == 1) {
      return static_cast<int64_t>(hash & (static_cast<uint64_t>(capacity) - 1));
    } else {
      return kLine * static_cast<int64_t>(ScaleHash(hash, static_cast<uint64_t>(capacity / kLine)));
    }
  }

  // Returns Home for the hash of a key.
  SLIPSTREAM_HOST_DEVICE int64_t HomeOf(const Key& key) const {
    return Home(Entry::Hash(key, seed));
  }

  // Returns the position of the entry of a key, or of a free entry if the key is absent. With
  // linear probing this is the first free entry, where the key may be inserted. home: HomeOf(key).
  // The table must not be empty.
  SLIPSTREAM_HOST_DEVICE int64_t Probe(int64_t home, const Key& key) const {
    return Search(home, key).position;
  }

  // Returns a copy of the entry of a key, or of a free entry if the key is absent. The table may be
  // empty.
  SLIPSTREAM_HOST_DEVICE Entry Find(const Key& key) const {
    return capacity == 0 ? Entry() : Search(HomeOf(key), key).entry;
  }

 private:
  // An entry and its position.
  struct Found {
    int64_t position;
    Entry entry;
  };

  // See Probe. Loads each entry once.
  SLIPSTREAM_HOST_DEVICE Found Search(int64_t home, const Key& key) const {
    if constexpr (kLine == 1) {
      for (int64_t i = home;; i = (i + 1) & (capacity - 1)) {
        const Entry entry = Load(i);
        if (entry.Is(key) || entry.is_free()) return {i, entry};
      }
    } else {
      for (int64_t line = home;; line = line + kLine == capacity ? 0 : line + kLine) {
        // Compare all entries without branches, because the position of a key is unpredictable.
        Found found = {-1, Entry()}, last = found;
        for (int64_t i = line; i < line + kLine; ++i) {
          last = {i, Load(i)};
          if (last.entry.Is(key)) found = last;
        }
        if (found.position >= 0) return found;
        // Free entries are at the end of a line, and a key is never beyond the first line with one.
        if (last.entry.is_free()) return last;
      }
    }
  }

  SLIPSTREAM_HOST_DEVICE Entry Load(int64_t position) const {
#ifdef __CUDA_ARCH__
    // Otherwise the compiler loads the fields one by one.
    if constexpr (sizeof(Entry) == sizeof(longlong2) && alignof(Entry) == alignof(longlong2)) {
      const longlong2 bits = reinterpret_cast<const longlong2*>(entries)[position];
      Entry entry;
      std::memcpy(&entry, &bits, sizeof(entry));
      return entry;
    }
#endif
    return entries[position];
  }
};

// Owns the entries. Grows only in explicit calls. Not thread-safe.
template <class E>
class FlatTable {
 public:
  using Entry = E;
  using Key = typename E::Key;

  // Returns the smallest power of two that is at least `minimum` and at least 16.
  static int64_t PowerOfTwo(int64_t minimum) {
    int64_t capacity = 16;
    while (capacity < minimum) capacity *= 2;
    return capacity;
  }

  int64_t capacity() const { return capacity_; }
  // Number of entries that the allocated memory can hold.
  int64_t reserved() const { return static_cast<int64_t>(memory_.size() / sizeof(Entry)); }
  // Valid until the next allocation.
  FlatTableView<Entry> view() const { return {begin(), capacity_, kHashSeed}; }
  Entry* begin() const { return reinterpret_cast<Entry*>(memory_.data()); }
  Entry* end() const { return begin() + capacity_; }

  // Sets the capacity and leaves the entries uninitialized. Reuses the memory if it is large
  // enough. Throws std::bad_alloc (strong exception guarantee).
  void ResetUninitialized(int64_t capacity) {
    const size_t bytes = static_cast<size_t>(capacity) * sizeof(Entry);
    if (bytes > memory_.size()) memory_ = PageMemory(bytes);
    capacity_ = capacity;
  }
  // Sets the capacity and makes all entries free. Throws like ResetUninitialized.
  void Reset(int64_t capacity) {
    ResetUninitialized(capacity);
    std::uninitialized_fill(begin(), end(), Entry());
  }

  // Returns the entry of a key, or the free entry where it must be inserted. At least one entry
  // must be free. For entries with linear probing (kLine 1), as are Erase and Build.
  Entry* Probe(const Key& key) const { return begin() + view().Probe(view().HomeOf(key), key); }

  // Frees an entry and shifts the following entries back, so that searches for them still succeed.
  // The entry type must also declare `Key key() const`.
  void Erase(Entry* entry) {
    const int64_t mask = capacity_ - 1;
    int64_t hole = entry - begin();
    for (int64_t i = (hole + 1) & mask; !begin()[i].is_free(); i = (i + 1) & mask) {
      // An entry may move back to the hole unless its home is after the hole.
      const int64_t home = view().HomeOf(begin()[i].key());
      if (((i - home) & mask) < ((i - hole) & mask)) continue;
      begin()[hole] = begin()[i];
      hole = i;
    }
    begin()[hole] = Entry();
  }

  // Replaces the contents by the entries entry_of(i) of keys[i], i in [0, n). At least half of the
  // table stays free. The first of equal keys counts; a free entry is ignored. Returns
  // ResourceExhausted, without changes, if the allocation fails. what: the name of the table in
  // that message. size: receives the number of entries in use.
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
                               " bytes, which cannot be allocated. Free memory or pass fewer keys");
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

// An entry that contains the position of a key in a list of keys, instead of the key.
template <class Number>
struct KeyNumber {
  struct Key {
    const int64_t* list;  // The list to which the positions refer; not empty.
    int64_t key;          // The key to find in the list.
  };
  static constexpr int64_t kLine = 1;

  Number number = -1;  // Negative if the entry is free.

  static uint64_t Hash(const Key& key, uint64_t seed) { return KeyedHash(key.key, seed); }
  bool is_free() const { return number < 0; }
  bool Is(const Key& key) const { return !is_free() && key.list[number] == key.key; }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_CONTAINERS_FLAT_TABLE_H_
