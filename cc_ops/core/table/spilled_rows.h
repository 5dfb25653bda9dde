// Where the rows of a table are that do not all fit in memory: the more valuable ones there, the
// others on disk.
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

// A row in memory has an index in its shard's arena; one on disk has a position in its shard's log,
// which stands in the hash index instead.
constexpr uint32_t kOnDisk = RowLog::kPositions;
inline bool IsOnDisk(uint32_t index) { return index >= kOnDisk; }

struct SpillStatistics {
  int64_t rows_in_memory = 0;
  int64_t rows_on_disk = 0;
  int64_t disk_bytes = 0;    // of files
  int64_t rows_read = 0;     // from the disk, since the table was made
  int64_t rows_written = 0;  // to it, by compaction, too
  int64_t reads_ahead = 0;   // of rows_read, those that had been announced
};

// All rows of a table as they were at one time, on the disk.
struct SealedRows {
  SealedFiles files;
  int64_t pages_of_block = 0, rows_of_block = 0;
  // Of each block: its file, where it begins there, and the number of its first page.
  std::vector<int32_t> file_of;
  std::vector<int64_t> offsets, pages;
  // Of each row of each block, how often it was accessed; -1: the row is somewhere else, or gone.
  std::vector<float> counts;
  std::vector<int64_t> last_used;  // of each, where it is known
};

// Callers hold the table's mutex exclusively, but for Announce. Calls for different shards may run
// at the same time where they take one.
class SpilledRows {
 public:
  // memory: bytes of rows, at least one page of each shard. row_bytes: of a row in the arenas.
  // tracks_use: whether the shards know when their rows were accessed last.
  static Status Make(const std::string& table, int64_t memory, const std::string& folder,
                     int64_t row_bytes, bool tracks_use, std::vector<RowShard>* shards,
                     std::unique_ptr<SpilledRows>* spilled);

  // Most rows in memory, but for those of a batch that do not spread evenly over the shards.
  int64_t most_rows() const { return most_rows_; }
  // Changes when rows leave memory.
  int64_t evictions() const { return evictions_; }
  int64_t bytes() const;
  SpillStatistics statistics() const;

  // Rows for which this holds stay in memory.
  void KeepIf(std::function<bool(int shard, uint32_t index)> keeps) { keeps_ = std::move(keeps); }

  // What is used from now on, until the next time, stays in memory.
  void BeginUse() { ++clock_; }
  // A row in memory is used.
  void Use(int shard, uint32_t index) { shards_[shard].used[index] = clock_; }
  // When a row on disk was accessed last, where that is known.
  int64_t LastUsed(int shard, uint32_t index) const {
    return shards_[shard].last_used[index - kOnDisk];
  }
  // A row in memory is new; it was made, or its key changed. Throws std::bad_alloc.
  void Add(int shard, uint32_t index, int64_t key);
  // A row in memory is no longer what is on disk.
  void Change(int shard, uint32_t index) {
    ShardSpill& spill = shards_[shard];
    if (spill.home[index] == kNoHome) return;
    spill.log.Drop(spill.home[index]);
    spill.home[index] = kNoHome;
  }
  // A row leaves the table; index: as in the hash index.
  void Forget(int shard, uint32_t index);
  // All do.
  void Clear();

  // Brings the rows of keys, which are on disk, into memory: keys by shard, each once. Others leave
  // for them, the least valuable first. ResourceExhausted if the disk is full, DataLoss if it
  // does not give back what was written: all rows are where they were, or on disk, and in
  // memory, whole. must_fit: false brings them in though the disk is full, beyond the memory: where
  // they are only read, they can leave again.
  Status Load(const std::vector<std::vector<int64_t>>& keys, bool must_fit,
              const Parallel& parallel);
  // Lets rows leave memory until no more are there than may be.
  Status Shrink(const Parallel& parallel) { return Load({}, true, parallel); }
  // Begins to read the rows of keys, wherever they are: Load will find them sooner. The caller
  // holds the table's mutex, shared.
  void Announce(const int64_t* keys, int64_t n);

  // Writes what has changed since it was read or written, and tells where all rows are. Rows in
  // memory stay there. Errors as Load.
  Status Seal(const Parallel& parallel, SealedRows* sealed);

  // visit(key, entry, row) of all rows of a shard, wherever they are, in any order. Errors as Load.
  Status ForEachRow(int shard,
                    const std::function<void(const HashIndex::Entry&, const StoredRow*)>& visit);

 private:
  static constexpr uint32_t kNoHome = 0xffffffffu;

  struct ShardSpill {
    explicit ShardSpill(RowLog of_shard) : log(std::move(of_shard)) {}
    RowLog log;
    // By index in the arena.
    std::vector<int64_t> key_of;
    std::vector<uint32_t> home;       // its position, if it is on disk as it is; else kNoHome
    std::vector<uint32_t> used;       // when it was used last
    std::vector<uint32_t> last_used;  // by position, of rows that are on disk alone
    uint32_t hand = 0;                // where the search for rows to leave goes on
    int64_t in_memory = 0;
    std::vector<std::pair<uint32_t, uint32_t>> to_compact;  // first page of a block, version
    int64_t rows_read = 0, rows_written = 0, reads_ahead = 0;
  };
  // A row that is to come.
  struct Coming {
    int64_t key;
    uint32_t position;
  };

  SpilledRows(std::string table, int64_t memory, int64_t row_bytes, bool tracks_use,
              int64_t block_pages, std::vector<RowShard>* shards,
              std::unique_ptr<SpillFiles> files);

  // An error of the core's, naming the table.
  Status OfTable(const Status& status) const;
  // DataLoss unless a page was read as it was written.
  Status CheckPage(const Transfer& transfer, uint32_t number) const;
  // How soon a row may leave: the least value first.
  double ValueOf(const RowShard& shard, const ShardSpill& spill, uint32_t index) const;
  // Lets rows leave a shard until it has room for so many.
  Status MakeRoom(int shard, int64_t incoming);
  // Lets the least valuable rows of a shard leave, so many as far as they may; of those that have
  // to be written, none if the disk is full.
  Status Evict(int shard, int64_t rows);
  // Chooses the files with the fewest rows for their room, if there is more room than should be:
  // their rows are to move to other files, until they go.
  void ChooseCompaction();
  // Moves some of a shard's.
  Status Compact(int shard);
  Status EndCompaction(int shard, bool waits);
  // Writes the rows of a shard that are not on the disk as they are in memory.
  Status WriteChanged(int shard);
  // Remembers when a row was accessed last that is on disk alone now.
  void SetLastUsed(ShardSpill* spill, uint32_t position, int64_t time) const;
  // Puts a row into memory.
  void PutInMemory(int shard, int64_t key, uint32_t position, const char* row);

  const std::string table_;
  const PageLayout layout_;
  const int64_t most_rows_;
  const bool tracks_use_;
  std::vector<RowShard>* const rows_;
  std::unique_ptr<SpillFiles> files_;
  std::vector<ShardSpill> shards_;
  PageReads reads_;
  std::function<bool(int, uint32_t)> keeps_ = [](int, uint32_t) { return false; };
  bool is_behind_ = false;  // whether there is too much room by far
  uint32_t clock_ = 1;
  std::atomic<int64_t> evictions_{0};
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_SPILLED_ROWS_H_
