// Classification of a batch by drift or at random, without an input classifier's state: the same
// scores and decisions as InputClassifier's in those modes.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_CLASSIFICATION_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_CLASSIFICATION_H_

#include <cstdint>

#include "cc_ops/core/base/host_device.h"
#include "cc_ops/core/saturation/drift_index.h"
#include "cc_ops/core/saturation/skip_rule.h"

namespace slipstream {

struct DriftClassifier {
  double alpha;                 // in (0, 1]; share of an input's lookups that must be saturated
  uint64_t seed;                // of thinning and of kRandom
  ClassifierSettings settings;  // of any mode but those by losses

  // Decides on input i of a batch.
  //   score: the drift that RequiredLookups of its lookups reach at most.
  //   first_number: inputs before the batch, since the start.
  SLIPSTREAM_HOST_DEVICE SkipDecision Decide(float score, uint64_t first_number, int64_t i) const {
    return Classify(settings, seed, score, first_number + static_cast<uint64_t>(i));
  }
};

// The lookups of a batch, input by input; owned by the caller.
struct LookupLists {
  const int64_t* keys;    // [num_lookups]
  const int32_t* tables;  // [num_lookups], of the keys; below 0: no lookup, but padding
  int64_t num_lookups;
  const int64_t* offsets;  // [batch + 1], ascending from 0 to num_lookups: input i has those from
                           // offsets[i] to offsets[i + 1] - 1
  int64_t batch;
};

// Classifies the inputs of a batch.
//   drifts        of the tracked keys.
//   first_number  inputs before the batch, since the start.
void ClassifyByDrift(const DriftIndex& drifts, const DriftClassifier& classifier,
                     const LookupLists& lookups, uint64_t first_number, const Classified& result);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_DRIFT_CLASSIFICATION_H_
