// What the CPU and the GPU kernels of the classification by drift share: resource and checks.
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
#include "cc_ops/tf/base/replaced_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/refcount.h"

namespace slipstream {

// One window's drifts: never changed, only replaced.
struct DriftContent {
  std::string Describe() const {
    return absl::StrCat("SlipstreamDriftClassifier of ", drifts.size(), " keys");
  }

  DriftIndex drifts;
  tensorflow::Tensor on_device;  // uint8, a copy of the slots in GPU memory; unused on the CPU
};

class DriftClassifierResource : public ReplacedResource<DriftContent> {
 public:
  DriftClassifierResource(int num_tables, double alpha, uint64_t seed)
      : num_tables(num_tables), classifier_{alpha, seed, ClassifierSettings()} {}

  void Configure(const ClassifierSettings& settings) {
    const std::lock_guard<std::mutex> lock(mutex_);
    classifier_.settings = settings;
  }

  // The rule for a batch, and the number of its first input since the start.
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

using DriftClassifierRef = tensorflow::core::RefCountPtr<DriftClassifierResource>;

// The classifier of input 0; the kernel's own reference to it.
inline absl::Status FindDriftClassifier(tensorflow::OpKernelContext* context,
                                        DriftClassifierRef* resource) {
  if (context->input(0).dims() != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "handle has shape ", context->input(0).shape().DebugString(), "; allowed: a scalar"));
  }
  return tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0), resource);
}

// Builds the content from inputs 1 to 3, which are in host memory.
class SetDriftsKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    DriftClassifierRef resource;
    OP_REQUIRES_OK(context, FindDriftClassifier(context, &resource));
    const tensorflow::Tensor &tables = context->input(1), &keys = context->input(2),
                             &drift = context->input(3);
    OP_REQUIRES(
        context,
        tables.dims() == 1 && keys.shape() == tables.shape() && drift.shape() == tables.shape(),
        absl::InvalidArgumentError(
            absl::StrCat("tables, keys and drift have shapes ", tables.shape().DebugString(), ", ",
                         keys.shape().DebugString(), " and ", drift.shape().DebugString(),
                         "; allowed: three vectors of one length")));
    auto content = std::make_shared<DriftContent>();
    OP_REQUIRES_OK(context, ToAbsl(content->drifts.Build(
                                resource->num_tables, tables.flat<int32_t>().data(),
                                keys.flat<int64_t>().data(), drift.flat<float>().data(),
                                keys.NumElements(), ParallelOf(context))));
    OP_REQUIRES_OK(context, CopyToDevice(context, content.get()));
    resource->Replace(std::move(content));
  }

 private:
  // Fills content->on_device where a kernel needs it.
  virtual absl::Status CopyToDevice(tensorflow::OpKernelContext* /*context*/,
                                    DriftContent* /*content*/) {
    return absl::OkStatus();
  }
};

// Checks what can be known of the inputs without reading them, allocates the outputs and leaves the
// rest to the device.
class ClassifyByDriftKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    DriftClassifierRef resource;
    OP_REQUIRES_OK(context, FindDriftClassifier(context, &resource));
    const tensorflow::Tensor &keys = context->input(1), &tables = context->input(2),
                             &row_splits = context->input(3);
    OP_REQUIRES(context,
                keys.dims() == 1 && tables.shape() == keys.shape() && row_splits.dims() == 1 &&
                    row_splits.NumElements() > 0,
                absl::InvalidArgumentError(absl::StrCat(
                    "keys, tables and row_splits have shapes ", keys.shape().DebugString(), ", ",
                    tables.shape().DebugString(), " and ", row_splits.shape().DebugString(),
                    "; allowed: [n], [n] and [batch + 1]")));
    const LookupLists lookups = {keys.flat<int64_t>().data(), tables.flat<int32_t>().data(),
                                 keys.NumElements(), row_splits.flat<int64_t>().data(),
                                 row_splits.NumElements() - 1};
    OP_REQUIRES_OK(context, CheckSplits(lookups));
    const tensorflow::TensorShape shape({lookups.batch});
    tensorflow::Tensor *skippable = nullptr, *score = nullptr, *weight = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &skippable));
    OP_REQUIRES_OK(context, context->allocate_output(1, shape, &score));
    OP_REQUIRES_OK(context, context->allocate_output(2, shape, &weight));
    uint64_t first_number = 0;
    const DriftClassifier classifier = resource->Begin(lookups.batch, &first_number);
    OP_REQUIRES_OK(context,
                   Classify(context, *resource->content(), classifier, lookups, first_number,
                            {skippable->flat<bool>().data(), score->flat<float>().data(),
                             weight->flat<float>().data()}));
  }

 private:
  // InvalidArgument if the offsets can be read here and are not sound.
  virtual absl::Status CheckSplits(const LookupLists& /*lookups*/) { return absl::OkStatus(); }

  virtual absl::Status Classify(tensorflow::OpKernelContext* context, const DriftContent& content,
                                const DriftClassifier& classifier, const LookupLists& lookups,
                                uint64_t first_number, const Classified& result) = 0;
};

// The same on both devices: only the memory type of the handle differs.
class CreateDriftClassifierKernel : public tensorflow::OpKernel {
 public:
  explicit CreateDriftClassifierKernel(tensorflow::OpKernelConstruction* context)
      : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_tables", &num_tables_));
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    double alpha = 0.0;
    OP_REQUIRES_OK(context, ReadScalar(context, 0, "alpha", &alpha));
    OP_REQUIRES(context, alpha > 0.0 && alpha <= 1.0,
                absl::InvalidArgumentError(
                    absl::StrCat("alpha is ", alpha, "; allowed: above 0, at most 1")));
    OP_REQUIRES_OK(context,
                   OutputResource(context, DriftClassifierRef(new DriftClassifierResource(
                                               num_tables_, alpha, static_cast<uint64_t>(seed_)))));
  }

 private:
  int num_tables_ = 1;
  int64_t seed_ = 0;
};

class ConfigureDriftClassifierKernel : public tensorflow::OpKernel {
 public:
  explicit ConfigureDriftClassifierKernel(tensorflow::OpKernelConstruction* context)
      : OpKernel(context) {
    std::string mode;
    OP_REQUIRES_OK(context, context->GetAttr("mode", &mode));
    OP_REQUIRES_OK(context, context->GetAttr("is_shadow", &settings_.is_shadow));
    if (mode == "drift") settings_.mode = SkipMode::kDrift;
    if (mode == "random") settings_.mode = SkipMode::kRandom;
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    DriftClassifierRef resource;
    OP_REQUIRES_OK(context, FindDriftClassifier(context, &resource));
    ClassifierSettings settings = settings_;
    OP_REQUIRES_OK(context, ReadScalar(context, 1, "threshold", &settings.threshold));
    OP_REQUIRES_OK(context, ReadScalar(context, 2, "random_share", &settings.random_share));
    OP_REQUIRES_OK(context, ReadScalar(context, 3, "keep_rate", &settings.keep_rate));
    OP_REQUIRES_OK(context, ToAbsl(ValidateSettings(settings)));
    resource->Configure(settings);
  }

 private:
  ClassifierSettings settings_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_SATURATION_DRIFT_CLASSIFIER_KERNELS_H_
