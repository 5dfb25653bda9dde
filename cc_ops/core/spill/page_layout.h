// Layout of a page in a file of spilled rows: a head, then entries of a key and its row.
//
// A page is the unit of reads. Its head contains a checksum and its number, so that damaged and
// misplaced pages are detected.
#ifndef SLIPSTREAM_CC_OPS_CORE_SPILL_PAGE_LAYOUT_H_
#define SLIPSTREAM_CC_OPS_CORE_SPILL_PAGE_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "cc_ops/core/base/status.h"

namespace slipstream {

// Alignment of direct reads and writes and of their memory.
constexpr int64_t kPageUnit = 4096;

struct PageLayout {
  struct Head {
    uint64_t checksum;  // Checksum of all following bytes of the page.
    uint32_t number;    // Number of the page in its log.
    uint32_t rows;      // Number of entries in use.
  };

  // of_row_bytes: bytes of a row without its key. A page has the smallest multiple of kPageUnit
  // bytes that fits the head and one row.
  explicit PageLayout(int64_t of_row_bytes)
      : row_bytes(of_row_bytes),
        entry_bytes(row_bytes + static_cast<int64_t>(sizeof(int64_t))),
        bytes((kHeadBytes + entry_bytes + kPageUnit - 1) / kPageUnit * kPageUnit),
        rows((bytes - kHeadBytes) / entry_bytes) {}

  // Return the address of entry number `row` of a page, its key and its row.
  const char* Entry(const char* page, int64_t row) const {
    return page + kHeadBytes + row * entry_bytes;
  }
  char* Entry(char* page, int64_t row) const { return page + kHeadBytes + row * entry_bytes; }
  int64_t KeyOf(const char* page, int64_t row) const {
    int64_t key;
    std::memcpy(&key, Entry(page, row), sizeof(key));
    return key;
  }
  const char* RowOf(const char* page, int64_t row) const {
    return Entry(page, row) + sizeof(int64_t);
  }
  // Writes entry number `row`. from: [row_bytes].
  void Set(char* page, int64_t row, int64_t key, const void* from) const {
    std::memcpy(Entry(page, row), &key, sizeof(key));
    std::memcpy(Entry(page, row) + sizeof(key), from, static_cast<size_t>(row_bytes));
  }

  // Writes the head of a page with `used` entries, after all entries were set.
  void Seal(char* page, uint32_t number, int64_t used) const;
  // Returns whether the checksum and the number in the head are right, i.e. whether the page is
  // undamaged and was sealed with `number`.
  bool IsWhole(const char* page, uint32_t number) const;

  static constexpr int64_t kHeadBytes = sizeof(Head);
  int64_t row_bytes;    // Bytes of a row.
  int64_t entry_bytes;  // Bytes of a row and its key.
  int64_t bytes;        // Bytes of a page.
  int64_t rows;         // Rows of a page.

 private:
  uint64_t ChecksumOf(const char* page) const;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SPILL_PAGE_LAYOUT_H_
