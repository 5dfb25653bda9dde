// Asynchronous reads and writes of files on a pool of threads.
#ifndef SLIPSTREAM_CC_OPS_CORE_SPILL_DISK_THREADS_H_
#define SLIPSTREAM_CC_OPS_CORE_SPILL_DISK_THREADS_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

namespace slipstream {

// A read or write of a range of a file.
struct Transfer {
  static constexpr int kShort = -1;  // The file ended before the end of the range.

  int file = -1;  // File descriptor.
  bool writes = false;
  char* bytes = nullptr;
  int64_t size = 0, offset = 0;
  int error = 0;  // Result: 0, an errno, or kShort.

  std::string ErrorText() const;
};

// A group of transfers to wait for. It must outlive them.
class TransferGroup {
 public:
  TransferGroup() = default;
  TransferGroup(const TransferGroup&) = delete;
  TransferGroup& operator=(const TransferGroup&) = delete;
  ~TransferGroup() { Wait(); }

  // Waits until all transfers of the group have finished.
  void Wait();
  bool IsDone() const;

 private:
  friend class DiskThreads;
  mutable std::mutex mutex_;
  std::condition_variable all_done_;
  int64_t left_ = 0;
};

// Thread-safe. Threads start with the first transfer and run until the process ends.
class DiskThreads {
 public:
  // Number of concurrent transfers. Disks reach their best rate for single pages with a long queue,
  // and a waiting thread has to wake up before it submits the next read.
  static constexpr int kThreads = 64;

  // Returns the pool of the process, which is never destroyed.
  static DiskThreads& OfProcess();

  // Starts the transfers [first, first + n), reads before writes. They must stay at their address
  // until the group has finished.
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
