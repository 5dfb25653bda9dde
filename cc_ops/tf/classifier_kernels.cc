// Kernels of the input classifier: checks of shapes, then calls into cc_ops/core.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/input_classifier.h"
#include "cc_ops/tf/feature_inputs.h"
#include "cc_ops/tf/memory_checked.h"
#include "cc_ops/tf/one_table_op.h"
#include "cc_ops/tf/replaced_resource.h"
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

class ClassifierResource : public tensorflow::ResourceBase {
 public:
  explicit ClassifierResource(const ClassifierOptions& options) : classifier(options) {}
  std::string DebugString() const override {
    return absl::StrCat("SlipstreamClassifier of ", classifier.options().num_tables, " tables");
  }
  InputClassifier classifier;
};

using ClassifierRef = tensorflow::core::RefCountPtr<ClassifierResource>;

absl::Status RequireScalar(const Tensor& tensor, const char* name) {
  if (tensor.dims() == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has shape ", tensor.shape().DebugString(), "; allowed: a scalar"));
}

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
    OP_REQUIRES_OK(context, RequireScalar(context->input(0), "alpha"));
    ClassifierOptions options = options_;
    options.alpha = context->input(0).scalar<double>()();
    OP_REQUIRES_OK(context, ToAbsl(InputClassifier::Validate(options)));
    OP_REQUIRES_OK(context,
                   OutputResource(context, ClassifierRef(new ClassifierResource(options))));
  }

 private:
  ClassifierOptions options_;
};

// A kernel whose input 0 is a classifier.
class ClassifierKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, RequireScalar(context->input(0), "handle"));
    ClassifierRef resource;
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
    const Tensor& ids = context->input(context->num_inputs() - 1);
    TF_RETURN_IF_ERROR(RequireOptional(ids, "ids", batch));
    Tensor *skippable = nullptr, *score = nullptr, *weight = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({batch}), &skippable));
    TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({batch}), &score));
    TF_RETURN_IF_ERROR(context->allocate_output(2, TensorShape({batch}), &weight));
    return ToAbsl(classifier->Classify(features, batch, OptionalData<int64_t>(ids, batch), observe_,
                                       {skippable->flat<bool>().data(), score->flat<float>().data(),
                                        weight->flat<float>().data()}));
  }

  FeatureInputs inputs_;
  bool observe_ = true;
};

// Inputs 1 to 3 are tables, keys and a number per key.
absl::Status RequireNumbersOfKeys(OpKernelContext* context) {
  const Tensor &tables = context->input(1), &keys = context->input(2);
  const Tensor& values = context->input(3);
  if (tables.dims() == 1 && keys.shape() == tables.shape() && values.shape() == tables.shape()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("tables, keys and their values have shapes ", tables.shape().DebugString(), ", ",
                   keys.shape().DebugString(), " and ", values.shape().DebugString(),
                   "; allowed: three vectors of one length"));
}

// Passes them on to one of the classifier's setters.
template <Status (InputClassifier::*kSet)(const int32_t*, const int64_t*, const float*, int64_t)>
class SetKeysKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
    TF_RETURN_IF_ERROR(RequireNumbersOfKeys(context));
    const Tensor& tables = context->input(1);
    return ToAbsl(
        (classifier->*kSet)(tables.flat<int32_t>().data(), context->input(2).flat<int64_t>().data(),
                            context->input(3).flat<float>().data(), tables.NumElements()));
  }
};

class ConfigureKernel : public ClassifierKernel {
 public:
  explicit ConfigureKernel(OpKernelConstruction* context) : ClassifierKernel(context) {
    std::string mode;
    OP_REQUIRES_OK(context, context->GetAttr("mode", &mode));
    OP_REQUIRES_OK(context, context->GetAttr("is_shadow", &settings_.is_shadow));
    if (mode == "drift") settings_.mode = SkipMode::kDrift;
    if (mode == "remembered_loss") settings_.mode = SkipMode::kRememberedLoss;
    if (mode == "random") settings_.mode = SkipMode::kRandom;
  }

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
    const char* names[] = {"handle", "threshold", "random_share", "keep_rate", "window"};
    for (int i = 1; i < 5; ++i) TF_RETURN_IF_ERROR(RequireScalar(context->input(i), names[i]));
    ClassifierSettings settings = settings_;
    settings.threshold = context->input(1).scalar<float>()();
    settings.random_share = context->input(2).scalar<double>()();
    settings.keep_rate = context->input(3).scalar<double>()();
    settings.window = context->input(4).scalar<int64_t>()();
    return ToAbsl(classifier->Configure(settings));
  }

  ClassifierSettings settings_;
};

class RecordLossesKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
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
    classifier->RecordLosses(OptionalData<int64_t>(ids, batch), losses.flat<float>().data(),
                             labels.flat<float>().data(), skippable.flat<bool>().data(),
                             OptionalData<float>(weights, batch), batch);
    return absl::OkStatus();
  }
};

constexpr int kStatisticsSums = 16;

// Gives statistics as outputs 0 and 1.
absl::Status OutputStatistics(OpKernelContext* context, const LossStatistics& statistics) {
  Tensor *sums = nullptr, *histogram = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({kStatisticsSums}), &sums));
  TF_RETURN_IF_ERROR(
      context->allocate_output(1, TensorShape({2, LossStatistics::kBins}), &histogram));
  double* out = sums->flat<double>().data();
  for (const LossMoments* moments :
       {&statistics.skippable, &statistics.others, &statistics.paired}) {
    *out++ = static_cast<double>(moments->count);
    *out++ = moments->sum;
    *out++ = moments->squares;
    *out++ = moments->squared_residuals;
  }
  *out++ = statistics.weight;
  *out++ = statistics.weighted_sum;
  *out++ = statistics.weighted_squared_residuals;
  *out = static_cast<double>(statistics.not_finite);
  double* bins = histogram->flat<double>().data();
  for (const auto& label : statistics.histogram) bins = std::copy(label.begin(), label.end(), bins);
  return absl::OkStatus();
}

// The reverse; the shapes are right.
// Sums are finite, counts and bins not negative.
absl::Status CheckStatistics(const Tensor& sums, const Tensor& histogram) {
  constexpr double kMostCounted = 9007199254740992.0;  // above it, not all integers are doubles
  for (int i = 0; i < kStatisticsSums; ++i) {
    const double value = sums.flat<double>()(i);
    const bool is_count = i % 4 == 0 ? i < 12 : i == kStatisticsSums - 1;
    if (std::isfinite(value) && (!is_count || (value >= 0.0 && value <= kMostCounted))) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "sums[", i, "] is ", value, "; allowed: ", is_count ? "a count from 0" : "a finite number",
        ". Nothing was imported"));
  }
  for (int64_t i = 0; i < histogram.NumElements(); ++i) {
    const double value = histogram.flat<double>()(i);
    if (std::isfinite(value) && value >= 0.0) continue;
    return absl::InvalidArgumentError(absl::StrCat("histogram[", i / LossStatistics::kBins, ", ",
                                                   i % LossStatistics::kBins, "] is ", value,
                                                   "; allowed: from 0. Nothing was imported"));
  }
  return absl::OkStatus();
}

LossStatistics StatisticsOf(const Tensor& sums, const Tensor& histogram) {
  LossStatistics statistics;
  const double* in = sums.flat<double>().data();
  for (LossMoments* moments : {&statistics.skippable, &statistics.others, &statistics.paired}) {
    moments->count = static_cast<int64_t>(*in++);
    moments->sum = *in++;
    moments->squares = *in++;
    moments->squared_residuals = *in++;
  }
  statistics.weight = *in++;
  statistics.weighted_sum = *in++;
  statistics.weighted_squared_residuals = *in++;
  statistics.not_finite = static_cast<int64_t>(*in);
  const double* bins = histogram.flat<double>().data();
  for (auto& label : statistics.histogram) {
    std::copy(bins, bins + label.size(), label.begin());
    bins += label.size();
  }
  return statistics;
}

class TakeLossStatisticsKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
    return OutputStatistics(context, classifier->TakeLossStatistics());
  }
};

// Numbers of a window, in the order of the op's `numbers`.
constexpr int kWindowNumbers = 9;

class ExportWindowKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
    const ClassifierWindow window = classifier->ExportWindow();
    TF_RETURN_IF_ERROR(OutputStatistics(context, window.statistics));
    const ClassifierCounts& counts = window.counts;
    const int64_t numbers[kWindowNumbers] = {counts.inputs_seen,
                                             counts.inputs_skipped,
                                             counts.hot_inputs,
                                             counts.inputs_skippable,
                                             counts.inputs_kept,
                                             static_cast<int64_t>(window.inputs_observed),
                                             static_cast<int64_t>(window.largest_hash),
                                             static_cast<int64_t>(window.reservoir.offered_total),
                                             window.reservoir.offered_in_window};
    const InputReservoir::State& sample = window.reservoir;
    const int64_t n = static_cast<int64_t>(sample.ends.size());
    const int64_t m = static_cast<int64_t>(sample.lookups.size());
    Tensor *out = nullptr, *tables = nullptr, *keys = nullptr, *ends = nullptr, *losses = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(2, TensorShape({kWindowNumbers}), &out));
    TF_RETURN_IF_ERROR(context->allocate_output(3, TensorShape({m}), &tables));
    TF_RETURN_IF_ERROR(context->allocate_output(4, TensorShape({m}), &keys));
    TF_RETURN_IF_ERROR(context->allocate_output(5, TensorShape({n}), &ends));
    TF_RETURN_IF_ERROR(context->allocate_output(6, TensorShape({n}), &losses));
    std::copy(std::begin(numbers), std::end(numbers), out->flat<int64_t>().data());
    for (int64_t i = 0; i < m; ++i) {
      tables->vec<int32_t>()(i) = sample.lookups[i].table;
      keys->vec<int64_t>()(i) = sample.lookups[i].key;
    }
    std::copy(sample.ends.begin(), sample.ends.end(), ends->flat<int64_t>().data());
    std::copy(sample.losses.begin(), sample.losses.end(), losses->flat<float>().data());
    return absl::OkStatus();
  }
};

class ImportWindowKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
    const TensorShape statistics_shapes[] = {TensorShape({kStatisticsSums}),
                                             TensorShape({2, LossStatistics::kBins}),
                                             TensorShape({kWindowNumbers})};
    const char* names[] = {"handle", "sums", "histogram", "numbers",
                           "tables", "keys", "ends",      "losses"};
    for (int i = 1; i < 8; ++i) {
      const TensorShape& shape = context->input(i).shape();
      if (i < 4 ? shape != statistics_shapes[i - 1] : shape.dims() != 1) {
        return absl::InvalidArgumentError(
            absl::StrCat(names[i], " has shape ", shape.DebugString(), "; allowed: ",
                         i < 4 ? statistics_shapes[i - 1].DebugString() : std::string("a vector")));
      }
    }
    TF_RETURN_IF_ERROR(CheckStatistics(context->input(1), context->input(2)));
    const Tensor &tables = context->input(4), &keys = context->input(5);
    if (tables.shape() != keys.shape()) {
      return absl::InvalidArgumentError(
          absl::StrCat("tables and keys have shapes ", tables.shape().DebugString(), " and ",
                       keys.shape().DebugString(), "; allowed: vectors of one length"));
    }
    ClassifierWindow window;
    const auto numbers = context->input(3).vec<int64_t>();
    for (int i = 0; i < kWindowNumbers; ++i) {
      if (numbers(i) < 0 && i != 6) {  // a hash may be any number
        return absl::InvalidArgumentError(
            absl::StrCat("numbers[", i, "] is ", numbers(i), "; allowed: 0 or more"));
      }
    }
    window.statistics = StatisticsOf(context->input(1), context->input(2));
    window.counts = {numbers(0), numbers(1), numbers(2), numbers(3), numbers(4)};
    window.inputs_observed = static_cast<uint64_t>(numbers(5));
    window.largest_hash = static_cast<uint64_t>(numbers(6));
    window.reservoir.offered_total = static_cast<uint64_t>(numbers(7));
    window.reservoir.offered_in_window = numbers(8);
    for (int64_t i = 0; i < keys.NumElements(); ++i) {
      window.reservoir.lookups.push_back({keys.vec<int64_t>()(i), tables.vec<int32_t>()(i)});
    }
    const auto ends = context->input(6).vec<int64_t>();
    const auto losses = context->input(7).vec<float>();
    window.reservoir.ends.assign(ends.data(), ends.data() + ends.size());
    window.reservoir.losses.assign(losses.data(), losses.data() + losses.size());
    return ToAbsl(classifier->ImportWindow(window));
  }
};

class ReservoirScoresKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
    TF_RETURN_IF_ERROR(RequireNumbersOfKeys(context));
    const Tensor& tables = context->input(1);
    std::vector<float> scores;
    TF_RETURN_IF_ERROR(ToAbsl(classifier->ReservoirScores(
        tables.flat<int32_t>().data(), context->input(2).flat<int64_t>().data(),
        context->input(3).flat<float>().data(), tables.NumElements(), &scores)));
    return Output(context, 0, TensorShape({static_cast<int64_t>(scores.size())}), scores);
  }
};

class ReservoirLossesKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
    const std::vector<float> losses = classifier->ReservoirLosses();
    return Output(context, 0, TensorShape({static_cast<int64_t>(losses.size())}), losses);
  }
};

class ExportMemoryKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
    const std::vector<LossMemory::Entry> entries = classifier->ExportMemory();
    const int64_t n = static_cast<int64_t>(entries.size());
    Tensor *ids = nullptr, *losses = nullptr, *visits = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({n}), &ids));
    TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({n}), &losses));
    TF_RETURN_IF_ERROR(context->allocate_output(2, TensorShape({n, 3}), &visits));
    for (int64_t i = 0; i < n; ++i) {
      ids->vec<int64_t>()(i) = entries[i].id;
      losses->vec<float>()(i) = entries[i].loss;
      visits->matrix<int32_t>()(i, 0) = static_cast<int32_t>(entries[i].window);
      visits->matrix<int32_t>()(i, 1) = static_cast<int32_t>(entries[i].skips);
      visits->matrix<int32_t>()(i, 2) = static_cast<int32_t>(entries[i].has_returned);
    }
    return absl::OkStatus();
  }
};

class ImportMemoryKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
    const Tensor &ids = context->input(1), &losses = context->input(2);
    const Tensor& visits = context->input(3);
    const int64_t n = ids.NumElements();
    if (ids.dims() != 1 || losses.shape() != ids.shape() || visits.shape() != TensorShape({n, 3})) {
      return absl::InvalidArgumentError(
          absl::StrCat("ids, losses and visits have shapes ", ids.shape().DebugString(), ", ",
                       losses.shape().DebugString(), " and ", visits.shape().DebugString(),
                       "; allowed: [n], [n] and [n, 3]"));
    }
    std::vector<LossMemory::Entry> entries(n);
    for (int64_t i = 0; i < n; ++i) {
      const int32_t window = visits.matrix<int32_t>()(i, 0), skips = visits.matrix<int32_t>()(i, 1);
      if (window < 0 || window > static_cast<int32_t>(LossMemory::kLargestWindow) || skips < 0 ||
          skips > static_cast<int32_t>(LossMemory::kLargestSkips)) {
        return absl::InvalidArgumentError(absl::StrCat(
            "visits[", i, "] is (", window, ", ", skips, "); allowed: a window of 0 to ",
            LossMemory::kLargestWindow, " and 0 to ", LossMemory::kLargestSkips, " skips"));
      }
      if (!std::isfinite(losses.vec<float>()(i))) {
        return absl::InvalidArgumentError(absl::StrCat(
            "loss of id ", ids.vec<int64_t>()(i), ", at place ", i, ", is ", losses.vec<float>()(i),
            "; allowed: finite numbers. Nothing was imported"));
      }
      entries[i].id = ids.vec<int64_t>()(i);
      entries[i].loss = losses.vec<float>()(i);
      entries[i].window = static_cast<uint32_t>(window);
      entries[i].skips = static_cast<uint32_t>(skips);
      entries[i].has_returned = visits.matrix<int32_t>()(i, 2) != 0;
    }
    classifier->ImportMemory(entries);
    return absl::OkStatus();
  }
};

class EndWindowKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, InputClassifier* classifier) override {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({5}), &output));
    const ClassifierCounts counts = classifier->EndWindow();
    auto values = output->flat<int64_t>();
    values(0) = counts.inputs_seen;
    values(1) = counts.inputs_skipped;
    values(2) = counts.hot_inputs;
    values(3) = counts.inputs_skippable;
    values(4) = counts.inputs_kept;
    return absl::OkStatus();
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
REGISTER_CPU("SlipstreamClassifierTakeLossStatistics", TakeLossStatisticsKernel);
REGISTER_CPU("SlipstreamClassifierExportMemory", ExportMemoryKernel);
REGISTER_CPU("SlipstreamClassifierImportMemory", ImportMemoryKernel);
REGISTER_CPU("SlipstreamClassifierExportWindow", ExportWindowKernel);
REGISTER_CPU("SlipstreamClassifierImportWindow", ImportWindowKernel);
REGISTER_CPU("SlipstreamClassifierEndWindow", EndWindowKernel);
#undef REGISTER_CPU

}  // namespace
}  // namespace slipstream
