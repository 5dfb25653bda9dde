// Several parallel sections with one call for help.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_WORK_CREW_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_WORK_CREW_H_

#include <functional>
#include <memory>

namespace slipstream {

// Runs tasks on the thread that asks for them and on those that have come to help. Helpers are
// asked for in the first section and stay for those that follow shortly after; nobody waits for
// one that has not come, as one that a virtual machine has to wake may take longer than the work.
class WorkCrew {
 public:
  // Has a function called on another thread, some time or never; may throw std::bad_alloc.
  using Schedule = std::function<void(std::function<void()>)>;

  // threads: with the one that asks.
  WorkCrew(int threads, Schedule schedule);
  // Helpers leave; it waits for none.
  ~WorkCrew();
  WorkCrew(const WorkCrew&) = delete;
  WorkCrew& operator=(const WorkCrew&) = delete;

  // As Parallel::run. A section within a section runs on its own thread alone. Throws what the
  // first task that failed threw.
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
