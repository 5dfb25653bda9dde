// Limits how far a data pipeline works ahead of the training loop.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_LOOK_AHEAD_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_LOOK_AHEAD_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace slipstream {

// Allows a pipeline to prepare a batch while the model trains on the previous batch, but only if
// both are in the same window. Decisions about examples change at the end of a window, therefore a
// batch of the next window that was prepared earlier would differ from a batch prepared on demand.
// Thread-safe; multiple pipelines may share an object.
class LookAhead {
 public:
  // Begins or continues a window.
  //   batches: number of batches in the window; 0 for a window that never ends.
  //   pulled: number of batches of the window that pipelines have already returned.
  void BeginWindow(int64_t batches, int64_t pulled);

  // Counts a batch that a pipeline returns. Returns whether the pipeline may prepare the next batch
  // now. If so, it must call Made when the preparation has ended, even with an error.
  bool Pull();
  // Ends a preparation that Pull allowed.
  void Made();

  // A wait that another thread can cancel; owned by the waiting thread.
  class Wait {
    friend class LookAhead;
    bool is_cancelled_ = false;
  };

  // Waits until no batch is being prepared. Returns false if the wait was cancelled before that.
  bool WaitUntilIdle(Wait* wait);
  // Cancels a wait, even if it has not started.
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
