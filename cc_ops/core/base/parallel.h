// Interface through which the op layer passes its thread pool to the core.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_PARALLEL_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_PARALLEL_H_

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>

namespace slipstream {

struct Parallel {
  // Number of tasks that is useful, at least 1. Results never depend on it.
  int threads = 1;
  // Runs fn(0) to fn(tasks - 1), possibly concurrently, and returns when all have finished. An
  // exception of a task is rethrown in the caller when no task is running. The other tasks may not
  // have run then.
  std::function<void(int tasks, const std::function<void(int task)>& fn)> run =
      [](int tasks, const std::function<void(int)>& fn) {
        for (int t = 0; t < tasks; ++t) fn(t);
      };
};

// Passes the first exception of worker threads to the thread that waits for them.
class TaskErrors {
 public:
  void Run(const std::function<void(int task)>& fn, int task) noexcept {
    try {
      fn(task);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (first_ == nullptr) first_ = std::current_exception();
    }
  }
  // Rethrows the exception of the first task that failed, if any. Call it after all tasks have
  // ended.
  void Rethrow() const {
    if (first_ != nullptr) std::rethrow_exception(first_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr first_;
};

// Returns the number of tasks for n items: at most parallel.threads, and such that each task has at
// least `per_task` items if there is more than one task.
inline int TasksFor(int64_t n, int64_t per_task, const Parallel& parallel) {
  return static_cast<int>(std::clamp<int64_t>(n / per_task, 1, parallel.threads));
}

// The items [begin, end).
struct TaskRange {
  int64_t begin, end;
};
// Splits n items evenly into one contiguous range per task, and returns the range of a task.
inline TaskRange RangeOf(int task, int tasks, int64_t n) {
  return {n * task / tasks, n * (task + 1) / tasks};
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_PARALLEL_H_
