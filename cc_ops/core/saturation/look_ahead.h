// How far a data pipeline may work ahead of the training loop that pulls its batches.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_LOOK_AHEAD_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_LOOK_AHEAD_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace slipstream {

// One batch may be made while another one trains, unless something ends in between that the making
// depends on: a window. So what is made is what it would be if it were made when it is pulled.
// Thread-safe; several pipelines may share one.
class LookAhead {
 public:
  // A window begins, or goes on.
  //   batches: of the window; 0: none ever ends.
  //   pulled: those that were handed out before.
  void BeginWindow(int64_t batches, int64_t pulled);

  // Counts a batch that is handed out. Returns whether the next one may be made at once: whoever is
  // told so must call Made, whatever becomes of it.
  bool Pull();
  void Made();

  // A wait that another thread may end; owned by the one who waits.
  class Wait {
    friend class LookAhead;
    bool is_cancelled_ = false;
  };

  // Waits until no batch is being made. Returns false if the wait was cancelled before.
  bool Settle(Wait* wait);
  // Ends a wait, also one that has not begun.
  void Cancel(Wait* wait);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int64_t batches_ = 0;
  int64_t pulled_ = 0;
  int64_t in_making_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_LOOK_AHEAD_H_
