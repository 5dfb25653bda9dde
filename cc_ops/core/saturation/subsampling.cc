// Dropping examples by predicted loss: the part of InputClassifier that uses a pilot.
#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

#include "cc_ops/core/saturation/input_classifier.h"

namespace slipstream {
namespace {

Status CheckRange(const char* name, const float* values, int64_t n, float largest,
                  const char* allowed) {
  for (int64_t i = 0; values != nullptr && i < n; ++i) {
    if (values[i] >= 0.0f && values[i] <= largest) continue;
    return InvalidArgument(std::string(name) + "[" + std::to_string(i) + "] is " +
                           std::to_string(values[i]) + "; expected " + allowed);
  }
  return OkStatus();
}

Status Check(const LabeledInputs& inputs, int64_t n) {
  Status status = CheckRange("labels", inputs.labels, n, 1.0f, "a number from 0 to 1");
  if (!status.ok()) return status;
  status = CheckRange("sample_weights", inputs.weights, n, std::numeric_limits<float>::max(),
                      "a finite number of at least 0");
  if (!status.ok()) return status;
  return CheckRange("predictions", inputs.predictions, n, 1.0f, "a number from 0 to 1");
}

// Returns the difference between the log odds of the kept examples and the log odds of all
// examples.
float OffsetOf(const ClassifierSettings& settings, float probability) {
  if (settings.mode != SkipMode::kPredictedLoss || settings.is_shadow) return 0.0f;
  return static_cast<float>(
      std::log(ChanceByScore(settings, 1.0f - probability) / ChanceByScore(settings, probability)));
}

}  // namespace

Status InputClassifier::Subsample(const std::vector<FeatureView>& features, int64_t batch,
                                  const LabeledInputs& inputs, KeptInputs* kept) {
  Status status = Check(features);
  if (!status.ok()) return status;
  status = slipstream::Check(inputs, batch);
  if (!status.ok()) return status;
  const std::lock_guard<std::mutex> one_at_a_time(classifying_);
  const std::lock_guard<std::mutex> lock(mutex_);
  kept->rows.reserve(static_cast<size_t>(batch));
  kept->weights.reserve(static_cast<size_t>(batch));
  kept->offsets.reserve(static_cast<size_t>(batch));
  kept->skippable.reserve(static_cast<size_t>(batch));
  const ClassifierSettings& settings = settings_;
  ClassifierCounts counts;
  const auto decide = [&](int64_t i, float predicted) {
    const float probability = inputs.predictions != nullptr ? inputs.predictions[i] : predicted;
    const float score = std::fabs(inputs.labels[i] - probability);
    const SkipDecision decision = slipstream::Classify(settings, options_.seed, score,
                                                       inputs_observed_ + static_cast<uint64_t>(i));
    reservoir_.OfferListed(score, [&] { return LookupsOf(features, i); });
    counts.inputs_skippable += decision.is_skippable;
    counts.inputs_kept += decision.is_skippable && decision.is_kept;
    if (decision.weight == 0.0f) {
      ++counts.inputs_skipped;
    } else {
      kept->rows.push_back(i);
      kept->weights.push_back(decision.weight);
      kept->offsets.push_back(OffsetOf(settings, probability));
      kept->skippable.push_back(decision.is_skippable);
    }
    if (!decision.is_kept) return Lesson{inputs.labels[i], 0.0f};
    // In shadow mode the weight of the decision is 1.
    const double chance = decision.is_skippable ? ChanceByScore(settings, score) : 1.0;
    const float weight = inputs.weights == nullptr ? 1.0f : inputs.weights[i];
    // Bounds the weight, because squares of gradients must be finite.
    constexpr float kMaxWeight = 1e6f;
    return Lesson{inputs.labels[i], std::min(weight / static_cast<float>(chance), kMaxWeight)};
  };
  pilot_.ForEach(features, options_.num_tables, batch, decide);
  inputs_observed_ += static_cast<uint64_t>(batch);
  counts_.inputs_seen += batch;
  counts_.hot_inputs += batch;
  counts_.inputs_skipped += counts.inputs_skipped;
  counts_.inputs_skippable += counts.inputs_skippable;
  counts_.inputs_kept += counts.inputs_kept;
  return OkStatus();
}

Pilot::State InputClassifier::ExportPilot() {
  const std::lock_guard<std::mutex> between_batches(classifying_);
  return pilot_.Export();
}

Status InputClassifier::ImportPilot(const Pilot::State& state) {
  const std::lock_guard<std::mutex> between_batches(classifying_);
  return pilot_.Import(state);
}

}  // namespace slipstream
