#include "cc_ops/core/saturation/input_classifier.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>

namespace slipstream {
namespace {

// Appends the lookups of example i.
void AppendLookups(const std::vector<FeatureView>& features, int64_t i, int num_tables,
                   std::vector<Lookup>* lookups) {
  for (const FeatureView& feature : features) {
    if (feature.table == num_tables) continue;
    const int64_t end = feature.end(i);
    for (int64_t position = feature.begin(i); position < end; ++position) {
      if (feature.is_key(position)) lookups->push_back({feature.keys[position], feature.table});
    }
  }
}

// Computes the skip scores of the examples `rows` from the drifts in `index`.
void ScoreInputs(const DriftIndex& index, const ClassifierOptions& options,
                 const std::vector<FeatureView>& features, const std::vector<int64_t>& rows,
                 InputLookups* inputs, std::vector<float>* scores) {
  scores->assign(rows.size(), DriftIndex::kUntracked);
  if (index.size() == 0) return;
  inputs->Clear();
  for (const int64_t i : rows) {
    AppendLookups(features, i, options.num_tables, &inputs->lookups);
    inputs->EndInput();
  }
  SkipScores(index, options.alpha, inputs, scores->data());
}

}  // namespace

Status InputClassifier::Validate(const ClassifierOptions& options) {
  if (!(options.alpha > 0.0 && options.alpha <= 1.0)) {
    return InvalidArgument("alpha is " + std::to_string(options.alpha) +
                           "; expected a number above 0 and at most 1");
  }
  if (options.num_tables < 1) {
    return InvalidArgument("num_tables is " + std::to_string(options.num_tables) +
                           "; expected at least 1");
  }
  if (options.reservoir_size < 1) {
    return InvalidArgument("reservoir_size is " + std::to_string(options.reservoir_size) +
                           "; expected at least 1 example");
  }
  return Pilot::Validate(options.pilot);
}

InputClassifier::InputClassifier(const ClassifierOptions& options)
    : options_(options), pilot_(options.pilot), reservoir_(options.reservoir_size, options.seed) {}

Status InputClassifier::Check(const std::vector<FeatureView>& features) const {
  for (size_t f = 0; f < features.size(); ++f) {
    if (features[f].table < 0 || features[f].table > options_.num_tables) {
      return InvalidArgument("feature_table[" + std::to_string(f) + "] is " +
                             std::to_string(features[f].table) + "; expected a table from 0 to " +
                             std::to_string(options_.num_tables - 1) + ", or " +
                             std::to_string(options_.num_tables) + " to ignore the feature");
    }
  }
  return OkStatus();
}

std::pair<const Lookup*, int64_t> InputClassifier::LookupsOf(
    const std::vector<FeatureView>& features, int64_t i) {
  of_input_.clear();
  AppendLookups(features, i, options_.num_tables, &of_input_);
  return {of_input_.data(), static_cast<int64_t>(of_input_.size())};
}

int64_t InputClassifier::StrideOf(int64_t batch, int64_t window_batches) const {
  // At least this many classified examples per example of the sample, so that the sample stays
  // random.
  constexpr int64_t kInputsPerChosen = 4;
  const bool skips_none = settings_.is_shadow || settings_.mode == SkipMode::kNone;
  if (window_batches <= 0 || batch <= 0 || !skips_none) return 1;
  const double inputs = static_cast<double>(window_batches) * static_cast<double>(batch);
  const double enough = static_cast<double>(kInputsPerChosen * options_.reservoir_size);
  return static_cast<int64_t>(std::clamp(inputs / enough, 1.0, static_cast<double>(kMaxStride)));
}

bool InputClassifier::IsInStride(int64_t batch, int64_t stride) const {
  if (stride == 1) return true;
  // Choose one of every `stride` batches at random, because data may be periodic.
  constexpr uint64_t kStrideStream = 0x9fb21c651e98df25ULL;
  const uint64_t number = inputs_observed_ / static_cast<uint64_t>(batch);
  const auto n = static_cast<uint64_t>(stride);
  return number % n == CounterRandom(options_.seed ^ kStrideStream, number / n) % n;
}

void InputClassifier::ChooseExamples(int64_t batch, int64_t stride) {
  // Blocks continue over batches, because all examples must have the same chance whatever the size
  // of a batch.
  constexpr uint64_t kExampleStream = 0xc2b2ae3d27d4eb4fULL;
  const auto n = static_cast<uint64_t>(stride);
  const uint64_t begin = inputs_observed_, blocks = static_cast<uint64_t>(batch) / n + 2;
  chosen_.clear();
  for (uint64_t block = begin / n; block < begin / n + blocks; ++block) {
    const uint64_t in_block = n == 1 ? 0 : CounterRandom(options_.seed ^ kExampleStream, block) % n;
    // Wraps around to a large number if the example is in an earlier batch.
    const uint64_t i = block * n + in_block - begin;
    if (i < static_cast<uint64_t>(batch)) chosen_.push_back(static_cast<int64_t>(i));
  }
}

Status InputClassifier::Classify(const std::vector<FeatureView>& features, int64_t batch,
                                 bool observe, const Classified& result, int64_t window_batches,
                                 int64_t stride) {
  const Status status = Check(features);
  if (!status.ok()) return status;
  if (stride < 1 || stride > kMaxStrideOfExamples) {
    return InvalidArgument("stride is " + std::to_string(stride) +
                           "; expected an integer from 1 to " +
                           std::to_string(kMaxStrideOfExamples));
  }
  const std::lock_guard<std::mutex> one_at_a_time(classifying_);
  std::unique_lock<std::mutex> lock(mutex_);
  const ClassifierSettings settings = settings_;
  if (settings.mode == SkipMode::kPredictedLoss) {
    return InvalidArgument(
        "mode predicted_loss requires labels, which SlipstreamClassifyInputs does not have. Use "
        "SlipstreamSubsampleInputs");
  }
  if (!observe) window_batches = 0, stride = 1;
  const int64_t batch_stride = StrideOf(batch, window_batches);
  chosen_.clear();
  if (IsInStride(batch, batch_stride)) ChooseExamples(batch, stride);
  const auto num_chosen = static_cast<int64_t>(chosen_.size());
  for (int64_t i = 0; num_chosen < batch && i < batch; ++i) {
    result.Write(i, DriftIndex::kUntracked, SkipDecision());
  }
  ClassifierCounts counts;
  if (num_chosen > 0) {
    // Other calls may run during the lookups.
    lock.unlock();
    ScoreInputs(index_, options_, features, chosen_, &scratch_, &scores_);
    lock.lock();
    constexpr float kNotPredicted = std::numeric_limits<float>::quiet_NaN();
    for (int64_t c = 0; c < num_chosen; ++c) {
      const int64_t i = chosen_[static_cast<size_t>(c)];
      const float score = scores_[static_cast<size_t>(c)];
      if (observe) {
        reservoir_.OfferListed(kNotPredicted, [&] { return LookupsOf(features, i); });
      }
      const SkipDecision decision = slipstream::Classify(
          settings, options_.seed, score, inputs_observed_ + static_cast<uint64_t>(i));
      result.Write(i, score, decision);
      counts.inputs_skippable += decision.is_skippable;
      counts.inputs_skipped += decision.weight == 0.0f;
      counts.inputs_kept += decision.is_skippable && decision.is_kept;
      counts.hot_inputs += std::isfinite(score);
    }
  }
  if (observe) {
    const int64_t represented = batch_stride * stride;
    inputs_observed_ += static_cast<uint64_t>(batch);
    counts_.inputs_seen += batch;
    counts_.inputs_skipped += counts.inputs_skipped;
    counts_.hot_inputs += represented * counts.hot_inputs;
    counts_.inputs_skippable += represented * counts.inputs_skippable;
    counts_.inputs_kept += represented * counts.inputs_kept;
  }
  return OkStatus();
}

Status InputClassifier::SetDrift(const int32_t* tables, const int64_t* keys, const float* drifts,
                                 int64_t n, const Parallel& parallel) {
  DriftIndex index;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    index.Swap(&spare_);
  }
  // Build without holding the locks, so that classification continues.
  const Status status = index.Rebuild(options_.num_tables, tables, keys, drifts, n, parallel);
  const std::lock_guard<std::mutex> between_batches(classifying_);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (status.ok()) index_.Swap(&index);
  spare_.Swap(&index);
  return status;
}

