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

// A read or write of the range [offset, offset + size) of a file.
struct Transfer {
  static constexpr int kShort = -1;  // The file ended before the end of the range.

  int file = -1;  // File descriptor.
  bool writes = false;
  char* bytes = nullptr;         // [size]; source of a write, destination of a read.
  int64_t size = 0, offset = 0;  // In bytes.
  int error = 0;                 // Result: 0 for success, an errno, or kShort.

  // Returns a description of `error` for messages.
  std::string ErrorText() const;
};

// A group of transfers to wait for. Its destructor waits for them.
class TransferGroup {
 public:
  TransferGroup() = default;
  TransferGroup(const TransferGroup&) = delete;
  TransferGroup& operator=(const TransferGroup&) = delete;
  ~TransferGroup() { Wait(); }

  // Waits until all transfers of the group have finished.
  void Wait();
  // Returns whether all transfers of the group have finished.
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
  // Number of concurrent transfers. For reads of single pages, disks reach their best rate only
  // with a long queue, and a thread keeps at most one transfer in the queue.
  static constexpr int kThreads = 64;

  // Returns the pool of the process, which is never destroyed.
  static DiskThreads& OfProcess();

  // Queues the transfers [first, first + n) and returns. Reads start before queued writes. The
  // transfers and their memory must stay at their addresses until `group` is done.
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
