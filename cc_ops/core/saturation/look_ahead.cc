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
  made_.notify_all();
}

void LookAhead::Settle() {
  std::unique_lock<std::mutex> lock(mutex_);
  made_.wait(lock, [this] { return in_making_ == 0; });
}

}  // namespace slipstream
