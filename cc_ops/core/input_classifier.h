// The input classifier: which inputs of a batch can be skipped, and the window's sample and
// counts from which the next threshold is found.
#ifndef SLIPSTREAM_CC_OPS_CORE_INPUT_CLASSIFIER_H_
#define SLIPSTREAM_CC_OPS_CORE_INPUT_CLASSIFIER_H_

#include <cstdint>
#include <mutex>
#include <vector>

#include "cc_ops/core/drift_index.h"
#include "cc_ops/core/feature_view.h"
#include "cc_ops/core/input_reservoir.h"
#include "cc_ops/core/status.h"

namespace slipstream {

enum class SkipMode {
  kNone,    // no input is skippable
  kDrift,   // an input whose skip score is below the threshold
  kRandom,  // the control: each input with the same probability, whatever its keys
};

struct ClassifierOptions {
  int num_tables = 1;
  double alpha = 1.0;             // in (0, 1]
  int64_t reservoir_size = 8192;  // inputs, at least 1
  uint64_t seed = 0;              // of the reservoir and of kRandom
};

struct ClassifierCounts {
  int64_t inputs_seen = 0;
  int64_t inputs_skipped = 0;  // skippable ones
  int64_t hot_inputs = 0;      // with a finite skip score
};

// Thread-safe. Deterministic as long as Classify is called in the same order.
class InputClassifier {
 public:
  // InvalidArgument for an option out of its range.
  static Status Validate(const ClassifierOptions& options);

  // `options` must be valid.
  explicit InputClassifier(const ClassifierOptions& options);

  // Classifies a batch.
  //   features: keys of every feature, all of `batch` inputs; not kept.
  //   observe: adds the inputs to the window's sample and counts.
  //   skippable, score: [batch], written.
  // InvalidArgument for a feature of a table that the classifier does not have.
  Status Classify(const std::vector<FeatureView>& features, int64_t batch, bool observe,
                  bool* skippable, float* score);

  // Replaces all drifts; see DriftIndex::Build.
  Status SetDrift(const int32_t* tables, const int64_t* keys, const float* drifts, int64_t n);

  // From the next batch on. threshold: not NaN, at least 0 (read by kDrift).
  // random_share: 0 to 1 (read by kRandom).
  Status Configure(SkipMode mode, float threshold, double random_share);

  // Skip scores of the sampled inputs under the current drifts.
  std::vector<float> ReservoirScores() const;

  // Returns the window's counts and starts the next window with an empty sample.
  ClassifierCounts EndWindow();

  const ClassifierOptions& options() const { return options_; }

 private:
  const ClassifierOptions options_;
  mutable std::mutex mutex_;  // guards all below
  DriftIndex index_;
  SkipMode mode_ = SkipMode::kNone;
  float threshold_ = 0.0f;
  double random_share_ = 0.0;
  uint64_t inputs_observed_ = 0;  // since the start; numbers the inputs for kRandom
  ClassifierCounts counts_;
  InputReservoir reservoir_;
  // Reused from batch to batch.
  std::vector<Lookup> lookups_;
  std::vector<int64_t> ends_;
  std::vector<float> scratch_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_INPUT_CLASSIFIER_H_
