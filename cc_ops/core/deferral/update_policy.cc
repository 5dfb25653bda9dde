#include "cc_ops/core/deferral/update_policy.h"

#include <cmath>
#include <string>

namespace slipstream {

Status ValidateUpdatePolicy(const UpdatePolicy& policy) {
  if (policy.ranks < 1 || policy.ranks > 64) {
    return InvalidArgument("ranks is " + std::to_string(policy.ranks) +
                           "; expected an integer from 1 to 64");
  }
  if (policy.is_exchanged && policy.ranks > 1) {
    return InvalidArgument(
        "ranks is " + std::to_string(policy.ranks) +
        " and is_exchanged is true; expected 1 if processes exchange deferred gradients");
  }
  if (policy.mode != UpdatePolicy::Mode::kDefer) return OkStatus();
  if (!(policy.movement >= 0.f) || !std::isfinite(policy.movement)) {
    return InvalidArgument("movement is " + std::to_string(policy.movement) +
                           "; expected a finite number of at least 0");
  }
  if (policy.max_age < 1) {
    return InvalidArgument("max_age is " + std::to_string(policy.max_age) +
                           "; expected at least 1 update");
  }
  if (policy.max_rows < 0) {
    return InvalidArgument("max_rows is " + std::to_string(policy.max_rows) +
                           "; expected at least 0");
  }
  return OkStatus();
}

void UpdateCounts::Add(const UpdateCounts& other, int64_t factor) {
  using C = UpdateCounts;
  for (int64_t C::* counter :
       {&C::offered, &C::sent, &C::masked, &C::deferred, &C::due_by_movement, &C::due_by_age,
        &C::flushed, &C::over_budget, &C::evicted, &C::without_gradient}) {
    this->*counter += factor * other.*counter;
  }
}

}  // namespace slipstream
