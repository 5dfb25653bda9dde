#include "cc_ops/core/spill/page_reads.h"

#include <algorithm>

namespace slipstream {

PageBatch::PageBatch(const PageLayout& layout, size_t pages)
    : page_bytes_(static_cast<size_t>(layout.bytes)),
      memory_(std::max<size_t>(1, pages) * page_bytes_, static_cast<size_t>(kPageUnit)) {
  transfers_.reserve(pages);
}

void PageBatch::Begin() {
  DiskThreads::OfProcess().Begin(transfers_.data(), transfers_.size(), &group_);
}

bool PageReads::Has(const PageId& id) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pages_.find(KeyOf(id));
  return found != pages_.end() && found->second.version == id.version;
}

void PageReads::Add(const std::vector<PageId>& ids, const std::shared_ptr<PageBatch>& batch) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < ids.size(); ++i) {
    pages_[KeyOf(ids[i])] = {{batch, i}, ids[i].version};
  }
  batches_.emplace_back(batch, ids);
  int64_t kept = 0;
  for (const auto& [known, pages] : batches_) {
    if (const auto alive = known.lock()) kept += alive->bytes();
  }
  // Keep the last two batches in any case: one is about to be used, the other follows.
  while (batches_.size() > 2) {
    const std::shared_ptr<PageBatch> oldest = batches_.front().first.lock();
    if (oldest != nullptr && kept <= max_bytes_) break;
    if (oldest != nullptr) {
      kept -= oldest->bytes();
      for (const PageId& id : batches_.front().second) {
        const auto found = pages_.find(KeyOf(id));
        if (found != pages_.end() && found->second.ahead.batch == oldest) pages_.erase(found);
      }
    }
    batches_.pop_front();
  }
}

PageAhead PageReads::Take(const PageId& id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pages_.find(KeyOf(id));
  if (found == pages_.end()) return {};
  PageAhead ahead = std::move(found->second.ahead);
  const bool is_current = found->second.version == id.version;
  pages_.erase(found);
  return is_current ? ahead : PageAhead();
}

void PageReads::Clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  pages_.clear();
  batches_.clear();
}

int64_t PageReads::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  int64_t bytes = 0;
  for (const auto& [known, pages] : batches_) {
    if (const auto alive = known.lock()) bytes += alive->bytes();
  }
  return bytes;
}

}  // namespace slipstream
