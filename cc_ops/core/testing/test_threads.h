// For tests: runs tasks on new threads.
#ifndef SLIPSTREAM_CC_OPS_CORE_TESTING_TEST_THREADS_H_
#define SLIPSTREAM_CC_OPS_CORE_TESTING_TEST_THREADS_H_

#include <functional>
#include <thread>
#include <vector>

#include "cc_ops/core/base/parallel.h"

namespace slipstream {

// Returns a Parallel with n threads that runs each task on a new thread.
inline Parallel Threads(int n) {
  Parallel parallel;
  parallel.threads = n;
  parallel.run = [](int tasks, const std::function<void(int)>& fn) {
    TaskErrors errors;
    std::vector<std::thread> threads;
    for (int t = 0; t < tasks; ++t) threads.emplace_back([&, t] { errors.Run(fn, t); });
    for (std::thread& thread : threads) thread.join();
    errors.Rethrow();
  };
  return parallel;
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TESTING_TEST_THREADS_H_
