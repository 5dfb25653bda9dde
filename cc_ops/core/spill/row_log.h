// The log of the spilled rows of one shard.
//
// Rows are appended to blocks of pages. A full block is written in the background and stays in
// memory until it is on disk. A row is addressed by its position (block, page and row within the
// page as one number), which it keeps until it is dropped. A changed row is appended again at
// another position. Rows are read by page.
//
// A row is live until it is dropped. When a block has no live rows, its place in a file (its
// extent) becomes free. Compaction frees extents early: it reads a block and passes its rows to
// the caller, which appends the live rows again. The number of a free block is reused. Therefore
// each block has a version that distinguishes its pages from earlier pages of the same number.
//
// Not thread-safe: one thread at a time uses the log of a shard.
#ifndef SLIPSTREAM_CC_OPS_CORE_SPILL_ROW_LOG_H_
#define SLIPSTREAM_CC_OPS_CORE_SPILL_ROW_LOG_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/memory/page_memory.h"
#include "cc_ops/core/spill/disk_threads.h"
#include "cc_ops/core/spill/page_layout.h"
#include "cc_ops/core/spill/spill_files.h"

namespace slipstream {

// See the top of the file.
class RowLog {
 public:
  // Positions are below this number.
  static constexpr uint32_t kPositions = uint32_t{1} << 31;

  // pages: pages of a block, which must have as many bytes as a block of `files`. `layout` and
  // `files` must outlive the log.
  RowLog(const PageLayout* layout, int64_t pages, SpillFiles* files)
      : layout_(layout), pages_(pages), files_(files) {}
  RowLog(RowLog&&) = default;

  int64_t live() const { return live_; }  // Number of live rows.
  // Bytes of all buffers: blocks that are not on disk yet, a block read for compaction, and spares.
  int64_t buffered_bytes() const;

  // Makes room for appending `rows` rows. Returns ResourceExhausted if the disk is full or cannot
  // be written, or if positions would reach kPositions; all rows keep their positions.
  Status Reserve(int64_t rows);
  // Appends a row, for which Reserve made room, and returns its position.
  uint32_t Append(int64_t key, const void* row);
  // Marks the row of a position as no longer live.
  void Drop(uint32_t position);

  // Returns the row if it is in memory, else null. Valid until the next Reserve, Poll or Flush.
  const char* InMemory(uint32_t position) const;
  // Returns the number of the page that contains a position. Another page may have the same number
  // later; see VersionOf.
  uint32_t PageOf(uint32_t position) const {
    return position / static_cast<uint32_t>(layout_->rows);
  }
  // Returns a number that differs between successive pages with the same page number.
  uint32_t VersionOf(uint32_t page) const {
    return blocks_[static_cast<size_t>(page / pages_)].version;
  }
  // Returns the transfer that reads a page on disk into `bytes` ([layout->bytes]).
  Transfer ReadOf(uint32_t page, char* bytes) const;
  // Returns the row in a page that was read.
  const char* RowIn(const char* page, uint32_t position) const {
    return layout_->RowOf(page, position % static_cast<uint32_t>(layout_->rows));
  }

  // Completes finished writes. Returns ResourceExhausted with the error of a failed write; its rows
  // are still in memory, and the write has been started again.
  Status Poll();

  // Writes all appended rows and waits for them. Returns the errors of Poll. Later rows are
  // appended to other blocks. Call it before SpillFiles::Seal, which needs all blocks on disk.
  Status Flush();
  // Calls fn(number of the first page, extent, number of live rows) for each block on disk.
  template <class Fn>
  void ForEachBlock(const Fn& fn) const {
    for (size_t number = 0; number < blocks_.size(); ++number) {
      const Block& block = blocks_[number];
      if (!block.is_used || block.buffer != nullptr) continue;
      fn(static_cast<uint32_t>(number) * static_cast<uint32_t>(pages_), block.extent, block.live);
    }
  }
  // Number of rows of a block.
  int64_t RowsOfBlock() const { return pages_ * layout_->rows; }

  // Starts to read the block whose first page is `page` for compaction, unless its version has
  // changed or another block is being read.
  void BeginCompaction(uint32_t page, uint32_t version);
  bool is_compacting() const { return compaction_ != nullptr; }
  // Finishes the compaction that BeginCompaction started. If the block is still being read, it
  // waits for the disk with `waits`, else it returns without effect.
  //
  //   room(rows)                 Receives the number of live rows. If it returns false, the
  //                              compaction is postponed to the next call.
  //   visit(key, row, position)  Called in order for the rows of the block, also for dropped rows,
  //                              until no live row is left. A row is live if the caller has not
  //                              dropped this position. Note: `visit` must append each live row
  //                              again and drop its old position.
  //
  // Returns DataLoss if the block cannot be read back.
  template <class Room, class Visit>
  Status EndCompaction(bool waits, const Room& room, const Visit& visit) {
    if (compaction_ == nullptr || (!waits && !compaction_->group.IsDone())) return OkStatus();
    compaction_->group.Wait();
    const uint32_t number = compaction_->block;
    Status status = CheckCompaction();
    if (status.ok() && !room(blocks_[number].live)) return OkStatus();
    const std::unique_ptr<Buffer> read = std::move(compaction_);
    if (!status.ok()) return status;
    const int64_t rows = layout_->rows;
    for (int64_t row = 0; row < pages_ * rows; ++row) {
      const char* page = read->data() + row / rows * layout_->bytes;
      if (blocks_[number].live == 0) break;
      visit(layout_->KeyOf(page, row % rows), layout_->RowOf(page, row % rows),
            static_cast<uint32_t>(number * pages_ * rows + row));
    }
    blocks_[number].is_compacted = false;
    FreeIfEmpty(number);
    return OkStatus();
  }

  // Drops all rows. Waits for pending writes.
  void Clear();

 private:
  static constexpr uint32_t kNone = 0xffffffffu;
  // Maximum number of blocks that are written at the same time.
  static constexpr size_t kMaxWriting = 4;

  // Memory of a block and its transfer.
  struct Buffer {
    explicit Buffer(int64_t bytes)
        : memory(static_cast<size_t>(bytes), static_cast<size_t>(kPageUnit)) {}
    char* data() const { return memory.data(); }
    PageMemory memory;
    uint32_t block = kNone;
    Transfer transfer;
    TransferGroup group;
  };
  struct Block {
    std::unique_ptr<Buffer> buffer;  // Until the block is on disk.
    Extent extent;
    int64_t live = 0;
    uint32_t version = 0;
    bool is_used = false, is_compacted = false;
  };

  int64_t BlockBytes() const { return pages_ * layout_->bytes; }
  std::unique_ptr<Buffer> NewBuffer();
  // Opens a block at a reserved extent.
  void Open();
  // Starts to write the open block.
  void Close();
  void BeginWrite(Buffer* buffer);
  // Returns DataLoss unless all pages of the block being compacted are valid.
  Status CheckCompaction();
  void FreeIfEmpty(uint32_t number);

  const PageLayout* layout_;
  const int64_t pages_;
  SpillFiles* files_;
  std::vector<Block> blocks_;
  std::vector<uint32_t> unused_;   // Numbers of free blocks.
  std::vector<Extent> reserved_;   // Extents for future blocks.
  std::vector<uint32_t> writing_;  // Numbers of blocks that are being written.
  std::vector<std::unique_ptr<Buffer>> spare_;
  std::unique_ptr<Buffer> compaction_;
  uint32_t open_ = kNone;
  int64_t open_rows_ = 0;  // Rows in the open block.
  int64_t live_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SPILL_ROW_LOG_H_
