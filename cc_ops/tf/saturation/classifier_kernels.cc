// Kernels of the classifier: they check shapes and call cc_ops/core.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/saturation/input_classifier.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/base/resource_kernel.h"
#include "cc_ops/tf/lookup/feature_inputs.h"
#include "cc_ops/tf/saturation/classifier_inputs.h"
#include "cc_ops/tf/saturation/classifier_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/refcount.h"

namespace slipstream {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// The registration limits the values.
PilotKind PilotOf(const std::string& name) {
  if (name == "label") return PilotKind::kLabel;
  if (name == "linear") return PilotKind::kLinear;
  if (name == "fm") return PilotKind::kFm;
  return name == "model" ? PilotKind::kModel : PilotKind::kNone;
}

class CreateKernel : public OpKernel {
 public:
  explicit CreateKernel(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_tables", &options_.num_tables));
    OP_REQUIRES_OK(context, context->GetAttr("reservoir_size", &options_.reservoir_size));
    int64_t seed = 0;
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed));
    options_.seed = static_cast<uint64_t>(seed);
    std::string pilot;
    OP_REQUIRES_OK(context, context->GetAttr("pilot", &pilot));
    options_.pilot.kind = PilotOf(pilot);
    OP_REQUIRES_OK(context, context->GetAttr("pilot_factors", &options_.pilot.factors));
    OP_REQUIRES_OK(context, context->GetAttr("pilot_memory_bytes", &options_.pilot.memory_bytes));
  }

  void Compute(OpKernelContext* context) override {
    ClassifierOptions options = options_;
    OP_REQUIRES_OK(context, ReadScalar(context, 0, "alpha", &options.alpha));
    OP_REQUIRES_OK(context, ToAbsl(InputClassifier::Validate(options)));
    OP_REQUIRES_OK(context,
                   OutputResource(context, tensorflow::core::RefCountPtr<ClassifierResource>(
                                               new ClassifierResource(options))));
  }

 private:
  ClassifierOptions options_;
};

struct ClassifyAttributes {
  explicit ClassifyAttributes(OpKernelConstruction* context) {
    // The classifier checks the number of tables in each call.
    OP_REQUIRES_OK(context, inputs.Init(context, std::numeric_limits<int>::max()));
    OP_REQUIRES_OK(context, context->GetAttr("observe", &observe));
    OP_REQUIRES_OK(context, context->GetAttr("window_batches", &window_batches));
    OP_REQUIRES_OK(context, context->GetAttr("stride", &stride));
  }

  FeatureInputs inputs;
  bool observe = true;
  int64_t window_batches = 0, stride = 1;
};

absl::Status Classify(OpKernelContext* context, ClassifierResource* resource,
                      const ClassifyAttributes& attributes) {
  std::vector<FeatureView> features;
  int64_t batch = 0;
  TF_RETURN_IF_ERROR(attributes.inputs.Read(context, &features, &batch));
  Classified result;
  TF_RETURN_IF_ERROR(AllocateClassified(context, batch, &result));
  return ToAbsl(resource->classifier.Classify(features, batch, attributes.observe, result,
                                              attributes.window_batches, attributes.stride));
}

absl::Status SetDrift(OpKernelContext* context, ClassifierResource* resource) {
  NumbersOfKeys given;
  TF_RETURN_IF_ERROR(given.Read(context));
  return ToAbsl(resource->classifier.SetDrift(given.tables, given.keys, given.numbers, given.n,
                                              ParallelOf(context)));
}

absl::Status Configure(OpKernelContext* context, ClassifierResource* resource) {
  ClassifierSettings settings;
  TF_RETURN_IF_ERROR(ReadSettings(context, &settings));
  return ToAbsl(resource->classifier.Configure(settings));
}

absl::Status RecordLosses(OpKernelContext* context, ClassifierResource* resource) {
  TF_RETURN_IF_ERROR(CheckInputs(context, 1, "losses: [n], labels: [n], skippable: [n]"));
  const int64_t batch = context->input(1).NumElements();
  const float* weights = nullptr;
  TF_RETURN_IF_ERROR(ReadOptional(context, 4, "weights", batch, &weights));
  resource->classifier.RecordLosses(Data<float>(context, 1), Data<float>(context, 2),
                                    Data<bool>(context, 3), weights, batch);
  return absl::OkStatus();
}

