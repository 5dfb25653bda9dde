// The rows of one embedding table, stored by key in memory and optionally on disk.
//
// # Layout
//
// A table is divided into `kNumShards` (64) shards by `ShardOf(key)`. Each shard (`RowShard`) has a
// hash index and an arena. The hash index maps a key to an entry (key, index, access count). The
// `index` of an entry is the number of the row in the arena of the shard. A row contains the
// values, then the optimizer slots, encoded as `RowLayout` describes.
//
//   RowStore
//     shards_[s].index   key -> {index, count}
//     shards_[s].arena   index -> values [dim], slots [slots]
//     spilled_           rows on disk, if TableOptions::spill is set; null otherwise
//
// A row keeps its address until it is removed or spilled. `generation()` and `addresses()` report
// whether that may have happened, so that a caller can validate row pointers that it saved.
//
// # Invariants
//
// - A key has at most one row. A row that is not in memory is in the log of its shard on disk. The
//   index of its entry then satisfies `IsOnDisk`.
// - In memory, values are divided by `scale()`. A weight decay of all rows therefore changes one
//   number per step instead of every row.
// - If an allocation fails, the rows keep their contents, and `TableOutOfMemory` or
//   `std::bad_alloc` is thrown.
//
// # Thread safety
//
// The mutex of the table (`EmbeddingTable::mutex()`) guards the store: hold it shared to call const
// members and exclusively to call the others. The holder of an exclusive lock may run multiple
// threads that change different shards.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_STORE_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_STORE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/containers/count_filter.h"
#include "cc_ops/core/memory/index_memory.h"
#include "cc_ops/core/memory/slab_allocator.h"
#include "cc_ops/core/table/row_initializer.h"
#include "cc_ops/core/table/row_layout.h"
#include "cc_ops/core/table/row_shard.h"
#include "cc_ops/core/table/spilled_rows.h"
#include "cc_ops/core/update/rules/update_rule.h"

namespace slipstream {

// Returns seconds since 1970.
int64_t SystemSeconds();

struct TableOptions {
  enum class Eviction { kLfu, kLru };
  std::string name;      // For error messages; not empty.
  int64_t dim = 0;       // Values per row, in [1, kMaxDim].
  int64_t capacity = 0;  // Maximum number of rows; 0 means unbounded.
  Eviction eviction = Eviction::kLfu;
  RowInitializer initializer;
  UpdateRule rule;
  RowDtype dtype = RowDtype::kFloat32;       // Type of the values; see RowLayout.
  RowDtype slot_dtype = RowDtype::kFloat32;  // Type of the optimizer slots.
  int64_t memory = 0;                        // Maximum bytes of rows in memory if `spill` is set.
  std::string spill;        // Folder for rows on disk; empty keeps all rows in memory.
  int64_t admit_after = 1;  // Number of accesses after which a key gets a row, at most 255.
  // Remove a row after this many lookups or seconds without access, or up to a quarter later; 0
  // means never.
  int64_t expire_after = 0;
  bool expires_by_seconds = false;     // Whether `expire_after` counts seconds instead of lookups.
  int64_t (*clock)() = SystemSeconds;  // Returns seconds since 1970; tests replace it.

  RowLayout layout() const {
    return {dtype, slot_dtype, dim, rule.SlotsPerRow(dim), initializer.seed};
  }
};

// Returns InvalidArgument with the option, its value and the allowed values.
Status ValidateTableOptions(const TableOptions& options);

class RowStore;

// Thrown if a table cannot allocate memory. Its rows are unchanged.
class TableOutOfMemory : public std::bad_alloc {
 public:
  explicit TableOutOfMemory(const RowStore* rows) : rows_(rows) {}
  const RowStore* rows() const { return rows_; }

 private:
  const RowStore* rows_;
};

// All rows of a table as arrays. An export sorts them by key.
struct TableContents {
  std::vector<int64_t> keys;       // [n]
  std::vector<float> rows;         // [n, dim]
  std::vector<float> slots;        // [n, slots per row]
  std::vector<float> counts;       // [n]; decayed access counts.
  std::vector<int64_t> last_used;  // [n], or empty unless RowStore::tracks_use: last accesses.
  int64_t update_step = 0;         // Number of updates of the table so far.
  int64_t lookup_step = 0;         // Number of lookups so far.
};

// Destination arrays of an export, sized as the arrays of TableContents.
struct ContentsRoom {
  int64_t* keys;
  float* rows;  // Null if neither rows nor slots are requested.
  float* slots;
  float* counts;
  int64_t* last_used;  // Written only if RowStore::tracks_use.
};

// Changes of a table's rows since the previous call to RowStore::TakeChanges.
struct RowChanges {
  std::vector<HashIndex::Entry> rows;  // New or changed rows, ascending by key.
  std::vector<int64_t> removed;  // Removed keys. A key that was inserted again is in `rows`, too.
  std::vector<float> decays;     // Factors that multiplied the counts of all other rows, in order.
  bool is_all = true;  // Whether `rows` contains all rows because the changes are unknown.
  int64_t number = 0;  // Number of this call; pass it to the next one.
};

// See the top of the file. Callers hold the mutex of the table.
class RowStore {
 public:
  // `options` must be valid and must outlive the store.
  explicit RowStore(const TableOptions& options);
  // Opens the files of rows on disk if `TableOptions::spill` is set. Call it once, before all other
  // functions. Returns InvalidArgument if no file can be created in the folder.
  Status OpenSpill();

