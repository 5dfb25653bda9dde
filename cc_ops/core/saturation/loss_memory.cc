#include "cc_ops/core/saturation/loss_memory.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <string>
#include <utility>

namespace slipstream {

Status LossMemory::ValidateBudget(int64_t budget_bytes) {
  const int64_t least = kSmallest * static_cast<int64_t>(sizeof(Entry));
  if (budget_bytes >= least) return OkStatus();
  return InvalidArgument("loss_memory_bytes is " + std::to_string(budget_bytes) +
                         "; allowed: at least " + std::to_string(least) + ", " +
                         std::to_string(kSmallest) + " entries of " +
                         std::to_string(sizeof(Entry)) + " bytes");
}

LossMemory::LossMemory(int64_t budget_bytes) : most_entries_(0) {
  // Divided, as the bytes of a next size may be beyond 2^63.
  const int64_t most = budget_bytes / static_cast<int64_t>(sizeof(Entry));
  for (int64_t n = kSmallest; n <= most; n *= 2) most_entries_ = n;
}

LossMemory::Entry* LossMemory::Find(int64_t id) {
  if (table_.capacity() == 0) return nullptr;
  Entry* const entry = table_.Probe(id);
  return entry->is_free() ? nullptr : entry;
}

void LossMemory::Record(int64_t id, float loss, int64_t window) {
  const uint32_t visited =
      static_cast<uint32_t>(std::clamp<int64_t>(window, 0, int64_t{kLargestWindow}));
  Entry* entry = Find(id);
  if (!std::isfinite(loss)) {
    if (entry == nullptr) return;
    table_.Erase(entry);
    --size_;
    return;
  }
  if (entry != nullptr) {
    entry->loss = loss;
    entry->window = visited;
    entry->skips = 0;
    return;
  }
  if (most_entries_ > 0 && IsInSample(id) && IsFull()) Grow();
  if (table_.capacity() == 0 || !IsInSample(id)) return;
  Entry added;
  added.id = id;
  added.loss = loss;
  added.window = visited;
  *table_.Probe(id) = added;
  ++size_;
}

void LossMemory::Grow() {
  if (table_.capacity() < most_entries_) {
    try {
      Rebuild(std::max(kSmallest, table_.capacity() * 2));
      return;
    } catch (const std::bad_alloc&) {
      most_entries_ = table_.capacity();
    }
  }
  // An eighth of the sample leaves at once, so that this is not done for every id.
  while (table_.capacity() > 0 && IsFull()) {
    largest_hash_ -= largest_hash_ / 8;
    Rebuild(table_.capacity());
  }
}

void LossMemory::Rebuild(int64_t capacity) {
  FlatTable<Entry> rebuilt;
  rebuilt.Reset(capacity);
  size_ = 0;
  for (const Entry& entry : table_) {
    if (entry.is_free() || !IsInSample(entry.id)) continue;
    *rebuilt.Probe(entry.id) = entry;
    ++size_;
  }
  table_ = std::move(rebuilt);
}

std::vector<LossMemory::Entry> LossMemory::Export() const {
  std::vector<Entry> kept;
  kept.reserve(static_cast<size_t>(size_));
  for (const Entry& entry : table_) {
    if (!entry.is_free()) kept.push_back(entry);
  }
  std::sort(kept.begin(), kept.end(), [](const Entry& a, const Entry& b) { return a.id < b.id; });
  return kept;
}

void LossMemory::Import(const std::vector<Entry>& entries) {
  table_.ResetUninitialized(0);
  size_ = 0;
  largest_hash_ = ~uint64_t{0};
  for (const Entry& entry : entries) {
    Record(entry.id, entry.loss, entry.window);
    Entry* stored = Find(entry.id);
    if (stored == nullptr) continue;
    stored->skips = entry.skips;
    stored->has_returned = entry.has_returned;
  }
}

}  // namespace slipstream
