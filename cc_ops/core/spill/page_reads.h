// Reads pages of a table's logs, possibly before they are needed.
#ifndef SLIPSTREAM_CC_OPS_CORE_SPILL_PAGE_READS_H_
#define SLIPSTREAM_CC_OPS_CORE_SPILL_PAGE_READS_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc_ops/core/memory/page_memory.h"
#include "cc_ops/core/spill/disk_threads.h"
#include "cc_ops/core/spill/page_layout.h"

namespace slipstream {

// A page of a shard's log. version: RowLog::VersionOf.
struct PageId {
  int shard;
  uint32_t page, version;
};

// Pages that are read together. The batch owns their memory.
class PageBatch {
 public:
  PageBatch(const PageLayout& layout, size_t pages);
  // Returns the memory for a page.
  char* PageAt(size_t index) { return memory_.data() + index * page_bytes_; }
  void Add(const Transfer& transfer) { transfers_.push_back(transfer); }
  size_t size() const { return transfers_.size(); }
  int64_t bytes() const { return static_cast<int64_t>(memory_.size()); }
  // Starts the reads. Call it once, after all pages were added.
  void Begin();
  void Wait() { group_.Wait(); }
  bool IsDone() const { return group_.IsDone(); }
  const Transfer& transfer(size_t index) const { return transfers_[index]; }

 private:
  const size_t page_bytes_;
  PageMemory memory_;
  std::vector<Transfer> transfers_;
  TransferGroup group_;
};

// A page that was or is being read ahead.
struct PageAhead {
  std::shared_ptr<PageBatch> batch;
  size_t index = 0;
};

// Pages that were read ahead and not taken yet. Thread-safe.
class PageReads {
 public:
  // most_bytes: maximum bytes of pages that were not taken, not counting the last two batches. The
  // oldest batches are dropped first.
  explicit PageReads(int64_t most_bytes) : most_bytes_(most_bytes) {}

  // Returns whether a page is read or being read.
  bool Has(const PageId& id) const;
  void Add(const std::vector<PageId>& ids, const std::shared_ptr<PageBatch>& batch);
  // Removes and returns a page. Its batch is null if the page was not read ahead.
  PageAhead Take(const PageId& id);
  void Clear();
  int64_t bytes() const;

 private:
  struct Kept {
    PageAhead ahead;
    uint32_t version;
  };
  static uint64_t KeyOf(const PageId& id) {
    return static_cast<uint64_t>(id.shard) << 32 | id.page;
  }

  const int64_t most_bytes_;
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, Kept> pages_;
  std::deque<std::pair<std::weak_ptr<PageBatch>, std::vector<PageId>>> batches_;  // Oldest first.
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SPILL_PAGE_READS_H_