  const RowLayout& layout() const { return layout_; }
  int64_t size() const;   // Number of rows, in memory and on disk.
  int64_t bytes() const;  // Allocated bytes of memory.
  // Number of entries that the hash indexes have memory for. The load factor is size() divided by
  // this number.
  int64_t index_capacity() const;
  // Changes when a row is removed or all rows are replaced. Note: it does not change when rows are
  // spilled; see addresses().
  int64_t generation() const { return generation_; }
  // Same, and changes also when rows move from memory to disk. A row pointer is valid only while
  // this number is the same as when the pointer was obtained.
  int64_t addresses() const {
    return generation_ + (spilled_ == nullptr ? 0 : spilled_->evictions());
  }
  int64_t lookup_step() const { return lookup_step_; }  // Number of lookups so far.
  int64_t num_evicted() const { return num_evicted_; }
  // Starts the next lookup. Returns the keys of expired rows in the shards whose turn it is; a
  // table is scanned about four times per `expire_after`. The caller must remove these keys before
  // the lookup.
  std::vector<int64_t> NextLookupStep();
  // Begins a lookup that is not counted.
  void JoinLookupStep() {
    if (spilled_ != nullptr) spilled_->BeginUse();
  }
  int64_t num_expired() const { return num_expired_; }
  void CountExpired(int64_t rows) { num_expired_ += rows; }
  // Factor by which stored values must be multiplied to get the values of a row. A decay of all
  // rows changes only this factor. It is 1 until the first decay.
  float scale() const { return static_cast<float>(scale_); }
  // Multiplies the values of all rows by `kept`, which must be positive. It changes only the scale,
  // except that it first rewrites all rows with a scale of 1 if the scale is below 1e-12. Returns
  // the scale before the multiplication.
  float DecayValues(double kept);
  // Whether the next DecayValues rewrites all rows. The limit is far from the smallest float, so
  // that stored values stay finite.
  bool will_rescale() const { return scale_ < 1e-12; }
  // The scale in full precision, to undo a decay.
  double exact_scale() const { return scale_; }
  void set_exact_scale(double scale) { scale_ = scale; }
  RowShard* shard(int64_t s) { return &shards_[s]; }
  const RowShard* shard(int64_t s) const { return &shards_[s]; }

  // Returns whether a key has a row, in memory or on disk.
  bool Has(int64_t key) const { return shards_[ShardOf(key)].index.Find(key) != nullptr; }

  // Null unless rows spill to disk. Note: rows on disk must be loaded with LoadRow before the
  // functions below find them.
  SpilledRows* spilled() { return spilled_.get(); }
  const SpilledRows* spilled() const { return spilled_.get(); }
  // Loads the existing rows of the keys [n] into memory. They stay there until the next call of
  // LoadRow or the next lookup. Keys may repeat or have no row. Does nothing if the table does not
  // spill.
  //
  //   reads  Whether the caller only reads the rows. A full disk is not an error then.
  //   who    Starts the error message, for example "a batch needs".
  //
  // Returns the errors of SpilledRows::Load, and ResourceExhausted if the rows exceed the memory.
  Status LoadRow(const int64_t* keys, int64_t n, bool reads, const std::string& who,
                 const Parallel& parallel);
  // Divides the keys [n] into ranges, so that the rows of a range fit in memory. For each range, it
  // loads the rows with LoadRow and then calls fn(begin, end). There is one range unless rows
  // spill. Returns the errors of LoadRow, after which fn is not called for the remaining ranges.
  template <class Fn>
  Status ForPartsInMemory(const int64_t* keys, int64_t n, bool reads, const std::string& who,
                          const Parallel& parallel, const Fn& fn) {
    const int64_t at_once = spilled_ == nullptr ? std::max<int64_t>(n, 1) : KeysAtOnce();
    for (int64_t begin = 0; begin < n; begin += at_once) {
      const int64_t end = std::min(n, begin + at_once);
      const Status status = LoadRow(keys + begin, end - begin, reads, who, parallel);
      if (!status.ok()) return status;
      fn(begin, end);
    }
    return OkStatus();
  }
  // Maximum number of keys that ForPartsInMemory loads at once.
  int64_t KeysAtOnce() const;
  // Note: call it before a row in memory changes. Otherwise the change is lost when the row is
  // evicted to disk, and TakeChanges misses it.
  void Change(int shard, uint32_t index) {
    if (spilled_ != nullptr) spilled_->Change(shard, index);
    if (tracks_changes_) shards_[shard].changed[index] = 1;
  }
  // Returns whether callers must call Change. Otherwise it has no effect.
  bool tracks_changes() const { return spilled_ != nullptr || tracks_changes_; }

