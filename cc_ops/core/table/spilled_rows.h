// Moves the rows of a table between memory and disk.
//
// Each shard keeps its most valuable rows in its arena and the others in a `RowLog` on disk. The
// hash index keeps an entry for every row. The entry of a row on disk contains `kOnDisk` plus its
// position in the log instead of an index in the arena.
//
// A batch calls `BeginUse` and then `Load` with its keys. Rows that are used in the batch, or for
// which the `KeepIf` function returns true, stay in memory. `Load` evicts the least valuable rows
// of a sample of the others. The value of a row is its access count, halved for each time that the
// shard has loaded as many rows as fit in its memory since the last use of the row.
//
// If a row in memory equals its version on disk, `home` stores the position of that version, so
// that the row can be evicted without a write. `Change` resets `home`. Logs are append-only.
// Compaction rewrites the remaining rows of the emptiest files when the files have over a third
// more room than the rows need, not counting two files.
//
// Disk errors are returned as a status, except a full disk while rows are only read. All rows are
// intact then, in memory or on disk, unless the status is DataLoss. Pages have checksums; a page
// that fails its check is never used.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_SPILLED_ROWS_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_SPILLED_ROWS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/spill/page_layout.h"
#include "cc_ops/core/spill/page_reads.h"
#include "cc_ops/core/spill/row_log.h"
#include "cc_ops/core/spill/spill_files.h"
#include "cc_ops/core/table/row_shard.h"

namespace slipstream {

// Indices from here on are positions in the log of a shard. Smaller ones are indices in its arena.
constexpr uint32_t kOnDisk = RowLog::kPositions;
inline bool IsOnDisk(uint32_t index) { return index >= kOnDisk; }

struct SpillStatistics {
  int64_t rows_in_memory = 0;
  int64_t rows_on_disk = 0;
  int64_t disk_bytes = 0;    // Size of the files.
  int64_t rows_read = 0;     // Rows read since the table was created.
  int64_t rows_written = 0;  // Rows written, including by compaction.
  int64_t reads_ahead = 0;   // Rows in `rows_read` that PrefetchRows requested.
};

// All rows of a table at one time, in files on disk.
struct SealedRows {
  SealedFiles files;
  int64_t pages_of_block = 0, rows_of_block = 0;
  // Per block: its file, its offset there, and the number of its first page.
  std::vector<int32_t> file_of;
  std::vector<int64_t> offsets, pages;
  // Per row of each block: the access count; -1 if the row was moved or removed.
  std::vector<float> counts;
  std::vector<int64_t> last_used;  // Per row of each block; empty if the table does not track use.
};

// Callers hold the mutex of the table exclusively, or shared for const members and PrefetchRows.
// Functions with a `shard` argument may run concurrently for different shards.
class SpilledRows {
 public:
  // Opens files in `folder`. memory: maximum bytes of rows in memory. row_bytes: bytes of a row in
  // the arenas. tracks_use: whether the shards record the last access to their rows.
  static Status Make(const std::string& table, int64_t memory, const std::string& folder,
                     int64_t row_bytes, bool tracks_use, std::vector<RowShard>* shards,
                     std::unique_ptr<SpilledRows>* spilled);

  // Maximum number of rows in memory. It may be exceeded if the rows of a batch are distributed
  // unevenly over the shards.
  int64_t max_rows() const { return max_rows_; }
  // Changes when rows are evicted from memory.
  int64_t evictions() const { return evictions_; }
  int64_t bytes() const;
  SpillStatistics statistics() const;

  // Keeps rows in memory for which `keeps` returns true. index: number of the row in its arena.
  void KeepIf(std::function<bool(int shard, uint32_t index)> keeps) { keeps_ = std::move(keeps); }

  // Begins the next use. Rows used from now on stay in memory until the next call.
  void BeginUse() { ++clock_; }
  // Marks a row in memory as used.
  void Use(int shard, uint32_t index) { shards_[shard].used[index] = clock_; }
  // Returns the last access to a row on disk, if the table tracks use. index: as in the hash index,
  // at least kOnDisk.
  int64_t LastUsed(int shard, uint32_t index) const {
    return shards_[shard].last_used[index - kOnDisk];
  }
  // Adds a row in memory that is new or has a new key. Throws std::bad_alloc.
  void Add(int shard, uint32_t index, int64_t key);
  // Records that a row in memory no longer equals its version on disk.
  void Change(int shard, uint32_t index) {
    ShardSpill& spill = shards_[shard];
    if (spill.home[index] == kNoHome) return;
    spill.log.Drop(spill.home[index]);
    spill.home[index] = kNoHome;
  }
  // Removes a row from the table; `index` as in the hash index.
  void Forget(int shard, uint32_t index);
  // Removes all rows.
  void Clear();

