// The pilot: a small click model that foresees an example's loss before the model sees it, and is
// trained along on the examples that are kept.
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
  kNone,    // there is none
  kLabel,   // the base rate, whatever the keys
  kLinear,  // logistic regression: a number per key
  kFm,      // factorisation machine (Rendle, ICDM 2010): a number and a factor per key
  kModel,   // the model itself predicts; nothing is held here
};

struct PilotOptions {
  PilotKind kind = PilotKind::kNone;
  int factors = 8;           // kFm: numbers of a key's factor, 1 to 8
  int64_t memory_bytes = 0;  // of the keys' numbers
};

// What the pilot learns from an example.
struct Lesson {
  float label = 0.0f;   // 0 to 1
  float weight = 0.0f;  // 0: of its keys nothing is learnt; its label counts for the base rate
};

// Keys share buckets by their hash and the feature that they are of (feature hashing, Weinberger
// et al., ICML 2009): memory is bounded whatever comes, and no key is looked for. Rules: Adagrad,
// with one accumulator per factor, by the sums of the gradients of some examples: those that follow
// each other are often of one user, and would push his numbers to and fro. To them the log-odds of
// the base rate are added, a running mean. Not thread-safe; deterministic.
class Pilot {
 public:
  static constexpr int kMostFactors = 8;
  static constexpr double kLearningRate = 0.1;
  static constexpr double kFirstAccumulator = 0.1;
  // Examples that are foreseen by the same numbers, before these are learnt by.
  static constexpr int64_t kExamplesOfAStep = 1024;

  // InvalidArgument for an option out of its range.
  static Status Validate(const PilotOptions& options);

  // `options` must be valid. Throws std::bad_alloc.
  explicit Pilot(const PilotOptions& options);

  // Foresees examples in their order, and learns from them, kExamplesOfAStep at a time.
  //   features: as of InputClassifier::Classify. A feature of table `num_tables` is passed over;
  //     the numbers of an example's several keys of one feature are averaged.
  //   decide(i, probability): called once for each example; returns its Lesson.
  template <class Decide>
  void ForEach(const std::vector<FeatureView>& features, int num_tables, int64_t batch,
               const Decide& decide);

  // What it has learnt, for a checkpoint. The same options give buckets of the same numbers.
  struct State {
    std::vector<double> base;      // [2]: base rate, and steps that it is the mean of
    std::vector<int64_t> buckets;  // [n]: those that something was learnt in, ascending
    std::vector<float> numbers;    // [n, width]
    int width = 0;
  };
  State Export() const;
  // InvalidArgument, changing nothing, for arrays of other options, or numbers that are not finite.
  Status Import(const State& state);

  int64_t num_buckets() const { return num_buckets_; }

 private:
  // A key of an example.
  struct Term {
    float* bucket;
    float share;     // of its feature's keys
    uint32_t index;  // while its example is learnt: of the bucket, in learning_
  };
  // An example of those that are at work at once.
  struct Example {
    int64_t end;  // of its terms
    float probability;
    float slope;  // of its loss by its log-odds, times its weight; 0: nothing is learnt of it
    // Of its keys' factors.
    alignas(32) float sum[kMostFactors];
  };
  // Gradients of factors lie in lines of their own.
  struct alignas(32) Block {
    float numbers[8];
  };

  // Lists the terms of examples begin .. end - 1, and asks for their memory.
  void List(const std::vector<FeatureView>& features, int num_tables, int64_t begin, int64_t end);
  float* BucketOf(int64_t key, uint64_t salt) const;
  // Lists those of one feature from `term` on; returns the one after them.
  Term* ListKeys(const FeatureView& feature, uint64_t salt, int64_t example, Term* term) const;
  // Foresees the listed examples.
  void Foresee();
  template <int kFactors>
  void ForeseeBy();
  // Adds their gradients to those of the step.
  void Collect();
  void Enlist();
  template <int kFactors>
  void CollectOf();
  // Ends the step.
  void Learn();
  template <int kFactors>
  void LearnOf();
  // Of what learning_ has at n: from n * padded_ on.
  float* factor_gradients() { return reinterpret_cast<float*>(factor_gradients_.data()); }

  void Start();
  void FollowBaseRate();

  static constexpr int64_t kExamplesAtOnce = 16;

  PilotOptions options_;
  // Of factors, 0, 4 or 8. A bucket has them first, then its number, the number's accumulator, that
  // of the factors, and while a step goes on 1 + where it is in learning_, else 0.
  int padded_ = 0;
  int width_ = 0;
  int64_t num_buckets_ = 0;
  PageMemory memory_;
  float* numbers_ = nullptr;  // [num_buckets, width]
  double base_rate_ = 0.5;
  int64_t base_steps_ = 0;
  float base_log_odds_ = 0.0f;
  double labels_ = 0.0;  // of this step: their sum, and how many they are
  int64_t labelled_ = 0;
  std::vector<uint64_t> salts_;  // of each feature
  std::vector<Term> terms_;
  std::vector<Example> examples_;
  // Of a step: the buckets in it, and the gradients of their factors and numbers, else 0.
  std::vector<float*> learning_;
  std::vector<Block> factor_gradients_;  // [learning, padded] floats
  std::vector<float> number_gradients_;
};

template <class Decide>
void Pilot::ForEach(const std::vector<FeatureView>& features, int num_tables, int64_t batch,
                    const Decide& decide) {
  for (int64_t begin = 0; begin < batch; begin += kExamplesAtOnce) {
    const int64_t end = std::min(batch, begin + kExamplesAtOnce);
    List(features, num_tables, begin, end);
    Foresee();
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
