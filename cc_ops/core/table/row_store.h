// The rows of a table by key, in 64 shards by hash: values with optimizer slots beside them, and
// decayed access counts.
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

int64_t SystemSeconds();

struct TableOptions {
  enum class Eviction { kLfu, kLru };
  std::string name;
  int64_t dim = 0;
  int64_t capacity = 0;  // most rows; 0: no bound
  Eviction eviction = Eviction::kLfu;
  RowInitializer initializer;
  UpdateRule rule;
  RowDtype dtype = RowDtype::kFloat32;       // of the values; see RowLayout
  RowDtype slot_dtype = RowDtype::kFloat32;  // of the slots
  int64_t memory = 0;                        // bytes of rows in memory, where others spill
  std::string spill;                         // folder on the disk; empty: all rows are in memory
  int64_t admit_after = 1;                   // accesses until a key gets a row
  int64_t expire_after = 0;                  // without an access, until a row leaves; 0: never
  bool expires_by_seconds = false;           // else by lookups
  int64_t (*clock)() = SystemSeconds;        // seconds since 1970

  RowLayout layout() const {
    return {dtype, slot_dtype, dim, rule.SlotsPerRow(dim), initializer.seed};
  }
};

// InvalidArgument naming the option, its value and what is allowed.
Status ValidateTableOptions(const TableOptions& options);

class RowStore;

// Thrown where a table's rows cannot grow; they are intact.
class TableOutOfMemory : public std::bad_alloc {
 public:
  explicit TableOutOfMemory(const RowStore* rows) : rows_(rows) {}
  const RowStore* rows() const { return rows_; }

 private:
  const RowStore* rows_;
};

// All rows of a table, sorted by key.
struct TableContents {
  std::vector<int64_t> keys;       // [n]
  std::vector<float> rows;         // [n, dim]
  std::vector<float> slots;        // [n, slots per row]
  std::vector<float> counts;       // [n]
  std::vector<int64_t> last_used;  // [n]: when it was accessed last; see RowStore::tracks_use
  int64_t update_step = 0;
  int64_t lookup_step = 0;
};

// Room for the arrays of as many rows; see TableContents.
struct ContentsRoom {
  int64_t* keys;
  float* rows;  // null: neither rows nor slots are asked for
  float* slots;
  float* counts;
  int64_t* last_used;  // of a table that tracks use
};

// What became of a table's rows since RowStore::TakeChanges was called before.
struct RowChanges {
  std::vector<HashIndex::Entry> rows;  // that changed or are new, ascending by key
  std::vector<int64_t> removed;        // keys that have left; some may be back, and in `rows`
  std::vector<float> decays;           // what the counts of all others were multiplied by, in turn
  bool is_all = true;                  // it is not known, and all rows are in `rows`
  int64_t number = 0;                  // of this call
};

// Callers hold the table's mutex: shared for const members, exclusive for the others.
class RowStore {
 public:
  // `options` must be valid, and outlive the store.
  explicit RowStore(const TableOptions& options);
  // Makes what a table with a folder needs; to be called once, before anything else.
  // InvalidArgument if no file can be made there.
  Status OpenSpill();

  const RowLayout& layout() const { return layout_; }
  int64_t size() const;
  int64_t bytes() const;
  // Entries that the shards' indexes have memory for; size() over it is their load.
  int64_t index_capacity() const;
  // Changes when a row leaves the table or all are replaced.
  int64_t generation() const { return generation_; }
  // The same where rows leave memory, too: row pointers from before may then belong to other keys.
  int64_t addresses() const {
    return generation_ + (spilled_ == nullptr ? 0 : spilled_->evictions());
  }
  int64_t lookup_step() const { return lookup_step_; }
  int64_t num_evicted() const { return num_evicted_; }
  // Rows that expired, and were not accessed before this lookup, are to leave.
  std::vector<int64_t> NextLookupStep();
  int64_t num_expired() const { return num_expired_; }
  void CountExpired(int64_t rows) { num_expired_ += rows; }
  // Rows lie in memory divided by this, so that all of them can decay at once; 1 until they do.
  float scale() const { return static_cast<float>(scale_); }
  // Multiplies the values of all rows, without touching them but once in a long while. kept: above
  // 0. Returns the scale that rows lie in memory by until then.
  float DecayValues(double kept);
  RowShard* shard(int64_t s) { return &shards_[s]; }
  const RowShard* shard(int64_t s) const { return &shards_[s]; }

