#include "cc_ops/core/containers/hash_index.h"

#include <algorithm>
#include <new>

#include "cc_ops/core/base/hash.h"

namespace slipstream {
namespace {

// Larger indexes grow by a quarter instead of doubling, so that the index needs about 16 / 0.72
// bytes per row.
constexpr uint64_t kDoublingLimit = 1 << 12;

// Returns the next capacity, in whole cache lines. Past kDoublingLimit, the capacities of the
// shards are spread over a quarter, so that shards grow in different steps.
uint64_t NextCapacity(uint64_t capacity, uint64_t shard) {
  constexpr uint64_t kLine = HashIndex::kLine;
  if (capacity == 0) return 2 * kLine;
  if (capacity < kDoublingLimit) return capacity * 2;
  uint64_t larger = capacity + capacity / 4;
  if (capacity == kDoublingLimit) larger += larger / 4 * shard / kNumShards;
  return larger & ~(kLine - 1);
}
// The index grows when more than 4/5 of the entries are used.
constexpr uint64_t kLoadNumerator = 4, kLoadDenominator = 5;

uint64_t MaxUsed(uint64_t capacity) { return capacity * kLoadNumerator / kLoadDenominator; }

// An index of 1 MiB or more prepares its next entries while it is 79% to 80% full, and drops them
// when it is at most 78% full again.
constexpr uint64_t kPreparedFrom = 1 << 16;

uint64_t PreparedAfter(uint64_t capacity) { return MaxUsed(capacity) - capacity / 100; }

}  // namespace

HashIndex::Entry* HashIndex::Put(Entries* entries, const Entry& entry) const {
  uint64_t i = HomeIn(KeyedHash(entry.key), entries->size());
  while ((*entries)[i].index != kEmpty) i = i + 1 == entries->size() ? 0 : i + 1;
  (*entries)[i] = entry;
  return &(*entries)[i];
}

bool HashIndex::IsDue(uint64_t keys) const {
  const uint64_t capacity = entries_.size();
  return capacity >= kPreparedFrom && keys > PreparedAfter(capacity) &&
         entries_.get_allocator() != IndexAllocator<Entry>();
}

void HashIndex::DropPrepared() { Entries(next_.get_allocator()).swap(next_); }

void HashIndex::Prepare(uint64_t keys) {
  const uint64_t capacity = entries_.size(), after = PreparedAfter(capacity);
  const uint64_t all = NextCapacity(capacity, shard_);
  const uint64_t part = all * (keys - after) / (MaxUsed(capacity) - after);
  try {
    next_.reserve(all);
    next_.resize(std::max<uint64_t>(next_.size(), part));
  } catch (const std::bad_alloc&) {
    // Growing allocates them if preparation fails.
  }
}

void HashIndex::Grow() {
  const uint64_t capacity = NextCapacity(entries_.size(), shard_);
  next_.reserve(capacity);
  next_.resize(capacity);
  for (const Entry& entry : entries_) {
    if (entry.index != kEmpty) Put(&next_, entry);
  }
  entries_.swap(next_);
  DropPrepared();
}

HashIndex::Entry* HashIndex::Insert(int64_t key, uint32_t index) {
  const uint64_t used = static_cast<uint64_t>(size_) + 1;
  if (used > MaxUsed(entries_.size())) {
    Grow();
  } else if (IsDue(used)) {
    Prepare(used);
  }
  Entry entry;
  entry.key = key;
  entry.index = index;
  ++size_;
  return Put(&entries_, entry);
}

bool HashIndex::Erase(int64_t key) {
  Entry* found = Find(key);
  if (found == nullptr) return false;
  uint64_t hole = static_cast<uint64_t>(found - entries_.data());
  for (uint64_t i = Next(hole); entries_[i].index != kEmpty; i = Next(i)) {
    // An entry may fill the hole unless its home lies cyclically in (hole, i].
    const uint64_t home = Home(KeyedHash(entries_[i].key));
    const bool stays = hole < i ? (home > hole && home <= i) : (home > hole || home <= i);
    if (stays) continue;
    entries_[hole] = entries_[i];
    hole = i;
  }
  entries_[hole] = Entry();
  --size_;
  const uint64_t capacity = entries_.size();
  if (next_.capacity() > 0 && !IsDue(static_cast<uint64_t>(size_) + capacity / 100)) {
    DropPrepared();
  }
  return true;
}

}  // namespace slipstream
