#include "cc_ops/core/drift_classification.h"

#include <vector>

#include "cc_ops/core/skip_score.h"

namespace slipstream {

void ClassifyByDrift(const DriftIndex& drifts, const DriftClassifier& classifier,
                     const Lookup* lookups, const int64_t* offsets, int64_t batch,
                     uint64_t first_number, const Classified& result) {
  std::vector<float> scratch;
  for (int64_t i = 0; i < batch; ++i) {
    const float score = SkipScore(drifts, classifier.alpha, lookups + offsets[i],
                                  offsets[i + 1] - offsets[i], &scratch);
    classifier.Write(score, first_number + static_cast<uint64_t>(i), i, result);
  }
}

}  // namespace slipstream
