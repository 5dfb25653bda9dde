// Kernels of the input classifier: checks of shapes, then calls into cc_ops/core. What it knows is
// exported and imported by classifier_state_kernels.cc.
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/saturation/input_classifier.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/base/replaced_resource.h"
#include "cc_ops/tf/lookup/feature_inputs.h"
#include "cc_ops/tf/saturation/classifier_inputs.h"
#include "cc_ops/tf/saturation/classifier_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// An empty vector stands for none.
absl::Status RequireOptional(const Tensor& values, const char* name, int64_t batch) {
  if (values.dims() == 1 && (values.NumElements() == 0 || values.NumElements() == batch)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(name, " have shape ", values.shape().DebugString(),
                                                 "; allowed: [", batch, "] or [0]"));
}

template <class T>
const T* OptionalData(const Tensor& values, int64_t batch) {
  return values.NumElements() == 0 && batch > 0 ? nullptr : values.flat<T>().data();
}

class CreateKernel : public OpKernel {
 public:
  explicit CreateKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_tables", &options_.num_tables));
    OP_REQUIRES_OK(context, context->GetAttr("reservoir_size", &options_.reservoir_size));
    int64_t seed = 0;
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed));
    options_.seed = static_cast<uint64_t>(seed);
    OP_REQUIRES_OK(context, context->GetAttr("loss_memory_bytes", &options_.loss_memory_bytes));
    OP_REQUIRES_OK(context, context->GetAttr("max_skips", &options_.max_skips));
    OP_REQUIRES_OK(context, context->GetAttr("weighs_visits", &options_.weighs_visits));
  }

  void Compute(OpKernelContext* context) override {
    ClassifierOptions options = options_;
    OP_REQUIRES_OK(context, ReadScalar(context, 0, "alpha", &options.alpha));
    OP_REQUIRES_OK(context, ToAbsl(InputClassifier::Validate(options)));
    OP_REQUIRES_OK(context,
                   OutputResource(context, ClassifierRef(new ClassifierResource(options))));
  }

 private:
  ClassifierOptions options_;
};

class ClassifyKernel : public ClassifierKernel {
 public:
  explicit ClassifyKernel(OpKernelConstruction* context) : ClassifierKernel(context) {
    // The number of tables belongs to the classifier, which checks it at each call.
    OP_REQUIRES_OK(context, inputs_.Init(context, std::numeric_limits<int>::max()));
    OP_REQUIRES_OK(context, context->GetAttr("observe", &observe_));
    OP_REQUIRES_OK(context, context->GetAttr("window_batches", &window_batches_));
  }

 private:
  absl::Status Run(OpKernelContext* context, ClassifierResource* resource) override {
    std::vector<FeatureView> features;
    int64_t batch = 0;
    TF_RETURN_IF_ERROR(inputs_.Read(context, &features, &batch));
    const Tensor& ids = context->input(context->num_inputs() - 1);
    TF_RETURN_IF_ERROR(RequireOptional(ids, "ids", batch));
    Classified result;
    TF_RETURN_IF_ERROR(AllocateClassified(context, batch, &result));
    return ToAbsl(resource->classifier.Classify(features, batch, OptionalData<int64_t>(ids, batch),
                                                observe_, result, window_batches_));
  }

  FeatureInputs inputs_;
  bool observe_ = true;
  int64_t window_batches_ = 0;
};

// Passes numbers of keys on to one of the classifier's setters.
template <Status (InputClassifier::*kSet)(const int32_t*, const int64_t*, const float*, int64_t,
                                          const Parallel&)>
class SetKeysKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, ClassifierResource* resource) override {
    NumbersOfKeys given;
    TF_RETURN_IF_ERROR(given.Read(context));
    return ToAbsl((resource->classifier.*kSet)(given.tables, given.keys, given.numbers, given.n,
                                               ParallelOf(context)));
  }
};

class ConfigureKernel : public ClassifierKernel {
 public:
  explicit ConfigureKernel(OpKernelConstruction* context) : ClassifierKernel(context) {
    OP_REQUIRES_OK(context, InitSettings(context, &settings_));
  }

 private:
  absl::Status Run(OpKernelContext* context, ClassifierResource* resource) override {
    ClassifierSettings settings = settings_;
    TF_RETURN_IF_ERROR(ReadSettings(context, &settings));
    TF_RETURN_IF_ERROR(ReadScalar(context, 4, "window", &settings.window));
    return ToAbsl(resource->classifier.Configure(settings));
  }

  ClassifierSettings settings_;
};

class RecordLossesKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, ClassifierResource* resource) override {
    const Tensor &ids = context->input(1), &losses = context->input(2);
    const Tensor &labels = context->input(3), &skippable = context->input(4);
    const Tensor& weights = context->input(5);
    if (losses.dims() != 1 || labels.shape() != losses.shape() ||
        skippable.shape() != losses.shape()) {
      return absl::InvalidArgumentError(
          absl::StrCat("losses, labels and skippable have shapes ", losses.shape().DebugString(),
                       ", ", labels.shape().DebugString(), " and ", skippable.shape().DebugString(),
                       "; allowed: three vectors of one length"));
    }
    const int64_t batch = losses.NumElements();
    TF_RETURN_IF_ERROR(RequireOptional(ids, "ids", batch));
    TF_RETURN_IF_ERROR(RequireOptional(weights, "weights", batch));
    resource->classifier.RecordLosses(
        OptionalData<int64_t>(ids, batch), losses.flat<float>().data(), labels.flat<float>().data(),
        skippable.flat<bool>().data(), OptionalData<float>(weights, batch), batch);
    return absl::OkStatus();
  }
};

class ReservoirScoresKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, ClassifierResource* resource) override {
    NumbersOfKeys given;
    TF_RETURN_IF_ERROR(given.Read(context));
    std::vector<float> scores;
    TF_RETURN_IF_ERROR(ToAbsl(resource->classifier.ReservoirScores(
        given.tables, given.keys, given.numbers, given.n, &scores, ParallelOf(context))));
    return Output(context, 0, TensorShape({static_cast<int64_t>(scores.size())}), scores);
  }
};

class ReservoirLossesKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, ClassifierResource* resource) override {
    const std::vector<float> losses = resource->classifier.ReservoirLosses();
    return Output(context, 0, TensorShape({static_cast<int64_t>(losses.size())}), losses);
  }
};

#define REGISTER_CPU(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), MemoryChecked<kernel>)
REGISTER_CPU("SlipstreamClassifier", CreateKernel);
REGISTER_CPU("SlipstreamClassifyInputs", ClassifyKernel);
REGISTER_CPU("SlipstreamClassifierSetDrift", SetKeysKernel<&InputClassifier::SetDrift>);
REGISTER_CPU("SlipstreamClassifierSetSaturated", SetKeysKernel<&InputClassifier::SetSaturated>);
REGISTER_CPU("SlipstreamClassifierConfigure", ConfigureKernel);
REGISTER_CPU("SlipstreamClassifierReservoirScores", ReservoirScoresKernel);
REGISTER_CPU("SlipstreamClassifierReservoirLosses", ReservoirLossesKernel);
REGISTER_CPU("SlipstreamRecordLosses", RecordLossesKernel);
#undef REGISTER_CPU

}  // namespace
}  // namespace slipstream
