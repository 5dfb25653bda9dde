// Decides whether an example is skippable and whether it is kept, identically on every device.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_RULE_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_SKIP_RULE_H_

#include <cstdint>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/base/status.h"

namespace slipstream {

enum class SkipMode {
  kNone,   // No example is skippable.
  kDrift,  // An example is skippable if its skip score (skip_score.h) is below the threshold.
  kPredictedLoss,  // Same, with |label - predicted probability| of a pilot as the score.
  kRandom,         // Control: each example is skippable with the same probability.
};

// Settings of a window.
struct ClassifierSettings {
  SkipMode mode = SkipMode::kNone;
  float threshold = 0.0f;  // Not NaN, at least 0; ignored by kNone and kRandom.
  // Probability that an example is skippable, in [0, 1]; used only by kRandom.
  double random_fraction = 0.0;
  // kDrift: probability that a skippable example is kept, in [0, 1). kPredictedLoss: minimum of
  // this probability, in (0, 1); an example is kept with probability max(keep_rate, score /
  // threshold). kRandom ignores it and keeps no skippable example.
  double keep_rate = 0.0;
  // Whether all examples are kept with weight 1, for a dry run. Decisions are made as without it.
  bool is_shadow = false;
};

// Returns InvalidArgument for a setting out of its range.
Status ValidateSettings(const ClassifierSettings& settings);

// Decision about an example. By default the example is not skippable and is kept.
struct SkipDecision {
  bool is_skippable = false;
  bool is_kept = true;  // In shadow mode, whether the example would be kept otherwise.
  // 0 if dropped. Otherwise the number of examples that it represents: 1, or 1 / keep probability.
  float weight = 1.0f;
};

// Results for the examples of a batch, each [batch].
struct Classified {
  // Writes the result for example i.
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

// Converts 64 random bits to a uniform number in [0, 1).
SLIPSTREAM_HOST_DEVICE inline double UnitInterval(uint64_t random) {
  return static_cast<double>(random >> 11) * 0x1.0p-53;
}

// Returns the probability that kPredictedLoss keeps an example with this score; 1 if the example is
// not skippable.
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
          ? UnitInterval(CounterRandom(seed ^ kRandomSkipStream, number)) < settings.random_fraction
          : settings.mode != SkipMode::kNone && score < settings.threshold;
  if (decision.is_skippable) {
    // Random skipping drops all skippable examples.
    const double chance = settings.mode == SkipMode::kPredictedLoss ? ChanceByScore(settings, score)
                          : is_random                               ? 0.0
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
