#include "cc_ops/core/saturation/loss_memory.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <string>

namespace slipstream {

Status LossMemory::ValidateBudget(int64_t budget_bytes) {
  const int64_t least = static_cast<int64_t>(kSmallest * sizeof(Entry));
  if (budget_bytes >= least) return OkStatus();
  return InvalidArgument("loss_memory_bytes is " + std::to_string(budget_bytes) +
                         "; allowed: at least " + std::to_string(least) + ", " +
                         std::to_string(kSmallest) + " entries of " +
                         std::to_string(sizeof(Entry)) + " bytes");
}

LossMemory::LossMemory(int64_t budget_bytes) : most_entries_(0) {
  // Divided, as the bytes of a next size may be beyond 2^63.
  const auto most = static_cast<size_t>(std::max<int64_t>(budget_bytes, 0)) / sizeof(Entry);
  for (size_t n = kSmallest; n <= most; n *= 2) {
    most_entries_ = n;
  }
}

LossMemory::Entry* LossMemory::Find(int64_t id) {
  if (entries_.empty()) return nullptr;
  for (size_t i = Home(id);; i = (i + 1) & (entries_.size() - 1)) {
    Entry& entry = entries_[i];
    if (entry.is_free()) return nullptr;
    if (entry.id == id) return &entry;
  }
}

void LossMemory::Record(int64_t id, float loss, int64_t window) {
  const uint32_t visited =
      static_cast<uint32_t>(std::clamp<int64_t>(window, 0, int64_t{kLargestWindow}));
  Entry* entry = Find(id);
  if (!std::isfinite(loss)) {
    if (entry != nullptr) Erase(entry);
    return;
  }
  if (entry != nullptr) {
    entry->loss = loss;
    entry->window = visited;
    entry->skips = 0;
    return;
  }
  if (most_entries_ > 0 && IsInSample(id) && IsFull(entries_.size())) MakeRoom();
  if (entries_.empty() || !IsInSample(id)) {
    ++num_refused_;
    return;
  }
  Entry added;
  added.id = id;
  added.loss = loss;
  added.window = visited;
  Place(added);
  ++size_;
}

void LossMemory::MakeRoom() {
  if (entries_.size() < most_entries_) {
    try {
      Rebuild(std::max(kSmallest, entries_.size() * 2));
      return;
    } catch (const std::bad_alloc&) {
      most_entries_ = entries_.size();
    }
  }
  // An eighth of the sample leaves at once, so that this is not done for every id.
  while (!entries_.empty() && IsFull(entries_.size())) {
    largest_hash_ -= largest_hash_ / 8;
    const int64_t before = size_;
    Rebuild(entries_.size());
    num_forgotten_ += before - size_;
  }
}

void LossMemory::Rebuild(size_t capacity) {
  std::vector<Entry> old(capacity);
  old.swap(entries_);
  size_ = 0;
  for (const Entry& entry : old) {
    if (entry.is_free() || !IsInSample(entry.id)) continue;
    Place(entry);
    ++size_;
  }
}

void LossMemory::Place(const Entry& entry) {
  size_t i = Home(entry.id);
  while (!entries_[i].is_free()) i = (i + 1) & (entries_.size() - 1);
  entries_[i] = entry;
}

void LossMemory::Erase(Entry* entry) {
  const size_t mask = entries_.size() - 1;
  size_t hole = static_cast<size_t>(entry - entries_.data());
  for (size_t i = (hole + 1) & mask; !entries_[i].is_free(); i = (i + 1) & mask) {
    // An entry may move back to the hole unless its home lies behind the hole.
    if (((i - Home(entries_[i].id)) & mask) < ((i - hole) & mask)) continue;
    entries_[hole] = entries_[i];
    hole = i;
  }
  entries_[hole] = Entry();
  --size_;
}

std::vector<LossMemory::Entry> LossMemory::Export() const {
  std::vector<Entry> kept;
  kept.reserve(static_cast<size_t>(size_));
  for (const Entry& entry : entries_) {
    if (!entry.is_free()) kept.push_back(entry);
  }
  std::sort(kept.begin(), kept.end(), [](const Entry& a, const Entry& b) { return a.id < b.id; });
  return kept;
}

void LossMemory::Import(const std::vector<Entry>& entries) {
  entries_.clear();
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
