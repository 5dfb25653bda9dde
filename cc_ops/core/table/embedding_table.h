// One embedding table of the native store: int64 keys -> rows with optimizer
// slots and decayed access counts, in 64 shards by hash.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_EMBEDDING_TABLE_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_EMBEDDING_TABLE_H_

#include <cstdint>
#include <memory>
#include <new>
#include <shared_mutex>
#include <string>
#include <vector>

#include "cc_ops/core/base/drift.h"
#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/containers/hash_index.h"
#include "cc_ops/core/deferral/deferred_gradients.h"
#include "cc_ops/core/deferral/update_policy.h"
#include "cc_ops/core/memory/index_memory.h"
#include "cc_ops/core/memory/row_arena.h"
#include "cc_ops/core/memory/slab_allocator.h"
#include "cc_ops/core/table/published_rows.h"
#include "cc_ops/core/table/row_initializer.h"
#include "cc_ops/core/update/rules/update_rule.h"

namespace slipstream {

struct TableOptions {
  enum class Eviction { kLfu, kLru };
  std::string name;
  int64_t dim = 0;
  int64_t capacity = 0;  // most rows; 0: no bound
  Eviction eviction = Eviction::kLfu;
  RowInitializer initializer;
  UpdateRule rule;
};

// InvalidArgument naming the option, its value and what is allowed.
Status ValidateTableOptions(const TableOptions& options);

class EmbeddingTable;

// Thrown where a table cannot grow; it is intact.
class TableOutOfMemory : public std::bad_alloc {
 public:
  explicit TableOutOfMemory(const EmbeddingTable* table) : table_(table) {}
  const EmbeddingTable* table() const { return table_; }

 private:
  const EmbeddingTable* table_;
};

// All rows of a table, sorted by key.
struct TableContents {
  std::vector<int64_t> keys;       // [n]
  std::vector<float> rows;         // [n, dim]
  std::vector<float> slots;        // [n, slots per row]
  std::vector<float> counts;       // [n]
  std::vector<int64_t> last_used;  // [n]: lookup number of the last access; LRU tables only
  int64_t update_step = 0;
  int64_t lookup_step = 0;
};

// What window ends say of a row, and how far it came since.
struct MarkedRow {
  float travelled = 0.f;  // sum of squared update lengths, of a watched row
  uint8_t marks = 0;      // RowMark bits
};

// How drifts are measured.
struct Measurement {
  DriftMetric metric = DriftMetric::kLinf;
  bool is_signal = false;  // SignalOfDrift of the l2 distance, instead
  double epsilon = 1e-12;  // see RowDrift
};

// A part of the keys with its own index and rows; touched by one thread at a time.
struct TableShard {
  TableShard(int number, int64_t stride, SlabAllocator* memory, IndexMemory* index_memory)
      : index(index_memory, number), arena(stride, memory) {}
  HashIndex index;
  RowArena arena;
  std::vector<int64_t> last_used;           // by slot; LRU tables only
  std::vector<MarkedRow> marked;            // by slot; slots beyond its end have no marks
  std::vector<DeferredGradients> deferred;  // by simulated rank; empty unless gradients are held
  UpdateCounts counts;

  uint8_t MarkOf(uint32_t slot) const { return slot < marked.size() ? marked[slot].marks : 0; }
  // Asks for what a lookup reads first; the arena's chunks need this to have come.
  void Prefetch() const {
    __builtin_prefetch(&index);
    __builtin_prefetch(&arena);
    __builtin_prefetch(&arena + 1);
  }
};

// Callers hold `mutex()`: shared for const members, exclusive for the others.
class EmbeddingTable {
 public:
  // `options` must be valid.
  explicit EmbeddingTable(const TableOptions& options);

  const TableOptions& options() const { return options_; }
  int64_t dim() const { return options_.dim; }
  int64_t slots_per_row() const { return slots_; }
  std::shared_mutex& mutex() const { return mutex_; }
  int64_t size() const;
  int64_t bytes() const;
  // Keys that the shards' indexes have places for; size() over it is their load.
  int64_t index_places() const;
  // Changes when a row leaves or all are replaced: row pointers from before may
  // then belong to other keys.
  int64_t generation() const { return generation_; }
  int64_t num_evicted() const { return num_evicted_; }
  int64_t num_dropped_updates() const { return num_dropped_updates_; }
  void CountDroppedUpdates(int64_t n) { num_dropped_updates_ += n; }
  int64_t NextUpdateStep() { return ++update_step_; }
  int64_t NextLookupStep() { return ++lookup_step_; }