  // Returns the row of a key as it is stored (see scale()), or nullptr if it is absent or on disk.
  StoredRow* Find(int64_t key) const {
    uint32_t index = 0;
    return Find(key, &index);
  }
  // Same, and sets `index` to the number of the row within its shard. `index` is unchanged if the
  // result is nullptr.
  StoredRow* Find(int64_t key, uint32_t* index) const {
    const RowShard& shard = shards_[ShardOf(key)];
    const HashIndex::Entry* entry = shard.index.Find(key);
    if (entry == nullptr || IsOnDisk(entry->index)) return nullptr;
    *index = entry->index;
    return shard.arena.Row(entry->index);
  }
  // Whether all rows are in range (RowShard::is_in_range).
  bool is_in_range() const;
  // Records in the shard if a row ([layout().floats()], as stored) is not in range.
  void NoteRange(const float* row, RowShard* shard) const;
  // Prefetches the line of the hash index that Find reads first.
  SLIPSTREAM_PREFETCHES void Prefetch(int64_t key) const {
    shards_[ShardOf(key)].index.Prefetch(KeyedHash(key));
  }

  // Returns the row of a key, creates it if it is absent, and adds `accesses` to its count. For a
  // row on disk it only adds the accesses, returns nullptr and sets an index that satisfies
  // IsOnDisk. Calls for different shards may run concurrently. Throws std::bad_alloc, for example
  // TableOutOfMemory (strong exception guarantee).
  StoredRow* FindOrInsert(int64_t key, float accesses, uint32_t* index);

  // Same, but if the key has no row and too few accesses for a row, only counts the accesses,
  // returns nullptr and sets `index` to HashIndex::kEmpty. Equals FindOrInsert unless admits().
  StoredRow* FindOrAdmit(int64_t key, float accesses, uint32_t* index);
  // Whether `accesses` more accesses would give the key a row, if it has none.
  bool WouldAdmit(int64_t key, int64_t accesses) const {
    return !admits() || Filter(key).Count(key) + accesses >= options_.admit_after;
  }
  // Whether keys get a row only after `TableOptions::admit_after` accesses.
  bool admits() const { return options_.admit_after > 1; }
  // Number of accesses to keys that were too rare for a row. A batch counts a key once.
  int64_t num_not_admitted() const;
  // One filter per shard; empty unless the table admits keys.
  const std::vector<CountFilter>& filters() const { return filters_; }
  std::vector<CountFilter>& filters() { return filters_; }

  // Fast path of FindOrInsert for a key whose entry is in the first cache line of its probe
  // sequence. hash: KeyedHash(key). For other keys it prefetches the second line, returns nullptr,
  // counts nothing and does not change `index`. For a row on disk it returns nullptr and sets
  // `index`, like FindOrInsert.
  StoredRow* FindAtOnce(RowShard* shard, int64_t key, uint64_t hash, float accesses,
                        uint32_t* index) const {
    HashIndex::Entry* const entry = shard->index.FindAtHome(key, hash);
    if (entry == nullptr) return nullptr;
    entry->count += accesses;
    *index = entry->index;
    if (spilled_ != nullptr) {
      if (IsOnDisk(*index)) return nullptr;
      spilled_->Use(static_cast<int>(shard - shards_.data()), *index);
    }
    if (tracks_use()) shard->last_used[*index] = now_;
    if (tracks_changes_) shard->changed[*index] = 1;
    return shard->arena.Row(*index);
  }
  // Records the current time as the last access to a row that is in memory.
  void SetLastUsed(int shard, uint32_t index) {
    if (tracks_use()) shards_[shard].last_used[index] = now_;
  }

