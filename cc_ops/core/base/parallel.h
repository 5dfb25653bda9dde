// How the core is given threads: the op layer passes the framework's pool in.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_PARALLEL_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_PARALLEL_H_

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>

namespace slipstream {

struct Parallel {
  // Useful number of tasks, at least 1. Results never depend on it.
  int threads = 1;
  // Runs fn(0) .. fn(tasks - 1), possibly at the same time; returns when all are done. What a task
  // throws, the caller gets, once no task is running; others may not have run then.
  std::function<void(int tasks, const std::function<void(int task)>& fn)> run =
      [](int tasks, const std::function<void(int)>& fn) {
        for (int t = 0; t < tasks; ++t) fn(t);
      };
};

// Brings what tasks throw on other threads to the thread that waits for them.
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
  // Throws what the first task to fail threw; to be called when all have ended.
  void Rethrow() const {
    if (first_ != nullptr) std::rethrow_exception(first_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr first_;
};

// Tasks for n items, if one with fewer than `per_task` costs more than it saves.
inline int TasksFor(int64_t n, int64_t per_task, const Parallel& parallel) {
  return static_cast<int>(std::clamp<int64_t>(n / per_task, 1, parallel.threads));
}

// Splits n items into one contiguous range per task.
struct TaskRange {
  int64_t begin, end;
};
inline TaskRange RangeOf(int task, int tasks, int64_t n) {
  return {n * task / tasks, n * (task + 1) / tasks};
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_PARALLEL_H_
