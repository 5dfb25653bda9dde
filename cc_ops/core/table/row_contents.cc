// Exports all rows of a store to arrays, and imports them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc_ops/core/base/radix_sort.h"
#include "cc_ops/core/table/row_store.h"

namespace slipstream {

std::vector<HashIndex::Entry> RowStore::Entries(bool only_changed) const {
  std::vector<HashIndex::Entry> entries;
  if (!only_changed) entries.reserve(static_cast<size_t>(size()));
  for (const RowShard& shard : shards_) {
    for (const HashIndex::Entry& entry : shard.index.entries()) {
      if (entry.index == HashIndex::kEmpty) continue;
      if (!only_changed || shard.changed[entry.index] != 0) entries.push_back(entry);
    }
  }
  RadixSort(&entries, [](const HashIndex::Entry& entry) { return AscendingBits(entry.key); });
  return entries;
}

Status RowStore::Export(const std::vector<HashIndex::Entry>& entries,
                        const ContentsRoom& room) const {
  if (spilled_ != nullptr) return ExportSpilled(entries, room);
  constexpr size_t kAhead = 16, kLine = 64;
  const auto row_of = [&](const HashIndex::Entry& entry) {
    return shards_[ShardOf(entry.key)].arena.Row(entry.index);
  };
  for (size_t i = 0; i < entries.size(); ++i) {
    if (room.rows != nullptr && i + kAhead < entries.size()) {
      const char* const ahead = reinterpret_cast<const char*>(row_of(entries[i + kAhead]));
      for (int64_t b = 0; b < layout_.bytes(); b += kLine) __builtin_prefetch(ahead + b);
    }
    ExportRow(ShardOf(entries[i].key), entries[i], row_of(entries[i]), i, room);
  }
  return OkStatus();
}

Status RowStore::ExportSpilled(const std::vector<HashIndex::Entry>& entries,
                               const ContentsRoom& room) const {
  // Rows arrive in the order of the disk, not of the keys.
  const auto is_before = [](const HashIndex::Entry& a, const HashIndex::Entry& b) {
    return a.key < b.key;
  };
  for (int s = 0; s < kNumShards; ++s) {
    const Status read =
        spilled_->ForEachRow(s, [&](const HashIndex::Entry& entry, const StoredRow* row) {
          const auto at = std::lower_bound(entries.begin(), entries.end(), entry, is_before);
          ExportRow(s, entry, row, static_cast<size_t>(at - entries.begin()), room);
        });
    if (!read.ok()) return read;
  }
  return OkStatus();
}

TableContents RowStore::Export(Status* status) const {
  const std::vector<HashIndex::Entry> entries = Entries();
  TableContents contents = EmptyContents(entries.size());
  const Status exported =
      Export(entries, {contents.keys.data(), contents.rows.data(), contents.slots.data(),
                       contents.counts.data(), contents.last_used.data()});
  if (!exported.ok() && status != nullptr) *status = exported;
  return contents;
}

RowChanges RowStore::TakeChanges(int64_t since) {
  const RowTransforms& transforms = options_.rule.transforms;
  const bool touches_all = transforms.DecaysAll() || transforms.SweepsAll();
  RowChanges changes;
  changes.is_all = touches_all || all_changed_ || !tracks_changes_ || since != changes_taken_;
  changes.rows = Entries(/*only_changed=*/!changes.is_all);
  if (changes.is_all) ChangeAll();
  changes.removed.swap(removed_);
  changes.decays.swap(decays_);
  // Tracking stays off if one of the following allocations throws.
  all_changed_ = true;
  for (RowShard& shard : shards_) shard.changed.assign(touches_all ? 0 : shard.arena.end(), 0);
  tracks_changes_ = !touches_all;
  all_changed_ = false;
  changes.number = ++changes_taken_;
  return changes;
}

void RowStore::ChangeAll() noexcept {
  all_changed_ = true;
  std::vector<int64_t>().swap(removed_);
  decays_.clear();
}

TableContents RowStore::EmptyContents(size_t n) const {
  TableContents contents;
  contents.lookup_step = lookup_step_;
  contents.keys.resize(n);
  contents.rows.resize(n * static_cast<size_t>(layout_.dim));
  contents.slots.resize(n * static_cast<size_t>(layout_.slots));
  contents.counts.resize(n);
  if (tracks_use()) contents.last_used.resize(n);
  return contents;
}

void RowStore::ExportRow(int shard, const HashIndex::Entry& entry, const StoredRow* row, size_t i,
                         const ContentsRoom& room) const {
  if (room.rows != nullptr) {
    float* const values = room.rows + i * static_cast<size_t>(layout_.dim);
    layout_.Read(row, values, room.slots + i * static_cast<size_t>(layout_.slots));
    for (int64_t j = 0; scale_ != 1.0 && j < layout_.dim; ++j) values[j] *= scale();
  }
  room.keys[i] = entry.key;
  room.counts[i] = entry.count;
  if (tracks_use()) room.last_used[i] = LastUsed(shard, entry.index);
}

Status RowStore::CheckValues(const TableContents& contents) const {
  const std::string into = " into table '" + options_.name + "'";
  const auto bad = [&](const char* what, size_t i, const std::string& value, const char* allowed) {
    return InvalidArgument(std::string(what) + " of key " + std::to_string(contents.keys[i]) +
                           " to import" + into + ", at index " + std::to_string(i) + ", is " +
                           value + "; expected " + allowed + ". No row was imported");
  };
  const auto first_bad = [](const std::vector<float>& values, RowDtype dtype) {
    const auto is_bad = [dtype](float value) { return !IsHeldBy(dtype, value); };
    return std::find_if(values.begin(), values.end(), is_bad) - values.begin();
  };
  const size_t row = static_cast<size_t>(first_bad(contents.rows, layout_.dtype));
  if (row < contents.rows.size()) {
    return bad("a row value", row / options_.dim, std::to_string(contents.rows[row]),
               NumbersHeldBy(layout_.dtype));
  }
  const size_t slot = static_cast<size_t>(first_bad(contents.slots, layout_.slot_dtype));
  if (slot < contents.slots.size()) {
    return bad("a slot value", slot / layout_.slots, std::to_string(contents.slots[slot]),
               NumbersHeldBy(layout_.slot_dtype));
  }
  for (size_t i = 0; i < contents.counts.size(); ++i) {
    if (std::isfinite(contents.counts[i]) && contents.counts[i] >= 0.f) continue;
    return bad("the access count", i, std::to_string(contents.counts[i]),
               "a finite number of at least 0");
  }
  for (size_t i = 0; is_lru() && i < contents.last_used.size(); ++i) {
    // A table with `expire_after` may count seconds. LastUsedOf replaces times of the other unit.
    const int64_t last = options_.expire_after > 0 ? INT64_MAX : contents.lookup_step;
    if (contents.last_used[i] >= 0 && contents.last_used[i] <= last) continue;
    return bad("the time of last use", i, std::to_string(contents.last_used[i]),
               "an integer from 0 to the number of lookups, or a table with `expire_after`, which "
               "accepts times in seconds");
  }
  if (contents.update_step < 0 || contents.lookup_step < 0) {
    return InvalidArgument("the steps to import" + into + " are " +
                           std::to_string(contents.update_step) + " updates and " +
                           std::to_string(contents.lookup_step) +
                           " lookups; expected at least 0 of each. No row was imported");
  }
  return OkStatus();
}

Status RowStore::Check(const TableContents& contents, bool adds) const {
  const std::string into = " into table '" + options_.name + "'";
  const size_t n = contents.keys.size(), all = n + (adds ? static_cast<size_t>(size()) : 0);
  if (options_.capacity > 0 && all > static_cast<size_t>(options_.capacity)) {
    return InvalidArgument("table '" + options_.name + "' would have " + std::to_string(all) +
                           " rows after the import; expected at most " +
                           std::to_string(options_.capacity) +
                           ", its capacity. Increase `capacity`");
  }
  if (contents.rows.size() != n * options_.dim || contents.slots.size() != n * layout_.slots ||
      contents.counts.size() != n ||
      (!contents.last_used.empty() && contents.last_used.size() != n)) {
    return InvalidArgument("the arrays to import for " + std::to_string(n) + " keys" + into +
                           " have " + std::to_string(contents.rows.size()) + " row values, " +
                           std::to_string(contents.slots.size()) + " slot values, " +
                           std::to_string(contents.counts.size()) + " counts and " +
                           std::to_string(contents.last_used.size()) +
                           " times of last use; expected " + std::to_string(options_.dim) + ", " +
                           std::to_string(layout_.slots) + ", 1 and 1 per key (or no times)");
  }
  const Status values = CheckValues(contents);
  if (!values.ok()) return values;
  std::vector<int64_t> sorted = contents.keys;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  const auto known =
      !adds ? sorted.end()
            : std::find_if(sorted.begin(), sorted.end(), [&](int64_t key) { return Has(key); });
  if (twice != sorted.end() || known != sorted.end()) {
    return InvalidArgument("key " + std::to_string(twice != sorted.end() ? *twice : *known) +
                           " to import" + into +
                           (twice != sorted.end() ? " occurs twice" : " has a row already") +
                           "; expected each key once");
  }
  return OkStatus();
}

Status RowStore::Add(const TableContents& contents) {
  if (spilled_ == nullptr) {
    return InvalidArgument("adds is true, but table '" + options_.name +
                           "' has all rows in memory; expected a table that spills to disk. Import "
                           "all rows in a single call");
  }
  const Status status = Check(contents, /*adds=*/true);
  return status.ok() ? AddChecked(contents) : status;
}

Status RowStore::Import(const TableContents& contents) {
  const Status status = Check(contents, /*adds=*/false);
  if (!status.ok()) return status;
  auto memory = std::make_unique<SlabAllocator>();
  auto index_memory = std::make_unique<IndexMemory>(kNumShards);
  std::vector<RowShard> shards = EmptyShards(memory.get(), index_memory.get());
  if (spilled_ != nullptr) {
    // The limit of memory and disk has no room for old and new rows at the same time.
    spilled_->Clear();
  } else {
    ImportRows(contents, 0, contents.keys.size(), Now(contents.lookup_step), &shards);
  }
  shards_.swap(shards);
  memory_.swap(memory);
  index_memory_.swap(index_memory);
  lookup_step_ = contents.lookup_step;
  now_ = Now(lookup_step_);
  scale_ = 1.0;
  ChangeAll();
  ++generation_;
  return spilled_ == nullptr ? OkStatus() : AddChecked(contents);
}

void RowStore::ImportRow(const TableContents& contents, size_t i, StoredRow* row) const {
  layout_.WriteValues(contents.rows.data() + i * static_cast<size_t>(layout_.dim), row);
  layout_.WriteSlots(contents.slots.data() + i * static_cast<size_t>(layout_.slots), row);
}

void RowStore::ImportRows(const TableContents& contents, size_t begin, size_t end, int64_t now,
                          std::vector<RowShard>* shards) {
  std::vector<float> copy(static_cast<size_t>(layout_.floats()));
  for (size_t i = begin; i < end; ++i) {
    uint32_t index = 0;
    RowShard& shard = (*shards)[ShardOf(contents.keys[i])];
    StoredRow* const row = InsertRow(&shard, contents.keys[i], contents.counts[i], &index);
    ImportRow(contents, i, row);
    layout_.Read(row, copy.data(), copy.data() + layout_.dim);
    NoteRange(copy.data(), &shard);
    if (tracks_use()) shard.last_used[index] = LastUsedOf(contents, i, now);
  }
}

Status RowStore::AddChecked(const TableContents& contents) {
  const size_t n = contents.keys.size();
  const size_t at_once = spilled_ == nullptr ? n : static_cast<size_t>(KeysAtOnce());
  for (size_t begin = 0; begin < n; begin += at_once) {
    if (spilled_ != nullptr) {
      spilled_->BeginUse();
      const Status room = spilled_->Shrink(Parallel());
      if (!room.ok()) {
        return Status(room.code(), room.message() + ". The table now has only a part of its rows");
      }
    }
    ImportRows(contents, begin, std::min(n, begin + at_once), Now(lookup_step_), &shards_);
  }
  return OkStatus();
}

}  // namespace slipstream
