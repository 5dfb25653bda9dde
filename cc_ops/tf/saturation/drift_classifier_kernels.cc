// CPU kernels of the classification by drift: checks of row splits, then calls into cc_ops/core.
#include "cc_ops/tf/saturation/drift_classifier_kernels.h"

#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

using tensorflow::OpKernelContext;

class ClassifyByDriftCpuKernel : public ClassifyByDriftKernel {
 public:
  using ClassifyByDriftKernel::ClassifyByDriftKernel;

 private:
  absl::Status CheckSplits(const LookupLists& lookups) override {
    for (int64_t i = 0; i <= lookups.batch; ++i) {
      const int64_t least = i == 0 ? 0 : lookups.offsets[i - 1];
      const int64_t most = i == 0 ? 0 : lookups.num_lookups;
      const int64_t split = lookups.offsets[i];
      if (split < least || split > most || (i == lookups.batch && split != lookups.num_lookups)) {
        return absl::InvalidArgumentError(
            absl::StrCat("row_splits[", i, "] is ", split, "; allowed: ascending from 0 to ",
                         lookups.num_lookups, ", the number of keys"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Classify(OpKernelContext* /*context*/, const DriftContent& content,
                        const DriftClassifier& classifier, const LookupLists& lookups,
                        uint64_t first_number, const Classified& result) override {
    ClassifyByDrift(content.drifts, classifier, lookups, first_number, result);
    return absl::OkStatus();
  }
};

#define REGISTER_CPU(name, Kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), MemoryChecked<Kernel>)
REGISTER_CPU("SlipstreamDriftClassifier", CreateDriftClassifierKernel);
REGISTER_CPU("SlipstreamDriftClassifierSetDrift", SetDriftsKernel);
REGISTER_CPU("SlipstreamDriftClassifierConfigure", ConfigureDriftClassifierKernel);
REGISTER_CPU("SlipstreamClassifyByDrift", ClassifyByDriftCpuKernel);
#undef REGISTER_CPU

}  // namespace
}  // namespace slipstream