  // A key that VisitRows visits.
  struct Visited {
    const StoredRow* row;  // Null if the key has no row in memory.
    int shard;
    uint32_t index;  // Number of the row within its shard.
  };
  // Calls see(i, visited) for the keys i in [begin, end), in order. Some keys ahead, it calls
  // prefetch(visited) if the key has a row in memory, so that `see` finds its data in the cache.
  // Declare `prefetch` with SLIPSTREAM_LAMBDA_INLINE.
  template <typename PrefetchVisited, typename See>
  void VisitRows(const int64_t* keys, int64_t begin, int64_t end, PrefetchVisited prefetch,
                 See see) const {
    constexpr int64_t kIndexAhead = 16, kRowAhead = 8;
    Visited ahead[kRowAhead];  // Ring buffer of the keys [i, i + kRowAhead).
    for (int64_t i = begin - kRowAhead; i < end; ++i) {
      Visited* const visited = &ahead[(i - begin + kRowAhead) % kRowAhead];
      if (i >= begin) see(i, *visited);
      if (i + kIndexAhead < end) Prefetch(keys[i + kIndexAhead]);
      if (i + kRowAhead >= end) continue;
      const int64_t key = keys[i + kRowAhead];
      visited->shard = ShardOf(key);
      visited->row = Find(key, &visited->index);
      if (visited->row != nullptr) prefetch(*visited);
    }
  }
  // Copies the values of a row to `values` ([dim]). found: the row of the key; null for a key
  // without a row, which gives its initial values.
  void CopyRow(int64_t key, const StoredRow* found, float* values) const;
  // Writes the initial values of a key, divided by scale(), to `values` ([dim]).
  void NewAsStored(int64_t key, float* values) const {
    FillNew(key, values);
    DivideByScale(values);
  }
  // Replaces the values of the row of a key by `values` ([dim]).
  void WriteRow(int64_t key, const float* values, StoredRow* row);
  // Factor from values to stored values.
  float stored_factor() const { return 1.f / scale(); }
  // Writes the initial values and slots of a key, rounded as if stored and read back, to `row`
  // ([layout().floats()]).
  void MakeNewRow(int64_t key, float* row) const;
  // Reads rows. keys: [n]. rows: [n, dim]. found: [n]. An absent key gets the values of its
  // initializer.
  void Gather(const int64_t* keys, int64_t n, const Parallel& parallel, float* rows,
              bool* found) const;

  // Returns at most k keys with the highest positive access counts, and these counts. Of equal
  // counts, smaller keys are preferred. kByCount sorts by descending count, then by ascending key.
  // kByKey sorts by ascending key, which is faster.
  enum class HotKeyOrder { kByCount, kByKey };
  void HotKeys(int64_t k, HotKeyOrder order, const Parallel& parallel, std::vector<int64_t>* keys,
               std::vector<float>* counts) const;

  // Multiplies the access counts of all rows by `factor`, in [0, 1].
  void DecayCounts(float factor);

  // Returns the keys to evict so that `incoming` new keys fit in the capacity; empty if they fit
  // already. Keys in `pinned` (ascending) are not returned. The result has the keys with the lowest
  // access counts or, with kLru, the oldest last accesses. If possible it has at least 1/64 of the
  // capacity, so that a full table does not search at every step. Throws std::bad_alloc.
  std::vector<int64_t> KeysToEvict(int64_t incoming, const std::vector<int64_t>& pinned) const;
  // Removes existing keys and invalidates pointers to their rows; see generation().
  void Remove(const std::vector<int64_t>& keys) noexcept;
  // Moves the rows to new memory without the room of removed rows, frees the old memory and
  // invalidates pointers to rows. A table that spills does not change. Throws std::bad_alloc
  // (strong exception guarantee).
  void Shrink();
  void CountEvicted(int64_t rows) { num_evicted_ += rows; }

  // Returns all keys, ascending.
  std::vector<int64_t> Keys() const;

