// Decides about an example from its score, identically on every device.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_RULE_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_RULE_H_

#include <cstdint>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/base/status.h"

namespace slipstream {

enum class SkipMode {
  kNone,          // No example is skippable.
  kDrift,         // An example is skippable if its skip score is below the threshold.
  kForeseenLoss,  // Same, with |label - predicted probability| of a pilot as the score.
  kRandom,        // Control: each example is skippable with the same probability.
};

// Settings of a window.
struct ClassifierSettings {
  SkipMode mode = SkipMode::kNone;
  float threshold = 0.0f;     // Not NaN, at least 0; ignored by kNone and kRandom.
  double random_share = 0.0;  // Probability of skipping, in [0, 1]; used by kRandom.
  // Probability that a skippable example is kept, in [0, 1). For kForeseenLoss it is a minimum: a
  // skippable example is kept with probability score / threshold, or with this one if it is larger.
  double keep_rate = 0.0;
  bool is_shadow = false;  // Examples are found skippable, but all are kept.
};

// Returns InvalidArgument for a setting out of its range.
Status ValidateSettings(const ClassifierSettings& settings);

// Decision about an example. By default it is not skippable.
struct SkipDecision {
  bool is_skippable = false;
  bool is_kept = true;  // In shadow mode, whether the example would be kept otherwise.
  // 0 if dropped. Otherwise the number of examples that it represents: 1, or 1 / keep probability.
  float weight = 1.0f;
};

// Results for the examples of a batch, each [batch].
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

// Returns a uniform number in [0, 1) with 53 bits.
SLIPSTREAM_HOST_DEVICE inline double UnitInterval(uint64_t random) {
  return static_cast<double>(random >> 11) * 0x1.0p-53;
}

// Returns the keep probability of an example by its predicted loss.
SLIPSTREAM_HOST_DEVICE inline double ChanceByScore(const ClassifierSettings& settings,
                                                   float score) {
  if (!(score < settings.threshold)) return 1.0;
  const double share = static_cast<double>(score) / settings.threshold;
  return share < settings.keep_rate ? settings.keep_rate : share;
}

// Decides about one example. seed: of the classifier. number: number of the example since the start
// of training, for random choices.
SLIPSTREAM_HOST_DEVICE inline SkipDecision Classify(const ClassifierSettings& settings,
                                                    uint64_t seed, float score, uint64_t number) {
  // Independent of the reservoir's stream, so that random skipping does not bias the sample.
  constexpr uint64_t kRandomSkipStream = 0x5851f42d4c957f2dULL;
  constexpr uint64_t kThinningStream = 0x14057b7ef767814fULL;
  const bool is_random = settings.mode == SkipMode::kRandom;
  SkipDecision decision;
  decision.is_skippable =
      is_random
          ? UnitInterval(CounterRandom(seed ^ kRandomSkipStream, number)) < settings.random_share
          : settings.mode != SkipMode::kNone && score < settings.threshold;
  if (decision.is_skippable) {
    // Random skipping drops all skippable examples.
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
