// CPU kernels of the classification by drift: checks of row splits, then calls into cc_ops/core.
#include "cc_ops/tf/saturation/drift_classifier_kernels.h"

#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

using tensorflow::OpKernelContext;

struct ClassifierOnCpu {
  static absl::Status CheckSplits(const LookupLists& lookups) {
    for (int64_t i = 0; i <= lookups.batch; ++i) {
      const int64_t minimum = i == 0 ? 0 : lookups.offsets[i - 1];
      const int64_t maximum = i == 0 ? 0 : lookups.num_lookups;
      const int64_t split = lookups.offsets[i];
      if (split < minimum || split > maximum ||
          (i == lookups.batch && split != lookups.num_lookups)) {
        return absl::InvalidArgumentError(
            absl::StrCat("row_splits[", i, "] is ", split, "; expected ascending values from 0 to ",
                         lookups.num_lookups, ", the number of keys"));
      }
    }
    return absl::OkStatus();
  }

  static absl::Status Classify(OpKernelContext* /*context*/, const DriftContent& content,
                               const DriftClassifier& classifier, const LookupLists& lookups,
                               uint64_t first_number, const Classified& result) {
    ClassifyByDrift(content.table, classifier, lookups, first_number, result);
    return absl::OkStatus();
  }
};

SLIPSTREAM_CPU_KERNEL("SlipstreamDriftClassifier", FunctionKernel<CreateDriftClassifier>);
SLIPSTREAM_CPU_KERNEL("SlipstreamDriftClassifierSetDrift", ResourceKernel<SetDrifts<OnCpu>>);
SLIPSTREAM_CPU_KERNEL("SlipstreamDriftClassifierConfigure",
                      ResourceKernel<ConfigureDriftClassifier>);
SLIPSTREAM_CPU_KERNEL("SlipstreamClassifyByDrift", ResourceKernel<ClassifyBatch<ClassifierOnCpu>>);

}  // namespace
}  // namespace slipstream
