// What becomes of an input once its score is known: the same on every device.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_RULE_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_RULE_H_

#include <cstdint>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/base/status.h"

namespace slipstream {

enum class SkipMode {
  kNone,            // no input is skippable
  kDrift,           // an input whose skip score is below the threshold
  kRememberedLoss,  // the same; the score is the input's loss at its last visit
  kRandom,          // the control: each input with the same probability, whatever its keys
};

// What a window skips.
struct ClassifierSettings {
  SkipMode mode = SkipMode::kNone;
  float threshold = 0.0f;     // not NaN, at least 0; read by kDrift and kRememberedLoss
  double random_share = 0.0;  // 0 to 1; read by kRandom
  double keep_rate = 0.0;     // share of the skippable inputs that is kept, 0 to below 1
  bool is_shadow = false;     // inputs are found skippable, and all are kept
  int64_t window = 0;         // number of the window, noted with the losses of its visits
};

// InvalidArgument for a setting out of its range.
Status ValidateSettings(const ClassifierSettings& settings);

// Of each input of a batch; [batch].
struct Classified {
  bool* skippable;
  float* score;
  // 0: left out. Else the inputs that it stands for: 1, 1 / keep_rate, or 1 + its skips.
  float* weight;
};

// Uniform in [0, 1): the 53 bits that a double holds.
SLIPSTREAM_HOST_DEVICE inline double UnitInterval(uint64_t random) {
  return static_cast<double>(random >> 11) * 0x1.0p-53;
}

// Whether an input is skippable.
//   seed: of the classifier. number: of the input since the start, for random choices.
SLIPSTREAM_HOST_DEVICE inline bool IsSkippable(const ClassifierSettings& settings, uint64_t seed,
                                               float score, uint64_t number) {
  // Apart from the reservoir's stream, so that skipping at random does not bias the sample.
  constexpr uint64_t kRandomSkipStream = 0x5851f42d4c957f2dULL;
  switch (settings.mode) {
    case SkipMode::kNone:
      return false;
    case SkipMode::kDrift:
    case SkipMode::kRememberedLoss:
      return score < settings.threshold;
    case SkipMode::kRandom:
      return UnitInterval(CounterRandom(seed ^ kRandomSkipStream, number)) < settings.random_share;
  }
  return false;
}

// The weight of an input, 0 to leave it out; arguments as above. Shadow mode is left to the caller.
SLIPSTREAM_HOST_DEVICE inline float WeightOf(const ClassifierSettings& settings, uint64_t seed,
                                             bool is_skippable, uint64_t number) {
  constexpr uint64_t kThinningStream = 0x14057b7ef767814fULL;
  if (!is_skippable) return 1.0f;
  // Random skipping is the control of skipping without a rest.
  if (settings.mode == SkipMode::kRandom || settings.keep_rate == 0.0) return 0.0f;
  const double draw = UnitInterval(CounterRandom(seed ^ kThinningStream, number));
  return draw < settings.keep_rate ? static_cast<float>(1.0 / settings.keep_rate) : 0.0f;
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_RULE_H_
