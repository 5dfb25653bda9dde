// Classifies the examples of a batch by drift or at random, without sample, counters and pilot.
// Scores and decisions equal the results of InputClassifier::Classify.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_CLASSIFICATION_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_CLASSIFICATION_H_

#include <cstdint>

#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/saturation/drift_index.h"
#include "cc_ops/core/saturation/skip_rule.h"

namespace slipstream {

struct DriftClassifier {
  double alpha;   // Fraction of the lookups of an example that must be saturated, in (0, 1].
  uint64_t seed;  // Seed for keeping skippable examples and for kRandom.
  ClassifierSettings settings;  // Any mode except kPredictedLoss.

  // Decides about example i of a batch. score: its skip score. first_number: number of examples
  // before the batch, since the start of training.
  SLIPSTREAM_HOST_DEVICE SkipDecision Decide(float score, uint64_t first_number, int64_t i) const {
    return Classify(settings, seed, score, first_number + static_cast<uint64_t>(i));
  }
};

// The lookups of a batch, by example; owned by the caller.
struct LookupLists {
  const int64_t* keys;    // [num_lookups]
  const int32_t* tables;  // [num_lookups]; table of each key. Negative for padding.
  int64_t num_lookups;
  // [batch + 1]; ascending from 0 to num_lookups. Example i has the lookups offsets[i] to offsets[i
  // + 1] - 1.
  const int64_t* offsets;
  int64_t batch;
};

// Classifies the examples of a batch and writes `result` ([lookups.batch] each). drifts: drifts of
// the tracked keys. first_number: number of examples before the batch, since the start of training.
void ClassifyByDrift(const DriftIndex& drifts, const DriftClassifier& classifier,
                     const LookupLists& lookups, uint64_t first_number, const Classified& result);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_CLASSIFICATION_H_
