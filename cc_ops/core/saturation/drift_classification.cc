#include "cc_ops/core/saturation/drift_classification.h"

#include "cc_ops/core/saturation/skip_score.h"

namespace slipstream {

void ClassifyByDrift(const DriftIndex& drifts, const DriftClassifier& classifier,
                     const LookupLists& lookups, uint64_t first_number, const Classified& result) {
  InputLookups inputs;
  for (int64_t i = 0; i < lookups.batch; ++i) {
    for (int64_t j = lookups.offsets[i]; j < lookups.offsets[i + 1]; ++j) {
      if (lookups.tables[j] >= 0) inputs.lookups.push_back({lookups.keys[j], lookups.tables[j]});
    }
    inputs.EndInput();
  }
  SkipScores(drifts, classifier.alpha, &inputs, result.score);
  for (int64_t i = 0; i < lookups.batch; ++i) {
    result.Write(i, result.score[i], classifier.Decide(result.score[i], first_number, i));
  }
}

}  // namespace slipstream
