// What becomes of an input once its score is known: the same on every device.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_RULE_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_RULE_H_

#include <cstdint>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/base/status.h"

namespace slipstream {

enum class SkipMode {
  kNone,          // no input is skippable
  kDrift,         // an input whose skip score is below the threshold
  kForeseenLoss,  // the same; the score is |label - what a pilot predicted|
  kRandom,        // the control: each input with the same probability, whatever its keys
};

// What a window skips.
struct ClassifierSettings {
  SkipMode mode = SkipMode::kNone;
  float threshold = 0.0f;     // not NaN, at least 0; read by all but kNone and kRandom
  double random_share = 0.0;  // 0 to 1; read by kRandom
  // Share of the skippable inputs that is kept, 0 to below 1; by kForeseenLoss the least one: a
  // skippable input is kept with probability score / threshold, or with this one.
  double keep_rate = 0.0;
  bool is_shadow = false;  // inputs are found skippable, and all are kept
};

// InvalidArgument for a setting out of its range.
Status ValidateSettings(const ClassifierSettings& settings);

// What becomes of one input; the default: it cannot be skipped.
struct SkipDecision {
  bool is_skippable = false;
  bool is_kept = true;  // in shadow mode: whether it would be kept without
  // 0: left out. Else the inputs that it stands for: 1, or 1 / its chance.
  float weight = 1.0f;
};

// Of each input of a batch; [batch].
struct Classified {
  SLIPSTREAM_HOST_DEVICE void Write(int64_t i, float its_score,
                                    const SkipDecision& decision) const {
    skippable[i] = decision.is_skippable;
    score[i] = its_score;
    weight[i] = decision.weight;
  }

  bool* skippable;
  float* score;
  float* weight;
};

// Uniform in [0, 1): the 53 bits that a double holds.
SLIPSTREAM_HOST_DEVICE inline double UnitInterval(uint64_t random) {
  return static_cast<double>(random >> 11) * 0x1.0p-53;
}

// The probability with which an input is kept by its foreseen loss.
SLIPSTREAM_HOST_DEVICE inline double ChanceByScore(const ClassifierSettings& settings,
                                                   float score) {
  if (!(score < settings.threshold)) return 1.0;
  const double share = static_cast<double>(score) / settings.threshold;
  return share < settings.keep_rate ? settings.keep_rate : share;
}

// Decides on one input, for every classifier and on every device.
//   seed: of the classifier. number: of the input since the start, for random choices.
SLIPSTREAM_HOST_DEVICE inline SkipDecision Classify(const ClassifierSettings& settings,
                                                    uint64_t seed, float score, uint64_t number) {
  // Apart from the reservoir's stream, so that skipping at random does not bias the sample.
  constexpr uint64_t kRandomSkipStream = 0x5851f42d4c957f2dULL;
  constexpr uint64_t kThinningStream = 0x14057b7ef767814fULL;
  const bool is_random = settings.mode == SkipMode::kRandom;
  SkipDecision decision;
  decision.is_skippable =
      is_random
          ? UnitInterval(CounterRandom(seed ^ kRandomSkipStream, number)) < settings.random_share
          : settings.mode != SkipMode::kNone && score < settings.threshold;
  if (decision.is_skippable) {
    // Random skipping keeps none of the skippable inputs.
    const double chance = settings.mode == SkipMode::kForeseenLoss ? ChanceByScore(settings, score)
                          : is_random                              ? 0.0
                                                                   : settings.keep_rate;
    decision.is_kept =
        chance > 0.0 && UnitInterval(CounterRandom(seed ^ kThinningStream, number)) < chance;
    decision.weight = decision.is_kept ? static_cast<float>(1.0 / chance) : 0.0f;
  }
  if (settings.is_shadow) decision.weight = 1.0f;
  return decision;
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_RULE_H_
