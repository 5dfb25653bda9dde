// Members of EmbeddingTable for window ends: rows by key, how far they have come, and their marks.
#include <algorithm>
#include <vector>

#include "cc_ops/core/base/drift.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {
namespace {

// How many keys ahead of the one at hand the index is asked for a key's line, and a row for its.
constexpr int64_t kIndexAhead = 16;
constexpr int64_t kRowAhead = 8;

// The marks that MarkRows alone sets and takes away.
constexpr uint8_t kTold = kSaturated | kWatched;

void PrefetchMark(const TableShard& shard, uint32_t slot) {
  if (slot < shard.marked.size()) __builtin_prefetch(&shard.marked[slot], 1);
}

void MakePlaceForMark(TableShard* shard, uint32_t slot) {
  if (slot < shard->marked.size()) return;
  const size_t wanted = std::max<size_t>(slot + 1, static_cast<size_t>(shard->index.size()));
  shard->marked.resize(wanted);
}

}  // namespace

template <typename Ask, typename See>
void EmbeddingTable::SeeRows(const int64_t* keys, int64_t begin, int64_t end, Ask ask,
                             See see) const {
  RowPlace ahead[kRowAhead];  // of keys [i, i + kRowAhead), from i % kRowAhead on
  for (int64_t i = begin - kRowAhead; i < end; ++i) {
    RowPlace* const place = &ahead[(i - begin + kRowAhead) % kRowAhead];
    if (i >= begin) see(i, *place);
    if (i + kIndexAhead < end) Prefetch(HashKey(keys[i + kIndexAhead]));
    if (i + kRowAhead >= end) continue;
    const int64_t key = keys[i + kRowAhead];
    const uint64_t hash = HashKey(key);
    place->shard = &shards_[ShardOf(hash)];
    place->row = Find(key, hash, &place->slot);
    if (place->row != nullptr) ask(*place);
  }
}

float EmbeddingTable::TravelledOf(const RowPlace& place) {
  if (place.row == nullptr || (place.shard->MarkOf(place.slot) & kWatched) == 0) return 0.f;
  return place.shard->marked[place.slot].travelled;
}

void EmbeddingTable::CopyRow(int64_t key, const RowPlace& place, float* row) const {
  if (place.row != nullptr) {
    std::copy_n(place.row, options_.dim, row);
  } else {
    options_.initializer.Fill(key, options_.dim, row);
  }
}

void EmbeddingTable::Gather(const int64_t* keys, int64_t n, const Parallel& parallel, float* rows,
                            bool* found) const {
  parallel.run(parallel.threads, [&](int task) {
    const TaskRange range = RangeOf(task, parallel.threads, n);
    SeeRows(
        keys, range.begin, range.end, [](const RowPlace& place) { __builtin_prefetch(place.row); },
        [&](int64_t i, const RowPlace& place) {
          found[i] = place.row != nullptr;
          CopyRow(keys[i], place, rows + i * options_.dim);
        });
  });
}

void EmbeddingTable::Measure(const int64_t* keys, const float* snapshot, int64_t n,
                             const Measurement& measurement, const Parallel& parallel, float* rows,
                             bool* found, float* drift) const {
  const DriftMetric metric = measurement.is_signal ? DriftMetric::kL2 : measurement.metric;
  parallel.run(parallel.threads, [&](int task) {
    const TaskRange range = RangeOf(task, parallel.threads, n);
    SeeRows(
        keys, range.begin, range.end,
        [&](const RowPlace& place) {
          __builtin_prefetch(place.row);
          if (measurement.is_signal) PrefetchMark(*place.shard, place.slot);
        },
        [&](int64_t i, const RowPlace& place) {
          found[i] = place.row != nullptr;
          CopyRow(keys[i], place, rows + i * options_.dim);
          RowDrift(rows, snapshot, i, i + 1, options_.dim, metric, measurement.epsilon, drift);
          if (measurement.is_signal) drift[i] = SignalOfDrift(drift[i], TravelledOf(place));
        });
  });
}

EmbeddingTable::MarkList EmbeddingTable::MarkChanges(const MarkView& wanted) const {
  MarkList changes;
  const size_t known = told_.keys.size();
  size_t old = 0;
  const auto take_away = [&](size_t at) {
    if (told_.marks[at] != 0) changes.Add(told_.keys[at], 0);
  };
  for (int64_t i = 0; i < wanted.n; ++i) {
    const int64_t key = wanted.keys[i];
    while (old < known && told_.keys[old] < key) take_away(old++);
    const bool is_known = old < known && told_.keys[old] == key;
    const uint8_t before = is_known ? told_.marks[old] : 0;
    if (wanted.marks[i] != before) changes.Add(key, wanted.marks[i]);
    old += is_known;
  }
  while (old < known) take_away(old++);
  return changes;
}

