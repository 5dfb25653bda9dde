#include "cc_ops/core/table/row_store.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include "cc_ops/core/base/radix_sort.h"
#include "cc_ops/core/base/row_dim.h"

namespace slipstream {
namespace {

std::string Of(const TableOptions& options) { return " of table '" + options.name + "'"; }

std::vector<RowShard> EmptyShards(const RowLayout& layout, SlabAllocator* memory,
                                  IndexMemory* index_memory) {
  std::vector<RowShard> shards;
  shards.reserve(kNumShards);
  for (int s = 0; s < kNumShards; ++s) {
    shards.emplace_back(s, layout.bytes(), memory, index_memory);
  }
  return shards;
}

}  // namespace

Status ValidateTableOptions(const TableOptions& options) {
  if (options.name.empty()) return InvalidArgument("a table's name is empty; give it one");
  const Status dim = ValidateDim(options.dim, Of(options));
  if (!dim.ok()) return dim;
  if (options.spill.empty() != (options.memory == 0) || options.memory < 0) {
    return InvalidArgument("memory" + Of(options) + " is " + std::to_string(options.memory) +
                           " and spill '" + options.spill +
                           "'; allowed: both, bytes and a folder, or neither");
  }
  if (!options.spill.empty() &&
      (options.rule.transforms.DecaysAll() || options.rule.transforms.SweepsAll())) {
    return InvalidArgument("spill" + Of(options) + " is '" + options.spill +
                           "'; allowed where no update touches all rows: a penalty or decay of all "
                           "rows does");
  }
  if (!options.spill.empty() && options.capacity > 0 &&
      options.eviction == TableOptions::Eviction::kLru) {
    return InvalidArgument("eviction" + Of(options) +
                           " is lru; allowed where rows spill to the disk: lfu");
  }
  if (options.capacity < 0) {
    return InvalidArgument("capacity" + Of(options) + " is " + std::to_string(options.capacity) +
                           "; allowed: 1 or more, or 0 for no bound");
  }
  if (options.dtype == RowDtype::kInt8 || options.slot_dtype == RowDtype::kInt8 ||
      options.slot_dtype == RowDtype::kFloat16) {
    return InvalidArgument("the dtypes of rows and slots" + Of(options) + " are numbers " +
                           std::to_string(static_cast<int>(options.dtype)) + " and " +
                           std::to_string(static_cast<int>(options.slot_dtype)) +
                           "; allowed: float32, bfloat16 or float16 of rows, float32 or bfloat16 "
                           "of slots");
  }
  if (options.dtype == RowDtype::kFloat16 && options.rule.transforms.DecaysAll()) {
    return InvalidArgument("dtype" + Of(options) +
                           " is float16; allowed where all rows decay: float32 or bfloat16, whose "
                           "range holds what rows are divided by");
  }
  std::vector<float> values(options.rule.parameters.begin(), options.rule.parameters.end());
  const RowTransforms& transforms = options.rule.transforms;
  values.insert(values.end(),
                {options.initializer.a, options.initializer.b, transforms.l2, transforms.clip_value,
                 transforms.clip_norm, transforms.decay, transforms.max_norm});
  for (float value : values) {
    if (!std::isfinite(value)) {
      return InvalidArgument("a parameter of the initializer or the update rule" + Of(options) +
                             " is " + std::to_string(value) + "; allowed: finite numbers");
    }
  }
  return OkStatus();
}

RowStore::RowStore(const TableOptions& options)
    : options_(options),
      layout_(options.layout()),
      memory_(std::make_unique<SlabAllocator>()),
      index_memory_(std::make_unique<IndexMemory>(kNumShards)),
      shards_(EmptyShards(layout_, memory_.get(), index_memory_.get())) {}

Status RowStore::OpenSpill() {
  if (options_.spill.empty()) return OkStatus();
  return SpilledRows::Make(options_.name, options_.memory, options_.spill, layout_.bytes(),
                           &shards_, &spilled_);
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
  for (const RowShard& shard : shards_) {
    bytes +=
        shard.index.bytes() + static_cast<int64_t>(shard.last_used.capacity() * sizeof(int64_t));
  }
  return bytes;
}

StoredRow* RowStore::InsertRow(RowShard* shard, int64_t key, float count, uint32_t* index) {
  HashIndex::Entry* entry = nullptr;
  const int number = static_cast<int>(shard - shards_.data());
  bool has_index = false, is_added = false;
  try {
    *index = shard->arena.Allocate();
    has_index = true;
    if (tracks_use() && shard->last_used.size() <= *index) shard->last_used.resize(*index + 1);
    if (spilled_ != nullptr) spilled_->Add(number, *index, key);
    is_added = spilled_ != nullptr;
    entry = shard->index.Insert(key, *index);
  } catch (const std::bad_alloc&) {
    if (is_added) spilled_->Forget(number, *index);
    if (has_index) shard->arena.Release(*index);
    throw TableOutOfMemory(this);
  }
  entry->count = count;
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
    row = shard.arena.Row(*index);
  } else {
    std::vector<float> copy;
    if (!layout_.is_floats()) copy.resize(static_cast<size_t>(layout_.floats()));
    row = InsertRow(&shard, key, accesses, index);
    float* const made = layout_.is_floats() ? RowLayout::Floats(row) : copy.data();
    MakeNewRow(key, made);
    DivideByScale(made);
    if (!layout_.is_floats()) {
      layout_.WriteValues(made, row);
      layout_.WriteSlots(made + layout_.dim, row);
    }
  }
  if (tracks_use()) shard.last_used[*index] = lookup_step_;
  return row;
}

