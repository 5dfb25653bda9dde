// Reads pages of the logs of a table, possibly before a batch needs them.
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

// A page of the log of a shard. page: RowLog::PageOf. version: RowLog::VersionOf.
struct PageId {
  int shard;
  uint32_t page, version;
};

// Pages that are read together. The batch owns their memory.
class PageBatch {
 public:
  // pages: maximum number of pages.
  PageBatch(const PageLayout& layout, size_t pages);
  // Returns the memory of page number `index` of the batch.
  char* PageAt(size_t index) { return memory_.data() + index * page_bytes_; }
  // Adds the read of the next page, into PageAt(size()).
  void Add(const Transfer& transfer) { transfers_.push_back(transfer); }
  size_t size() const { return transfers_.size(); }                       // Number of added pages.
  int64_t bytes() const { return static_cast<int64_t>(memory_.size()); }  // Allocated memory.
  // Starts the reads. Call it once, after all pages were added.
  void Begin();
  // Waits until all reads have finished.
  void Wait() { group_.Wait(); }
  bool IsDone() const { return group_.IsDone(); }
  // Returns the read of page number `index`, with its error after Wait.
  const Transfer& transfer(size_t index) const { return transfers_[index]; }

 private:
  const size_t page_bytes_;
  PageMemory memory_;
  std::vector<Transfer> transfers_;
  TransferGroup group_;
};

// A page that was or is being read ahead.
struct PageAhead {
  std::shared_ptr<PageBatch> batch;  // Null if the page was not read ahead.
  size_t index = 0;                  // Number of the page in the batch.
};

// Pages that were read ahead and not taken yet. Thread-safe.
class PageReads {
 public:
  // max_bytes: maximum bytes of all batches with pages that were not taken. If they have more, the
  // oldest batches are dropped, but the last two batches always stay.
  explicit PageReads(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // Returns whether a page was or is being read ahead, and was not taken.
  bool Has(const PageId& id) const;
  // Adds a batch that has begun. ids: the pages of the batch, in its order.
  void Add(const std::vector<PageId>& ids, const std::shared_ptr<PageBatch>& batch);
  // Removes and returns a page. Its batch is null if the page was not read ahead.
  PageAhead Take(const PageId& id);
  // Drops all pages.
  void Clear();
  // Bytes of the batches that are still in use.
  int64_t bytes() const;

 private:
  struct Kept {
    PageAhead ahead;
    uint32_t version;
  };
  static uint64_t KeyOf(const PageId& id) {
    return static_cast<uint64_t>(id.shard) << 32 | id.page;
  }

  const int64_t max_bytes_;
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, Kept> pages_;
  std::deque<std::pair<std::weak_ptr<PageBatch>, std::vector<PageId>>> batches_;  // Oldest first.
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SPILL_PAGE_READS_H_
