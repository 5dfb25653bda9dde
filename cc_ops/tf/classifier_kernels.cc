// Kernels of the input classifier: checks of shapes, then calls into cc_ops/core.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/input_classifier.h"
#include "cc_ops/tf/feature_inputs.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/refcount.h"

namespace slipstream {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

class ClassifierResource : public tensorflow::ResourceBase {
 public:
  explicit ClassifierResource(const ClassifierOptions& options) : classifier(options) {}
  std::string DebugString() const override {
    return absl::StrCat("SlipstreamClassifier of ", classifier.options().num_tables, " tables");
  }
  InputClassifier classifier;
};

absl::Status RequireScalar(const Tensor& tensor, const char* name) {
  if (tensor.dims() == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has shape ", tensor.shape().DebugString(), "; allowed: a scalar"));
}

class CreateKernel : public OpKernel {
 public:
  explicit CreateKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_tables", &options_.num_tables));
    OP_REQUIRES_OK(context, context->GetAttr("reservoir_size", &options_.reservoir_size));
    int64_t seed = 0;
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed));
    options_.seed = static_cast<uint64_t>(seed);
  }

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, RequireScalar(context->input(0), "alpha"));
    ClassifierOptions options = options_;
    options.alpha = context->input(0).scalar<double>()();
    OP_REQUIRES_OK(context, ToAbsl(InputClassifier::Validate(options)));
    Tensor* handle = nullptr;
    tensorflow::AllocatorAttributes on_host;
    on_host.set_on_host(true);
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &handle, on_host));
    // The handle takes over the reference of `new`.
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::ResourceHandle::MakeRefCountingHandle(new ClassifierResource(options),
                                                          context->device()->name());
  }

 private:
  ClassifierOptions options_;
};

// A kernel whose input 0 is a classifier.
class ClassifierKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) final {
    OP_REQUIRES_OK(context, RequireScalar(context->input(0), "handle"));
    tensorflow::core::RefCountPtr<ClassifierResource> resource;
    OP_REQUIRES_OK(context, tensorflow::LookupResource(
                                context, tensorflow::HandleFromInput(context, 0), &resource));
    OP_REQUIRES_OK(context, Run(context, &resource->classifier));
  }

 private:
  virtual absl::Status Run(OpKernelContext* context, InputClassifier* classifier) = 0;
};

class ClassifyKernel : public ClassifierKernel {
 public:
  explicit ClassifyKernel(OpKernelConstruction* context) : ClassifierKernel(context) {
    // The number of tables belongs to the classifier, which checks it at each call.
    OP_REQUIRES_OK(context, inputs_.Init(context, std::numeric_limits<int>::max()));
    OP_REQUIRES_OK(context, context->GetAttr("observe", &observe_));
  }

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
    std::vector<FeatureView> features;
    int64_t batch = 0;
    TF_RETURN_IF_ERROR(inputs_.Read(context, &features, &batch));
    Tensor *skippable = nullptr, *score = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({batch}), &skippable));
    TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({batch}), &score));
    return ToAbsl(classifier->Classify(features, batch, observe_, skippable->flat<bool>().data(),
                                       score->flat<float>().data()));
  }

  FeatureInputs inputs_;
  bool observe_ = true;
};

class SetDriftKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
    const Tensor &tables = context->input(1), &keys = context->input(2), &drift = context->input(3);
    if (tables.dims() != 1 || keys.shape() != tables.shape() || drift.shape() != tables.shape()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tables, keys and drift have shapes ", tables.shape().DebugString(), ", ",
                       keys.shape().DebugString(), " and ", drift.shape().DebugString(),
                       "; allowed: three vectors of one length"));
    }
    return ToAbsl(classifier->SetDrift(tables.flat<int32_t>().data(), keys.flat<int64_t>().data(),
                                       drift.flat<float>().data(), tables.NumElements()));
  }
};

class ConfigureKernel : public ClassifierKernel {
 public:
  explicit ConfigureKernel(OpKernelConstruction* context) : ClassifierKernel(context) {
    std::string mode;
    OP_REQUIRES_OK(context, context->GetAttr("mode", &mode));
    if (mode == "drift") mode_ = SkipMode::kDrift;
    if (mode == "random") mode_ = SkipMode::kRandom;
  }

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
    TF_RETURN_IF_ERROR(RequireScalar(context->input(1), "threshold"));
    TF_RETURN_IF_ERROR(RequireScalar(context->input(2), "random_share"));
    return ToAbsl(classifier->Configure(mode_, context->input(1).scalar<float>()(),
                                        context->input(2).scalar<double>()()));
  }

  SkipMode mode_ = SkipMode::kNone;
};

class ReservoirScoresKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
    const std::vector<float> scores = classifier->ReservoirScores();
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(
        context->allocate_output(0, TensorShape({static_cast<int64_t>(scores.size())}), &output));
    std::copy(scores.begin(), scores.end(), output->flat<float>().data());
    return absl::OkStatus();
  }
};

class EndWindowKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({3}), &output));
    const ClassifierCounts counts = classifier->EndWindow();
    auto values = output->flat<int64_t>();
    values(0) = counts.inputs_seen;
    values(1) = counts.inputs_skipped;
    values(2) = counts.hot_inputs;
    return absl::OkStatus();
  }
};

#define REGISTER_CPU(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), kernel)
REGISTER_CPU("SlipstreamClassifier", CreateKernel);
REGISTER_CPU("SlipstreamClassifyInputs", ClassifyKernel);
REGISTER_CPU("SlipstreamClassifierSetDrift", SetDriftKernel);
REGISTER_CPU("SlipstreamClassifierConfigure", ConfigureKernel);
REGISTER_CPU("SlipstreamClassifierReservoirScores", ReservoirScoresKernel);
REGISTER_CPU("SlipstreamClassifierEndWindow", EndWindowKernel);
#undef REGISTER_CPU

}  // namespace
}  // namespace slipstream