absl::Status ReservoirScores(OpKernelContext* context, ClassifierResource* resource) {
  NumbersOfKeys given;
  std::vector<float> scores;
  TF_RETURN_IF_ERROR(given.Read(context));
  TF_RETURN_IF_ERROR(ToAbsl(resource->classifier.ReservoirScores(
      given.tables, given.keys, given.numbers, given.n, &scores, ParallelOf(context))));
  return Output(context, 0, scores);
}

absl::Status ReservoirLosses(OpKernelContext* context, ClassifierResource* resource) {
  return Output(context, 0, resource->classifier.ReservoirLosses());
}

constexpr int kStatisticsSums = 6;

// Visits all numbers except the histogram, in the order of the ops' `sums`.
template <class Statistics, class Visit>
void VisitSums(Statistics* statistics, const Visit& visit) {
  visit(statistics->skippable);
  visit(statistics->skippable_squared_residuals);
  visit(statistics->weight);
  visit(statistics->weighted_sum);
  visit(statistics->weighted_squared_residuals);
  visit(statistics->not_finite);
}

// Outputs the statistics that `take` returns as outputs 0 and 1. It calls `take` after it has
// allocated the outputs, so that no statistics are lost when memory runs out.
template <class Take>
absl::Status OutputStatistics(OpKernelContext* context, const Take& take) {
  double *sums = nullptr, *bins = nullptr;
  TF_RETURN_IF_ERROR(Allocate(context, 0, TensorShape({kStatisticsSums}), &sums));
  TF_RETURN_IF_ERROR(Allocate(context, 1, TensorShape({2, LossStatistics::kBins}), &bins));
  const LossStatistics statistics = take();
  VisitSums(&statistics, [&](auto value) { *sums++ = static_cast<double>(value); });
  for (const auto& label : statistics.histogram) bins = std::copy(label.begin(), label.end(), bins);
  return absl::OkStatus();
}

// Checks that sums are finite, and counts and bins at least 0.
absl::Status CheckStatistics(const Tensor& sums, const Tensor& histogram) {
  constexpr double kMaxCounted = 9007199254740992.0;  // 2^53: above it, doubles skip integers
  for (int i = 0; i < kStatisticsSums; ++i) {
    const double value = sums.flat<double>()(i);
    const bool is_count = i == 0 || i == kStatisticsSums - 1;
    if (std::isfinite(value) && (!is_count || (value >= 0.0 && value <= kMaxCounted))) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "sums[", i, "] is ", value, "; expected ",
        is_count ? "a count from 0 to 2^53" : "a finite number", ". The window was not imported"));
  }
  for (int64_t i = 0; i < histogram.NumElements(); ++i) {
    const double value = histogram.flat<double>()(i);
    if (std::isfinite(value) && value >= 0.0) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "histogram[", i / LossStatistics::kBins, ", ", i % LossStatistics::kBins, "] is ", value,
        "; expected a finite number of at least 0. The window was not imported"));
  }
  return absl::OkStatus();
}

// The reverse of OutputStatistics, for values that CheckStatistics accepted.
LossStatistics StatisticsOf(const Tensor& sums, const Tensor& histogram) {
  LossStatistics statistics;
  const double* in = sums.flat<double>().data();
  VisitSums(&statistics,
            [&](auto& value) { value = static_cast<std::decay_t<decltype(value)>>(*in++); });
  const double* bins = histogram.flat<double>().data();
  for (auto& label : statistics.histogram) {
    std::copy(bins, bins + label.size(), label.begin());
    bins += label.size();
  }
  return statistics;
}

absl::Status TakeLossStatistics(OpKernelContext* context, ClassifierResource* resource) {
  return OutputStatistics(context, [&] { return resource->classifier.TakeLossStatistics(); });
}

// Returns the counts in the order of the ops' `counts` and `numbers`.
std::array<int64_t, 5> NumbersOf(const ClassifierCounts& counts) {
  return {counts.inputs_seen, counts.inputs_skipped, counts.hot_inputs, counts.inputs_skippable,
          counts.inputs_kept};
}

