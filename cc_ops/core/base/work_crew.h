// Runs multiple parallel sections with one request for helper threads.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_WORK_CREW_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_WORK_CREW_H_

#include <functional>
#include <memory>

namespace slipstream {

// Runs tasks on the calling thread and on helpers that have arrived.
//
// The first section requests helpers, which stay for sections that follow shortly. A section never
// waits for a helper that has not arrived, because waking a thread on a virtual machine can take
// longer than the work.
class WorkCrew {
 public:
  // Calls a function on another thread at some time, or never. May throw std::bad_alloc.
  using Schedule = std::function<void(std::function<void()>)>;

  // threads: number of threads including the caller.
  WorkCrew(int threads, Schedule schedule);
  // Dismisses the helpers without waiting for them.
  ~WorkCrew();
  WorkCrew(const WorkCrew&) = delete;
  WorkCrew& operator=(const WorkCrew&) = delete;

  // Same contract as Parallel::run. A section within a section runs on its thread only. Rethrows
  // the exception of the first task that failed.
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
