#include "cc_ops/core/saturation/drift_index.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace slipstream {
namespace {

std::string At(int64_t position) { return " at position " + std::to_string(position); }

}  // namespace

void DriftIndex::Find(const Lookup* lookups, int64_t n, float* drifts) const {
  constexpr int64_t kAhead = 16;
  const DriftIndexView index = view();
  if (index.num_slots == 0) {
    std::fill_n(drifts, n, kUntracked);
    return;
  }
  int64_t homes[kAhead];
  for (int64_t i = 0; i < n + kAhead; ++i) {
    int64_t* const home = &homes[i % kAhead];
    if (i >= kAhead) drifts[i - kAhead] = index.FindFrom(*home, lookups[i - kAhead]);
    if (i < n) {
      *home = index.Home(lookups[i]);
      __builtin_prefetch(&slots_[*home]);
    }
  }
}

Status DriftIndex::Check(int num_tables, const int32_t* tables, const float* drifts, int64_t i) {
  if (tables[i] < 0 || tables[i] >= num_tables) {
    return InvalidArgument("tables is " + std::to_string(tables[i]) + At(i) + "; allowed: 0 to " +
                           std::to_string(num_tables - 1));
  }
  if (std::isfinite(drifts[i]) && drifts[i] < 0.0f) {
    return InvalidArgument("drift is " + std::to_string(drifts[i]) + At(i) +
                           "; allowed: at least 0, or not finite for an anomaly");
  }
  return OkStatus();
}

void DriftIndex::Swap(DriftIndex* other) {
  std::swap(memory_, other->memory_);
  std::swap(slots_, other->slots_);
  std::swap(capacity_, other->capacity_);
  std::swap(num_slots_, other->num_slots_);
  std::swap(size_, other->size_);
}

struct DriftIndex::Part {
  int64_t begin = 0, end = 0;
  int64_t size = 0;           // keys with a drift
  std::vector<int64_t> left;  // entries that found no free slot up to the end
  int64_t failed = -1;        // the first entry that is wrong, if any
  Status status;

  void Fail(int64_t entry, Status why) {
    failed = entry;
    status = std::move(why);
  }
};

namespace {

enum class Placed { kYes, kTwice, kNoRoom };

// Puts an entry into the first free slot from `home`, before `end`.
Placed Place(DriftIndexView::Slot* slots, int64_t home, int64_t end, const Lookup& lookup,
             float drift) {
  for (int64_t place = home; place < end; ++place) {
    DriftIndexView::Slot* const slot = &slots[place];
    if (slot->table == DriftIndexView::kFree) {
      // An anomaly keeps a slot, so that a second mention is still found. 0 is added so that there
      // is one zero: scores are the same bytes wherever they are made.
      *slot = {lookup.key, lookup.table,
               std::isfinite(drift) ? drift + 0.0f : DriftIndexView::kUntracked};
      return Placed::kYes;
    }
    if (slot->key == lookup.key && slot->table == lookup.table) return Placed::kTwice;
  }
  return Placed::kNoRoom;
}

Status GivenTwice(const Lookup& lookup) {
  return InvalidArgument("key " + std::to_string(lookup.key) + " of table " +
                         std::to_string(lookup.table) +
                         " is given twice; allowed: one drift per key");
}

}  // namespace

void DriftIndex::Fill(int num_tables, const int32_t* tables, const int64_t* keys,
                      const float* drifts, int64_t n, Part* part) {
  constexpr int64_t kAhead = 16, kBlock = 1024;
  std::uninitialized_fill(slots_ + part->begin, slots_ + part->end, DriftIndexView::Slot());
  const DriftIndexView index = view();
  int64_t own[kBlock], homes[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    // Which entries are its own, no branch could predict.
    int64_t m = 0;
    for (int64_t i = begin; i < std::min(n, begin + kBlock); ++i) {
      const int64_t home = index.Home({keys[i], tables[i]});
      own[m] = i;
      homes[m] = home;
      m += (home >= part->begin) & (home < part->end);
    }
    for (int64_t j = 0; j < std::min(kAhead, m); ++j) __builtin_prefetch(&slots_[homes[j]], 1);
    for (int64_t j = 0; j < m; ++j) {
      if (j + kAhead < m) __builtin_prefetch(&slots_[homes[j + kAhead]], 1);
      const int64_t i = own[j];
      Status status = Check(num_tables, tables, drifts, i);
      if (!status.ok()) return part->Fail(i, std::move(status));
      const Lookup lookup = {keys[i], tables[i]};
      const Placed placed = Place(slots_, homes[j], part->end, lookup, drifts[i]);
      if (placed == Placed::kTwice) return part->Fail(i, GivenTwice(lookup));
      if (placed == Placed::kNoRoom) part->left.push_back(i);
      part->size += std::isfinite(drifts[i]);
    }
  }
}

void DriftIndex::MakeSlots(int64_t number) {
  num_slots_ = size_ = 0;
  if (number > capacity_ || number < capacity_ / 2) {
    memory_.reset();
    slots_ = nullptr;
    capacity_ = 0;
    if (number == 0) return;
    memory_ = std::make_unique<IndexMemory>(1);
    const size_t bytes = static_cast<size_t>(number) * sizeof(DriftIndexView::Slot);
    slots_ = static_cast<DriftIndexView::Slot*>(memory_->Allocate(bytes));
    capacity_ = number;
  }
  num_slots_ = number;
}

Status DriftIndex::Build(int num_tables, const int32_t* tables, const int64_t* keys,
                         const float* drifts, int64_t n, const Parallel& parallel) {
  DriftIndex built;
  const Status status = built.Rebuild(num_tables, tables, keys, drifts, n, parallel);
  if (status.ok()) Swap(&built);
  return status;
}

Status DriftIndex::Rebuild(int num_tables, const int32_t* tables, const int64_t* keys,
                           const float* drifts, int64_t n, const Parallel& parallel) {
  constexpr int64_t kPerTask = 1 << 14, kLine = DriftIndexView::kLine;
  const int64_t lines = n > 0 ? n / (kLine - 1) + 1 : 0;
  MakeSlots(kLine * lines);
  if (n == 0) return OkStatus();
  const int tasks = TasksFor(n, kPerTask, parallel);
  std::vector<Part> parts(static_cast<size_t>(tasks));
  parallel.run(tasks, [&](int task) {
    Part* const part = &parts[static_cast<size_t>(task)];
    const TaskRange range = RangeOf(task, tasks, lines);
    part->begin = kLine * range.begin;
    part->end = kLine * range.end;
    Fill(num_tables, tables, keys, drifts, n, part);
  });
  // Entries beyond a part's end; a second mention of one of them is there, too.
  for (Part& part : parts) {
    for (const int64_t i : part.left) {
      const Lookup lookup = {keys[i], tables[i]};
      const int64_t home = view().Home(lookup);
      Placed placed = Place(slots_, home, num_slots_, lookup, drifts[i]);
      if (placed == Placed::kNoRoom) placed = Place(slots_, 0, home, lookup, drifts[i]);
      if (placed != Placed::kTwice) continue;
      if (part.failed < 0 || i < part.failed) part.Fail(i, GivenTwice(lookup));
      break;
    }
  }
  const Part* first = nullptr;
  for (const Part& part : parts) {
    size_ += part.size;
    const bool is_first = first == nullptr || part.failed < first->failed;
    if (part.failed >= 0 && is_first) first = &part;
  }
  if (first == nullptr) return OkStatus();
  num_slots_ = size_ = 0;
  return first->status;
}

}  // namespace slipstream
