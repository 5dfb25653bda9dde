// Decides which examples of a batch are dropped, and samples the examples of a window.
//
// The decision uses the drifts of the tracked keys (Classify) or the loss that a pilot predicts
// (Subsample). An example is skippable if its score is below the threshold, which means that it may
// be dropped. The classifier also keeps a uniform sample of the examples of the window, and
// counters. The caller chooses the next threshold from the scores of the sample at the end of a
// window.
//
// Note: an "input" in the names below is a training example.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_INPUT_CLASSIFIER_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_INPUT_CLASSIFIER_H_

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/lookup/feature_view.h"
#include "cc_ops/core/saturation/drift_index.h"
#include "cc_ops/core/saturation/input_reservoir.h"
#include "cc_ops/core/saturation/loss_statistics.h"
#include "cc_ops/core/saturation/pilot.h"
#include "cc_ops/core/saturation/skip_rule.h"
#include "cc_ops/core/saturation/skip_score.h"

namespace slipstream {

struct ClassifierOptions {
  // Number of tables. Features with this number as FeatureView::table are ignored.
  int num_tables = 1;
  // Fraction of the lookups of an example that must be saturated, in (0, 1].
  double alpha = 1.0;
  int64_t reservoir_size = 8192;  // Maximum number of examples in the sample, at least 1.
  uint64_t seed = 0;   // Seed of the sample, of keeping skippable examples and of kRandom.
  PilotOptions pilot;  // For SkipMode::kPredictedLoss.
};

// Labels, weights and predictions of a batch, each [batch].
struct LabeledInputs {
  const float* labels;                 // In [0, 1].
  const float* weights = nullptr;      // Finite and at least 0; null means 1.
  const float* predictions = nullptr;  // Probabilities from the model, if it is the pilot.
};

// The kept examples of a batch, in order, each [kept].
struct KeptInputs {
  std::vector<int64_t> rows;   // Position in the batch.
  std::vector<float> weights;  // Number of examples that each one represents.
  // Log of (keep probability with label 1 / keep probability with label 0); 0 in shadow mode and in
  // other modes than kPredictedLoss.
  std::vector<float> offsets;
  std::vector<uint8_t> skippable;  // Whether the example was kept although it was skippable.
};

// Counts of the observed examples of a window.
struct ClassifierCounts {
  int64_t inputs_seen = 0;       // All observed examples.
  int64_t inputs_skipped = 0;    // Dropped examples; 0 in shadow mode.
  int64_t hot_inputs = 0;        // Examples with a finite score.
  int64_t inputs_skippable = 0;  // Skippable examples, dropped or kept.
  int64_t inputs_kept = 0;       // Skippable examples that were, or in shadow mode would be, kept.
};

// State since the start of the window, including the position of the random numbers.
struct ClassifierWindow {
  LossStatistics statistics;
  ClassifierCounts counts;
  uint64_t inputs_observed = 0;
  InputReservoir::State reservoir;
};

// Thread-safe. Deterministic if Classify is called in the same order.
class InputClassifier {
 public:
  // Returns InvalidArgument for an option out of its range.
  static Status Validate(const ClassifierOptions& options);

  // `options` must be valid.
  explicit InputClassifier(const ClassifierOptions& options);

  // Classifies a batch by the current drifts and settings, and writes `result` ([batch] each).
  // While it looks up the drifts, other threads may call all functions except Classify and
  // Subsample.
  //   features: keys of every feature, each with `batch` examples; not stored.
  //   observe: whether the examples are added to the sample and counters of the window.
  //   window_batches: number of batches in a window, or 0. If it is positive, and examples are
  //     observed and none can be dropped, only as many batches are classified as the sample needs,
  //     at least one in kMaxStride. They count for the others, whose examples are reported as not
  //     skippable.
  //   stride: if it is above 1 and examples are observed, one random example of each `stride`
  //     consecutive examples of training is classified, and counts for the others as above. The
  //     choice depends on the seed and the numbers of the examples only. At most
  //     kMaxStrideOfExamples.
  //
  // Returns InvalidArgument for a feature of an unknown table, a stride out of its range, and in
  // mode kPredictedLoss.
  Status Classify(const std::vector<FeatureView>& features, int64_t batch, bool observe,
                  const Classified& result, int64_t window_batches = 0, int64_t stride = 1);
  static constexpr int64_t kMaxStride = 16;  // See `window_batches`.
  static constexpr int64_t kMaxStrideOfExamples = 1 << 20;

