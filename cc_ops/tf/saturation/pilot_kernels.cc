// Kernels of the classifier's pilot, which predicts the losses of examples.
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/saturation/input_classifier.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/base/resource_kernel.h"
#include "cc_ops/tf/lookup/feature_inputs.h"
#include "cc_ops/tf/saturation/classifier_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::TensorShape;

struct SubsampleAttributes {
  explicit SubsampleAttributes(OpKernelConstruction* context) {
    OP_REQUIRES_OK(context, inputs.Init(context, std::numeric_limits<int>::max()));
  }

  FeatureInputs inputs;
};

absl::Status Subsample(OpKernelContext* context, ClassifierResource* resource,
                       const SubsampleAttributes& attributes) {
  std::vector<FeatureView> features;
  int64_t batch = 0;
  TF_RETURN_IF_ERROR(attributes.inputs.Read(context, &features, &batch));
  const int first = context->num_inputs() - 3;
  LabeledInputs inputs;
  TF_RETURN_IF_ERROR(CheckInputs(
      context, first, "labels: [n], sample_weights: [?], predictions: [?]", {{'n', batch}}));
  inputs.labels = Data<float>(context, first);
  TF_RETURN_IF_ERROR(ReadOptional(context, first + 1, "sample_weights", batch, &inputs.weights));
  TF_RETURN_IF_ERROR(ReadOptional(context, first + 2, "predictions", batch, &inputs.predictions));
  const bool is_model = resource->classifier.options().pilot.kind == PilotKind::kModel;
  if (batch > 0 && is_model != (inputs.predictions != nullptr)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "predictions has ", is_model ? 0 : batch, " elements; expected ", is_model ? batch : 0,
        " if the pilot is ", is_model ? "the trained model" : "not the trained model"));
  }
  KeptInputs kept;
  TF_RETURN_IF_ERROR(ToAbsl(resource->classifier.Subsample(features, batch, inputs, &kept)));
  TF_RETURN_IF_ERROR(Output(context, 0, kept.rows));
  TF_RETURN_IF_ERROR(Output(context, 1, kept.weights));
  TF_RETURN_IF_ERROR(Output(context, 2, kept.offsets));
  bool* skippable = nullptr;
  const auto n = static_cast<int64_t>(kept.rows.size());
  TF_RETURN_IF_ERROR(Allocate(context, 3, TensorShape({n}), &skippable));
  for (int64_t i = 0; i < n; ++i) skippable[i] = kept.skippable[i] != 0;
  return absl::OkStatus();
}

absl::Status ExportPilot(OpKernelContext* context, ClassifierResource* resource) {
  const Pilot::State state = resource->classifier.ExportPilot();
  const auto n = static_cast<int64_t>(state.buckets.size());
  TF_RETURN_IF_ERROR(Output(context, 0, state.base));
  TF_RETURN_IF_ERROR(Output(context, 1, state.buckets));
  return Output(context, 2, TensorShape({n, state.width}), state.numbers);
}

absl::Status ImportPilot(OpKernelContext* context, ClassifierResource* resource) {
  TF_RETURN_IF_ERROR(CheckInputs(context, 1, "base: [2], buckets: [n], numbers: [n, ?]"));
  Pilot::State state;
  state.base = ValuesOf<double>(context, 1);
  state.buckets = ValuesOf<int64_t>(context, 2);
  state.numbers = ValuesOf<float>(context, 3);
  return ToAbsl(resource->classifier.ImportPilot(state));
}

#define REGISTER_CPU(name, kRun) SLIPSTREAM_CPU_KERNEL("Slipstream" name, ResourceKernel<kRun>)
REGISTER_CPU("SubsampleInputs", Subsample);
REGISTER_CPU("ClassifierExportPilot", ExportPilot);
REGISTER_CPU("ClassifierImportPilot", ImportPilot);
#undef REGISTER_CPU

}  // namespace
}  // namespace slipstream