  // Loads rows from disk into memory, and evicts the least valuable other rows. keys: [shards], the
  // keys of rows on disk in each shard, without repeats; empty to load none. Returns
  // ResourceExhausted if the disk is full, and DataLoss if a page cannot be read back. Each row
  // keeps its contents, in memory or on disk.
  //
  // With must_fit = false, rows are loaded even if the disk is full, beyond the memory limit. Use
  // it for rows that are only read, because they can be evicted again without a write.
  Status Load(const std::vector<std::vector<int64_t>>& keys, bool must_fit,
              const Parallel& parallel);
  // Evicts rows until the memory limit holds or only rows that must stay in memory are left.
  Status Shrink(const Parallel& parallel) { return Load({}, true, parallel); }
  // Starts reading the rows of keys, so that a later Load finds them sooner. The keys may be absent
  // or in memory. The caller holds the mutex of the table shared.
  void PrefetchRows(const int64_t* keys, int64_t n);

  // Writes all rows that differ from disk and stores the positions of all rows in `sealed`. Rows in
  // memory stay there. Returns the errors of Load.
  Status Seal(const Parallel& parallel, SealedRows* sealed);

  // Calls visit(entry, row) for all rows of a shard, in memory and on disk, in any order. Returns
  // the errors of Load.
  Status ForEachRow(int shard,
                    const std::function<void(const HashIndex::Entry&, const StoredRow*)>& visit);

 private:
  static constexpr uint32_t kNoHome = 0xffffffffu;

  struct ShardSpill {
    explicit ShardSpill(RowLog of_shard) : log(std::move(of_shard)) {}
    RowLog log;
    // By index in the arena:
    std::vector<int64_t> key_of;
    std::vector<uint32_t> home;       // Position of an identical version on disk, or kNoHome.
    std::vector<uint32_t> used;       // Clock of the last use; 0 if the index is free.
    std::vector<uint32_t> last_used;  // Last access by position, for rows that are only on disk.
    uint32_t hand = 0;                // Index at which the next search for rows to evict starts.
    int64_t in_memory = 0;
    // First page of each block, and its version.
    std::vector<std::pair<uint32_t, uint32_t>> to_compact;
    int64_t rows_read = 0, rows_written = 0, reads_ahead = 0;
  };
  // A row to be loaded.
  struct IncomingRow {
    int64_t key;
    uint32_t position;
  };

  SpilledRows(std::string table, int64_t memory, int64_t row_bytes, bool tracks_use,
              int64_t block_pages, std::vector<RowShard>* shards,
              std::unique_ptr<SpillFiles> files);

  // Adds the name of the table to an error of the spill files.
  Status ForTable(const Status& status) const;
  // Returns DataLoss unless a page was read as it was written.
  Status CheckPage(const Transfer& transfer, uint32_t number) const;
  // Value of a row in memory. Rows with low values are evicted first.
  double ValueOf(const RowShard& shard, const ShardSpill& spill, uint32_t index) const;
  // Evicts rows of a shard until it has room for `incoming` more.
  Status MakeRoom(int shard, int64_t incoming);
  // Evicts up to `rows` of the least valuable rows of a shard. If the disk is full, evicts only
  // rows that need no write and returns the error.
  Status Evict(int shard, int64_t rows);
  // If the files have too much unused room, chooses the emptiest files for compaction. Their
  // remaining rows move to other files.
  void ChooseCompaction();
  // Compacts a part of the chosen blocks of a shard.
  Status Compact(int shard);
  Status EndCompaction(int shard, bool waits);
  // Writes the rows of a shard whose version on disk is missing or outdated.
  Status WriteChanged(int shard);
  // Records the last access to a row that is now only on disk.
  void SetLastUsed(ShardSpill* spill, uint32_t position, int64_t time) const;
  // Copies a row that was read from disk into the arena.
  void PutInMemory(int shard, int64_t key, uint32_t position, const char* row);

  const std::string table_;
  const PageLayout layout_;
  const int64_t max_rows_;
  const bool tracks_use_;
  std::vector<RowShard>* const rows_;
  std::unique_ptr<SpillFiles> files_;
  std::vector<ShardSpill> shards_;
  PageReads reads_;
  std::function<bool(int, uint32_t)> keeps_ = [](int, uint32_t) { return false; };
  // Whether the unused room is far too large, so that compaction has to catch up.
  bool is_behind_ = false;
  uint32_t clock_ = 1;
  std::atomic<int64_t> evictions_{0};
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_SPILLED_ROWS_H_
