#include "cc_ops/core/base/work_crew.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <thread>
#include <utility>

#include "cc_ops/core/base/parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace slipstream {
namespace {

// Time for which a helper spins for the next section, and a section for its last tasks, before the
// thread yields the processor.
constexpr std::chrono::microseconds kPatience{50};
constexpr int kLooksBetweenTimes = 64;

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `is_done` returns true. Returns false after kPatience.
template <class IsDone>
bool LookUntil(const IsDone& is_done) {
  const auto start = std::chrono::steady_clock::now();
  while (true) {
    for (int i = 0; i < kLooksBetweenTimes; ++i) {
      if (is_done()) return true;
      Pause();
    }
    if (std::chrono::steady_clock::now() - start > kPatience) return false;
  }
}

// One integer has the number of tasks of a section and the number of taken tasks. A thread can
// therefore not take a task of one section for a task of the next.
uint64_t Section(int tasks) { return static_cast<uint64_t>(tasks) << 32; }
int TasksOf(uint64_t section) { return static_cast<int>(section >> 32); }
int TakenOf(uint64_t section) { return static_cast<int>(section & 0xffffffffu); }

}  // namespace

struct WorkCrew::State {
  std::atomic<uint64_t> section{0};
  std::atomic<int> unfinished{0};  // Tasks of the section that have not finished.
  std::atomic<int> helpers{0};     // Helpers that were requested and have not left yet.
  std::atomic<bool> is_over{false};
  std::atomic<bool> is_running{false};
  // Function of the section; valid while a task is unfinished.
  const std::function<void(int)>* fn = nullptr;

  bool HasTask() const {
    const uint64_t now = section.load(std::memory_order_acquire);
    return TakenOf(now) < TasksOf(now);
  }

  void TakeTasks() {
    while (HasTask()) {
      const uint64_t taken = section.fetch_add(1, std::memory_order_acq_rel);
      if (TakenOf(taken) >= TasksOf(taken)) return;
      (*fn)(TakenOf(taken));
      unfinished.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  void Help() {
    while (!is_over.load(std::memory_order_acquire)) {
      TakeTasks();
      if (!LookUntil([this] { return HasTask() || is_over.load(std::memory_order_acquire); })) {
        break;
      }
    }
    helpers.fetch_sub(1, std::memory_order_acq_rel);
  }
};

WorkCrew::WorkCrew(int threads, Schedule schedule)
    : threads_(threads), schedule_(std::move(schedule)), state_(std::make_shared<State>()) {}

WorkCrew::~WorkCrew() { state_->is_over.store(true, std::memory_order_release); }

void WorkCrew::CallForHelp(int wanted) {
  while (state_->helpers.load(std::memory_order_acquire) < wanted) {
    state_->helpers.fetch_add(1, std::memory_order_acq_rel);
    try {
      schedule_([state = state_] { state->Help(); });
    } catch (const std::bad_alloc&) {
      // The calling thread does the work without this helper.
      state_->helpers.fetch_sub(1, std::memory_order_acq_rel);
      return;
    }
  }
}

void WorkCrew::Run(int tasks, const std::function<void(int task)>& fn) {
  if (tasks <= 1 || threads_ <= 1 || state_->is_running.exchange(true)) {
    for (int task = 0; task < tasks; ++task) fn(task);
    return;
  }
  TaskErrors errors;
  const std::function<void(int)> caught = [&](int task) { errors.Run(fn, task); };
  state_->fn = &caught;
  state_->unfinished.store(tasks, std::memory_order_relaxed);
  state_->section.store(Section(tasks), std::memory_order_release);
  CallForHelp(std::min(threads_, tasks) - 1);
  state_->TakeTasks();
  const auto is_done = [this] { return state_->unfinished.load(std::memory_order_acquire) == 0; };
  if (!LookUntil(is_done)) {
    while (!is_done()) std::this_thread::yield();
  }
  state_->is_running.store(false);
  errors.Rethrow();
}

}  // namespace slipstream
