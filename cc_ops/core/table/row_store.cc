#include "cc_ops/core/table/row_store.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include "cc_ops/core/base/radix_sort.h"
#include "cc_ops/core/base/row_dim.h"

namespace slipstream {
namespace {

std::string Of(const TableOptions& options) { return " of table '" + options.name + "'"; }

// Returns InvalidArgument if a value or slot of a new row may exceed its type.
Status CheckInitialRow(const TableOptions& options) {
  const double maximum = options.initializer.MaxMagnitude();
  if (!IsHeldBy(options.dtype, static_cast<float>(maximum))) {
    return InvalidArgument("initializer" + Of(options) + " gives values of up to " +
                           std::to_string(maximum) + "; expected " + NumbersHeldBy(options.dtype));
  }
  // While all rows decay, stored values are larger; see RowStore::DecayValues.
  constexpr double kMaxIfDecaying = 1e9;
  if (options.rule.transforms.DecaysAll() && maximum > kMaxIfDecaying) {
    return InvalidArgument("initializer" + Of(options) + " gives values of up to " +
                           std::to_string(maximum) +
                           "; expected at most 1e9 in magnitude if all rows decay");
  }
  std::vector<float> slots(static_cast<size_t>(options.rule.SlotsPerRow(options.dim)));
  options.rule.InitSlots(options.dim, slots.data());
  for (const float slot : slots) {
    if (IsHeldBy(options.slot_dtype, slot)) continue;
    return InvalidArgument("an initial slot" + Of(options) + " is " + std::to_string(slot) +
                           "; expected " + NumbersHeldBy(options.slot_dtype));
  }
  return OkStatus();
}

}  // namespace

Status ValidateTableOptions(const TableOptions& options) {
  if (options.name.empty()) return InvalidArgument("table_name is empty; expected a name");
  const Status dim = ValidateDim(options.dim, Of(options));
  if (!dim.ok()) return dim;
  if (options.spill.empty() != (options.memory == 0) || options.memory < 0) {
    return InvalidArgument("memory" + Of(options) + " is " + std::to_string(options.memory) +
                           " and spill is '" + options.spill +
                           "'; expected both (a number of bytes and a folder) or neither");
  }
  if (!options.spill.empty() &&
      (options.rule.transforms.DecaysAll() || options.rule.transforms.SweepsAll())) {
    return InvalidArgument("spill" + Of(options) + " is '" + options.spill +
                           "', but l2 or weight_decay with decay='all' changes all rows in every "
                           "step; expected decay='batch' for a table that spills");
  }
  if (!options.spill.empty() && options.capacity > 0 &&
      options.eviction == TableOptions::Eviction::kLru) {
    return InvalidArgument("eviction" + Of(options) +
                           " is 'lru'; expected 'lfu' for a table that spills to disk");
  }
  if (options.admit_after < 1 || options.admit_after > CountFilter::kMax) {
    return InvalidArgument("admit_after" + Of(options) + " is " +
                           std::to_string(options.admit_after) +
                           "; expected an integer from 1 to " + std::to_string(CountFilter::kMax));
  }
  if (options.expire_after < 0) {
    return InvalidArgument("expire_after" + Of(options) + " is " +
                           std::to_string(options.expire_after) +
                           "; expected at least 1, or 0 to keep rows forever");
  }
  if (options.capacity < 0) {
    return InvalidArgument("capacity" + Of(options) + " is " + std::to_string(options.capacity) +
                           "; expected at least 1, or 0 for no maximum");
  }
  if (options.dtype == RowDtype::kInt8 || options.slot_dtype == RowDtype::kInt8 ||
      options.slot_dtype == RowDtype::kFloat16) {
    return InvalidArgument(
        "dtype and slot_dtype" + Of(options) + " are the numbers " +
        std::to_string(static_cast<int>(options.dtype)) + " and " +
        std::to_string(static_cast<int>(options.slot_dtype)) +
        "; expected float32, bfloat16 or float16 for rows and float32 or bfloat16 for slots");
  }
  if (options.dtype == RowDtype::kFloat16 && options.rule.transforms.DecaysAll()) {
    return InvalidArgument("dtype" + Of(options) +
                           " is float16; expected float32 or bfloat16 if all rows decay, because "
                           "the stored values exceed the range of float16");
  }
  std::vector<float> values(options.rule.parameters.begin(), options.rule.parameters.end());
  const RowTransforms& transforms = options.rule.transforms;
  values.insert(values.end(),
                {options.initializer.a, options.initializer.b, transforms.l2, transforms.clip_value,
                 transforms.clip_norm, transforms.decay, transforms.max_norm});
  for (float value : values) {
    if (!std::isfinite(value)) {
      return InvalidArgument("a parameter of the initializer or the update rule" + Of(options) +
                             " is " + std::to_string(value) + "; expected a finite number");
    }
  }
  return CheckInitialRow(options);
}

RowStore::RowStore(const TableOptions& options)
    : options_(options),
      layout_(options.layout()),
      memory_(std::make_unique<SlabAllocator>()),
      index_memory_(std::make_unique<IndexMemory>(kNumShards)),
      shards_(EmptyShards(memory_.get(), index_memory_.get())) {
  now_ = Now(lookup_step_);
  if (!admits()) return;
  filters_.resize(kNumShards);
  not_admitted_.resize(kNumShards);
}

std::vector<RowShard> RowStore::EmptyShards(SlabAllocator* memory,
                                            IndexMemory* index_memory) const {
  std::vector<RowShard> shards;
  shards.reserve(kNumShards);
  for (int s = 0; s < kNumShards; ++s) {
    shards.emplace_back(s, layout_.bytes(), memory, index_memory);
  }
  return shards;
}

Status RowStore::OpenSpill() {
  if (options_.spill.empty()) return OkStatus();
  return SpilledRows::Make(options_.name, options_.memory, options_.spill, layout_.bytes(),
                           tracks_use(), &shards_, &spilled_);
}

int64_t RowStore::size() const {
  int64_t size = 0;
  for (const RowShard& shard : shards_) size += shard.index.size();
  return size;
}

int64_t RowStore::index_capacity() const {
  int64_t entries = 0;
  for (const RowShard& shard : shards_) {
    entries += static_cast<int64_t>(shard.index.entries().size());
  }
  return entries;
}

int64_t RowStore::bytes() const {
  int64_t bytes = memory_->bytes() + (spilled_ == nullptr ? 0 : spilled_->bytes());
  bytes += static_cast<int64_t>(removed_.capacity() * sizeof(int64_t));
  for (const CountFilter& filter : filters_) bytes += filter.bytes();
  for (const RowShard& shard : shards_) {
    bytes +=
        shard.index.bytes() + static_cast<int64_t>(shard.changed.capacity() +
                                                   shard.last_used.capacity() * sizeof(int64_t));
  }
  return bytes;
}

StoredRow* RowStore::InsertRow(RowShard* shard, int64_t key, float count, uint32_t* index) {
  HashIndex::Entry* entry = nullptr;
  const int number = ShardOf(key);
  bool has_index = false, is_added = false;
  try {
    *index = shard->arena.Allocate();
    has_index = true;
    if (tracks_use() && shard->last_used.size() <= *index) shard->last_used.resize(*index + 1);
    if (tracks_changes_ && shard->changed.size() <= *index) shard->changed.resize(*index + 1);
    if (spilled_ != nullptr) spilled_->Add(number, *index, key);
    is_added = spilled_ != nullptr;
    entry = shard->index.Insert(key, *index);
  } catch (const std::bad_alloc&) {
    if (is_added) spilled_->Forget(number, *index);
    if (has_index) shard->arena.Release(*index);
    throw TableOutOfMemory(this);
  }
  entry->count = count;
  if (tracks_changes_) shard->changed[*index] = 1;
  return shard->arena.Row(*index);
}

StoredRow* RowStore::FindOrInsert(int64_t key, float accesses, uint32_t* index) {
  RowShard& shard = shards_[ShardOf(key)];
  StoredRow* row = nullptr;
  HashIndex::Entry* entry = shard.index.Find(key);
  if (entry != nullptr) {
    entry->count += accesses;
    *index = entry->index;
    if (IsOnDisk(*index)) return nullptr;
    if (spilled_ != nullptr) spilled_->Use(ShardOf(key), *index);
    if (tracks_changes_) shard.changed[*index] = 1;
    row = shard.arena.Row(*index);
  } else {
    std::vector<float> copy;
    if (!layout_.is_floats()) copy.resize(static_cast<size_t>(layout_.floats()));
    row = InsertRow(&shard, key, accesses, index);
    float* const made = layout_.is_floats() ? RowLayout::Floats(row) : copy.data();
    MakeNewRow(key, made);
    DivideByScale(made);
    NoteRange(made, &shard);
    if (!layout_.is_floats()) {
      layout_.WriteValues(made, row);
      layout_.WriteSlots(made + layout_.dim, row);
    }
  }
  if (tracks_use()) shard.last_used[*index] = now_;
  return row;
}

void RowStore::NoteRange(const float* row, RowShard* shard) const {
  if (options_.rule.IsInRange(layout_.dim, options_.rule.RangeOf(layout_.dtype).max_value, row))
    return;
  shard->is_in_range = false;
}

bool RowStore::is_in_range() const {
  return std::all_of(shards_.begin(), shards_.end(),
                     [](const RowShard& shard) { return shard.is_in_range; });
}

float RowStore::DecayValues(double kept) {
  if (will_rescale()) {
    std::vector<float> copy(static_cast<size_t>(layout_.floats()));
    for (RowShard& shard : shards_) {
      for (const HashIndex::Entry& entry : shard.index.entries()) {
        if (entry.index == HashIndex::kEmpty) continue;
        StoredRow* const row = shard.arena.Row(entry.index);
        layout_.Read(row, copy.data(), copy.data() + layout_.dim);
        for (int64_t j = 0; j < layout_.dim; ++j) copy[j] *= scale();
        layout_.WriteValues(copy.data(), row);
      }
    }
    scale_ = 1.0;
  }
  const float before = scale();
  scale_ *= kept;
  return before;
}

void RowStore::DivideByScale(float* values) const {
  if (scale_ == 1.0) return;
  const float factor = stored_factor();
  for (int64_t j = 0; j < layout_.dim; ++j) values[j] *= factor;
}

void RowStore::WriteRow(int64_t key, const float* values, StoredRow* row) {
  std::vector<float> divided;
  if (scale_ != 1.0) {
    divided.assign(values, values + layout_.dim);
    DivideByScale(divided.data());
    values = divided.data();
  }
  if (!AreAtMost(options_.rule.RangeOf(layout_.dtype).max_value, layout_.dim, values)) {
    shards_[ShardOf(key)].is_in_range = false;
  }
  layout_.WriteValues(values, row);
}

void RowStore::CopyRow(int64_t key, const StoredRow* found, float* values) const {
  if (found == nullptr) return FillNew(key, values);
  layout_.ReadValues(found, values);
  if (scale_ == 1.0) return;
  const float factor = scale();
  for (int64_t j = 0; j < layout_.dim; ++j) values[j] *= factor;
}

void RowStore::FillNew(int64_t key, float* values) const {
  options_.initializer.Fill(key, layout_.dim, values);
  layout_.Round(values);
}

void RowStore::MakeNewRow(int64_t key, float* row) const {
  FillNew(key, row);
  options_.rule.InitSlots(layout_.dim, row + layout_.dim);
  layout_.RoundSlots(row + layout_.dim);
}

void RowStore::Gather(const int64_t* keys, int64_t n, const Parallel& parallel, float* rows,
                      bool* found) const {
  parallel.run(parallel.threads, [&](int task) {
    const TaskRange range = RangeOf(task, parallel.threads, n);
    VisitRows(
        keys, range.begin, range.end,
        [](const Visited& visited) SLIPSTREAM_LAMBDA_INLINE { __builtin_prefetch(visited.row); },
        [&](int64_t i, const Visited& visited) {
          found[i] = visited.row != nullptr;
          CopyRow(keys[i], visited.row, rows + i * options_.dim);
        });
  });
}

void RowStore::HotKeys(int64_t k, HotKeyOrder order, const Parallel& parallel,
                       std::vector<int64_t>* keys, std::vector<float>* counts) const {
  struct Hot {
    float count;
    int64_t key;
    bool operator<(const Hot& other) const {
      return count != other.count ? count > other.count : key < other.key;
    }
  };
  keys->clear();
  counts->clear();
  k = std::min(k, size());
  if (k <= 0) return;
  // Keep at most 2k candidates. When the list is full, only the best k stay.
  const size_t maximum = static_cast<size_t>(k), limit = std::max<size_t>(2 * maximum, 1024);
  const auto prune = [maximum](std::vector<Hot>* hot) {
    if (hot->size() <= maximum) return;
    std::nth_element(hot->begin(), hot->begin() + static_cast<int64_t>(maximum), hot->end());
    hot->resize(maximum);
  };
  std::vector<std::vector<Hot>> parts(parallel.threads);
  parallel.run(parallel.threads, [&](int task) {
    std::vector<Hot>& hot = parts[task];
    const int end = kNumShards * (task + 1) / parallel.threads;
    for (int s = kNumShards * task / parallel.threads; s < end; ++s) {
      for (const HashIndex::Entry& entry : shards_[s].index.entries()) {
        if (entry.index == HashIndex::kEmpty || !(entry.count > 0.f)) continue;
        hot.push_back({entry.count, entry.key});
        if (hot.size() >= limit) prune(&hot);
      }
    }
    prune(&hot);
    if (order == HotKeyOrder::kByKey) return;
    RadixSort(&hot, [](const Hot& h) { return AscendingBits(h.key); });
    RadixSort(&hot, [](const Hot& h) { return DescendingBits(h.count); });
  });
  std::vector<Hot> hot;
  for (std::vector<Hot>& part : parts) {
    const auto middle = hot.insert(hot.end(), part.begin(), part.end());
    if (order == HotKeyOrder::kByCount) std::inplace_merge(hot.begin(), middle, hot.end());
    std::vector<Hot>().swap(part);
  }
  if (order == HotKeyOrder::kByKey) {
    prune(&hot);
    RadixSort(&hot, [](const Hot& h) { return AscendingBits(h.key); });
  } else if (hot.size() > maximum) {
    hot.resize(maximum);
  }
  keys->reserve(hot.size());
  counts->reserve(hot.size());
  for (const Hot& h : hot) {
    keys->push_back(h.key);
    counts->push_back(h.count);
  }
}

void RowStore::DecayCounts(float factor) {
  if (tracks_changes_ && !all_changed_) {
    // Readers apply each decay to all rows.
    constexpr size_t kMaxDecays = 64;
    if (decays_.size() == kMaxDecays) {
      ChangeAll();
    } else {
      decays_.push_back(factor);
    }
  }
  for (RowShard& shard : shards_) {
    for (HashIndex::Entry& entry : shard.index.entries()) entry.count *= factor;
  }
}

std::vector<int64_t> RowStore::KeysToEvict(int64_t incoming,
                                           const std::vector<int64_t>& pinned) const {
  const int64_t needed = size() + incoming - options_.capacity;
  if (options_.capacity == 0 || needed <= 0) return {};
  // Compare values first, then hashes of keys, so that ties are broken alike on all ranks.
  struct Candidate {
    double value;
    float count;
    uint64_t hash;
    int64_t key;
    bool operator<(const Candidate& other) const {
      return std::tie(value, count, hash) < std::tie(other.value, other.count, other.hash);
    }
  };
  // Keep at most twice the number of rows to evict. When the list is full, only the best candidates
  // stay. From then on most rows cost one comparison, without a hash or a search among the pinned
  // keys.
  const auto leaving = static_cast<size_t>(std::max(needed, options_.capacity / 64));
  std::vector<Candidate> candidates;
  candidates.reserve(std::min(2 * leaving, static_cast<size_t>(size())));
  double max_value = std::numeric_limits<double>::infinity();
  const auto keep_the_best = [&] {
    if (candidates.size() <= leaving) return;
    const auto last = candidates.begin() + static_cast<int64_t>(leaving) - 1;
    std::nth_element(candidates.begin(), last, candidates.end());
    max_value = last->value;
    candidates.resize(leaving);
  };
  for (const RowShard& shard : shards_) {
    for (const HashIndex::Entry& entry : shard.index.entries()) {
      if (entry.index == HashIndex::kEmpty) continue;
      const double value =
          is_lru() ? static_cast<double>(shard.last_used[entry.index]) : entry.count;
      if (value > max_value || std::binary_search(pinned.begin(), pinned.end(), entry.key)) {
        continue;
      }
      candidates.push_back({value, entry.count, HashKey(entry.key), entry.key});
      if (candidates.size() == 2 * leaving) keep_the_best();
    }
  }
  keep_the_best();
  std::vector<int64_t> keys;
  keys.reserve(candidates.size());
  for (const Candidate& candidate : candidates) keys.push_back(candidate.key);
  return keys;
}

void RowStore::Remove(const std::vector<int64_t>& keys) noexcept {
  if (keys.empty()) return;
  for (const int64_t key : keys) {
    RowShard& shard = shards_[ShardOf(key)];
    const uint32_t index = shard.index.Find(key)->index;
    if (spilled_ != nullptr) spilled_->Forget(ShardOf(key), index);
    if (!IsOnDisk(index)) shard.arena.Release(index);
    shard.index.Erase(key);
  }
  NoteRemoved(keys);
  ++generation_;
}

void RowStore::Shrink() {
  if (spilled_ != nullptr) return;
  auto memory = std::make_unique<SlabAllocator>();
  auto index_memory = std::make_unique<IndexMemory>(kNumShards);
  std::vector<RowShard> shards = EmptyShards(memory.get(), index_memory.get());
  std::vector<HashIndex::Entry> entries;
  for (int s = 0; s < kNumShards; ++s) {
    const RowShard& old = shards_[s];
    shards[s].is_in_range = old.is_in_range;
    entries.clear();
    for (const HashIndex::Entry& entry : old.index.entries()) {
      if (entry.index != HashIndex::kEmpty) entries.push_back(entry);
    }
    // In the order of the hash index, all keys would probe the same part of the growing new index.
    std::sort(entries.begin(), entries.end(),
              [](const auto& a, const auto& b) { return a.index < b.index; });
    for (const HashIndex::Entry& entry : entries) {
      uint32_t index = 0;
      void* const row = InsertRow(&shards[s], entry.key, entry.count, &index);
      std::memcpy(row, old.arena.Row(entry.index), static_cast<size_t>(layout_.bytes()));
      if (tracks_use()) shards[s].last_used[index] = old.last_used[entry.index];
      if (tracks_changes_) shards[s].changed[index] = old.changed[entry.index];
    }
  }
  shards_.swap(shards);
  memory_.swap(memory);
  index_memory_.swap(index_memory);
  ++generation_;
}

void RowStore::NoteRemoved(const std::vector<int64_t>& keys) noexcept {
  if (!tracks_changes_ || all_changed_) return;
  try {
    removed_.insert(removed_.end(), keys.begin(), keys.end());
  } catch (const std::bad_alloc&) {
    return ChangeAll();
  }
  if (static_cast<int64_t>(removed_.size()) <= size() + options_.capacity) return;
  // No reader seems to be left.
  ChangeAll();
  tracks_changes_ = false;
  for (RowShard& shard : shards_) std::vector<uint8_t>().swap(shard.changed);
}

std::vector<int64_t> RowStore::Keys() const {
  std::vector<int64_t> keys;
  keys.reserve(static_cast<size_t>(size()));
  for (const RowShard& shard : shards_) {
    for (const HashIndex::Entry& entry : shard.index.entries()) {
      if (entry.index != HashIndex::kEmpty) keys.push_back(entry.key);
    }
  }
  std::sort(keys.begin(), keys.end());
  return keys;
}

int64_t RowStore::KeysAtOnce() const {
  return spilled_ == nullptr ? size() : std::max<int64_t>(1, spilled_->max_rows() / 4);
}

Status RowStore::LoadRow(const int64_t* keys, int64_t n, bool reads, const std::string& who,
                         const Parallel& parallel) {
  if (spilled_ == nullptr) return OkStatus();
  constexpr int64_t kAhead = 16;
  spilled_->BeginUse();
  std::vector<std::vector<int64_t>> missing(kNumShards);
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) Prefetch(keys[i + kAhead]);
    const int s = ShardOf(keys[i]);
    const HashIndex::Entry* const entry = shards_[s].index.Find(keys[i]);
    if (entry == nullptr) continue;
    if (IsOnDisk(entry->index)) {
      missing[s].push_back(keys[i]);
    } else {
      spilled_->Use(s, entry->index);
    }
  }
  int64_t needed = 0;
  for (std::vector<int64_t>& of_shard : missing) {
    std::sort(of_shard.begin(), of_shard.end());
    of_shard.erase(std::unique(of_shard.begin(), of_shard.end()), of_shard.end());
    needed += static_cast<int64_t>(of_shard.size());
  }
  if (needed > spilled_->max_rows()) {
    return ResourceExhausted(who + " " + std::to_string(needed) + " rows of table '" +
                             options_.name + "' from disk at once, but its memory of " +
                             std::to_string(options_.memory) + " bytes holds " +
                             std::to_string(spilled_->max_rows()) +
                             " rows. Increase `memory` or reduce the batch size");
  }
  return spilled_->Load(missing, /*must_fit=*/!reads, parallel);
}

}  // namespace slipstream
