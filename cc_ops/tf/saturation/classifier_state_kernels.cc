// Kernels that take, export and import what an input classifier knows.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/saturation/input_classifier.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/saturation/classifier_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

constexpr int kStatisticsSums = 16;

// All numbers but the histogram, in the order of the ops' `sums`.
template <class Statistics, class Visit>
void VisitSums(Statistics* statistics, const Visit& visit) {
  for (auto* moments : {&statistics->skippable, &statistics->others, &statistics->paired}) {
    visit(moments->count);
    visit(moments->sum);
    visit(moments->squares);
    visit(moments->squared_residuals);
  }
  visit(statistics->weight);
  visit(statistics->weighted_sum);
  visit(statistics->weighted_squared_residuals);
  visit(statistics->not_finite);
}

// Gives the statistics that `take` returns as outputs 0 and 1. It is called when there is memory
// for them: what was taken is not lost.
template <class Take>
absl::Status OutputStatistics(OpKernelContext* context, const Take& take) {
  Tensor *sums = nullptr, *histogram = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({kStatisticsSums}), &sums));
  TF_RETURN_IF_ERROR(
      context->allocate_output(1, TensorShape({2, LossStatistics::kBins}), &histogram));
  const LossStatistics statistics = take();
  double *out = sums->flat<double>().data(), *bins = histogram->flat<double>().data();
  VisitSums(&statistics, [&](auto value) { *out++ = static_cast<double>(value); });
  for (const auto& label : statistics.histogram) bins = std::copy(label.begin(), label.end(), bins);
  return absl::OkStatus();
}

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

// The reverse of OutputStatistics; the values are right.
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

class TakeLossStatisticsKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, ClassifierResource* resource) override {
    return OutputStatistics(context, [&] { return resource->classifier.TakeLossStatistics(); });
  }
};

// In the order of the ops' `counts` and `numbers`.
std::array<int64_t, 5> NumbersOf(const ClassifierCounts& counts) {
  return {counts.inputs_seen, counts.inputs_skipped, counts.hot_inputs, counts.inputs_skippable,
          counts.inputs_kept};
}

class EndWindowKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, ClassifierResource* resource) override {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({5}), &output));
    const std::array<int64_t, 5> counts = NumbersOf(resource->classifier.EndWindow());
    std::copy(counts.begin(), counts.end(), output->flat<int64_t>().data());
    return absl::OkStatus();
  }
};

constexpr int kWindowNumbers = 9;

class ExportWindowKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, ClassifierResource* resource) override {
    const ClassifierWindow window = resource->classifier.ExportWindow();
    TF_RETURN_IF_ERROR(OutputStatistics(context, [&] { return window.statistics; }));
    const InputReservoir::State& sample = window.reservoir;
    const std::array<int64_t, 5> counts = NumbersOf(window.counts);
    std::vector<int64_t> numbers(counts.begin(), counts.end()), keys;
    numbers.push_back(static_cast<int64_t>(window.inputs_observed));
    numbers.push_back(static_cast<int64_t>(window.largest_hash));
    numbers.push_back(static_cast<int64_t>(sample.offered_total));
    numbers.push_back(sample.offered_in_window);
    std::vector<int32_t> tables;
    for (const Lookup& lookup : sample.lookups) {
      tables.push_back(lookup.table);
      keys.push_back(lookup.key);
    }
    const TensorShape inputs({static_cast<int64_t>(sample.ends.size())});
    const TensorShape lookups({static_cast<int64_t>(keys.size())});
    TF_RETURN_IF_ERROR(Output(context, 2, TensorShape({kWindowNumbers}), numbers));
    TF_RETURN_IF_ERROR(Output(context, 3, lookups, tables));
    TF_RETURN_IF_ERROR(Output(context, 4, lookups, keys));
    TF_RETURN_IF_ERROR(Output(context, 5, inputs, sample.ends));
    return Output(context, 6, inputs, sample.losses);
  }
};

class ImportWindowKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, ClassifierResource* resource) override {
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
    window.reservoir.ends = ValuesOf<int64_t>(context->input(6));
    window.reservoir.losses = ValuesOf<float>(context->input(7));
    return ToAbsl(resource->classifier.ImportWindow(window));
  }
};

class ExportMemoryKernel : public ClassifierKernel {
 public:
  using ClassifierKernel::ClassifierKernel;

 private:
  absl::Status Run(OpKernelContext* context, ClassifierResource* resource) override {
    const std::vector<LossMemory::Entry> entries = resource->classifier.ExportMemory();
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
  absl::Status Run(OpKernelContext* context, ClassifierResource* resource) override {
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
    resource->classifier.ImportMemory(entries);
    return absl::OkStatus();
  }
};

#define REGISTER_CPU(name, kernel) \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_CPU), MemoryChecked<kernel>)
REGISTER_CPU("SlipstreamClassifierTakeLossStatistics", TakeLossStatisticsKernel);
REGISTER_CPU("SlipstreamClassifierExportMemory", ExportMemoryKernel);
REGISTER_CPU("SlipstreamClassifierImportMemory", ImportMemoryKernel);
REGISTER_CPU("SlipstreamClassifierEndWindow", EndWindowKernel);
REGISTER_CPU("SlipstreamClassifierExportWindow", ExportWindowKernel);
REGISTER_CPU("SlipstreamClassifierImportWindow", ImportWindowKernel);
#undef REGISTER_CPU

}  // namespace
}  // namespace slipstream
