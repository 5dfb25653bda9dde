#include "cc_ops/core/saturation/drift_index.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace slipstream {
namespace {

// Number of keys, or home positions, whose entries are prefetched ahead.
constexpr int64_t kAhead = 16;

std::string At(int64_t position) { return "[" + std::to_string(position) + "] is "; }

// The data of an index.
struct Drifts {
  int num_tables;
  const int32_t* tables;
  const int64_t* keys;
  const float* drifts;
  int64_t n;

  Lookup LookupOf(int64_t i) const { return {keys[i], tables[i]}; }
  // An anomaly also gets an entry, so that a repeated key is found. Adding 0 maps -0 to 0, so that
  // scores have the same bytes on all devices.
  DriftEntry EntryOf(int64_t i) const {
    return {keys[i], tables[i],
            std::isfinite(drifts[i]) ? drifts[i] + 0.0f : DriftEntry::kUntracked};
  }
};

Status GivenTwice(const DriftEntry& entry) {
  return InvalidArgument("key " + std::to_string(entry.key) + " of table " +
                         std::to_string(entry.table) +
                         " occurs twice; expected distinct keys per table");
}

enum class PutResult { kYes, kTwice, kNoRoom };

// Writes an entry to the first free position in [begin, end).
PutResult Put(DriftEntry* begin, DriftEntry* end, const DriftEntry& entry) {
  for (; begin < end; ++begin) {
    if (begin->is_free()) {
      *begin = entry;
      return PutResult::kYes;
    }
    if (begin->Is({entry.key, entry.table})) return PutResult::kTwice;
  }
  return PutResult::kNoRoom;
}

// Entries [begin, end) of one task, which inserts the keys with homes in this range.
struct Part {
  int64_t begin = 0, end = 0;
  int64_t size = 0;           // Number of keys with a drift.
  std::vector<int64_t> left;  // Keys that found no free entry before the end.
  int64_t failed = -1;        // First invalid entry, or -1.
  Status status;

  void Fail(int64_t i, Status why) {
    failed = i;
    status = std::move(why);
  }

  void Fill(const Drifts& drifts, const FlatTable<DriftEntry>& table) {
    constexpr int64_t kBlock = 1024;
    DriftEntry* const entries = table.begin();
    std::uninitialized_fill(entries + begin, entries + end, DriftEntry());
    int64_t own[kBlock], homes[kBlock];
    for (int64_t first = 0; first < drifts.n; first += kBlock) {
      // Select the keys of the task without branches, because membership is unpredictable.
      int64_t m = 0;
      for (int64_t i = first; i < std::min(drifts.n, first + kBlock); ++i) {
        const int64_t home = table.view().HomeOf(drifts.LookupOf(i));
        own[m] = i;
        homes[m] = home;
        m += (home >= begin) & (home < end);
      }
      for (int64_t j = 0; j < std::min(kAhead, m); ++j) __builtin_prefetch(&entries[homes[j]], 1);
      for (int64_t j = 0; j < m; ++j) {
        if (j + kAhead < m) __builtin_prefetch(&entries[homes[j + kAhead]], 1);
        const int64_t i = own[j];
        Status checked = DriftIndex::Check(drifts.num_tables, drifts.tables, drifts.drifts, i);
        if (!checked.ok()) return Fail(i, std::move(checked));
        const DriftEntry entry = drifts.EntryOf(i);
        const PutResult result = Put(entries + homes[j], entries + end, entry);
        if (result == PutResult::kTwice) return Fail(i, GivenTwice(entry));
        if (result == PutResult::kNoRoom) left.push_back(i);
        size += std::isfinite(entry.drift);
      }
    }
  }
};

}  // namespace

void DriftIndex::Find(const Lookup* lookups, int64_t n, float* drifts) const {
  const DriftIndexView index = view();
  if (index.capacity == 0) {
    std::fill_n(drifts, n, kUntracked);
    return;
  }
  int64_t homes[kAhead];
  for (int64_t i = 0; i < n + kAhead; ++i) {
    int64_t* const home = &homes[i % kAhead];
    if (i >= kAhead) {
      drifts[i - kAhead] = index.entries[index.Probe(*home, lookups[i - kAhead])].drift;
    }
    if (i < n) {
      *home = index.HomeOf(lookups[i]);
      __builtin_prefetch(&index.entries[*home]);
    }
  }
}

Status DriftIndex::Check(int num_tables, const int32_t* tables, const float* drifts, int64_t i) {
  if (tables[i] < 0 || tables[i] >= num_tables) {
    return InvalidArgument("tables" + At(i) + std::to_string(tables[i]) +
                           "; expected an integer from 0 to " + std::to_string(num_tables - 1));
  }
  if (std::isfinite(drifts[i]) && drifts[i] < 0.0f) {
    return InvalidArgument("drifts" + At(i) + std::to_string(drifts[i]) +
                           "; expected at least 0, or a value that is not finite for an anomaly");
  }
  return OkStatus();
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
  constexpr int64_t kPerTask = 1 << 14, kLine = DriftEntry::kLine;
  const Drifts given = {num_tables, tables, keys, drifts, n};
  const int64_t lines = n > 0 ? n / (kLine - 1) + 1 : 0, capacity = kLine * lines;
  size_ = 0;
  if (capacity > table_.reserved() || capacity < table_.reserved() / 2) table_ = {};
  table_.ResetUninitialized(capacity);
  if (n == 0) return OkStatus();
  const int tasks = TasksFor(n, kPerTask, parallel);
  std::vector<Part> parts(static_cast<size_t>(tasks));
  parallel.run(tasks, [&](int task) {
    Part* const part = &parts[static_cast<size_t>(task)];
    const TaskRange range = RangeOf(task, tasks, lines);
    part->begin = kLine * range.begin;
    part->end = kLine * range.end;
    part->Fill(given, table_);
  });
  // Insert keys that run past the end of a part. Their repeats are found here, too.
  for (Part& part : parts) {
    for (const int64_t i : part.left) {
      const DriftEntry entry = given.EntryOf(i);
      DriftEntry* const home = table_.begin() + view().HomeOf(given.LookupOf(i));
      PutResult result = Put(home, table_.end(), entry);
      if (result == PutResult::kNoRoom) result = Put(table_.begin(), home, entry);
      if (result != PutResult::kTwice) continue;
      if (part.failed < 0 || i < part.failed) part.Fail(i, GivenTwice(entry));
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
  table_.ResetUninitialized(0);
  size_ = 0;
  return first->status;
}

}  // namespace slipstream
