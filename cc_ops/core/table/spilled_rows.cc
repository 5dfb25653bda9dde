#include "cc_ops/core/table/spilled_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

#include "cc_ops/core/base/hash.h"

namespace slipstream {
namespace {

// Size of the blocks of a log: large writes, but a small part of the memory.
constexpr int64_t kMaxBlockBytes = 256 << 10, kBlocksOfMemory = 16;
// Pages that are read ahead take at most 1 / kPartAhead of the memory limit, but at least 1 MiB is
// allowed.
constexpr int64_t kPartAhead = 8, kMinAhead = 1 << 20;
// Candidates per evicted row, and the number of rows that are evicted at once.
constexpr int64_t kCandidates = 8, kMaxLeaving = 256, kPartLeaving = 64;
// Maximum number of blocks per shard and step if compaction has to catch up.
constexpr int kMaxCompacted = 8;
}  // namespace

Status SpilledRows::Make(const std::string& table, int64_t memory, const std::string& folder,
                         int64_t row_bytes, bool tracks_use, std::vector<RowShard>* shards,
                         std::unique_ptr<SpilledRows>* spilled) {
  const PageLayout layout(row_bytes);
  const int64_t of_block =
      std::min(kMaxBlockBytes, memory / (kNumShards * kBlocksOfMemory)) / layout.bytes;
  const int64_t pages = std::max<int64_t>(1, of_block);
  std::unique_ptr<SpillFiles> files;
  const Status status = SpillFiles::Open(folder, pages * layout.bytes, &files);
  if (!status.ok()) return Status(status.code(), "table '" + table + "': " + status.message());
  spilled->reset(
      new SpilledRows(table, memory, row_bytes, tracks_use, pages, shards, std::move(files)));
  return OkStatus();
}

SpilledRows::SpilledRows(std::string table, int64_t memory, int64_t row_bytes, bool tracks_use,
                         int64_t block_pages, std::vector<RowShard>* shards,
                         std::unique_ptr<SpillFiles> files)
    : table_(std::move(table)),
      layout_(row_bytes),
      max_rows_(std::max<int64_t>(memory / row_bytes, kNumShards)),
      tracks_use_(tracks_use),
      rows_(shards),
      files_(std::move(files)),
      reads_(std::max(kMinAhead, memory / kPartAhead)) {
  shards_.reserve(kNumShards);
  for (int s = 0; s < kNumShards; ++s) {
    shards_.emplace_back(RowLog(&layout_, block_pages, files_.get()));
  }
}

int64_t SpilledRows::bytes() const {
  int64_t bytes = reads_.bytes();
  for (const ShardSpill& spill : shards_) {
    bytes += spill.log.buffered_bytes() +
             static_cast<int64_t>(
                 spill.key_of.capacity() * sizeof(int64_t) +
                 (spill.home.capacity() + spill.used.capacity() + spill.last_used.capacity()) *
                     sizeof(uint32_t));
  }
  return bytes;
}

SpillStatistics SpilledRows::statistics() const {
  SpillStatistics sum;
  sum.disk_bytes = files_->bytes();
  for (size_t s = 0; s < shards_.size(); ++s) {
    const ShardSpill& spill = shards_[s];
    sum.rows_in_memory += spill.in_memory;
    sum.rows_on_disk += (*rows_)[s].index.size() - spill.in_memory;
    sum.rows_read += spill.rows_read;
    sum.rows_written += spill.rows_written;
    sum.reads_ahead += spill.reads_ahead;
  }
  return sum;
}

void SpilledRows::Add(int shard, uint32_t index, int64_t key) {
  ShardSpill& spill = shards_[shard];
  if (spill.used.size() <= index) {
    spill.key_of.resize(index + 1);
    spill.home.resize(index + 1, kNoHome);
    spill.used.resize(index + 1);
  }
  spill.key_of[index] = key;
  spill.home[index] = kNoHome;
  spill.used[index] = clock_;
  ++spill.in_memory;
}

void SpilledRows::Forget(int shard, uint32_t index) {
  ShardSpill& spill = shards_[shard];
  if (IsOnDisk(index)) {
    spill.log.Drop(index - kOnDisk);
    return;
  }
  Change(shard, index);
  spill.used[index] = 0;
  --spill.in_memory;
}

void SpilledRows::Clear() {
  reads_.Clear();
  for (ShardSpill& spill : shards_) {
    spill.log.Clear();
    spill.key_of.clear();
    spill.home.clear();
    spill.used.clear();
    spill.hand = 0;
    spill.in_memory = 0;
    spill.to_compact.clear();
  }
  ++evictions_;
}

Status SpilledRows::ForTable(const Status& status) const {
  if (status.ok()) return status;
  return Status(status.code(), "table '" + table_ + "': " + status.message());
}

Status SpilledRows::CheckPage(const Transfer& transfer, uint32_t number) const {
  const std::string what = "a page of rows in '" + files_->folder() + "' ";
  if (transfer.error != 0) {
    return ForTable(DataLoss(what + "cannot be read: " + transfer.ErrorText() +
                             ". Restore the last checkpoint"));
  }
  if (layout_.IsWhole(transfer.bytes, number)) return OkStatus();
  return ForTable(
      DataLoss(what + "is damaged: it does not match its checksum. Restore the last checkpoint"));
}

double SpilledRows::ValueOf(const RowShard& shard, const ShardSpill& spill, uint32_t index) const {
  // The value of a row halves each time the shard has loaded as many rows as it holds without a use
  // of the row.
  const double age = clock_ - spill.used[index];
  const int64_t read = std::max<int64_t>(1, spill.rows_read);
  const double turns =
      age * static_cast<double>(read) / clock_ / static_cast<double>(max_rows_) * kNumShards;
  return shard.index.Find(spill.key_of[index])->count * std::exp2(-turns);
}

Status SpilledRows::Evict(int shard, int64_t rows) {
  ShardSpill& spill = shards_[shard];
  RowShard& table = (*rows_)[shard];
  const auto frames = static_cast<uint32_t>(spill.used.size());
  struct Leaving {
    double value;
    uint32_t index;
    bool operator<(const Leaving& other) const {
      return value != other.value ? value < other.value : index < other.index;
    }
  };
  std::vector<Leaving> leaving;
  leaving.reserve(static_cast<size_t>(std::min<int64_t>(kCandidates * rows, frames)));
  for (uint32_t seen = 0; seen < frames; ++seen) {
    if (static_cast<int64_t>(leaving.size()) >= kCandidates * rows) break;
    const uint32_t index = spill.hand;
    spill.hand = spill.hand + 1 == frames ? 0 : spill.hand + 1;
    if (spill.used[index] == 0 || spill.used[index] == clock_ || keeps_(shard, index)) continue;
    table.index.Prefetch(KeyedHash(spill.key_of[index]));
    leaving.push_back({0., index});
  }
  for (Leaving& one : leaving) one.value = ValueOf(table, spill, one.index);
  if (static_cast<int64_t>(leaving.size()) > rows) {
    std::nth_element(leaving.begin(), leaving.begin() + rows, leaving.end());
    leaving.resize(static_cast<size_t>(rows));
  }
  // Sorting puts rows of similar value on the same page, so that they are loaded together.
  std::sort(leaving.begin(), leaving.end());
  const auto is_changed = [&](const Leaving& one) { return spill.home[one.index] == kNoHome; };
  int64_t changed = std::count_if(leaving.begin(), leaving.end(), is_changed);
  const Status status = changed == 0 ? OkStatus() : spill.log.Reserve(changed);
  if (!status.ok()) {
    leaving.erase(std::remove_if(leaving.begin(), leaving.end(), is_changed), leaving.end());
    changed = 0;
  }
  for (const Leaving& one : leaving) {
    const int64_t key = spill.key_of[one.index];
    uint32_t position = spill.home[one.index];
    if (position == kNoHome) position = spill.log.Append(key, table.arena.Row(one.index));
    if (tracks_use_) SetLastUsed(&spill, position, table.last_used[one.index]);
    table.index.Find(key)->index = kOnDisk + position;
    table.arena.Release(one.index);
    spill.home[one.index] = kNoHome;
    spill.used[one.index] = 0;
  }
  spill.rows_written += changed;
  spill.in_memory -= static_cast<int64_t>(leaving.size());
  if (!leaving.empty()) ++evictions_;
  return ForTable(status);
}

void SpilledRows::ChooseCompaction() {
  const auto has_some = [](const ShardSpill& spill) { return !spill.to_compact.empty(); };
  // Rows must fill three quarters of the room, not counting two files.
  constexpr int64_t kFew = 2;
  const int64_t rows_of_block = shards_[0].log.RowsOfBlock();
  int64_t live = 0;
  for (const ShardSpill& spill : shards_) live += spill.log.live();
  const std::vector<int64_t> rooms = files_->ClosedRoom();
  const int64_t largest = *std::max_element(rooms.begin(), rooms.end());
  int64_t room = std::accumulate(rooms.begin(), rooms.end(), int64_t{0}) - kFew * largest;
  const auto is_too_much = [&] { return room * rows_of_block * 3 > 4 * live; };
  is_behind_ = room * rows_of_block * 3 > 5 * live;
  if (!is_too_much() || std::any_of(shards_.begin(), shards_.end(), has_some)) return;
  std::vector<int64_t> rows(rooms.size());
  for (const ShardSpill& spill : shards_) {
    spill.log.ForEachBlock([&](uint32_t, const Extent& extent, int64_t of_block) {
      rows[static_cast<size_t>(extent.file)] += of_block;
    });
  }
  std::vector<size_t> files;
  for (size_t file = 0; file < rooms.size(); ++file) {
    if (rows[file] < rooms[file] * rows_of_block) files.push_back(file);
  }
  std::sort(files.begin(), files.end(),
            [&](size_t a, size_t b) { return rows[a] * rooms[b] < rows[b] * rooms[a]; });
  std::vector<bool> is_chosen(rooms.size());
  for (const size_t file : files) {
    if (!is_too_much()) break;
    is_chosen[file] = true;
    room -= rooms[file] - rows[file] / rows_of_block;
  }
  for (ShardSpill& spill : shards_) {
    spill.log.ForEachBlock([&](uint32_t page, const Extent& extent, int64_t) {
      if (!is_chosen[static_cast<size_t>(extent.file)]) return;
      spill.to_compact.emplace_back(page, spill.log.VersionOf(page));
    });
  }
}

Status SpilledRows::Compact(int shard) {
  ShardSpill& spill = shards_[shard];
  for (int block = 0; block < (is_behind_ ? kMaxCompacted : 1); ++block) {
    const Status status = EndCompaction(shard, /*waits=*/is_behind_);
    if (!status.ok()) return status;
    while (!spill.log.is_compacting() && !spill.to_compact.empty()) {
      const auto [page, version] = spill.to_compact.back();
      spill.to_compact.pop_back();
      spill.log.BeginCompaction(page, version);
    }
  }
  return OkStatus();
}

Status SpilledRows::EndCompaction(int shard, bool waits) {
  ShardSpill& spill = shards_[shard];
  HashIndex& index = (*rows_)[shard].index;
  const Status status = spill.log.EndCompaction(
      waits, [&](int64_t rows) { return spill.log.Reserve(rows).ok(); },
      [&](int64_t key, const char* row, uint32_t position) {
        HashIndex::Entry* const entry = index.Find(key);
        if (entry == nullptr) return;
        if (entry->index == kOnDisk + position) {
          const uint32_t moved = spill.log.Append(key, row);
          if (tracks_use_) SetLastUsed(&spill, moved, spill.last_used[position]);
          entry->index = kOnDisk + moved;
          ++spill.rows_written;
        } else if (!IsOnDisk(entry->index) && spill.home[entry->index] == position) {
          spill.home[entry->index] = kNoHome;
        } else {
          return;
        }
        spill.log.Drop(position);
      });
  return ForTable(status);
}

Status SpilledRows::MakeRoom(int shard, int64_t incoming) {
  ShardSpill& spill = shards_[shard];
  const int64_t maximum = (max_rows_ + kNumShards - 1) / kNumShards;
  const int64_t excess = spill.in_memory + incoming - maximum;
  if (excess <= 0) return OkStatus();
  return Evict(shard, std::max(excess, std::min(kMaxLeaving, maximum / kPartLeaving)));
}

void SpilledRows::SetLastUsed(ShardSpill* spill, uint32_t position, int64_t time) const {
  if (spill->last_used.size() <= position) spill->last_used.resize(position + 1);
  spill->last_used[position] = static_cast<uint32_t>(std::min<int64_t>(time, UINT32_MAX));
}

void SpilledRows::PutInMemory(int shard, int64_t key, uint32_t position, const char* row) {
  RowShard& table = (*rows_)[shard];
  const uint32_t index = table.arena.Allocate();
  std::memcpy(static_cast<void*>(table.arena.Row(index)), row,
              static_cast<size_t>(layout_.row_bytes));
  try {
    Add(shard, index, key);
    if (tracks_use_ && table.last_used.size() <= index) table.last_used.resize(index + 1);
  } catch (const std::bad_alloc&) {
    table.arena.Release(index);
    throw;
  }
  shards_[shard].home[index] = position;
  if (tracks_use_) table.last_used[index] = shards_[shard].last_used[position];
  table.index.Find(key)->index = index;
}

Status SpilledRows::Load(const std::vector<std::vector<int64_t>>& keys, bool must_fit,
                         const Parallel& parallel) {
  struct FromPages {
    std::vector<IncomingRow> rows;  // In the order of their pages.
    std::vector<PageId> pages;      // Pages of `rows`, without repeats.
    // Per page: where it was read ahead. A page without a batch still has to be read.
    std::vector<PageAhead> ahead;
  };
  std::vector<FromPages> found(kNumShards);
  ChooseCompaction();
  std::vector<Status> statuses(kNumShards);
  // Compaction moves rows, therefore it runs first. Rows on buffered pages are loaded at once. For
  // the others, collect the pages to read.
  ForEachShard(parallel, [&](int s) { statuses[s] = Compact(s); });
  if (!keys.empty()) {
    ForEachShard(parallel, [&](int s) {
      ShardSpill& spill = shards_[s];
      FromPages& of_shard = found[s];
      for (const int64_t key : keys[s]) {
        const uint32_t position = (*rows_)[s].index.Find(key)->index - kOnDisk;
        const char* const row = spill.log.InMemory(position);
        if (row != nullptr) {
          PutInMemory(s, key, position, row);
        } else {
          of_shard.rows.push_back({key, position});
        }
      }
      std::sort(of_shard.rows.begin(), of_shard.rows.end(),
                [](const IncomingRow& a, const IncomingRow& b) { return a.position < b.position; });
      for (const IncomingRow& coming : of_shard.rows) {
        const uint32_t page = spill.log.PageOf(coming.position);
        if (!of_shard.pages.empty() && of_shard.pages.back().page == page) continue;
        of_shard.pages.push_back({s, page, spill.log.VersionOf(page)});
        of_shard.ahead.push_back(reads_.Take(of_shard.pages.back()));
      }
    });
  }
  size_t to_read = 0;
  for (const FromPages& of_shard : found) {
    to_read += static_cast<size_t>(
        std::count_if(of_shard.ahead.begin(), of_shard.ahead.end(),
                      [](const PageAhead& ahead) { return ahead.batch == nullptr; }));
  }
  const auto batch = std::make_shared<PageBatch>(layout_, to_read);
  for (int s = 0; s < kNumShards; ++s) {
    FromPages& of_shard = found[s];
    for (size_t p = 0; p < of_shard.pages.size(); ++p) {
      if (of_shard.ahead[p].batch != nullptr) continue;
      of_shard.ahead[p] = {batch, batch->size()};
      batch->Add(shards_[s].log.ReadOf(of_shard.pages[p].page, batch->PageAt(batch->size())));
    }
  }
  batch->Begin();
  // Evict other rows while the disk reads.
  ForEachShard(parallel, [&](int s) {
    if (!statuses[s].ok()) return;
    const Status room = MakeRoom(s, static_cast<int64_t>(found[s].rows.size()));
    if (must_fit) statuses[s] = room;
  });
  for (const Status& status : statuses) {
    if (!status.ok()) return status;
  }
  ForEachShard(parallel, [&](int s) {
    ShardSpill& spill = shards_[s];
    FromPages& of_shard = found[s];
    auto coming = of_shard.rows.begin();
    for (size_t p = 0; p < of_shard.pages.size(); ++p) {
      const PageAhead& ahead = of_shard.ahead[p];
      const uint32_t number = of_shard.pages[p].page;
      const Transfer& transfer = ahead.batch->transfer(ahead.index);
      ahead.batch->Wait();
      statuses[s] = CheckPage(transfer, number);
      if (!statuses[s].ok()) break;
      for (; coming != of_shard.rows.end() && spill.log.PageOf(coming->position) == number;
           ++coming) {
        PutInMemory(s, coming->key, coming->position,
                    spill.log.RowIn(transfer.bytes, coming->position));
        ++spill.rows_read;
        if (ahead.batch != batch) ++spill.reads_ahead;
      }
    }
  });
  for (const Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return OkStatus();
}

void SpilledRows::PrefetchRows(const int64_t* keys, int64_t n) {
  std::vector<PageId> pages;
  for (int64_t i = 0; i < n; ++i) {
    constexpr int64_t kAhead = 16;
    if (i + kAhead < n) {
      (*rows_)[ShardOf(keys[i + kAhead])].index.Prefetch(KeyedHash(keys[i + kAhead]));
    }
    const int s = ShardOf(keys[i]);
    const HashIndex::Entry* const entry = (*rows_)[s].index.Find(keys[i]);
    if (entry == nullptr || !IsOnDisk(entry->index)) continue;
    const RowLog& log = shards_[s].log;
    const uint32_t position = entry->index - kOnDisk;
    if (log.InMemory(position) != nullptr) continue;
    const uint32_t page = log.PageOf(position);
    pages.push_back({s, page, log.VersionOf(page)});
  }
  const auto key_of = [](const PageId& id) { return std::make_pair(id.shard, id.page); };
  std::sort(pages.begin(), pages.end(),
            [&](const PageId& a, const PageId& b) { return key_of(a) < key_of(b); });
  pages.erase(std::unique(pages.begin(), pages.end(),
                          [&](const PageId& a, const PageId& b) { return key_of(a) == key_of(b); }),
              pages.end());
  pages.erase(
      std::remove_if(pages.begin(), pages.end(), [&](const PageId& id) { return reads_.Has(id); }),
      pages.end());
  if (pages.empty()) return;
  const auto batch = std::make_shared<PageBatch>(layout_, pages.size());
  for (const PageId& id : pages) {
    batch->Add(shards_[id.shard].log.ReadOf(id.page, batch->PageAt(batch->size())));
  }
  batch->Begin();
  reads_.Add(pages, batch);
}

}  // namespace slipstream