  // The row of a key, or nullptr if it is not there.
  float* Find(int64_t key, uint64_t hash) const {
    const TableShard& shard = shards_[ShardOf(hash)];
    const HashIndex::Entry* entry = shard.index.Find(key, hash);
    return entry == nullptr ? nullptr : shard.arena.Row(entry->slot);
  }
  // The same; `slot` identifies the row within its shard.
  float* Find(int64_t key, uint64_t hash, uint32_t* slot) const {
    const TableShard& shard = shards_[ShardOf(hash)];
    const HashIndex::Entry* entry = shard.index.Find(key, hash);
    if (entry == nullptr) return nullptr;
    *slot = entry->slot;
    return shard.arena.Row(entry->slot);
  }
  void Prefetch(uint64_t hash) const { shards_[ShardOf(hash)].index.Prefetch(hash); }

  // The row of a key, made if need be, and `accesses` more of them counted. Calls for
  // different shards may run at the same time. `slot` identifies the row within
  // its shard. Throws TableOutOfMemory, changing nothing.
  float* FindOrInsert(int64_t key, uint64_t hash, float accesses, uint32_t* slot);

  // The same for a key whose entry is in the first line of the index that is looked at; else asks
  // for the second one and returns nullptr, changing nothing.
  float* FindAtOnce(TableShard* shard, int64_t key, uint64_t hash, float accesses,
                    uint32_t* slot) const {
    HashIndex::Entry* const entry = shard->index.FindAtHome(key, hash);
    if (entry == nullptr) return nullptr;
    entry->count += accesses;
    *slot = entry->slot;
    if (tracks_use()) shard->last_used[*slot] = lookup_step_;
    return shard->arena.Row(*slot);
  }

  // Makes room for `incoming` new keys by removing the least valuable rows,
  // never one of `pinned` (sorted). At least 1/64 of the capacity leaves at once
  // where that many may, so that a full table doesn't search at every step.
  // Pinned and incoming keys together must fit in the capacity. Throws std::bad_alloc, changing
  // nothing. In table_room.cc.
  void MakeRoom(int64_t incoming, const std::vector<int64_t>& pinned);

  // keys: [n]. rows: [n, dim], found: [n]; the row of an absent key is what its
  // initializer would give.
  void Gather(const int64_t* keys, int64_t n, const Parallel& parallel, float* rows,
              bool* found) const;

  // The same, and drift: [n], of each row from snapshot: [n, dim]. A row that is not watched has
  // travelled 0.
  void Measure(const int64_t* keys, const float* snapshot, int64_t n,
               const Measurement& measurement, const Parallel& parallel, float* rows, bool* found,
               float* drift) const;

  // The at most k keys with the highest access counts above 0 (ties: the smaller key), by count
  // descending, then key ascending; or, which takes less time, by key alone.
  enum class HotKeyOrder { kByCount, kByKey };
  void HotKeys(int64_t k, HotKeyOrder order, const Parallel& parallel, std::vector<int64_t>* keys,
               std::vector<float>* counts) const;

  void DecayCounts(float factor);

  const UpdatePolicy& policy() const { return policy_; }
  // Whether updates of a shard's rows need more than gradients and rows.
  bool UpdatesByPolicy(int64_t shard) const {
    return is_watching_ || (policy_.IsActive() && policy_.Samples(shard));
  }
  // `policy` must be valid. Sums that are held must have been flushed, unless only
  // numbers of the policy change. Throws std::bad_alloc, changing nothing.
  void SetPolicy(const UpdatePolicy& policy);
  // keys, marks (RowMark bits): [n]. Replaces all marks, but that kKept stays, and starts the sums
  // of squared update lengths anew. makes_rows: whether keys without a row that get a mark get a
  // row, too; else they are passed over. Takes little where most marks stay as they were, keys are
  // ascending, all that got a mark last had a row, and none has left since; else all are set anew.
  // Throws std::bad_alloc: no mark has changed then, but some keys may have got their rows.
  void MarkRows(const int64_t* keys, const uint8_t* marks, int64_t n, const Parallel& parallel,
                bool makes_rows = false);
  // Adds kFrozen, until the next MarkRows, or kKept. Throws std::bad_alloc, changing nothing.
  void AddMark(uint64_t hash, uint32_t slot, RowMark mark);
  void RemoveMark(uint64_t hash, uint32_t slot, RowMark mark);
  // travelled: [n], the sum of squared update lengths since MarkRows; 0 for a row
  // that is not watched.
  void Travelled(const int64_t* keys, int64_t n, const Parallel& parallel, float* travelled) const;
  // marks: [n], RowMark bits; 0 for a key without a row.
  void Marks(const int64_t* keys, int64_t n, uint8_t* marks) const;
  // Replaces these sums, [n], of watched rows; other keys are passed over.
  void SetTravelled(const int64_t* keys, const float* travelled, int64_t n);