  // Whether a key has a row, wherever it is.
  bool Has(int64_t key) const { return shards_[ShardOf(key)].index.Find(key) != nullptr; }

  // Null unless rows spill to the disk. Those that are there have to be brought in before any of
  // the functions below finds them.
  SpilledRows* spilled() { return spilled_.get(); }
  const SpilledRows* spilled() const { return spilled_.get(); }
  // Brings in the rows that keys have, and keeps them there until the next use begins. Does nothing
  // where rows do not spill. Errors as SpilledRows::Load, and ResourceExhausted if they are more
  // than there is memory for; who: that needs them, for the error. reads: they are only read: a
  // full disk is no error.
  Status BringIn(const int64_t* keys, int64_t n, bool reads, const std::string& who,
                 const Parallel& parallel);
  // Calls fn(begin, end) for parts of the keys, one after the other, whose rows are in memory then:
  // one part, unless rows spill. Errors as BringIn.
  template <class Fn>
  Status ForPartsInMemory(const int64_t* keys, int64_t n, bool reads, const std::string& who,
                          const Parallel& parallel, const Fn& fn) {
    const int64_t at_once = spilled_ == nullptr ? std::max<int64_t>(n, 1) : KeysAtOnce();
    for (int64_t begin = 0; begin < n; begin += at_once) {
      const int64_t end = std::min(n, begin + at_once);
      const Status status = BringIn(keys + begin, end - begin, reads, who, parallel);
      if (!status.ok()) return status;
      fn(begin, end);
    }
    return OkStatus();
  }
  // So many keys are brought in at once where there are more than fit.
  int64_t KeysAtOnce() const;
  // A row in memory is about to change.
  void Change(int shard, uint32_t index) {
    if (spilled_ != nullptr) spilled_->Change(shard, index);
    if (tracks_changes_) shards_[shard].changed[index] = 1;
  }
  // Whether Change has to be called.
  bool hears_of_changes() const { return spilled_ != nullptr || tracks_changes_; }

  // The row of a key as it lies in memory, see scale(), or nullptr if it is not there.
  StoredRow* Find(int64_t key) const {
    uint32_t index = 0;
    return Find(key, &index);
  }
  // The same; `index` identifies the row within its shard.
  StoredRow* Find(int64_t key, uint32_t* index) const {
    const RowShard& shard = shards_[ShardOf(key)];
    const HashIndex::Entry* entry = shard.index.Find(key);
    if (entry == nullptr || IsOnDisk(entry->index)) return nullptr;
    *index = entry->index;
    return shard.arena.Row(entry->index);
  }
  SLIPSTREAM_PREFETCHES void Prefetch(int64_t key) const {
    shards_[ShardOf(key)].index.Prefetch(KeyedHash(key));
  }

  // The row of a key, made if need be, and `accesses` more of them counted. Of a row on the disk
  // these are counted: it returns nullptr, and an index that IsOnDisk. Calls for different shards
  // may run at the same time. Throws TableOutOfMemory, changing nothing.
  StoredRow* FindOrInsert(int64_t key, float accesses, uint32_t* index);

