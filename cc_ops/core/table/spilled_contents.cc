// Visits all rows of a table that spills, and seals them for a checkpoint.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "cc_ops/core/table/spilled_rows.h"

namespace slipstream {
namespace {

// Number of pages that are read at once to visit all rows.
constexpr size_t kPagesAtOnce = 1024;

}  // namespace

Status SpilledRows::WriteChanged(int shard) {
  ShardSpill& spill = shards_[shard];
  RowShard& table = (*rows_)[shard];
  int64_t room = 0;
  for (uint32_t index = 0; index < spill.used.size(); ++index) {
    if (spill.used[index] == 0 || spill.home[index] != kNoHome) continue;
    if (room-- == 0) {
      // Reserve one block at a time, so that the rows to write are not all buffered in memory.
      room = spill.log.RowsOfBlock() - 1;
      const Status status = spill.log.Reserve(spill.log.RowsOfBlock());
      if (!status.ok()) return ForTable(status);
    }
    spill.home[index] = spill.log.Append(spill.key_of[index], table.arena.Row(index));
    ++spill.rows_written;
  }
  return ForTable(spill.log.Flush());
}

Status SpilledRows::Seal(const Parallel& parallel, SealedRows* sealed) {
  std::vector<Status> statuses(kNumShards);
  ForEachShard(parallel, [&](int s) { statuses[s] = WriteChanged(s); });
  for (const Status& status : statuses) {
    if (!status.ok()) return status;
  }
  std::vector<int32_t> numbers;
  const Status status = files_->Seal(&sealed->files, &numbers);
  if (!status.ok()) return ForTable(status);
  sealed->pages_of_block = files_->block_bytes() / layout_.bytes;
  sealed->rows_of_block = shards_[0].log.RowsOfBlock();
  std::vector<std::vector<int64_t>> at(kNumShards);  // By block of a log: its number in `sealed`.
  for (int s = 0; s < kNumShards; ++s) {
    shards_[s].log.ForEachBlock([&](uint32_t page, const Extent& extent, int64_t) {
      const auto block = static_cast<size_t>(page / sealed->pages_of_block);
      if (at[s].size() <= block) at[s].resize(block + 1);
      at[s][block] = static_cast<int64_t>(sealed->pages.size());
      const auto file = std::lower_bound(numbers.begin(), numbers.end(), extent.file);
      sealed->file_of.push_back(static_cast<int32_t>(file - numbers.begin()));
      sealed->offsets.push_back(extent.offset);
      sealed->pages.push_back(page);
    });
  }
  sealed->counts.assign(sealed->pages.size() * static_cast<size_t>(sealed->rows_of_block), -1.f);
  if (tracks_use_) sealed->last_used.resize(sealed->counts.size());
  ForEachShard(parallel, [&](int s) {
    for (const HashIndex::Entry& entry : (*rows_)[s].index.entries()) {
      if (entry.index == HashIndex::kEmpty) continue;
      const int64_t position =
          IsOnDisk(entry.index) ? entry.index - kOnDisk : shards_[s].home[entry.index];
      const int64_t first = at[s][static_cast<size_t>(position / sealed->rows_of_block)];
      const auto row =
          static_cast<size_t>(first * sealed->rows_of_block + position % sealed->rows_of_block);
      sealed->counts[row] = entry.count;
      if (!tracks_use_) continue;
      sealed->last_used[row] =
          IsOnDisk(entry.index) ? LastUsed(s, entry.index) : (*rows_)[s].last_used[entry.index];
    }
  });
  return OkStatus();
}

Status SpilledRows::ForEachRow(
    int shard, const std::function<void(const HashIndex::Entry&, const StoredRow*)>& visit) {
  const ShardSpill& spill = shards_[shard];
  const RowShard& table = (*rows_)[shard];
  std::vector<HashIndex::Entry> on_disk;
  for (const HashIndex::Entry& entry : table.index.entries()) {
    if (entry.index == HashIndex::kEmpty) continue;
    if (!IsOnDisk(entry.index)) {
      visit(entry, table.arena.Row(entry.index));
      continue;
    }
    const char* const row = spill.log.InMemory(entry.index - kOnDisk);
    if (row != nullptr) {
      visit(entry, reinterpret_cast<const StoredRow*>(row));
    } else {
      on_disk.push_back(entry);
    }
  }
  std::sort(on_disk.begin(), on_disk.end(),
            [](const auto& a, const auto& b) { return a.index < b.index; });
  const auto page_of = [&](const HashIndex::Entry& entry) {
    return spill.log.PageOf(entry.index - kOnDisk);
  };
  for (size_t begin = 0; begin < on_disk.size();) {
    PageBatch batch(layout_, kPagesAtOnce);
    std::vector<uint32_t> numbers;
    size_t end = begin;
    for (; end < on_disk.size(); ++end) {
      const uint32_t page = page_of(on_disk[end]);
      if (!numbers.empty() && numbers.back() == page) continue;
      if (numbers.size() == kPagesAtOnce) break;
      numbers.push_back(page);
      batch.Add(spill.log.ReadOf(page, batch.PageAt(batch.size())));
    }
    batch.Begin();
    batch.Wait();
    for (size_t p = 0; p < numbers.size(); ++p) {
      const Transfer& transfer = batch.transfer(p);
      const Status status = CheckPage(transfer, numbers[p]);
      if (!status.ok()) return status;
      for (; begin < end && page_of(on_disk[begin]) == numbers[p]; ++begin) {
        visit(on_disk[begin], reinterpret_cast<const StoredRow*>(
                                  spill.log.RowIn(transfer.bytes, on_disk[begin].index - kOnDisk)));
      }
    }
  }
  return OkStatus();
}

}  // namespace slipstream
