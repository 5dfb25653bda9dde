// Runs multiple parallel sections with one request for helper threads.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_WORK_CREW_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_WORK_CREW_H_

#include <functional>
#include <memory>

namespace slipstream {

// Runs tasks on the calling thread and on helper threads.
//
// A section is one call of Run. It requests helpers, which stay for sections that follow within
// about 50 microseconds. A section never waits for a helper that has not started yet, because
// waking a thread on a virtual machine can take longer than the work.
class WorkCrew {
 public:
  // Calls the given function on another thread at any later time, or never. May throw
  // std::bad_alloc.
  using Schedule = std::function<void(std::function<void()>)>;

  // threads: number of threads including the caller.
  WorkCrew(int threads, Schedule schedule);
  // Dismisses the helpers without waiting for them.
  ~WorkCrew();
  WorkCrew(const WorkCrew&) = delete;
  WorkCrew& operator=(const WorkCrew&) = delete;

  // Runs fn(0) to fn(tasks - 1) and returns when all have finished. A call within a task, or during
  // a call of another thread, runs its tasks on the calling thread only. Rethrows the exception of
  // the first task that failed.
  void Run(int tasks, const std::function<void(int task)>& fn);

 private:
  struct State;
  void CallForHelp(int wanted);

  const int threads_;
  const Schedule schedule_;
  const std::shared_ptr<State> state_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_WORK_CREW_H_
