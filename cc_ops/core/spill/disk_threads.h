// Reads and writes of files by threads of their own, so that many are under way at once.
#ifndef SLIPSTREAM_CC_OPS_CORE_SPILL_DISK_THREADS_H_
#define SLIPSTREAM_CC_OPS_CORE_SPILL_DISK_THREADS_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

namespace slipstream {

// A read or a write of a part of a file.
struct Transfer {
  static constexpr int kShort = -1;  // the file ended before

  int file = -1;  // descriptor
  bool writes = false;
  char* bytes = nullptr;
  int64_t size = 0, offset = 0;
  int error = 0;  // once it is done: 0, an errno, or kShort

  std::string ErrorText() const;
};

// Transfers that somebody waits for. It must outlive them.
class TransferGroup {
 public:
  TransferGroup() = default;
  TransferGroup(const TransferGroup&) = delete;
  TransferGroup& operator=(const TransferGroup&) = delete;
  ~TransferGroup() { Wait(); }

  // Until all that were begun are done.
  void Wait();
  bool IsDone() const;

 private:
  friend class DiskThreads;
  mutable std::mutex mutex_;
  std::condition_variable all_done_;
  int64_t left_ = 0;
};

// Thread-safe. Threads start when the first transfer comes, and stay.
class DiskThreads {
 public:
  // As many transfers are under way at once. Disks answer single pages best when asked for many,
  // and a thread that waits has to wake up before it asks again.
  static constexpr int kThreads = 64;

  // Those of the process, which are never ended.
  static DiskThreads& OfProcess();

  // Has the transfers [first, first + n) done, reads before writes. They must stay where they are
  // until the group is done.
  void Begin(Transfer* first, size_t n, TransferGroup* group);

 private:
  struct Queued {
    Transfer* transfer;
    TransferGroup* group;
  };
  DiskThreads() = default;
  void Work();

  std::mutex mutex_;
  std::condition_variable any_;
  std::deque<Queued> reads_, writes_;
  bool has_started_ = false;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SPILL_DISK_THREADS_H_