  // Predicts the losses of the examples with the pilot, decides by them, and trains the pilot on
  // the kept examples with their weights (in shadow mode, on the examples that would be kept).
  // Observes all examples. Requires a pilot. features: as in Classify.
  //
  // Returns InvalidArgument, without changes, for a feature of an unknown table and for a label,
  // weight or prediction out of its range.
  Status Subsample(const std::vector<FeatureView>& features, int64_t batch,
                   const LabeledInputs& inputs, KeptInputs* kept);

  // Export and import the parameters of the pilot. Returns the errors of Pilot::Import.
  Pilot::State ExportPilot();
  Status ImportPilot(const Pilot::State& state);

  // Replaces all drifts from the next batch on. Arguments and errors as of DriftIndex::Build; after
  // an error the drifts are unchanged.
  Status SetDrift(const int32_t* tables, const int64_t* keys, const float* drifts, int64_t n,
                  const Parallel& parallel = {});

  // Changes the settings from the next batch on. Returns InvalidArgument for a setting out of its
  // range, and for kPredictedLoss without a pilot.
  Status Configure(const ClassifierSettings& settings);

  // Computes the skip scores of the sampled examples with the given drifts instead of the present
  // drifts, which stay. Arguments and errors as of SetDrift. Drifts of keys that no sampled example
  // looks up have no effect. scores: becomes [sampled examples].
  Status ReservoirScores(const int32_t* tables, const int64_t* keys, const float* drifts, int64_t n,
                         std::vector<float>* scores, const Parallel& parallel = {}) const;
  // Returns the predicted losses of the sampled examples that have one.
  std::vector<float> ReservoirLosses() const;

  // Adds the losses of trained examples to the statistics. losses, labels, skippable: [n]; a label
  // of at least 0.5 is positive. weights: [n], number of examples that each represents; null means
  // 1.
  void RecordLosses(const float* losses, const float* labels, const bool* skippable,
                    const float* weights, int64_t n);

  // Returns the statistics of the losses since the last call, and resets them.
  LossStatistics TakeLossStatistics();

  ClassifierWindow ExportWindow() const;
  // Replaces the state by the result of ExportWindow. Returns InvalidArgument, without changes, if
  // the arrays of the sample do not match each other or this classifier.
  Status ImportWindow(const ClassifierWindow& window);

  // Returns the counters of the window and starts the next window with an empty sample. If one
  // batch counted for multiple batches, all counters except inputs_seen are estimates.
  ClassifierCounts EndWindow();

  const ClassifierOptions& options() const { return options_; }

 private:
  Status Check(const std::vector<FeatureView>& features) const;
  // Returns the lookups of example i; valid until the next call.
  std::pair<const Lookup*, int64_t> LookupsOf(const std::vector<FeatureView>& features, int64_t i);
  int64_t StrideOf(int64_t batch, int64_t window_batches) const;
  bool IsInStride(int64_t batch, int64_t stride) const;
  // Writes the positions in the next batch of one random example in `stride` to chosen_.
  void ChooseExamples(int64_t batch, int64_t stride);

  const ClassifierOptions options_;
  // Serializes batches. Lock it before mutex_. Guards the next five members.
  std::mutex classifying_;
  InputLookups scratch_;
  std::vector<int64_t> chosen_;
  std::vector<float> scores_;
  DriftIndex index_;
  Pilot pilot_;
  mutable std::mutex mutex_;  // Guards all members below.
  DriftIndex spare_;          // Memory for the next index.
  ClassifierSettings settings_;
  LossStatistics statistics_;
  // Examples since the start of training; numbers them for random choices.
  uint64_t inputs_observed_ = 0;
  ClassifierCounts counts_;
  InputReservoir reservoir_;
  std::vector<Lookup> of_input_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_INPUT_CLASSIFIER_H_
