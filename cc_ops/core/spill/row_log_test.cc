#include "cc_ops/core/spill/row_log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace slipstream {
namespace {

constexpr int64_t kRowBytes = 600, kPages = 2;

// A log and the rows that it must contain.
class KnownLog {
 public:
  KnownLog() : layout(kRowBytes) {
    const Status status = SpillFiles::Open(testing::TempDir(), kPages * layout.bytes, &files);
    EXPECT_TRUE(status.ok()) << status.message();
    log = std::make_unique<RowLog>(&layout, kPages, files.get());
  }

  static std::vector<char> RowOf(int64_t key, int version) {
    std::vector<char> row(kRowBytes);
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = static_cast<char>(key * 7 + version * 31 + static_cast<int64_t>(i));
    }
    return row;
  }

  void Put(int64_t key, int version) {
    ASSERT_TRUE(log->Reserve(1).ok());
    const std::vector<char> row = RowOf(key, version);
    if (known.count(key) > 0) log->Drop(known[key].position);
    known[key] = {log->Append(key, row.data()), version};
  }

  void ExpectAll() {
    const PageMemory memory(static_cast<size_t>(layout.bytes), static_cast<size_t>(kPageUnit));
    char* const page = memory.data();
    for (const auto& [key, entry] : known) {
      const char* row = log->InMemory(entry.position);
      if (row == nullptr) {
        const uint32_t number = log->PageOf(entry.position);
        Transfer transfer = log->ReadOf(number, page);
        TransferGroup group;
        DiskThreads::OfProcess().Begin(&transfer, 1, &group);
        group.Wait();
        ASSERT_EQ(transfer.error, 0);
        ASSERT_TRUE(layout.IsWhole(page, number));
        row = log->RowIn(page, entry.position);
      }
      ASSERT_EQ(std::memcmp(row, RowOf(key, entry.version).data(), kRowBytes), 0) << key;
    }
    ASSERT_EQ(log->live(), static_cast<int64_t>(known.size()));
  }

  // Returns whether there is too much unused room, and the file that has it.
  bool NeedsCompaction(int32_t* file) const {
    const std::vector<int64_t> rooms = files->ClosedRoom();
    int64_t all = 0;
    for (const int64_t room : rooms) all += room;
    *file = static_cast<int32_t>(std::max_element(rooms.begin(), rooms.end()) - rooms.begin());
    return all > 0 && all * log->RowsOfBlock() > 2 * log->live();
  }

  Status Compact(int32_t file, bool waits = true) {
    log->ForEachBlock([&](uint32_t page, const Extent& extent, int64_t) {
      if (extent.file == file && !log->is_compacting()) {
        log->BeginCompaction(page, log->VersionOf(page));
      }
    });
    return log->EndCompaction(
        waits, [&](int64_t rows) { return log->Reserve(rows).ok(); },
        [&](int64_t key, const char* row, uint32_t position) {
          const auto found = known.find(key);
          if (found == known.end() || found->second.position != position) return;
          found->second.position = log->Append(key, row);
          log->Drop(position);
        });
  }

  struct Entry {
    uint32_t position;
    int version;
  };
  PageLayout layout;
  std::unique_ptr<SpillFiles> files;
  std::unique_ptr<RowLog> log;
  std::map<int64_t, Entry> known;
};

TEST(PageLayout, HoldsWholeRows) {
  for (const int64_t bytes : {16, 256, 600, 4000, 4080, 9000}) {
    const PageLayout layout(bytes);
    EXPECT_EQ(layout.bytes % kPageUnit, 0);
    EXPECT_GE(layout.rows, 1);
    EXPECT_LE(PageLayout::kHeadBytes + layout.rows * layout.entry_bytes, layout.bytes);
    EXPECT_GT(PageLayout::kHeadBytes + (layout.rows + 1) * layout.entry_bytes, layout.bytes);
  }
}

TEST(PageLayout, DetectsEveryChangedByte) {
  const PageLayout layout(600);
  std::vector<char> page(static_cast<size_t>(layout.bytes));
  for (int64_t row = 0; row < layout.rows; ++row) {
    layout.Set(page.data(), row, row, KnownLog::RowOf(row, 0).data());
  }
  layout.Seal(page.data(), 12, layout.rows);
  EXPECT_TRUE(layout.IsWhole(page.data(), 12));
  EXPECT_FALSE(layout.IsWhole(page.data(), 13));
  for (char& byte : page) {
    byte = static_cast<char>(byte ^ 4);
    EXPECT_FALSE(layout.IsWhole(page.data(), 12));
    byte = static_cast<char>(byte ^ 4);
  }
}

TEST(RowLog, StoresWrittenRows) {
  KnownLog known;
  std::mt19937_64 random(1);
  for (int i = 0; i < 5000; ++i) {
    known.Put(static_cast<int64_t>(random() % 300), i);
    if (random() % 10 == 0 && !known.known.empty()) {
      const auto leaving = known.known.begin();
      known.log->Drop(leaving->second.position);
      known.known.erase(leaving);
    }
    int32_t file = 0;
    while (known.NeedsCompaction(&file)) {
      ASSERT_TRUE(known.Compact(file, random() % 2 == 0).ok());
    }
    if (i % 500 == 0) known.ExpectAll();
  }
  known.ExpectAll();
  const int64_t rows = kPages * known.layout.rows;
  EXPECT_LE(known.files->bytes(), (2 * 300 / rows + 64 + 1) * kPages * known.layout.bytes);
  known.log->Clear();
  known.known.clear();
  known.Put(1, 2);
  known.ExpectAll();
}