std::vector<uint32_t> EmbeddingTable::PlacesForMarks(const MarkView& list, bool makes_rows,
                                                     bool takes_zeros, const Parallel& parallel) {
  std::vector<uint32_t> slots(static_cast<size_t>(list.n), HashIndex::kEmpty);
  if (makes_rows) {
    for (int64_t i = 0; i < list.n; ++i) {
      if (list.marks[i] == 0) continue;
      FindOrInsert(list.keys[i], HashKey(list.keys[i]), 0.f, &slots[i]);
    }
  } else {
    parallel.run(parallel.threads, [&](int task) {
      const TaskRange range = RangeOf(task, parallel.threads, list.n);
      SeeRows(
          list.keys, range.begin, range.end,
          [](const RowPlace& place) { PrefetchMark(*place.shard, place.slot); },
          [&](int64_t i, const RowPlace& place) {
            if (place.row != nullptr && (takes_zeros || list.marks[i] != 0)) slots[i] = place.slot;
          });
    });
  }
  for (int64_t i = 0; i < list.n; ++i) {
    if (slots[i] == HashIndex::kEmpty) continue;
    MakePlaceForMark(&shards_[ShardOf(HashKey(list.keys[i]))], slots[i]);
  }
  return slots;
}

void EmbeddingTable::MarkRows(const int64_t* keys, const uint8_t* marks, int64_t n,
                              const Parallel& parallel, bool makes_rows) {
  // Whatever needs memory comes first.
  const MarkView wanted = {keys, marks, n};
  const bool are_changes = !makes_rows && told_generation_ == generation_;
  const MarkList changes = are_changes ? MarkChanges(wanted) : MarkList();
  const MarkView list = are_changes ? changes.View() : wanted;
  const std::vector<uint32_t> slots = PlacesForMarks(list, makes_rows, are_changes, parallel);
  const bool is_remembered = Remember(wanted, makes_rows);

  // A shard is marked by one task, in the order of the keys.
  const uint8_t stays = kKept | (are_changes ? kTold : 0);
  parallel.run(parallel.threads, [&](int task) {
    const TaskRange own = RangeOf(task, parallel.threads, kNumShards);
    for (int64_t s = own.begin; s < own.end; ++s) {
      for (MarkedRow& row : shards_[s].marked) {
        row = {0.f, static_cast<uint8_t>(row.marks & stays)};
      }
    }
    for (int64_t i = 0; i < list.n; ++i) {
      const int64_t s = ShardOf(HashKey(list.keys[i]));
      if (s < own.begin || s >= own.end || slots[i] == HashIndex::kEmpty) continue;
      uint8_t& mark = shards_[s].marked[slots[i]].marks;
      mark = static_cast<uint8_t>((mark & kKept) | list.marks[i]);
    }
  });
  bool is_marked = true;
  for (int64_t i = 0; i < list.n; ++i) {
    is_marked &= list.marks[i] == 0 || slots[i] != HashIndex::kEmpty;
  }
  if (is_remembered && is_marked) told_generation_ = generation_;
  is_watching_ = false;
  for (int64_t i = 0; i < n && !is_watching_; ++i) {
    is_watching_ = (marks[i] & kWatched) != 0 && (are_changes || slots[i] != HashIndex::kEmpty);
  }
}

bool EmbeddingTable::Remember(const MarkView& list, bool makes_rows) {
  told_generation_ = kNothingTold;
  bool is_plain = !makes_rows;
  for (int64_t i = 0; i < list.n && is_plain; ++i) {
    is_plain = (list.marks[i] & ~kTold) == 0 && (i == 0 || list.keys[i - 1] < list.keys[i]);
  }
  if (!is_plain) {
    told_ = MarkList();
    return false;
  }
  told_.keys.assign(list.keys, list.keys + list.n);
  told_.marks.assign(list.marks, list.marks + list.n);
  return true;
}

void EmbeddingTable::AddMark(uint64_t hash, uint32_t slot, RowMark mark) {
  TableShard& shard = shards_[ShardOf(hash)];
  MakePlaceForMark(&shard, slot);
  shard.marked[slot].marks |= mark;
}

void EmbeddingTable::RemoveMark(uint64_t hash, uint32_t slot, RowMark mark) {
  TableShard& shard = shards_[ShardOf(hash)];
  if (slot < shard.marked.size()) shard.marked[slot].marks &= static_cast<uint8_t>(~mark);
}

void EmbeddingTable::Travelled(const int64_t* keys, int64_t n, const Parallel& parallel,
                               float* travelled) const {
  parallel.run(parallel.threads, [&](int task) {
    const TaskRange range = RangeOf(task, parallel.threads, n);
    SeeRows(
        keys, range.begin, range.end,
        [](const RowPlace& place) { PrefetchMark(*place.shard, place.slot); },
        [&](int64_t i, const RowPlace& place) { travelled[i] = TravelledOf(place); });
  });
}

void EmbeddingTable::Marks(const int64_t* keys, int64_t n, uint8_t* marks) const {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = HashKey(keys[i]);
    uint32_t slot = 0;
    const bool is_there = Find(keys[i], hash, &slot) != nullptr;
    marks[i] = is_there ? shards_[ShardOf(hash)].MarkOf(slot) : 0;
  }
}

void EmbeddingTable::SetTravelled(const int64_t* keys, const float* travelled, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = HashKey(keys[i]);
    TableShard& shard = shards_[ShardOf(hash)];
    uint32_t slot = 0;
    if (Find(keys[i], hash, &slot) != nullptr && (shard.MarkOf(slot) & kWatched) != 0) {
      shard.marked[slot].travelled = travelled[i];
    }
  }
}

}  // namespace slipstream