Status InputClassifier::Configure(const ClassifierSettings& settings) {
  const Status status = ValidateSettings(settings);
  if (!status.ok()) return status;
  if (settings.mode == SkipMode::kPredictedLoss && options_.pilot.kind == PilotKind::kNone) {
    return InvalidArgument(
        "mode is predicted_loss, but the classifier has no pilot; expected a classifier with a "
        "pilot other than 'none'");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  settings_ = settings;
  return OkStatus();
}

Status InputClassifier::ReservoirScores(const int32_t* tables, const int64_t* keys,
                                        const float* drifts, int64_t n, std::vector<float>* scores,
                                        const Parallel& parallel) const {
  constexpr int64_t kInputsPerTask = 256;
  DriftIndex index;
  const Status status = index.Build(options_.num_tables, tables, keys, drifts, n, parallel);
  if (!status.ok()) return status;
  const std::lock_guard<std::mutex> lock(mutex_);
  scores->assign(static_cast<size_t>(reservoir_.size()), 0.0f);
  const int scorers = TasksFor(reservoir_.size(), kInputsPerTask, parallel);
  parallel.run(scorers, [&](int task) {
    const TaskRange range = RangeOf(task, scorers, reservoir_.size());
    InputLookups inputs;
    for (int64_t i = range.begin; i < range.end; ++i) {
      const std::vector<Lookup>& lookups = reservoir_.input(i);
      inputs.lookups.insert(inputs.lookups.end(), lookups.begin(), lookups.end());
      inputs.EndInput();
    }
    SkipScores(index, options_.alpha, &inputs, scores->data() + range.begin);
  });
  return OkStatus();
}

std::vector<float> InputClassifier::ReservoirLosses() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<float> losses;
  for (int64_t i = 0; i < reservoir_.size(); ++i) {
    if (!std::isnan(reservoir_.loss(i))) losses.push_back(reservoir_.loss(i));
  }
  return losses;
}

