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
#include "cc_ops/tf/saturation/classifier_inputs.h"
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

// Builds the content from inputs 1 to 3, which are in host memory.
class SetDriftsKernel : public ResourceKernel<DriftClassifierResource> {
 public:
  using ResourceKernel::ResourceKernel;

 private:
  absl::Status Run(tensorflow::OpKernelContext* context,
                   DriftClassifierResource* resource) override {
    NumbersOfKeys given;
    TF_RETURN_IF_ERROR(given.Read(context));
    auto content = std::make_shared<DriftContent>();
    TF_RETURN_IF_ERROR(ToAbsl(content->drifts.Build(resource->num_tables, given.tables, given.keys,
                                                    given.numbers, given.n, ParallelOf(context))));
    TF_RETURN_IF_ERROR(CopyToDevice(context, content.get()));
    resource->Replace(std::move(content));
    return absl::OkStatus();
  }

  // Fills content->on_device where a kernel needs it.
  virtual absl::Status CopyToDevice(tensorflow::OpKernelContext* /*context*/,
                                    DriftContent* /*content*/) {
    return absl::OkStatus();
  }
};

// Checks what can be known of the inputs without reading them, allocates the outputs and leaves the
// rest to the device.
class ClassifyByDriftKernel : public ResourceKernel<DriftClassifierResource> {
 public:
  using ResourceKernel::ResourceKernel;

 private:
  absl::Status Run(tensorflow::OpKernelContext* context,
                   DriftClassifierResource* resource) override {
    const tensorflow::Tensor &keys = context->input(1), &tables = context->input(2),
                             &row_splits = context->input(3);
    if (keys.dims() != 1 || tables.shape() != keys.shape() || row_splits.dims() != 1 ||
        row_splits.NumElements() == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("keys, tables and row_splits have shapes ", keys.shape().DebugString(), ", ",
                       tables.shape().DebugString(), " and ", row_splits.shape().DebugString(),
                       "; allowed: [n], [n] and [batch + 1]"));
    }
    const LookupLists lookups = {keys.flat<int64_t>().data(), tables.flat<int32_t>().data(),
                                 keys.NumElements(), row_splits.flat<int64_t>().data(),
                                 row_splits.NumElements() - 1};
    TF_RETURN_IF_ERROR(CheckSplits(lookups));
    Classified result;
    TF_RETURN_IF_ERROR(AllocateClassified(context, lookups.batch, &result));
    uint64_t first_number = 0;
    const DriftClassifier classifier = resource->Begin(lookups.batch, &first_number);
    return Classify(context, *resource->content(), classifier, lookups, first_number, result);
  }

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

class ConfigureDriftClassifierKernel : public ResourceKernel<DriftClassifierResource> {
 public:
  explicit ConfigureDriftClassifierKernel(tensorflow::OpKernelConstruction* context)
      : ResourceKernel(context) {
    OP_REQUIRES_OK(context, InitSettings(context, &settings_));
  }

 private:
  absl::Status Run(tensorflow::OpKernelContext* context,
                   DriftClassifierResource* resource) override {
    ClassifierSettings settings = settings_;
    TF_RETURN_IF_ERROR(ReadSettings(context, &settings));
    TF_RETURN_IF_ERROR(ToAbsl(ValidateSettings(settings)));
    resource->Configure(settings);
    return absl::OkStatus();
  }

  ClassifierSettings settings_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_SATURATION_DRIFT_CLASSIFIER_KERNELS_H_
