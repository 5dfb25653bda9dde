// The input classifier: which inputs of a batch can be skipped, and the window's sample and
// counts from which the next threshold is found.
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
  // Features of table `num_tables` are ignored, as if an input did not have them.
  int num_tables = 1;
  double alpha = 1.0;             // in (0, 1]
  int64_t reservoir_size = 8192;  // inputs, at least 1
  uint64_t seed = 0;              // of the reservoir, of thinning and of kRandom
  PilotOptions pilot;             // kForeseenLoss
};

// What is known of a batch's inputs beside their keys; [batch] each.
struct LabeledInputs {
  const float* labels;                 // 0 to 1
  const float* weights = nullptr;      // finite, at least 0; nullptr: 1
  const float* predictions = nullptr;  // probabilities of the model, where it is the pilot
};

// The inputs of a batch that are kept, in order; [kept] each.
struct KeptInputs {
  std::vector<int64_t> rows;   // of the batch
  std::vector<float> weights;  // inputs that each one stands for
  // Log of (probability to be kept with label 1 / with label 0).
  std::vector<float> offsets;
  std::vector<uint8_t> skippable;  // whether it could have been left out
};

struct ClassifierCounts {
  int64_t inputs_seen = 0;
  int64_t inputs_skipped = 0;    // left out
  int64_t hot_inputs = 0;        // with a finite skip score
  int64_t inputs_skippable = 0;  // left out or kept all the same
  int64_t inputs_kept = 0;       // skippable ones that thinning kept
};

// What has come in since the present window began, and where random choices are.
struct ClassifierWindow {
  LossStatistics statistics;
  ClassifierCounts counts;
  uint64_t inputs_observed = 0;
  InputReservoir::State reservoir;
};

// Thread-safe. Deterministic as long as Classify is called in the same order.
class InputClassifier {
 public:
  // InvalidArgument for an option out of its range.
  static Status Validate(const ClassifierOptions& options);

  // `options` must be valid.
  explicit InputClassifier(const ClassifierOptions& options);

  // Classifies a batch by the drifts and settings that hold when it is called. Other calls but
  // Classify may go on while drifts are looked up.
  //   features: keys of every feature, all of `batch` inputs; not kept.
  //   observe: adds the inputs to the window's sample and counts.
  //   window_batches: of a window, or 0. Where it is given, inputs are observed and nothing may be
  //     left out, as many batches as a window's sample needs are classified and count for the
  //     others, one in kMostStride at least. Inputs of the others are not skippable.
  // InvalidArgument for a feature of a table that the classifier does not have.
  Status Classify(const std::vector<FeatureView>& features, int64_t batch, bool observe,
                  const Classified& result, int64_t window_batches = 0);
  static constexpr int64_t kMostStride = 16;

  // Foresees the inputs' losses by the pilot, decides by them, and lets the pilot learn from the
  // inputs that are kept (in shadow mode, that would be), with the weight that they stand for. All
  // are observed. For a classifier with a pilot.
  //   features: as of Classify.
  // InvalidArgument, changing nothing, for a feature of a table that the classifier does not have,
  // or a label, weight or prediction out of its range.
  Status Foresee(const std::vector<FeatureView>& features, int64_t batch,
                 const LabeledInputs& inputs, KeptInputs* kept);

  // What the pilot has learnt; errors as of Pilot::Import.
  Pilot::State ExportPilot();
  Status ImportPilot(const Pilot::State& state);

  // Replaces all drifts; see DriftIndex::Build.
  Status SetDrift(const int32_t* tables, const int64_t* keys, const float* drifts, int64_t n,
                  const Parallel& parallel = {});

  // From the next batch on. InvalidArgument for a setting out of its range.
  Status Configure(const ClassifierSettings& settings);

  // Skip scores by drift of the sampled inputs, if drifts were these; those that were set do not
  // count, and keys that no sampled input has make no difference. Errors as SetDrift.
  Status ReservoirScores(const int32_t* tables, const int64_t* keys, const float* drifts, int64_t n,
                         std::vector<float>* scores, const Parallel& parallel = {}) const;
  // Scores by foreseen loss of the sampled inputs, of those that have one.
  std::vector<float> ReservoirLosses() const;

  // Takes in the losses of trained inputs.
  //   losses, labels, skippable: [n]; a label of 0.5 or more is positive. weights: [n], inputs
  //   that each stands for; nullptr: 1.
  void RecordLosses(const float* losses, const float* labels, const bool* skippable,
                    const float* weights, int64_t n);

  // Returns the statistics of the losses since the last call.
  LossStatistics TakeLossStatistics();

  ClassifierWindow ExportWindow() const;
  // Replaces all that ExportWindow gave. InvalidArgument, and nothing is changed, if the sample's
  // arrays do not fit each other or this classifier.
  Status ImportWindow(const ClassifierWindow& window);

  // Returns the window's counts and starts the next window with an empty sample. Where one batch
  // counted for several, all counts but inputs_seen are estimates.
  ClassifierCounts EndWindow();

  const ClassifierOptions& options() const { return options_; }

 private:
  Status Check(const std::vector<FeatureView>& features) const;
  // Of input i; valid until the next call.
  std::pair<const Lookup*, int64_t> LookupsOf(const std::vector<FeatureView>& features, int64_t i);
  int64_t StrideOf(int64_t batch, int64_t window_batches) const;
  bool IsInStride(int64_t batch, int64_t stride) const;

  const ClassifierOptions options_;
  std::mutex classifying_;  // one batch at a time; locked before mutex_; guards the next three
  InputLookups scratch_;
  DriftIndex index_;
  Pilot pilot_;
  mutable std::mutex mutex_;  // guards all below
  DriftIndex spare_;          // memory for the next index
  ClassifierSettings settings_;
  LossStatistics statistics_;
  uint64_t inputs_observed_ = 0;  // since the start; numbers the inputs for random choices
  ClassifierCounts counts_;
  InputReservoir reservoir_;
  std::vector<Lookup> of_input_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_INPUT_CLASSIFIER_H_
