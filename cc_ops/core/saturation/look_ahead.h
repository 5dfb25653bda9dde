// Limits how far a data pipeline works ahead of the training loop.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_LOOK_AHEAD_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_LOOK_AHEAD_H_

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace slipstream {

// Allows a pipeline to prepare one batch while another one trains, except across the end of a
// window, because decisions change there. A prepared batch is therefore the same as a batch
// prepared on demand. Thread-safe; multiple pipelines may share an object.
class LookAhead {
 public:
  // Begins or continues a window.
  //   batches: number of batches in the window; 0 for a window that never ends.
  //   pulled: number of batches that were returned before.
  void BeginWindow(int64_t batches, int64_t pulled);

  // Counts a batch that is returned. Returns whether the next batch may be prepared now. If so, the
  // caller must call Made afterwards, even after an error.
  bool Pull();
  void Made();

  // A wait that another thread can cancel; owned by the waiting thread.
  class Wait {
    friend class LookAhead;
    bool is_cancelled_ = false;
  };

  // Waits until no batch is being prepared. Returns false if the wait was cancelled.
  bool Settle(Wait* wait);
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
