#include "cc_ops/core/spill/row_log.h"

#include <algorithm>
#include <utility>

namespace slipstream {

std::unique_ptr<RowLog::Buffer> RowLog::NewBuffer() {
  if (spare_.empty()) return std::make_unique<Buffer>(BlockBytes());
  std::unique_ptr<Buffer> buffer = std::move(spare_.back());
  spare_.pop_back();
  return buffer;
}

int64_t RowLog::buffered_bytes() const {
  const int64_t open = open_ == kNone ? 0 : 1, read = compaction_ == nullptr ? 0 : 1;
  return (open + read + static_cast<int64_t>(writing_.size() + spare_.size())) * BlockBytes();
}

Status RowLog::Reserve(int64_t rows) {
  const Status status = Poll();
  if (!status.ok()) return status;
  const int64_t left = open_ == kNone ? 0 : RowsOfBlock() - open_rows_;
  const int64_t blocks = (std::max<int64_t>(0, rows - left) + RowsOfBlock() - 1) / RowsOfBlock();
  if ((static_cast<int64_t>(blocks_.size()) + blocks) * RowsOfBlock() >= kPositions) {
    return ResourceExhausted("the rows on disk exceed the maximum of " +
                             std::to_string(kPositions) +
                             " per shard. Set `capacity` to limit the number of rows");
  }
  while (static_cast<int64_t>(reserved_.size()) < blocks) {
    Extent extent;
    const Status taken = files_->Take(&extent);
    if (!taken.ok()) return taken;
    reserved_.push_back(extent);
  }
  // Allocate memory, too, before any row moves.
  blocks_.reserve(blocks_.size() + static_cast<size_t>(blocks));
  writing_.reserve(writing_.size() + static_cast<size_t>(blocks) + 1);
  while (static_cast<int64_t>(spare_.size()) < blocks) {
    spare_.push_back(std::make_unique<Buffer>(BlockBytes()));
  }
  return OkStatus();
}

void RowLog::Open() {
  if (unused_.empty()) {
    open_ = static_cast<uint32_t>(blocks_.size());
    blocks_.emplace_back();
  } else {
    open_ = unused_.back();
    unused_.pop_back();
  }
  Block& block = blocks_[open_];
  block.buffer = NewBuffer();
  block.buffer->block = open_;
  block.extent = reserved_.back();
  reserved_.pop_back();
  block.is_used = true;
  open_rows_ = 0;
}

uint32_t RowLog::Append(int64_t key, const void* row) {
  if (open_ == kNone) Open();
  const uint32_t number = open_;
  Block& block = blocks_[number];
  const int64_t at = open_rows_++;
  layout_->Set(block.buffer->data() + at / layout_->rows * layout_->bytes, at % layout_->rows, key,
               row);
  ++block.live;
  ++live_;
  if (open_rows_ == RowsOfBlock()) Close();
  return static_cast<uint32_t>(number * RowsOfBlock() + at);
}

void RowLog::Close() {
  const uint32_t number = open_;
  open_ = kNone;
  Buffer* const buffer = blocks_[number].buffer.get();
  for (int64_t page = 0; page < pages_; ++page) {
    const int64_t used = std::clamp<int64_t>(open_rows_ - page * layout_->rows, 0, layout_->rows);
    layout_->Seal(buffer->data() + page * layout_->bytes,
                  static_cast<uint32_t>(number * pages_ + page), used);
  }
  writing_.push_back(number);
  BeginWrite(buffer);
}

void RowLog::BeginWrite(Buffer* buffer) {
  const Extent extent = blocks_[buffer->block].extent;
  buffer->transfer = Transfer();
  buffer->transfer.file = files_->descriptor(extent.file);
  buffer->transfer.writes = true;
  buffer->transfer.bytes = buffer->data();
  buffer->transfer.size = BlockBytes();
  buffer->transfer.offset = extent.offset;
  DiskThreads::OfProcess().Begin(&buffer->transfer, 1, &buffer->group);
}

Status RowLog::Poll() {
  Status status;
  std::vector<uint32_t> left;
  left.reserve(writing_.size());
  for (const uint32_t number : writing_) {
    Buffer* const buffer = blocks_[number].buffer.get();
    if (writing_.size() - left.size() > kMaxWriting) buffer->group.Wait();
    if (!buffer->group.IsDone()) {
      left.push_back(number);
      continue;
    }
    if (buffer->transfer.error != 0) {
      status = ResourceExhausted("rows cannot be written to '" + files_->folder() +
                                 "': " + buffer->transfer.ErrorText() +
                                 ". The rows stay in memory, and the write is repeated");
      left.push_back(number);
      BeginWrite(buffer);
      continue;
    }
    std::unique_ptr<Buffer> done = std::move(blocks_[number].buffer);
    if (spare_.size() < 2) spare_.push_back(std::move(done));
    FreeIfEmpty(number);
  }
  writing_.swap(left);
  return status;
}

void RowLog::Drop(uint32_t position) {
  const auto number = static_cast<uint32_t>(position / RowsOfBlock());
  --blocks_[number].live;
  --live_;
  FreeIfEmpty(number);
}

void RowLog::FreeIfEmpty(uint32_t number) {
  Block& block = blocks_[number];
  if (block.live > 0 || block.buffer != nullptr || block.is_compacted || !block.is_used) return;
  files_->Release(block.extent);
  block.extent = Extent();
  block.is_used = false;
  ++block.version;
  unused_.push_back(number);
}

const char* RowLog::InMemory(uint32_t position) const {
  const int64_t at = position % RowsOfBlock();
  const Block& block = blocks_[static_cast<size_t>(position / RowsOfBlock())];
  if (block.buffer == nullptr) return nullptr;
  return layout_->RowOf(block.buffer->data() + at / layout_->rows * layout_->bytes,
                        at % layout_->rows);
}

Transfer RowLog::ReadOf(uint32_t page, char* bytes) const {
  const Extent extent = blocks_[static_cast<size_t>(page / pages_)].extent;
  Transfer transfer;
  transfer.file = files_->descriptor(extent.file);
  transfer.bytes = bytes;
  transfer.size = layout_->bytes;
  transfer.offset = extent.offset + page % pages_ * layout_->bytes;
  return transfer;
}

Status RowLog::Flush() {
  if (open_ != kNone) Close();
  for (const uint32_t number : writing_) blocks_[number].buffer->group.Wait();
  for (const Extent& extent : reserved_) files_->Release(extent);
  reserved_.clear();
  return Poll();
}

void RowLog::BeginCompaction(uint32_t page, uint32_t version) {
  const auto number = static_cast<uint32_t>(page / pages_);
  Block& block = blocks_[number];
  if (compaction_ != nullptr || !block.is_used || block.version != version) return;
  compaction_ = NewBuffer();
  compaction_->block = number;
  block.is_compacted = true;
  Transfer* const transfer = &compaction_->transfer;
  *transfer = ReadOf(static_cast<uint32_t>(number * pages_), compaction_->data());
  transfer->size = BlockBytes();
  DiskThreads::OfProcess().Begin(transfer, 1, &compaction_->group);
}

Status RowLog::CheckCompaction() {
  const std::string where = "a block of rows in '" + files_->folder() + "' ";
  Block& block = blocks_[compaction_->block];
  if (compaction_->transfer.error != 0) {
    block.is_compacted = false;
    return DataLoss(where + "cannot be read: " + compaction_->transfer.ErrorText() +
                    ". Restore the last checkpoint");
  }
  for (int64_t page = 0; page < pages_; ++page) {
    const auto number = static_cast<uint32_t>(compaction_->block * pages_ + page);
    if (layout_->IsWhole(compaction_->data() + page * layout_->bytes, number)) continue;
    block.is_compacted = false;
    return DataLoss(where +
                    "is damaged: it does not match its checksum. Restore the last checkpoint");
  }
  return OkStatus();
}

void RowLog::Clear() {
  for (const uint32_t number : writing_) blocks_[number].buffer->group.Wait();
  if (compaction_ != nullptr) compaction_->group.Wait();
  compaction_.reset();
  writing_.clear();
  open_ = kNone;
  live_ = 0;
  for (uint32_t number = 0; number < blocks_.size(); ++number) {
    Block& block = blocks_[number];
    block.buffer.reset();
    block.live = 0;
    block.is_compacted = false;
    FreeIfEmpty(number);
  }
}

}  // namespace slipstream