absl::Status EndWindow(OpKernelContext* context, ClassifierResource* resource) {
  int64_t* out = nullptr;
  TF_RETURN_IF_ERROR(Allocate(context, 0, TensorShape({5}), &out));
  const std::array<int64_t, 5> counts = NumbersOf(resource->classifier.EndWindow());
  std::copy(counts.begin(), counts.end(), out);
  return absl::OkStatus();
}

absl::Status ExportWindow(OpKernelContext* context, ClassifierResource* resource) {
  const ClassifierWindow window = resource->classifier.ExportWindow();
  TF_RETURN_IF_ERROR(OutputStatistics(context, [&] { return window.statistics; }));
  const InputReservoir::State& sample = window.reservoir;
  const std::array<int64_t, 5> counts = NumbersOf(window.counts);
  std::vector<int64_t> numbers(counts.begin(), counts.end()), keys;
  numbers.push_back(static_cast<int64_t>(window.inputs_observed));
  numbers.push_back(static_cast<int64_t>(sample.offered_total));
  numbers.push_back(sample.offered_in_window);
  std::vector<int32_t> tables;
  for (const Lookup& lookup : sample.lookups) {
    tables.push_back(lookup.table);
    keys.push_back(lookup.key);
  }
  TF_RETURN_IF_ERROR(Output(context, 2, numbers));
  TF_RETURN_IF_ERROR(Output(context, 3, tables));
  TF_RETURN_IF_ERROR(Output(context, 4, keys));
  TF_RETURN_IF_ERROR(Output(context, 5, sample.ends));
  return Output(context, 6, sample.losses);
}

absl::Status ImportWindow(OpKernelContext* context, ClassifierResource* resource) {
  TF_RETURN_IF_ERROR(CheckInputs(context, 1,
                                 "sums: [6], histogram: [2, b], numbers: [8], tables: [n], "
                                 "keys: [n], ends: [?], losses: [?]",
                                 {{'b', LossStatistics::kBins}}));
  TF_RETURN_IF_ERROR(CheckStatistics(context->input(1), context->input(2)));
  const int64_t* const numbers = Data<int64_t>(context, 3);
  for (int i = 0; i < 8; ++i) {
    if (numbers[i] < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("numbers[", i, "] is ", numbers[i],
                       "; expected at least 0. The window was not imported"));
    }
  }
  ClassifierWindow window;
  window.statistics = StatisticsOf(context->input(1), context->input(2));
  window.counts = {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
  window.inputs_observed = static_cast<uint64_t>(numbers[5]);
  window.reservoir.offered_total = static_cast<uint64_t>(numbers[6]);
  window.reservoir.offered_in_window = numbers[7];
  for (int64_t i = 0; i < context->input(5).NumElements(); ++i) {
    window.reservoir.lookups.push_back(
        {Data<int64_t>(context, 5)[i], Data<int32_t>(context, 4)[i]});
  }
  window.reservoir.ends = ValuesOf<int64_t>(context, 6);
  window.reservoir.losses = ValuesOf<float>(context, 7);
  return ToAbsl(resource->classifier.ImportWindow(window));
}

#define REGISTER_CPU(name, kRun) SLIPSTREAM_CPU_KERNEL("Slipstream" name, ResourceKernel<kRun>)
SLIPSTREAM_CPU_KERNEL("SlipstreamClassifier", CreateKernel);
REGISTER_CPU("ClassifyInputs", Classify);
REGISTER_CPU("ClassifierSetDrift", SetDrift);
REGISTER_CPU("ClassifierConfigure", Configure);
REGISTER_CPU("RecordLosses", RecordLosses);
REGISTER_CPU("ClassifierReservoirScores", ReservoirScores);
REGISTER_CPU("ClassifierReservoirLosses", ReservoirLosses);
REGISTER_CPU("ClassifierTakeLossStatistics", TakeLossStatistics);
REGISTER_CPU("ClassifierEndWindow", EndWindow);
REGISTER_CPU("ClassifierExportWindow", ExportWindow);
REGISTER_CPU("ClassifierImportWindow", ImportWindow);
#undef REGISTER_CPU

}  // namespace
}  // namespace slipstream
