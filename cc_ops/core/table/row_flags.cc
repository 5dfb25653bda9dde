#include "cc_ops/core/table/row_flags.h"

#include <algorithm>

namespace slipstream {

void ShardFlags::Reserve(uint32_t index, int64_t rows) {
  if (index < flags_.size()) return;
  flags_.resize(std::max<size_t>(index + 1, static_cast<size_t>(rows)));
}

int64_t RowFlags::bytes() const {
  size_t bytes = last_.keys.capacity() * sizeof(int64_t) + last_.flags.capacity();
  for (const ShardFlags& shard : shards_) bytes += shard.flags_.capacity();
  return static_cast<int64_t>(bytes);
}

RowFlags::List RowFlags::ChangesTo(const View& wanted) const {
  List changes;
  const size_t known = last_.keys.size();
  size_t old = 0;
  const auto take_away = [&](size_t at) {
    if (last_.flags[at] != 0) changes.Add(last_.keys[at], 0);
  };
  for (int64_t i = 0; i < wanted.n; ++i) {
    const int64_t key = wanted.keys[i];
    while (old < known && last_.keys[old] < key) take_away(old++);
    const bool is_known = old < known && last_.keys[old] == key;
    const uint8_t before = is_known ? last_.flags[old] : 0;
    if (wanted.flags[i] != before) changes.Add(key, wanted.flags[i]);
    old += is_known;
  }
  while (old < known) take_away(old++);
  return changes;
}

std::vector<uint32_t> RowFlags::IndicesOf(const View& list, bool create_missing, bool takes_zeros,
                                          const Parallel& parallel, RowStore* rows) {
  std::vector<uint32_t> indices(static_cast<size_t>(list.n), HashIndex::kEmpty);
  if (create_missing) {
    for (int64_t i = 0; i < list.n; ++i) {
      if (list.flags[i] == 0) continue;
      rows->FindOrInsert(list.keys[i], 0.f, &indices[i]);
    }
  } else {
    parallel.run(parallel.threads, [&](int task) {
      const TaskRange range = RangeOf(task, parallel.threads, list.n);
      rows->VisitRows(
          list.keys, range.begin, range.end,
          [&](const RowStore::Visited& row)
              SLIPSTREAM_LAMBDA_INLINE { shards_[row.shard].Prefetch(row.index); },
          [&](int64_t i, const RowStore::Visited& row) {
            if (row.row != nullptr && (takes_zeros || list.flags[i] != 0)) indices[i] = row.index;
          });
    });
  }
  for (int64_t i = 0; i < list.n; ++i) {
    if (indices[i] == HashIndex::kEmpty) continue;
    const int s = ShardOf(list.keys[i]);
    shards_[s].Reserve(indices[i], rows->shard(s)->index.size());
  }
  return indices;
}

void RowFlags::Set(const int64_t* keys, const uint8_t* flags, int64_t n, const Parallel& parallel,
                   bool create_missing, RowStore* rows) {
  // Allocate first, so that a failure changes no flag.
  const View wanted = {keys, flags, n};
  const bool are_changes = !create_missing && last_generation_ == rows->generation();
  const List changes = are_changes ? ChangesTo(wanted) : List();
  const View list = are_changes ? changes.view() : wanted;
  const std::vector<uint32_t> indices =
      IndicesOf(list, create_missing, are_changes, parallel, rows);
  const bool is_remembered = Remember(wanted, create_missing);

  // One task sets the flags of a shard, in the order of the keys.
  parallel.run(parallel.threads, [&](int task) {
    const TaskRange own = RangeOf(task, parallel.threads, kNumShards);
    for (int64_t s = own.begin; s < own.end; ++s) {
      if (!are_changes) std::fill(shards_[s].flags_.begin(), shards_[s].flags_.end(), 0);
    }
    for (int64_t i = 0; i < list.n; ++i) {
      const int64_t s = ShardOf(list.keys[i]);
      if (s < own.begin || s >= own.end || indices[i] == HashIndex::kEmpty) continue;
      shards_[s].flags_[indices[i]] = list.flags[i];
    }
  });
  bool all_have_rows = true;
  for (int64_t i = 0; i < list.n; ++i) {
    all_have_rows &= list.flags[i] == 0 || indices[i] != HashIndex::kEmpty;
  }
  if (is_remembered && all_have_rows) last_generation_ = rows->generation();
}

bool RowFlags::Remember(const View& list, bool create_missing) {
  last_generation_ = kNever;
  bool is_plain = !create_missing;
  for (int64_t i = 1; i < list.n && is_plain; ++i) is_plain = list.keys[i - 1] < list.keys[i];
  if (!is_plain) {
    last_ = List();
    return false;
  }
  last_.keys.assign(list.keys, list.keys + list.n);
  last_.flags.assign(list.flags, list.flags + list.n);
  return true;
}

void RowFlags::Clear(int64_t key, uint32_t index) noexcept {
  std::vector<uint8_t>& flags = shards_[ShardOf(key)].flags_;
  if (index < flags.size()) flags[index] = 0;
}

void RowFlags::Clear() noexcept {
  for (ShardFlags& shard : shards_) std::vector<uint8_t>().swap(shard.flags_);
}

void RowFlags::Get(const int64_t* keys, int64_t n, const RowStore& rows, uint8_t* flags) const {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t index = 0;
    const bool is_present = rows.Find(keys[i], &index) != nullptr;
    flags[i] = is_present ? shards_[ShardOf(keys[i])].Of(index) : 0;
  }
}

}  // namespace slipstream
