#include "cc_ops/core/saturation/drift_classification.h"

#include <vector>

#include "cc_ops/core/saturation/skip_score.h"

namespace slipstream {

void ClassifyByDrift(const DriftIndex& drifts, const DriftClassifier& classifier,
                     const LookupLists& lookups, uint64_t first_number, const Classified& result) {
  std::vector<Lookup> own;
  std::vector<float> scratch;
  for (int64_t i = 0; i < lookups.batch; ++i) {
    own.clear();
    for (int64_t j = lookups.offsets[i]; j < lookups.offsets[i + 1]; ++j) {
      if (lookups.tables[j] >= 0) own.push_back({lookups.keys[j], lookups.tables[j]});
    }
    const float score =
        SkipScore(drifts, classifier.alpha, own.data(), static_cast<int64_t>(own.size()), &scratch);
    classifier.Write(score, first_number + static_cast<uint64_t>(i), i, result);
  }
}

}  // namespace slipstream
