#include "cc_ops/core/table/embedding_table.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "cc_ops/core/base/radix_sort.h"
#include "cc_ops/core/base/row_dim.h"

namespace slipstream {
namespace {

std::string Place(const TableOptions& options) { return " of table '" + options.name + "'"; }

// Floats from one row to the next: 16-byte steps, so that whole rows share
// cache lines where their size allows it.
int64_t Stride(const TableOptions& options) {
  const int64_t floats = options.dim + options.rule.SlotsPerRow(options.dim);
  return (floats + 3) / 4 * 4;
}

std::vector<TableShard> EmptyShards(const TableOptions& options, SlabAllocator* memory,
                                    IndexMemory* index_memory) {
  std::vector<TableShard> shards;
  shards.reserve(kNumShards);
  for (int s = 0; s < kNumShards; ++s)
    shards.emplace_back(s, Stride(options), memory, index_memory);
  return shards;
}

}  // namespace

Status ValidateTableOptions(const TableOptions& options) {
  if (options.name.empty()) return InvalidArgument("a table's name is empty; give it one");
  const Status dim = ValidateDim(options.dim, Place(options));
  if (!dim.ok()) return dim;
  if (options.capacity < 0) {
    return InvalidArgument("capacity" + Place(options) + " is " + std::to_string(options.capacity) +
                           "; allowed: 1 or more, or 0 for no bound");
  }
  const float values[] = {options.initializer.a, options.initializer.b, options.rule.a,
                          options.rule.b, options.rule.c};
  for (float value : values) {
    if (!std::isfinite(value)) {
      return InvalidArgument("a parameter of the initializer or the update rule" + Place(options) +
                             " is " + std::to_string(value) + "; allowed: finite numbers");
    }
  }
  return OkStatus();
}

EmbeddingTable::EmbeddingTable(const TableOptions& options)
    : options_(options),
      slots_(options.rule.SlotsPerRow(options.dim)),
      memory_(std::make_unique<SlabAllocator>()),
      index_memory_(std::make_unique<IndexMemory>(kNumShards)),
      shards_(EmptyShards(options, memory_.get(), index_memory_.get())) {}

int64_t EmbeddingTable::size() const {
  int64_t size = 0;
  for (const TableShard& shard : shards_) size += shard.index.size();
  return size;
}

int64_t EmbeddingTable::index_places() const {
  int64_t places = 0;
  for (const TableShard& shard : shards_) {
    places += static_cast<int64_t>(shard.index.entries().size());
  }
  return places;
}

int64_t EmbeddingTable::bytes() const {
  int64_t bytes = memory_->bytes();
  for (const TableShard& shard : shards_) {
    bytes +=
        shard.index.bytes() + static_cast<int64_t>(shard.last_used.capacity() * sizeof(int64_t) +
                                                   shard.marked.capacity() * sizeof(MarkedRow));
  }
  bytes += static_cast<int64_t>(told_.keys.capacity() * sizeof(int64_t) + told_.marks.capacity());
  return bytes + deferred_bytes() + published_.bytes();
}

float* EmbeddingTable::InsertRow(TableShard* shard, int64_t key, uint64_t hash, float count,
                                 uint32_t* slot) {
  HashIndex::Entry* entry = nullptr;
  bool has_slot = false;
  try {
    *slot = shard->arena.Allocate();
    has_slot = true;
    if (tracks_use() && shard->last_used.size() <= *slot) shard->last_used.resize(*slot + 1);
    entry = shard->index.Insert(key, hash, *slot);
  } catch (const std::bad_alloc&) {
    if (has_slot) shard->arena.Release(*slot);
    throw TableOutOfMemory(this);
  }
  entry->count = count;
  return shard->arena.Row(*slot);
}

float* EmbeddingTable::FindOrInsert(int64_t key, uint64_t hash, float accesses, uint32_t* slot) {
  TableShard& shard = shards_[ShardOf(hash)];
  float* row = nullptr;
  HashIndex::Entry* entry = shard.index.Find(key, hash);
  if (entry != nullptr) {
    entry->count += accesses;
    *slot = entry->slot;
    row = shard.arena.Row(*slot);
  } else {
    row = InsertRow(&shard, key, hash, accesses, slot);
    options_.initializer.Fill(key, options_.dim, row);
    options_.rule.InitSlots(options_.dim, row + options_.dim);
  }
  if (tracks_use()) shard.last_used[*slot] = lookup_step_;
  return row;
}

void EmbeddingTable::ForgetRow(TableShard* shard, int64_t key, uint64_t hash) {
  const uint32_t slot = shard->index.Find(key, hash)->slot;
  if (slot < shard->marked.size()) shard->marked[slot].marks = 0;
  for (DeferredGradients& sums : shard->deferred) {
    if (policy_.is_exchanged) break;
    const uint32_t place = sums.Find(key, hash);
    if (place == DeferredGradients::kNone) continue;
    sums.Remove(place);
    ++shard->counts.evicted;
  }
  shard->arena.Release(slot);
  shard->index.Erase(key, hash);
}

void EmbeddingTable::HotKeys(int64_t k, HotKeyOrder order, const Parallel& parallel,
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
        if (entry.slot == HashIndex::kEmpty || !(entry.count > 0.f)) continue;
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

void EmbeddingTable::DecayCounts(float factor) {
  for (TableShard& shard : shards_) {
    for (HashIndex::Entry& entry : shard.index.entries()) entry.count *= factor;
  }
}

TableContents EmbeddingTable::Export() const {
  struct Place {
    int64_t key;
    int shard;
    HashIndex::Entry entry;
    bool operator<(const Place& other) const { return key < other.key; }
  };
  std::vector<Place> places;
  places.reserve(static_cast<size_t>(size()));
  for (int s = 0; s < kNumShards; ++s) {
    for (const HashIndex::Entry& entry : shards_[s].index.entries()) {
      if (entry.slot != HashIndex::kEmpty) places.push_back({entry.key, s, entry});
    }
  }
  std::sort(places.begin(), places.end());
  TableContents contents;
  contents.update_step = update_step_;
  contents.lookup_step = lookup_step_;
  const size_t n = places.size();
  contents.keys.reserve(n);
  contents.counts.reserve(n);
  contents.rows.reserve(n * static_cast<size_t>(options_.dim));
  contents.slots.reserve(n * static_cast<size_t>(slots_));
  for (const Place& place : places) {
    const TableShard& shard = shards_[place.shard];
    const float* row = shard.arena.Row(place.entry.slot);
    contents.keys.push_back(place.key);
    contents.counts.push_back(place.entry.count);
    contents.rows.insert(contents.rows.end(), row, row + options_.dim);
    contents.slots.insert(contents.slots.end(), row + options_.dim, row + options_.dim + slots_);
    if (tracks_use()) {
      contents.last_used.push_back(shard.last_used[place.entry.slot]);
    }
  }
  return contents;
}

Status EmbeddingTable::CheckValues(const TableContents& contents) const {
  const auto bad = [&](const char* what, size_t i, const std::string& value, const char* allowed) {
    return InvalidArgument(std::string(what) + " of key " + std::to_string(contents.keys[i]) +
                           " to import" + Place(options_) + ", at place " + std::to_string(i) +
                           ", is " + value + "; allowed: " + allowed + ". Nothing was imported");
  };
  const auto first_not_finite = [](const std::vector<float>& values) {
    const auto is_bad = [](float value) { return !std::isfinite(value); };
    return std::find_if(values.begin(), values.end(), is_bad) - values.begin();
  };
  const size_t row = static_cast<size_t>(first_not_finite(contents.rows));
  if (row < contents.rows.size()) {
    return bad("a value", row / options_.dim, std::to_string(contents.rows[row]), "finite numbers");
  }
  const size_t slot = static_cast<size_t>(first_not_finite(contents.slots));
  if (slot < contents.slots.size()) {
    return bad("a slot", slot / slots_, std::to_string(contents.slots[slot]), "finite numbers");
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
    return InvalidArgument("the steps to import" + Place(options_) + " are " +
                           std::to_string(contents.update_step) + " updates and " +
                           std::to_string(contents.lookup_step) +
                           " lookups; allowed: from 0. Nothing was imported");
  }
  return OkStatus();
}

Status EmbeddingTable::Import(const TableContents& contents) {
  const size_t n = contents.keys.size();
  if (options_.capacity > 0 && n > static_cast<size_t>(options_.capacity)) {
    return InvalidArgument(std::to_string(n) + " keys to import exceed the capacity" +
                           Place(options_) + ", " + std::to_string(options_.capacity));
  }
  if (contents.rows.size() != n * options_.dim || contents.slots.size() != n * slots_ ||
      contents.counts.size() != n ||
      (!contents.last_used.empty() && contents.last_used.size() != n)) {
    return InvalidArgument("arrays to import for " + std::to_string(n) + " keys" + Place(options_) +
                           " have " + std::to_string(contents.rows.size()) + " row values, " +
                           std::to_string(contents.slots.size()) + " slot values and " +
                           std::to_string(contents.counts.size()) + " counts; each key has " +
                           std::to_string(options_.dim) + ", " + std::to_string(slots_) + " and 1");
  }
  const Status values = CheckValues(contents);
  if (!values.ok()) return values;
  std::vector<int64_t> sorted = contents.keys;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    return InvalidArgument("key " + std::to_string(*twice) + " to import" + Place(options_) +
                           " comes twice; each key may come once");
  }
  auto memory = std::make_unique<SlabAllocator>();
  auto index_memory = std::make_unique<IndexMemory>(kNumShards);
  std::vector<TableShard> shards = EmptyShards(options_, memory.get(), index_memory.get());
  for (size_t i = 0; i < n; ++i) {
    const int64_t key = contents.keys[i];
    const uint64_t hash = HashKey(key);
    TableShard& shard = shards[ShardOf(hash)];
    uint32_t slot = 0;
    float* row = InsertRow(&shard, key, hash, contents.counts[i], &slot);
    std::copy_n(contents.rows.data() + i * options_.dim, options_.dim, row);
    std::copy_n(contents.slots.data() + i * slots_, slots_, row + options_.dim);
    if (tracks_use()) {
      shard.last_used[slot] = contents.last_used.empty() ? 0 : contents.last_used[i];
    }
  }
  for (int s = 0; s < kNumShards; ++s) {
    shards[s].counts = shards_[s].counts;
    for (size_t r = 0; r < shards_[s].deferred.size(); ++r) shards[s].deferred.emplace_back(dim());
  }
  shards_.swap(shards);
  memory_.swap(memory);
  index_memory_.swap(index_memory);
  is_watching_ = false;
  update_step_ = contents.update_step;
  lookup_step_ = contents.lookup_step;
  ++generation_;
  return OkStatus();
}

void EmbeddingTable::SetPolicy(const UpdatePolicy& policy) {
  const bool holds = policy.mode == UpdatePolicy::Mode::kDefer;
  const size_t ranks = holds ? static_cast<size_t>(policy.ranks) : 0;
  std::vector<std::vector<DeferredGradients>> empty(kNumShards);
  for (int s = 0; s < kNumShards; ++s) {
    if (shards_[s].deferred.size() != ranks) empty[s].assign(ranks, DeferredGradients(dim()));
  }
  earlier_counts_ = update_counts();
  for (int s = 0; s < kNumShards; ++s) {
    shards_[s].counts = UpdateCounts();
    if (shards_[s].deferred.size() != ranks) shards_[s].deferred.swap(empty[s]);
  }
  policy_ = policy;
}

UpdateCounts EmbeddingTable::update_counts() const {
  UpdateCounts sum = earlier_counts_;
  const int step = policy_.is_shadow ? UpdatePolicy::kShadowSampling : 1;
  for (int s = 0; s < kNumShards; s += step) sum.Add(shards_[s].counts, step);
  return sum;
}

int64_t EmbeddingTable::num_deferred() const {
  int64_t n = 0;
  for (const TableShard& shard : shards_) {
    for (const DeferredGradients& sums : shard.deferred) n += sums.size();
  }
  return n;
}

int64_t EmbeddingTable::deferred_bytes() const {
  int64_t bytes = 0;
  for (const TableShard& shard : shards_) {
    for (const DeferredGradients& sums : shard.deferred) bytes += sums.bytes();
  }
  return bytes;
}

}  // namespace slipstream