float RowStore::DecayValues(double kept) {
  // Far from the ends of float's range.
  constexpr double kSmallest = 1e-12;
  if (scale_ < kSmallest) {
    std::vector<float> values(static_cast<size_t>(layout_.dim));
    for (RowShard& shard : shards_) {
      for (const HashIndex::Entry& entry : shard.index.entries()) {
        if (entry.index == HashIndex::kEmpty) continue;
        StoredRow* const row = shard.arena.Row(entry.index);
        CopyRow(entry.key, row, values.data());
        layout_.WriteValues(values.data(), row);
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
  const float factor = 1.f / scale();
  for (int64_t j = 0; j < layout_.dim; ++j) values[j] *= factor;
}

void RowStore::WriteRow(const float* values, StoredRow* row) const {
  if (scale_ == 1.0) return layout_.WriteValues(values, row);
  std::vector<float> divided(values, values + layout_.dim);
  DivideByScale(divided.data());
  layout_.WriteValues(divided.data(), row);
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
  // Keeps at most 2k candidates: when full, only the best k stay.
  const size_t most = static_cast<size_t>(k), limit = std::max<size_t>(2 * most, 1024);
  const auto prune = [most](std::vector<Hot>* hot) {
    if (hot->size() <= most) return;
    std::nth_element(hot->begin(), hot->begin() + static_cast<int64_t>(most), hot->end());
    hot->resize(most);
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
  } else if (hot.size() > most) {
    hot.resize(most);
  }
  keys->reserve(hot.size());
  counts->reserve(hot.size());
  for (const Hot& h : hot) {
    keys->push_back(h.key);
    counts->push_back(h.count);
  }
}

void RowStore::DecayCounts(float factor) {
  for (RowShard& shard : shards_) {
    for (HashIndex::Entry& entry : shard.index.entries()) entry.count *= factor;
  }
}

std::vector<int64_t> RowStore::KeysToEvict(int64_t incoming,
                                           const std::vector<int64_t>& pinned) const {
  const int64_t needed = size() + incoming - options_.capacity;
  if (options_.capacity == 0 || needed <= 0) return {};
  // Value first, then the hash of the key: ties fall the same way everywhere.
  struct Candidate {
    double value;
    float count;
    uint64_t hash;
    int64_t key;
    bool operator<(const Candidate& other) const {
      return std::tie(value, count, hash) < std::tie(other.value, other.count, other.hash);
    }
  };
  // Keeps at most twice the rows to leave. When full, only the best of them stay, and from then on
  // most rows cost one comparison: neither a hash nor a search among the pinned ones.
  const auto leaving = static_cast<size_t>(std::max(needed, options_.capacity / 64));
  std::vector<Candidate> candidates;
  candidates.reserve(std::min(2 * leaving, static_cast<size_t>(size())));
  double most_value = std::numeric_limits<double>::infinity();
  const auto keep_the_best = [&] {
    if (candidates.size() <= leaving) return;
    const auto last = candidates.begin() + static_cast<int64_t>(leaving) - 1;
    std::nth_element(candidates.begin(), last, candidates.end());
    most_value = last->value;
    candidates.resize(leaving);
  };
  for (const RowShard& shard : shards_) {
    for (const HashIndex::Entry& entry : shard.index.entries()) {
      if (entry.index == HashIndex::kEmpty) continue;
      const double value =
          tracks_use() ? static_cast<double>(shard.last_used[entry.index]) : entry.count;
      if (value > most_value || std::binary_search(pinned.begin(), pinned.end(), entry.key)) {
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
  ++generation_;
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

TableContents RowStore::Export(Status* status) const {
  if (spilled_ != nullptr) return ExportSpilled(status);
  struct Exported {
    int64_t key;
    int shard;
    HashIndex::Entry entry;
    bool operator<(const Exported& other) const { return key < other.key; }
  };
  std::vector<Exported> entries;
  entries.reserve(static_cast<size_t>(size()));
  for (int s = 0; s < kNumShards; ++s) {
    for (const HashIndex::Entry& entry : shards_[s].index.entries()) {
      if (entry.index != HashIndex::kEmpty) entries.push_back({entry.key, s, entry});
    }
  }
  std::sort(entries.begin(), entries.end());
  TableContents contents = EmptyContents(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const Exported& exported = entries[i];
    const RowShard& shard = shards_[exported.shard];
    contents.keys[i] = exported.key;
    ExportRow(exported.entry, shard.arena.Row(exported.entry.index), i, &contents);
    if (tracks_use()) contents.last_used[i] = shard.last_used[exported.entry.index];
  }
  return contents;
}

TableContents RowStore::ExportSpilled(Status* status) const {
  // Rows come as they lie on the disk.
  std::vector<int64_t> keys = Keys();
  TableContents contents = EmptyContents(keys.size());
  for (int s = 0; s < kNumShards; ++s) {
    const Status read =
        spilled_->ForEachRow(s, [&](const HashIndex::Entry& entry, const StoredRow* row) {
          const auto at = std::lower_bound(keys.begin(), keys.end(), entry.key) - keys.begin();
          ExportRow(entry, row, static_cast<size_t>(at), &contents);
        });
    if (!read.ok() && status != nullptr) *status = read;
  }
  contents.keys = std::move(keys);
  return contents;
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

void RowStore::ExportRow(const HashIndex::Entry& entry, const StoredRow* row, size_t i,
                         TableContents* contents) const {
  CopyRow(entry.key, row, contents->rows.data() + i * static_cast<size_t>(layout_.dim));
  layout_.ReadSlots(row, contents->slots.data() + i * static_cast<size_t>(layout_.slots));
  contents->counts[i] = entry.count;
}

Status RowStore::CheckValues(const TableContents& contents) const {
  const auto bad = [&](const char* what, size_t i, const std::string& value, const char* allowed) {
    return InvalidArgument(std::string(what) + " of key " + std::to_string(contents.keys[i]) +
                           " to import" + Of(options_) + ", at index " + std::to_string(i) +
                           ", is " + value + "; allowed: " + allowed + ". Nothing was imported");
  };
  const auto first_bad = [](const std::vector<float>& values, RowDtype dtype) {
    const auto is_bad = [dtype](float value) { return !IsHeldBy(dtype, value); };
    return std::find_if(values.begin(), values.end(), is_bad) - values.begin();
  };
  const size_t row = static_cast<size_t>(first_bad(contents.rows, layout_.dtype));
  if (row < contents.rows.size()) {
    return bad("a value", row / options_.dim, std::to_string(contents.rows[row]),
               NumbersHeldBy(layout_.dtype));
  }
  const size_t slot = static_cast<size_t>(first_bad(contents.slots, layout_.slot_dtype));
  if (slot < contents.slots.size()) {
    return bad("a slot", slot / layout_.slots, std::to_string(contents.slots[slot]),
               NumbersHeldBy(layout_.slot_dtype));
  }
  for (size_t i = 0; i < contents.counts.size(); ++i) {
    if (std::isfinite(contents.counts[i]) && contents.counts[i] >= 0.f) continue;
    return bad("the access count", i, std::to_string(contents.counts[i]), "a finite number from 0");
  }
  for (size_t i = 0; i < contents.last_used.size(); ++i) {
    if (contents.last_used[i] >= 0 && contents.last_used[i] <= contents.lookup_step) continue;
    return bad("the time of last use", i, std::to_string(contents.last_used[i]),
               "from 0 to the number of lookups");
  }
  if (contents.update_step < 0 || contents.lookup_step < 0) {
    return InvalidArgument("the steps to import" + Of(options_) + " are " +
                           std::to_string(contents.update_step) + " updates and " +
                           std::to_string(contents.lookup_step) +
                           " lookups; allowed: from 0. Nothing was imported");
  }
  return OkStatus();
}

Status RowStore::Import(const TableContents& contents) {
  const size_t n = contents.keys.size();
  if (options_.capacity > 0 && n > static_cast<size_t>(options_.capacity)) {
    return InvalidArgument(std::to_string(n) + " keys to import exceed the capacity" +
                           Of(options_) + ", " + std::to_string(options_.capacity));
  }
  if (contents.rows.size() != n * options_.dim || contents.slots.size() != n * layout_.slots ||
      contents.counts.size() != n ||
      (!contents.last_used.empty() && contents.last_used.size() != n)) {
    return InvalidArgument("arrays to import for " + std::to_string(n) + " keys" + Of(options_) +
                           " have " + std::to_string(contents.rows.size()) + " row values, " +
                           std::to_string(contents.slots.size()) + " slot values and " +
                           std::to_string(contents.counts.size()) + " counts; each key has " +
                           std::to_string(options_.dim) + ", " + std::to_string(layout_.slots) +
                           " and 1");
  }
  const Status values = CheckValues(contents);
  if (!values.ok()) return values;
  std::vector<int64_t> sorted = contents.keys;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    return InvalidArgument("key " + std::to_string(*twice) + " to import" + Of(options_) +
                           " comes twice; each key may come once");
  }
  if (spilled_ != nullptr) return ImportSpilled(contents);
  auto memory = std::make_unique<SlabAllocator>();
  auto index_memory = std::make_unique<IndexMemory>(kNumShards);
  std::vector<RowShard> shards = EmptyShards(layout_, memory.get(), index_memory.get());
  for (size_t i = 0; i < n; ++i) {
    uint32_t index = 0;
    RowShard& shard = shards[ShardOf(contents.keys[i])];
    ImportRow(contents, i, InsertRow(&shard, contents.keys[i], contents.counts[i], &index));
    if (tracks_use()) {
      shard.last_used[index] = contents.last_used.empty() ? 0 : contents.last_used[i];
    }
  }
  shards_.swap(shards);
  memory_.swap(memory);
  index_memory_.swap(index_memory);
  lookup_step_ = contents.lookup_step;
  scale_ = 1.0;
  ++generation_;
  return OkStatus();
}

void RowStore::ImportRow(const TableContents& contents, size_t i, StoredRow* row) const {
  layout_.WriteValues(contents.rows.data() + i * static_cast<size_t>(layout_.dim), row);
  layout_.WriteSlots(contents.slots.data() + i * static_cast<size_t>(layout_.slots), row);
}

Status RowStore::ImportSpilled(const TableContents& contents) {
  spilled_->Clear();
  auto memory = std::make_unique<SlabAllocator>();
  auto index_memory = std::make_unique<IndexMemory>(kNumShards);
  std::vector<RowShard> shards = EmptyShards(layout_, memory.get(), index_memory.get());
  shards_.swap(shards);
  memory_.swap(memory);
  index_memory_.swap(index_memory);
  lookup_step_ = contents.lookup_step;
  ++generation_;
  const auto at_once = static_cast<size_t>(KeysAtOnce());
  for (size_t i = 0; i < contents.keys.size(); ++i) {
    if (i % at_once == 0) {
      spilled_->BeginUse();
      const Status room = spilled_->Shrink(Parallel());
      if (!room.ok()) {
        return Status(room.code(), room.message() + ". The table has a part of its rows now");
      }
    }
    uint32_t index = 0;
    RowShard& shard = shards_[ShardOf(contents.keys[i])];
    ImportRow(contents, i, InsertRow(&shard, contents.keys[i], contents.counts[i], &index));
  }
  return OkStatus();
}

int64_t RowStore::KeysAtOnce() const {
  return spilled_ == nullptr ? size() : std::max<int64_t>(1, spilled_->most_rows() / 4);
}

Status RowStore::BringIn(const int64_t* keys, int64_t n, bool reads, const std::string& who,
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
  if (needed > spilled_->most_rows()) {
    return ResourceExhausted(
        who + " " + std::to_string(needed) + " rows of table '" + options_.name +
        "' at once; its memory, " + std::to_string(options_.memory) + " bytes, holds " +
        std::to_string(spilled_->most_rows()) + ": raise it or make the batches smaller");
  }
  return spilled_->Load(missing, /*must_fit=*/!reads, parallel);
}

}  // namespace slipstream
