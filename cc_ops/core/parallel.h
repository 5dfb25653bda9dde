// How the core is given threads: the op layer passes the framework's pool in.
#ifndef SLIPSTREAM_CC_OPS_CORE_PARALLEL_H_
#define SLIPSTREAM_CC_OPS_CORE_PARALLEL_H_

#include <functional>

namespace slipstream {

struct Parallel {
  // Useful number of tasks, at least 1. Results never depend on it.
  int threads = 1;
  // Runs fn(0) .. fn(tasks - 1), possibly at the same time; returns when all are done.
  std::function<void(int tasks, const std::function<void(int task)>& fn)> run =
      [](int tasks, const std::function<void(int)>& fn) {
        for (int t = 0; t < tasks; ++t) fn(t);
      };
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_PARALLEL_H_