  UpdateCounts update_counts() const;
  int64_t num_deferred() const;
  int64_t deferred_bytes() const;
  TableShard* shard(int64_t s) { return &shards_[s]; }
  // Rows of which other ranks keep copies.
  PublishedRows& published() { return published_; }
  const PublishedRows& published() const { return published_; }
  // That of the last update, and of a flush after it.
  float last_learning_rate() const { return last_learning_rate_; }
  void set_last_learning_rate(float rate) { last_learning_rate_ = rate; }
  int64_t update_step() const { return update_step_; }

  TableContents Export() const;
  // Replaces everything. InvalidArgument on a key that comes twice, on more keys
  // than the capacity, on arrays of the wrong length, and on a row, slot or count that is not
  // finite or, of counts and times of use, negative; nothing is changed then. Throws
  // std::bad_alloc, changing nothing.
  Status Import(const TableContents& contents);

 private:
  struct RowPlace {
    const float* row;  // nullptr: not there
    const TableShard* shard;
    uint32_t slot;  // within the shard
  };
  struct MarkView {
    const int64_t* keys;   // [n]
    const uint8_t* marks;  // [n], RowMark bits
    int64_t n;
  };
  struct MarkList {
    std::vector<int64_t> keys;
    std::vector<uint8_t> marks;
    void Add(int64_t key, uint8_t mark) {
      keys.push_back(key);
      marks.push_back(mark);
    }
    MarkView View() const { return {keys.data(), marks.data(), static_cast<int64_t>(keys.size())}; }
  };
  static constexpr int64_t kNothingTold = -1;

  // Calls see(i, place) for the keys [begin, end), in order, and ahead of it ask(place) for those
  // that are there, to ask for what `see` will read.
  template <typename Ask, typename See>
  void SeeRows(const int64_t* keys, int64_t begin, int64_t end, Ask ask, See see) const;
  // The row, or what the initializer would give. row: [dim].
  void CopyRow(int64_t key, const RowPlace& place, float* row) const;
  static float TravelledOf(const RowPlace& place);
  // Marks that differ from `told_`. Of a key that is wanted again, whatever the order of the keys,
  // the last mark that is not 0 holds, as where all are set anew.
  MarkList MarkChanges(const MarkView& wanted) const;
  // The slot of each key of a list in its shard, with a place for a mark, or HashIndex::kEmpty.
  std::vector<uint32_t> PlacesForMarks(const MarkView& list, bool makes_rows, bool takes_zeros,
                                       const Parallel& parallel);
  // Copies a list to `told_`, valid once `told_generation_` is set; false if changes cannot be told
  // from it, as its keys are not ascending or it has kKept, or are not, as it makes rows.
  bool Remember(const MarkView& list, bool makes_rows);
  // Only a bounded table needs to know when its rows were last used.
  bool tracks_use() const {
    return options_.capacity > 0 && options_.eviction == TableOptions::Eviction::kLru;
  }
  // Of arrays of the right length.
  Status CheckValues(const TableContents& contents) const;
  void ForgetRow(TableShard* shard, int64_t key, uint64_t hash);
  float* InsertRow(TableShard* shard, int64_t key, uint64_t hash, float count, uint32_t* slot);

  const TableOptions options_;
  const int64_t slots_;
  std::unique_ptr<SlabAllocator> memory_;
  std::unique_ptr<IndexMemory> index_memory_;
  std::vector<TableShard> shards_;
  PublishedRows published_;
  UpdatePolicy policy_;
  UpdateCounts earlier_counts_;  // under former policies
  bool is_watching_ = false;
  MarkList told_;                           // by the last MarkRows, keys ascending
  int64_t told_generation_ = kNothingTold;  // in which rows have the marks of `told_`
  float last_learning_rate_ = 0.f;
  int64_t generation_ = 0;
  int64_t num_evicted_ = 0;
  int64_t num_dropped_updates_ = 0;
  int64_t update_step_ = 0;
  int64_t lookup_step_ = 0;
  mutable std::shared_mutex mutex_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_EMBEDDING_TABLE_H_