void InputClassifier::RecordLosses(const float* losses, const float* labels, const bool* skippable,
                                   const float* weights, int64_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t i = 0; i < n; ++i) {
    if (std::isfinite(losses[i])) {
      const double weight = weights == nullptr ? 1.0 : weights[i];
      statistics_.Add(losses[i], labels[i] >= 0.5f, skippable[i], weight);
    } else {
      ++statistics_.not_finite;
    }
  }
}

LossStatistics InputClassifier::TakeLossStatistics() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(statistics_, LossStatistics());
}

ClassifierWindow InputClassifier::ExportWindow() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  ClassifierWindow window;
  window.statistics = statistics_;
  window.counts = counts_;
  window.inputs_observed = inputs_observed_;
  window.reservoir = reservoir_.Export();
  return window;
}

Status InputClassifier::ImportWindow(const ClassifierWindow& window) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!reservoir_.Fits(window.reservoir)) {
    return InvalidArgument(
        "the sample to import has " + std::to_string(window.reservoir.ends.size()) +
        " of the window's " + std::to_string(window.reservoir.offered_in_window) +
        " examples; expected all examples, up to reservoir_size (" +
        std::to_string(options_.reservoir_size) + "), each with its lookups and a loss");
  }
  for (const Lookup& lookup : window.reservoir.lookups) {
    if (lookup.table < 0 || lookup.table >= options_.num_tables) {
      return InvalidArgument("the sample to import has a lookup in table " +
                             std::to_string(lookup.table) + "; expected a table from 0 to " +
                             std::to_string(options_.num_tables - 1));
    }
  }
  reservoir_.Import(window.reservoir);
  statistics_ = window.statistics;
  counts_ = window.counts;
  inputs_observed_ = window.inputs_observed;
  return OkStatus();
}

ClassifierCounts InputClassifier::EndWindow() {
  const std::lock_guard<std::mutex> lock(mutex_);
  reservoir_.Clear();
  ClassifierCounts counts = std::exchange(counts_, ClassifierCounts());
  // A window may have begun or ended between two batches that also count for others, therefore
  // clamp the estimates.
  for (int64_t* count : {&counts.hot_inputs, &counts.inputs_skippable, &counts.inputs_kept}) {
    *count = std::min(*count, counts.inputs_seen);
  }
  return counts;
}

}  // namespace slipstream