// Simulates another process that writes to the file.
TEST(RowLog, ReportsDamage) {
  KnownLog known;
  for (int64_t key = 0; key < 200; ++key) known.Put(key, 0);
  while (!known.log->Poll().ok() || known.log->InMemory(known.known[0].position) != nullptr) {
    usleep(1000);
  }
  const Transfer where = known.log->ReadOf(0, nullptr);
  Extent where_block;
  known.log->ForEachBlock([&](uint32_t page, const Extent& extent, int64_t) {
    if (page == 0) where_block = extent;
  });
  const std::string proc = "/proc/self/fd/" + std::to_string(where.file);
  const int file = open(proc.c_str(), O_WRONLY);
  ASSERT_GE(file, 0);
  ASSERT_EQ(pwrite(file, "x", 1, where.offset + 100), 1);
  close(file);
  const Status status = known.Compact(where_block.file);
  EXPECT_FALSE(status.ok());
  EXPECT_NE(status.message().find("does not match its checksum"), std::string::npos)
      << status.message();
}

// A sealed file can be read after all of its rows were dropped.
TEST(SealedFiles, SealedFilesAreImmutable) {
  KnownLog known;
  std::mt19937_64 random(2);
  for (int i = 0; i < 2000; ++i) known.Put(static_cast<int64_t>(random() % 100), i);
  ASSERT_TRUE(known.log->Flush().ok());
  SealedFiles sealed;
  std::vector<int32_t> numbers;
  ASSERT_TRUE(known.files->Seal(&sealed, &numbers).ok());
  ASSERT_EQ(sealed.size(), numbers.size());
  std::map<uint32_t, Extent> blocks;
  known.log->ForEachBlock(
      [&](uint32_t page, const Extent& extent, int64_t) { blocks[page] = extent; });
  const std::map<int64_t, KnownLog::Entry> then = known.known;
  for (int i = 2000; i < 4000; ++i) known.Put(static_cast<int64_t>(random() % 100), i);
  int32_t file = 0;
  while (known.NeedsCompaction(&file)) ASSERT_TRUE(known.Compact(file).ok());
  known.ExpectAll();
  const std::string folder = testing::TempDir();
  for (const bool copies : {false, true}) {
    std::vector<std::string> paths;
    for (size_t i = 0; i < sealed.size(); ++i) {
      paths.push_back(folder + "/" + sealed.name(i) + (copies ? "-copy" : "-link"));
      bool is_linked = true;
      ASSERT_TRUE((copies ? sealed.Copy(i, paths[i]) : sealed.Link(i, paths[i], &is_linked)).ok());
      // The file system may not allow a second link.
      if (!is_linked) {
        ASSERT_TRUE(sealed.Copy(i, paths[i]).ok());
      }
      EXPECT_FALSE(sealed.Copy(i, paths[i]).ok());
    }
    for (const auto& [key, entry] : then) {
      const auto block = std::prev(blocks.upper_bound(known.log->PageOf(entry.position)));
      const auto at = std::find(numbers.begin(), numbers.end(), block->second.file);
      ASSERT_NE(at, numbers.end());
      const int64_t number = block->first;
      PageMemory memory;
      const Status status =
          ReadBlocks(paths[static_cast<size_t>(at - numbers.begin())], known.layout,
                     {kPages, &block->second.offset, &number, 1}, &memory);
      ASSERT_TRUE(status.ok()) << status.message();
      const auto page = known.log->PageOf(entry.position) - block->first;
      const char* const row =
          known.log->RowIn(memory.data() + page * known.layout.bytes, entry.position);
      ASSERT_EQ(std::memcmp(row, KnownLog::RowOf(key, entry.version).data(), kRowBytes), 0);
    }
    const int64_t offset = 0, number = 77777;
    PageMemory memory;
    const Status status =
        ReadBlocks(paths[0], known.layout, {kPages, &offset, &number, 1}, &memory);
    EXPECT_EQ(status.code(), StatusCode::kDataLoss);
    EXPECT_NE(status.message().find(paths[0]), std::string::npos) << status.message();
    for (const std::string& path : paths) unlink(path.c_str());
  }
}

TEST(SpillFiles, ErrorNamesMissingDirectory) {
  std::unique_ptr<SpillFiles> files;
  const Status status = SpillFiles::Open("/not/there", 4096, &files);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("/not/there"), std::string::npos);
}

TEST(DiskThreads, ReportsFailedTransfer) {
  std::unique_ptr<SpillFiles> files;
  ASSERT_TRUE(SpillFiles::Open(testing::TempDir(), 4096, &files).ok());
  Extent extent;
  ASSERT_TRUE(files->Take(&extent).ok());
  const PageMemory memory(static_cast<size_t>(kPageUnit), static_cast<size_t>(kPageUnit));
  char* const page = memory.data();
  Transfer transfers[2];
  for (Transfer& transfer : transfers) {
    transfer.bytes = page;
    transfer.size = kPageUnit;
  }
  transfers[0].file = files->descriptor(extent.file);
  transfers[0].offset = 1 << 20;
  transfers[1].file = -1;
  TransferGroup group;
  DiskThreads::OfProcess().Begin(transfers, 2, &group);
  group.Wait();
  EXPECT_EQ(transfers[0].error, Transfer::kShort);
  EXPECT_NE(transfers[0].ErrorText().find("the file ends"), std::string::npos);
  EXPECT_EQ(transfers[1].ErrorText(), "Bad file descriptor");
}

}  // namespace
}  // namespace slipstream
