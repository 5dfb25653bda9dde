#include "cc_ops/core/saturation/look_ahead.h"

namespace slipstream {

void LookAhead::BeginWindow(int64_t batches, int64_t pulled) {
  const std::lock_guard<std::mutex> lock(mutex_);
  batches_ = batches;
  pulled_ = pulled;
}

bool LookAhead::Pull() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++pulled_;
  if (batches_ > 0 && pulled_ >= batches_) return false;
  ++in_making_;
  return true;
}

void LookAhead::Made() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --in_making_;
  }
  changed_.notify_all();
}

bool LookAhead::WaitUntilIdle(Wait* wait) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return in_making_ == 0 || wait->is_cancelled_; });
  return in_making_ == 0;
}

void LookAhead::Cancel(Wait* wait) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    wait->is_cancelled_ = true;
  }
  changed_.notify_all();
}

}  // namespace slipstream