  // The same for an access where a key may be too rare to have a row: of one that is, it returns
  // nullptr, and an index of HashIndex::kEmpty.
  StoredRow* FindOrAdmit(int64_t key, float accesses, uint32_t* index);
  // Whether so many accesses more would give a key without a row one.
  bool WouldAdmit(int64_t key, int64_t accesses) const {
    return !admits() || Filter(key).Count(key) + accesses >= options_.admit_after;
  }
  // Whether keys get a row only after some accesses.
  bool admits() const { return options_.admit_after > 1; }
  // Accesses of keys that had no row then, each batch's of a key once.
  int64_t num_not_admitted() const;
  // Of the shards; empty unless the table admits.
  const std::vector<CountFilter>& filters() const { return filters_; }
  std::vector<CountFilter>& filters() { return filters_; }

  // The same as FindOrInsert in a shard by a key's KeyedHash, for one whose entry is in the first
  // line of the index that is looked at; else prefetches the second one and returns nullptr,
  // leaving index as it was.
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
  // A row in memory is accessed: it was brought in.
  void SetLastUsed(int shard, uint32_t index) {
    if (tracks_use()) shards_[shard].last_used[index] = now_;
  }

  // A key that VisitRows comes to.
  struct Visited {
    const StoredRow* row;  // nullptr: not there
    int shard;
    uint32_t index;  // within the shard
  };
  // Calls see(i, visited) for the keys [begin, end), in order, and ahead of it prefetch(visited)
  // for those that are there: what `see` will read. `prefetch` is to be SLIPSTREAM_LAMBDA_INLINE.
  template <typename PrefetchVisited, typename See>
  void VisitRows(const int64_t* keys, int64_t begin, int64_t end, PrefetchVisited prefetch,
                 See see) const {
    constexpr int64_t kIndexAhead = 16, kRowAhead = 8;
    Visited ahead[kRowAhead];  // of keys [i, i + kRowAhead), from i % kRowAhead on
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
  // The values of a row, or, where there is none, those of a new one. values: [dim].
  void CopyRow(int64_t key, const StoredRow* found, float* values) const;
  // The values of a key without a row as they would lie in memory, see scale(). values: [dim].
  void NewAsStored(int64_t key, float* values) const {
    FillNew(key, values);
    DivideByScale(values);
  }
  // Replaces the values of a row. values: [dim].
  void WriteRow(const float* values, StoredRow* row) const;
  // Values and slots of a key's new row, as they are when read back. row: [layout().floats()].
  void MakeNewRow(int64_t key, float* row) const;
  // keys: [n]. rows: [n, dim], found: [n]; the row of an absent key is what its
  // initializer would give.
  void Gather(const int64_t* keys, int64_t n, const Parallel& parallel, float* rows,
              bool* found) const;

  // The at most k keys with the highest access counts above 0 (ties: the smaller key), by count
  // descending, then key ascending; or, which takes less time, by key alone.
  enum class HotKeyOrder { kByCount, kByKey };
  void HotKeys(int64_t k, HotKeyOrder order, const Parallel& parallel, std::vector<int64_t>* keys,
               std::vector<float>* counts) const;

  void DecayCounts(float factor);

  // The least valuable keys that must leave for `incoming` new ones, never one of `pinned`
  // (sorted); empty where there is room. At least 1/64 of the capacity leaves at once where that
  // many may, so that a full table doesn't search at every step. Throws std::bad_alloc.
  std::vector<int64_t> KeysToEvict(int64_t incoming, const std::vector<int64_t>& pinned) const;
  // Removes keys that are there; pointers to their rows are void, see generation().
  void Remove(const std::vector<int64_t>& keys) noexcept;
  void CountEvicted(int64_t rows) { num_evicted_ += rows; }

  // All keys, ascending.
  std::vector<int64_t> Keys() const;

  // All rows, or those that are marked as changed, ascending by key.
  std::vector<HashIndex::Entry> Entries(bool only_changed = false) const;
  // Rows of entries of this table, whose room it fills. Errors of reading from the disk.
  Status Export(const std::vector<HashIndex::Entry>& entries, const ContentsRoom& room) const;
  // All but the number of updates, which is not the rows'.
  // status: an error of reading from the disk; what is exported is not whole then.
  TableContents Export(Status* status = nullptr) const;
  // What became of the rows since the call with this number. All rows come if that was not the last
  // call, or none. For a table in memory: from the first call on it keeps track, at a byte a row.
  // It stops when more rows have left since than it has room for.
  RowChanges TakeChanges(int64_t since);
  // Writes all rows to the disk, where they spill, and tells where they are.
  Status Seal(const Parallel& parallel, SealedRows* sealed) {
    return spilled_->Seal(parallel, sealed);
  }
  // Replaces everything. InvalidArgument on a key that comes twice, on more keys
  // than the capacity, on arrays of the wrong length, and on a row, slot or count that is not
  // finite or, of counts and times of use, negative; nothing is changed then. Throws
  // std::bad_alloc, changing nothing.
  Status Import(const TableContents& contents);
  // Adds rows of keys that are not there to a table whose rows spill; the steps of the contents do
  // not matter. Errors as Import; and ResourceExhausted if the disk is full: some rows are there
  // then.
  Status Add(const TableContents& contents);

  // Whether the table knows when its rows were accessed last: by lookups, or by seconds.
  bool tracks_use() const { return is_lru() || options_.expire_after > 0; }

 private:
  bool is_lru() const {
    return options_.capacity > 0 && options_.eviction == TableOptions::Eviction::kLru;
  }
  // The time that rows are accessed at now.
  int64_t Now(int64_t lookup_step) const {
    return options_.expires_by_seconds ? options_.clock() : lookup_step;
  }
  // When a row was accessed last; index: as in the hash index.
  int64_t LastUsed(int shard, uint32_t index) const {
    return IsOnDisk(index) ? spilled_->LastUsed(shard, index) : shards_[shard].last_used[index];
  }
  // When a row was that is imported.
  int64_t LastUsedOf(const TableContents& contents, size_t i, int64_t now) const;
  const CountFilter& Filter(int64_t key) const {
    return filters_[static_cast<size_t>(ShardOf(key))];
  }
  // Errors of Import, and of Add beside the rows that are there.
  Status Check(const TableContents& contents, bool adds) const;
  // Of arrays of the right length.
  Status CheckValues(const TableContents& contents) const;
  std::vector<RowShard> EmptyShards(SlabAllocator* memory, IndexMemory* index_memory) const;
  Status ExportSpilled(const std::vector<HashIndex::Entry>& entries,
                       const ContentsRoom& room) const;
  // Of n rows, which are still to be set.
  TableContents EmptyContents(size_t n) const;
  void ExportRow(int shard, const HashIndex::Entry& entry, const StoredRow* row, size_t i,
                 const ContentsRoom& room) const;
  // From here on all rows count as changed.
  void ChangeAll() noexcept;
  void NoteRemoved(const std::vector<int64_t>& keys) noexcept;
  // Writes row i of contents, which were checked.
  void ImportRow(const TableContents& contents, size_t i, StoredRow* row) const;
  // Those rows of contents, into shards that have none of their keys. now: for rows that were never
  // accessed.
  void ImportRows(const TableContents& contents, size_t begin, size_t end, int64_t now,
                  std::vector<RowShard>* shards);
  // Rows and counts of contents that were checked, beside those that are there.
  Status AddChecked(const TableContents& contents);
  // Values, [dim], to what lies in memory of them.
  void DivideByScale(float* values) const;
  // The values of a new row.
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
  int64_t now_ = 0;  // see Now(), of the last lookup
  std::vector<CountFilter> filters_;
  std::vector<int64_t> not_admitted_;  // by shard
  double scale_ = 1.0;
  bool tracks_changes_ = false, all_changed_ = true;
  std::vector<int64_t> removed_;
  std::vector<float> decays_;
  int64_t changes_taken_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_STORE_H_
