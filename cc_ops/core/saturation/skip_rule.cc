#include "cc_ops/core/saturation/skip_rule.h"

#include <string>

namespace slipstream {

Status ValidateSettings(const ClassifierSettings& settings) {
  if (!(settings.threshold >= 0.0f)) {
    return InvalidArgument("threshold is " + std::to_string(settings.threshold) +
                           "; expected a number of at least 0");
  }
  if (!(settings.random_fraction >= 0.0 && settings.random_fraction <= 1.0)) {
    return InvalidArgument("random_fraction is " + std::to_string(settings.random_fraction) +
                           "; expected a number from 0 to 1");
  }
  if (!(settings.keep_rate >= 0.0 && settings.keep_rate < 1.0)) {
    return InvalidArgument("keep_rate is " + std::to_string(settings.keep_rate) +
                           "; expected a number from 0 to below 1");
  }
  if (settings.mode == SkipMode::kPredictedLoss && settings.keep_rate == 0.0) {
    return InvalidArgument(
        "keep_rate is 0 in mode predicted_loss; expected a number above 0, because no weight can "
        "represent examples that are never kept");
  }
  return OkStatus();
}

}  // namespace slipstream
