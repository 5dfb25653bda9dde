#include "cc_ops/core/spill/disk_threads.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

namespace slipstream {
namespace {

void Do(Transfer* transfer) {
  int64_t done = 0;
  while (done < transfer->size) {
    char* const at = transfer->bytes + done;
    const auto left = static_cast<size_t>(transfer->size - done);
    const int64_t offset = transfer->offset + done;
    const ssize_t moved = transfer->writes ? pwrite(transfer->file, at, left, offset)
                                           : pread(transfer->file, at, left, offset);
    if (moved > 0) {
      done += moved;
    } else if (moved == 0) {
      transfer->error = Transfer::kShort;
      return;
    } else if (errno != EINTR) {
      transfer->error = errno;
      return;
    }
  }
  transfer->error = 0;
}

}  // namespace

std::string Transfer::ErrorText() const {
  if (error == kShort) {
    return "the file ends before byte " + std::to_string(offset + size);
  }
  return std::strerror(error);
}

void TransferGroup::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  all_done_.wait(lock, [&] { return left_ == 0; });
}

bool TransferGroup::IsDone() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return left_ == 0;
}

DiskThreads& DiskThreads::OfProcess() {
  static auto* const threads = new DiskThreads();
  return *threads;
}

void DiskThreads::Begin(Transfer* first, size_t n, TransferGroup* group) {
  if (n == 0) return;
  {
    const std::lock_guard<std::mutex> lock(group->mutex_);
    group->left_ += static_cast<int64_t>(n);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < n; ++i) {
      (first[i].writes ? writes_ : reads_).push_back({first + i, group});
    }
    if (!has_started_) {
      for (int t = 0; t < kThreads; ++t) std::thread([this] { Work(); }).detach();
      has_started_ = true;
    }
  }
  if (n == 1) {
    any_.notify_one();
  } else {
    any_.notify_all();
  }
}

void DiskThreads::Work() {
  while (true) {
    Queued next;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      any_.wait(lock, [&] { return !reads_.empty() || !writes_.empty(); });
      std::deque<Queued>& queue = reads_.empty() ? writes_ : reads_;
      next = queue.front();
      queue.pop_front();
    }
    Do(next.transfer);
    // Notify under the lock, because the waiting thread may destroy the group immediately.
    const std::lock_guard<std::mutex> lock(next.group->mutex_);
    if (--next.group->left_ == 0) next.group->all_done_.notify_all();
  }
}

}  // namespace slipstream
