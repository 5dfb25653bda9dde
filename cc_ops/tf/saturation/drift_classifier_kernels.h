// Shared parts of the CPU and GPU kernels of the classification by drift: the resource and checks.
#ifndef SLIPSTREAM_CC_OPS_TF_SATURATION_DRIFT_CLASSIFIER_KERNELS_H_
#define SLIPSTREAM_CC_OPS_TF_SATURATION_DRIFT_CLASSIFIER_KERNELS_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/saturation/drift_classification.h"
#include "cc_ops/core/saturation/drift_index.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/resource_kernel.h"
#include "cc_ops/tf/containers/key_table_kernels.h"
#include "cc_ops/tf/saturation/classifier_inputs.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/refcount.h"

namespace slipstream {

using DriftContent = KeyTableContent<DriftIndex>;

class DriftClassifierResource : public ReplacedResource<DriftContent> {
 public:
  DriftClassifierResource(int num_tables, double alpha, uint64_t seed)
      : num_tables(num_tables), classifier_{alpha, seed, ClassifierSettings()} {}

  void Configure(const ClassifierSettings& settings) {
    const std::lock_guard<std::mutex> lock(mutex_);
    classifier_.settings = settings;
  }

  // Returns the classifier for a batch of `batch` examples. Sets the number of its first example
  // since the start.
  DriftClassifier Begin(int64_t batch, uint64_t* first_number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    *first_number = inputs_;
    inputs_ += static_cast<uint64_t>(batch);
    return classifier_;
  }

  const int num_tables;

 private:
  std::mutex mutex_;
  DriftClassifier classifier_;
  uint64_t inputs_ = 0;
};

// Replaces the drifts by inputs 1 to 3, which are in host memory.
template <class Device>
absl::Status SetDrifts(tensorflow::OpKernelContext* context, DriftClassifierResource* resource) {
  NumbersOfKeys given;
  TF_RETURN_IF_ERROR(given.Read(context));
  return ReplaceTable<Device, DriftIndex>(context, resource, [&](DriftIndex* drifts) {
    return drifts->Build(resource->num_tables, given.tables, given.keys, given.numbers, given.n,
                         ParallelOf(context));
  });
}

// Checks the shapes of the inputs, allocates the outputs, and calls static functions of Device:
//   CheckSplits(lookups)   Returns InvalidArgument for invalid row splits, if it can read them.
//   Classify(context, content, classifier, lookups, first_number, result)
template <class Device>
absl::Status ClassifyBatch(tensorflow::OpKernelContext* context,
                           DriftClassifierResource* resource) {
  TF_RETURN_IF_ERROR(CheckInputs(context, 1, "keys: [n], tables: [n], row_splits: [?]"));
  const int64_t num_splits = context->input(3).NumElements();
  if (num_splits == 0) {
    return absl::InvalidArgumentError("row_splits has shape [0]; expected [batch + 1]");
  }
  const LookupLists lookups = {Data<int64_t>(context, 1), Data<int32_t>(context, 2),
                               context->input(1).NumElements(), Data<int64_t>(context, 3),
                               num_splits - 1};
  TF_RETURN_IF_ERROR(Device::CheckSplits(lookups));
  Classified result;
  TF_RETURN_IF_ERROR(AllocateClassified(context, lookups.batch, &result));
  uint64_t first_number = 0;
  const DriftClassifier classifier = resource->Begin(lookups.batch, &first_number);
  return Device::Classify(context, *resource->content(), classifier, lookups, first_number, result);
}

// Changes the settings of the classifier.
inline absl::Status ConfigureDriftClassifier(tensorflow::OpKernelContext* context,
                                             DriftClassifierResource* resource) {
  ClassifierSettings settings;
  TF_RETURN_IF_ERROR(ReadSettings(context, &settings));
  TF_RETURN_IF_ERROR(ToAbsl(ValidateSettings(settings)));
  resource->Configure(settings);
  return absl::OkStatus();
}

// Outputs the handle of a new classifier. The function is the same on both devices: only the memory
// type of the handle differs.
inline absl::Status CreateDriftClassifier(tensorflow::OpKernelContext* context) {
  int num_tables = 1;
  int64_t seed = 0;
  double alpha = 0.0;
  TF_RETURN_IF_ERROR(ReadAttribute(context, "num_tables", &num_tables));
  TF_RETURN_IF_ERROR(ReadAttribute(context, "seed", &seed));
  TF_RETURN_IF_ERROR(ReadScalar(context, 0, "alpha", &alpha));
  if (!(alpha > 0.0 && alpha <= 1.0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("alpha is ", alpha, "; expected a number above 0 and at most 1"));
  }
  return OutputResource(
      context, tensorflow::core::RefCountPtr<DriftClassifierResource>(
                   new DriftClassifierResource(num_tables, alpha, static_cast<uint64_t>(seed))));
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_SATURATION_DRIFT_CLASSIFIER_KERNELS_H_
