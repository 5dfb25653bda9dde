// The pilot: a small click model that predicts an example's loss before the model sees the example.
// It is trained on the kept examples.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_PILOT_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_PILOT_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/lookup/feature_view.h"
#include "cc_ops/core/memory/page_memory.h"

namespace slipstream {

enum class PilotKind {
  kNone,    // No pilot.
  kLabel,   // The base rate, which ignores the keys.
  kLinear,  // Logistic regression with one number per key.
  kFm,      // Factorization machine (Rendle, ICDM 2010) with a number and a factor per key.
  kModel,   // The trained model predicts; the pilot has no parameters.
};

struct PilotOptions {
  PilotKind kind = PilotKind::kNone;
  int factors = 8;           // kFm: dimension of a key's factor, in [1, 8].
  int64_t memory_bytes = 0;  // Bytes for the parameters of all keys.
};

// The label and weight with which the pilot learns from an example.
struct Lesson {
  float label = 0.0f;   // In [0, 1].
  float weight = 0.0f;  // With weight 0, only the base rate learns from the label.
};

// The parameters of a key are in a bucket: one number and, for kFm, a factor (a vector). The hash
// of feature and key selects the bucket, which other keys may share (feature hashing, Weinberger et
// al., ICML 2009). Memory is therefore bounded, and no search is needed.
//
// The parameters are trained with Adagrad, with one accumulator for the number and one for the
// factor. A step applies the summed gradients of up to kExamplesOfAStep examples, because
// consecutive examples are often from one user and would push that user's parameters back and
// forth. The predicted log odds include the log odds of the base rate, which is the running mean of
// the labels. Not thread-safe; deterministic.
class Pilot {
 public:
  static constexpr int kMaxFactors = 8;
  static constexpr double kLearningRate = 0.1;
  static constexpr double kFirstAccumulator = 0.1;
  // Number of examples that are predicted with the same parameters, i.e. the batch size of a step.
  static constexpr int64_t kExamplesOfAStep = 1024;

  // Returns InvalidArgument for an option out of its range.
  static Status Validate(const PilotOptions& options);

  // `options` must be valid. Throws std::bad_alloc.
  explicit Pilot(const PilotOptions& options);

  // Predicts the examples of a batch in order and learns from them, kExamplesOfAStep at a time and
  // at the end of the batch.
  //   features: as in InputClassifier::Classify. Features of table `num_tables` are ignored. The
  //     parameters of multiple keys of one feature are averaged.
  //   decide(i, probability): called once for each example, with the predicted probability of label
  //     1; returns the Lesson of the example.
  template <class Decide>
  void ForEach(const std::vector<FeatureView>& features, int num_tables, int64_t batch,
               const Decide& decide);

  // The parameters for a checkpoint. A pilot with equal options gives a key the same bucket.
  struct State {
    std::vector<double> base;      // [2]; the base rate, and the number of steps in its mean.
    std::vector<int64_t> buckets;  // [n]; numbers of the buckets that were trained, ascending.
    std::vector<float> numbers;    // [n, width]; contents of these buckets.
    int width = 0;                 // Floats of a bucket.
  };
  State Export() const;
  // Replaces all parameters. Returns InvalidArgument, without changes, for arrays that do not match
  // the options and for numbers that are not finite.
  Status Import(const State& state);

  int64_t num_buckets() const { return num_buckets_; }

 private:
  // A key of an example.
  struct Term {
    float* bucket;
    float share;     // 1 / number of keys of its feature.
    uint32_t index;  // Index of the bucket in learning_, while the example is learned.
  };
  // An example of the group that is processed at once.
  struct Example {
    int64_t end;  // End of its terms.
    float probability;
    // Derivative of the loss by the log odds, times the weight; 0 if the example is not learned.
    float slope;
    // Sum of the factors of its keys.
    alignas(32) float sum[kMaxFactors];
  };
  // Aligned memory for gradients of factors.
  struct alignas(32) Block {
    float numbers[8];
  };

  // Sets terms_ and examples_ to the examples [begin, end) and prefetches their buckets.
  void List(const std::vector<FeatureView>& features, int num_tables, int64_t begin, int64_t end);
  float* BucketOf(int64_t key, uint64_t salt) const;
  // Lists the keys of one feature from `term` on; returns the end.
  Term* ListKeys(const FeatureView& feature, uint64_t salt, int64_t example, Term* term) const;
  // Predicts the listed examples.
  void Predict();
  template <int kFactors>
  void PredictWith();
  // Adds the gradients of the listed examples to the gradients of the step.
  void Collect();
  // Adds the buckets of the listed examples to learning_.
  void Enlist();
  template <int kFactors>
  void CollectOf();
  // Applies the gradients of the step to the buckets, and starts the next step.
  void Learn();
  template <int kFactors>
  void LearnOf();
  // The gradient of learning_[n] starts at n * padded_.
  float* factor_gradients() { return reinterpret_cast<float*>(factor_gradients_.data()); }

  // Initializes all parameters.
  void Start();
  // Updates the base rate with the labels of the step.
  void FollowBaseRate();

  static constexpr int64_t kExamplesAtOnce = 16;

  PilotOptions options_;
  // Padded dimension of factors: 0, 4 or 8. A bucket contains the factor, the number, the
  // accumulator of the number, the accumulator of the factor, and during a step 1 + its index in
  // learning_, else 0.
  int padded_ = 0;
  int width_ = 0;
  int64_t num_buckets_ = 0;
  PageMemory memory_;
  float* numbers_ = nullptr;  // [num_buckets, width]
  double base_rate_ = 0.5;
  int64_t base_steps_ = 0;
  float base_log_odds_ = 0.0f;
  double labels_ = 0.0;  // Sum and number of the labels in this step.
  int64_t labelled_ = 0;
  std::vector<uint64_t> salts_;  // One per feature.
  std::vector<Term> terms_;
  std::vector<Example> examples_;
  // State of a step: its buckets, and the gradients of their factors and numbers.
  std::vector<float*> learning_;
  std::vector<Block> factor_gradients_;  // [learning, padded] floats.
  std::vector<float> number_gradients_;
};

template <class Decide>
void Pilot::ForEach(const std::vector<FeatureView>& features, int num_tables, int64_t batch,
                    const Decide& decide) {
  for (int64_t begin = 0; begin < batch; begin += kExamplesAtOnce) {
    const int64_t end = std::min(batch, begin + kExamplesAtOnce);
    List(features, num_tables, begin, end);
    Predict();
    for (int64_t i = begin; i < end; ++i) {
      Example* const example = &examples_[static_cast<size_t>(i - begin)];
      const Lesson lesson = decide(i, example->probability);
      labels_ += lesson.label;
      ++labelled_;
      example->slope =
          lesson.weight > 0.0f ? lesson.weight * (example->probability - lesson.label) : 0.0f;
    }
    Collect();
    if (end % kExamplesOfAStep == 0 || end == batch) {
      Learn();
      FollowBaseRate();
    }
  }
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_PILOT_H_
