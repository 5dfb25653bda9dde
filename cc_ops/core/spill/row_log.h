// The spilled rows of one shard: written behind each other in blocks, each read by its page.
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

// A row has a position until it is dropped, and never changes there: one that changed is appended
// anew. A block that is full is written in the background, and lies in memory until then. Its
// extent is free again once none of its rows is left, which compaction sees to: it gives out the
// rows of a block, to be appended anew. Not thread-safe: a shard has one
// owner at a time, but for what says so.
class RowLog {
 public:
  // Positions are below it.
  static constexpr uint32_t kPositions = uint32_t{1} << 31;

  // pages: of a block, whose bytes are those of `files`. Both must outlive the log.
  RowLog(const PageLayout* layout, int64_t pages, SpillFiles* files)
      : layout_(layout), pages_(pages), files_(files) {}
  RowLog(RowLog&&) = default;

  int64_t live() const { return live_; }
  // Memory of blocks that are not on the disk yet.
  int64_t buffered_bytes() const;

  // Makes room for so many rows to be appended. ResourceExhausted if the disk is full or cannot be
  // written to: all rows are where they were then.
  Status Reserve(int64_t rows);
  // Appends a row, for which there is room; its position.
  uint32_t Append(int64_t key, const void* row);
  // The row of a position is not needed any more.
  void Drop(uint32_t position);

  // The row, while it lies in memory; else null. Valid until the next Reserve or Poll.
  const char* InMemory(uint32_t position) const;
  // The number of its page. Equal for rows of one page; another page may have it later.
  uint32_t PageOf(uint32_t position) const {
    return position / static_cast<uint32_t>(layout_->rows);
  }
  // Tells the pages of a number apart.
  uint32_t VersionOf(uint32_t page) const {
    return blocks_[static_cast<size_t>(page / pages_)].version;
  }
  // How a page that is on the disk is read, into layout->bytes.
  Transfer ReadOf(uint32_t page, char* bytes) const;
  // The row in a page that was read.
  const char* RowIn(const char* page, uint32_t position) const {
    return layout_->RowOf(page, position % static_cast<uint32_t>(layout_->rows));
  }

  // Takes note of what was written since. ResourceExhausted that names the error of a write: its
  // rows are still in memory, and Reserve writes them again.
  Status Poll();

  // Has what was appended written, and waits for it. Errors as Poll. What is appended later is in
  // other blocks, and their files may be sealed.
  Status Flush();
  // Of the blocks on the disk: fn(number of the first page, extent, rows that are left).
  template <class Fn>
  void ForEachBlock(const Fn& fn) const {
    for (size_t number = 0; number < blocks_.size(); ++number) {
      const Block& block = blocks_[number];
      if (!block.is_used || block.buffer != nullptr) continue;
      fn(static_cast<uint32_t>(number) * static_cast<uint32_t>(pages_), block.extent, block.live);
    }
  }
  int64_t RowsOfBlock() const { return pages_ * layout_->rows; }

  // Begins to read the block that begins with a page, to give out its rows; if it is still the one
  // of that version, and no other is being read.
  void BeginCompaction(uint32_t page, uint32_t version);
  bool is_compacting() const { return compaction_ != nullptr; }
  // Rows of the block, once it was read: visit(key, row, position) of all that it ever had; who
  // visits appends those that are left and drops their positions. room(rows): for so many more;
  // false: not now. Does nothing before. Waits for the disk if `waits`.
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

  // Drops all rows; waits for what is being written.
  void Clear();

 private:
  static constexpr uint32_t kNone = 0xffffffffu;
  // Blocks being written before more wait.
  static constexpr size_t kMostWriting = 4;

  // The memory of a block, and what moves it.
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
    std::unique_ptr<Buffer> buffer;  // until it is on the disk
    Extent extent;
    int64_t live = 0;
    uint32_t version = 0;
    bool is_used = false, is_compacted = false;
  };

  int64_t BlockBytes() const { return pages_ * layout_->bytes; }
  std::unique_ptr<Buffer> NewBuffer();
  // Begins a block at an extent that was reserved.
  void Open();
  // Has the open block written.
  void Close();
  void BeginWrite(Buffer* buffer);
  // Of the block being compacted: DataLoss unless it is whole.
  Status CheckCompaction();
  void FreeIfEmpty(uint32_t number);

  const PageLayout* layout_;
  const int64_t pages_;
  SpillFiles* files_;
  std::vector<Block> blocks_;
  std::vector<uint32_t> unused_;   // numbers of blocks
  std::vector<Extent> reserved_;   // for blocks to come
  std::vector<uint32_t> writing_;  // numbers of blocks
  std::vector<std::unique_ptr<Buffer>> spare_;
  std::unique_ptr<Buffer> compaction_;
  uint32_t open_ = kNone;
  int64_t open_rows_ = 0;  // of the open block
  int64_t live_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SPILL_ROW_LOG_H_