  // Returns the entries of all rows, or of the rows that changed since TakeChanges, ascending by
  // key.
  std::vector<HashIndex::Entry> Entries(bool only_changed = false) const;
  // Copies the rows of `entries` to `room`, in this order. For a table that spills, `entries` must
  // contain all rows. Returns the errors of reading from disk.
  Status Export(const std::vector<HashIndex::Entry>& entries, const ContentsRoom& room) const;
  // Exports everything except the update step, which UpdateState counts. An error of reading from
  // disk is stored in `status`; the contents are incomplete then.
  TableContents Export(Status* status = nullptr) const;
  // Returns the changes since the last call if `since` is its RowChanges::number, else all rows.
  // For tables in memory only. The first call starts to track changes, which takes one byte per
  // row. Tracking stops when the list of removed keys gets longer than the rows and the capacity
  // together, because then probably no more calls follow. A table is not tracked if every update
  // changes all rows.
  RowChanges TakeChanges(int64_t since);
  // Writes all rows of a table that spills to disk and stores their positions in `sealed`. Returns
  // the errors of SpilledRows::Seal.
  Status Seal(const Parallel& parallel, SealedRows* sealed) {
    return spilled_->Seal(parallel, sealed);
  }
  // Replaces all rows and the number of lookups. Returns InvalidArgument for a repeated key, for
  // more keys than the capacity, for arrays of the wrong length, for values that are not finite in
  // their data type, for negative counts or steps and, with kLru, for last accesses beyond the
  // steps. The table is unchanged then. A table that spills also returns ResourceExhausted if the
  // disk is full; it has a part of the new rows then. Throws std::bad_alloc (strong exception
  // guarantee unless the table spills).
  Status Import(const TableContents& contents);
  // Adds rows of new keys to a table that spills and ignores the steps in `contents`. Returns the
  // errors of Import, also for a key that has a row.
  Status Add(const TableContents& contents);

  // Whether the table records when each row was accessed last: the number of the lookup or, with
  // TableOptions::expires_by_seconds, the time in seconds. True for tables with kLru and a
  // capacity, and for tables with TableOptions::expire_after.
  bool tracks_use() const { return is_lru() || options_.expire_after > 0; }

 private:
  bool is_lru() const {
    return options_.capacity > 0 && options_.eviction == TableOptions::Eviction::kLru;
  }
  // Time of an access in the given lookup, in the unit of `last_used`.
  int64_t Now(int64_t lookup_step) const {
    return options_.expires_by_seconds ? options_.clock() : lookup_step;
  }
  // Time of the last access to a row; `index` as in the hash index.
  int64_t LastUsed(int shard, uint32_t index) const {
    return IsOnDisk(index) ? spilled_->LastUsed(shard, index) : shards_[shard].last_used[index];
  }
  // Time of the last access to row i of imported contents.
  int64_t LastUsedOf(const TableContents& contents, size_t i, int64_t now) const;
  const CountFilter& Filter(int64_t key) const {
    return filters_[static_cast<size_t>(ShardOf(key))];
  }
  // Returns the errors of Import, or of Add if `adds`.
  Status Check(const TableContents& contents, bool adds) const;
  // Checks the values in arrays that have the right lengths.
  Status CheckValues(const TableContents& contents) const;
  std::vector<RowShard> EmptyShards(SlabAllocator* memory, IndexMemory* index_memory) const;
  Status ExportSpilled(const std::vector<HashIndex::Entry>& entries,
                       const ContentsRoom& room) const;
  // Returns contents with arrays of n rows that are still unset.
  TableContents EmptyContents(size_t n) const;
  void ExportRow(int shard, const HashIndex::Entry& entry, const StoredRow* row, size_t i,
                 const ContentsRoom& room) const;
  // Marks all rows as changed.
  void ChangeAll() noexcept;
  void NoteRemoved(const std::vector<int64_t>& keys) noexcept;
  // Writes row i of valid contents.
  void ImportRow(const TableContents& contents, size_t i, StoredRow* row) const;
  // Writes the rows [begin, end) of contents to `shards`, which must not have their keys. now: the
  // last access of rows for which `contents` has none.
  void ImportRows(const TableContents& contents, size_t begin, size_t end, int64_t now,
                  std::vector<RowShard>* shards);
  // Adds the rows and counts of valid contents to the existing rows.
  Status AddChecked(const TableContents& contents);
  // Converts values ([dim]) to their stored form.
  void DivideByScale(float* values) const;
  // Writes the initial values of a key.
  void FillNew(int64_t key, float* values) const;
  StoredRow* InsertRow(RowShard* shard, int64_t key, float count, uint32_t* index);

  const TableOptions& options_;
  const RowLayout layout_;
  std::unique_ptr<SlabAllocator> memory_;
  std::unique_ptr<IndexMemory> index_memory_;
  std::vector<RowShard> shards_;
  std::unique_ptr<SpilledRows> spilled_;
  int64_t generation_ = 0;
  int64_t num_evicted_ = 0, num_expired_ = 0;
  int64_t lookup_step_ = 0;
  int64_t now_ = 0;  // Now() of the last lookup.
  std::vector<CountFilter> filters_;
  std::vector<int64_t> not_admitted_;  // One count per shard.
  double scale_ = 1.0;
  bool tracks_changes_ = false, all_changed_ = true;
  std::vector<int64_t> removed_;
  std::vector<float> decays_;
  int64_t changes_taken_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_STORE_H_
