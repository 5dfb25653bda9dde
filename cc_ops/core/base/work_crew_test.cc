#include "cc_ops/core/base/work_crew.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace slipstream {
namespace {

// Three threads that call functions in turn, each after a delay.
class Threads {
 public:
  explicit Threads(std::chrono::microseconds delay = {}) : delay_(delay) {
    for (int i = 0; i < 3; ++i) threads_.emplace_back([this] { CallFunctions(); });
  }
  ~Threads() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_over_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  WorkCrew::Schedule schedule() {
    return [this](std::function<void()> fn) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        functions_.push_back(std::move(fn));
        ++count_;
      }
      wake_.notify_one();
    };
  }
  int count() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return count_;
  }

 private:
  void CallFunctions() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return is_over_ || !functions_.empty(); });
      if (functions_.empty()) return;
      const std::function<void()> fn = std::move(functions_.front());
      functions_.pop_front();
      lock.unlock();
      std::this_thread::sleep_for(delay_);
      fn();
      lock.lock();
    }
  }

  const std::chrono::microseconds delay_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> functions_;
  int count_ = 0;
  bool is_over_ = false;
  std::vector<std::thread> threads_;
};

// Checks that every task runs once, and before the next section starts.
void RunsEveryTaskOnce(WorkCrew* crew, int sections, int tasks) {
  // Not atomic, so that ThreadSanitizer can find races.
  std::vector<int> runs(static_cast<size_t>(tasks), 0);
  for (int section = 1; section <= sections; ++section) {
    crew->Run(tasks, [&](int task) { ++runs[static_cast<size_t>(task)]; });
    for (int task = 0; task < tasks; ++task) ASSERT_EQ(runs[static_cast<size_t>(task)], section);
  }
}

TEST(WorkCrew, RunsEveryTaskOnceWithDelayedHelpers) {
  for (const int delay : {0, 20, 200, 5000}) {
    Threads threads{std::chrono::microseconds(delay)};
    for (const int tasks : {1, 2, 3, 17}) {
      WorkCrew crew(4, threads.schedule());
      RunsEveryTaskOnce(&crew, 300, tasks);
    }
  }
}

TEST(WorkCrew, DoesNotWaitForLateHelpers) {
  std::vector<std::function<void()>> late;
  {
    WorkCrew crew(3, [&](std::function<void()> fn) { late.push_back(std::move(fn)); });
    RunsEveryTaskOnce(&crew, 10, 5);
    EXPECT_EQ(late.size(), 2u);
  }
  // The crew is destroyed, therefore the late helpers have no work.
  for (const std::function<void()>& fn : late) fn();
}

TEST(WorkCrew, HelpersJoinLaterSections) {
  Threads threads;
  WorkCrew crew(2, threads.schedule());
  const std::thread::id self = std::this_thread::get_id();
  std::atomic<int> helped{0};
  for (int section = 0; section < 2000 && helped < 2; ++section) {
    crew.Run(2, [&](int) {
      if (std::this_thread::get_id() != self) ++helped;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    });
  }
  EXPECT_GE(helped, 2);
}

TEST(WorkCrew, RethrowsTaskExceptionAfterAllTasksEnd) {
  Threads threads;
  WorkCrew crew(2, threads.schedule());
  for (int failing = 0; failing < 4; ++failing) {
    std::atomic<int> others{0};
    const auto fails = [&](int task) {
      if (task == failing) throw std::runtime_error("task");
      ++others;
    };
    EXPECT_THROW(crew.Run(4, fails), std::runtime_error);
    EXPECT_EQ(others, 3);
  }
  RunsEveryTaskOnce(&crew, 10, 4);
}

TEST(WorkCrew, RunsWithoutHelpersIfSchedulingFails) {
  WorkCrew crew(4, [](const std::function<void()>&) { throw std::bad_alloc(); });
  RunsEveryTaskOnce(&crew, 3, 4);
}

TEST(WorkCrew, NestedSectionRunsOnCallingThread) {
  Threads threads;
  WorkCrew crew(2, threads.schedule());
  std::atomic<int> inner{0};
  crew.Run(4, [&](int) { crew.Run(3, [&](int) { ++inner; }); });
  EXPECT_EQ(inner, 12);
}

TEST(WorkCrew, SingleThreadSchedulesNoHelpers) {
  Threads threads;
  WorkCrew crew(1, threads.schedule());
  RunsEveryTaskOnce(&crew, 3, 4);
  EXPECT_EQ(threads.count(), 0);
}

}  // namespace
}  // namespace slipstream
