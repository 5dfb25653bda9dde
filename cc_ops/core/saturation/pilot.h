// The pilot: a small click model that foresees an example's loss before the model sees it, and is
// trained along on the examples that are kept.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_PILOT_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_PILOT_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
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
    float share;  // of its feature's keys
  };

  // Lists the terms of examples begin .. end - 1, and asks for their memory.
  void List(const std::vector<FeatureView>& features, int num_tables, int64_t begin, int64_t end);
  float* BucketOf(int64_t key, uint64_t salt) const;
  // Lists those of one feature from `term` on; returns the one after them.
  Term* ListKeys(const FeatureView& feature, uint64_t salt, int64_t example, Term* term) const;

  // kFactors: 0, 4 or 8: a bucket has them first, then its number, the number's accumulator, that
  // of the factors, and where in gradients_ its own begin while a step goes on, else 0.
  template <int kFactors>
  float LogOdds(int64_t begin, int64_t end, float* sum) const;
  // Adds an example's gradients to those of the step.
  template <int kFactors>
  void Collect(int64_t begin, int64_t end, const float* sum, float gradient);
  // Ends the step.
  template <int kFactors>
  void Learn();
  template <int kFactors, class Decide>
  void ForEachOf(const std::vector<FeatureView>& features, int num_tables, int64_t batch,
                 const Decide& decide);

  void Start();
  void FollowBaseRate();

  static constexpr int64_t kExamplesAtOnce = 16;
  static float Probability(float log_odds);

  PilotOptions options_;
  int padded_ = 0;  // kFactors
  int width_ = 0;
  int64_t num_buckets_ = 0;
  PageMemory memory_;
  float* numbers_ = nullptr;  // [num_buckets, width]
  double base_rate_ = 0.5;
  int64_t base_steps_ = 0;
  float base_log_odds_ = 0.0f;
  double labels_ = 0.0;  // of this step: their sum, and how many they are
  int64_t examples_ = 0;
  std::vector<uint64_t> salts_;  // of each feature
  std::vector<Term> terms_;
  std::vector<int64_t> ends_;  // of each listed example's terms
  // Of a step: of each bucket in it, gradients of its factors and its number.
  std::vector<float> gradients_;
  std::vector<float*> learning_;  // these buckets
};

template <int kFactors>
inline float Pilot::LogOdds(int64_t begin, int64_t end, float* sum) const {
  // Four numbers at a time, as GCC does not by itself.
  using Four = float __attribute__((vector_size(16)));
  constexpr int kFours = kFactors / 4;
  Four totals[kFours + 1] = {}, squares[kFours + 1] = {};
  float linear = base_log_odds_;
  const Term* const last = terms_.data() + end;
  for (const Term* term = terms_.data() + begin; term < last; ++term) {
    const float share = term->share;
    const auto* const factors = reinterpret_cast<const Four*>(term->bucket);
    for (int v = 0; v < kFours; ++v) {
      const Four value = share * factors[v];
      totals[v] += value;
      squares[v] += value * value;
    }
    linear += share * term->bucket[kFactors];
  }
  float pairs = 0.0f;
  for (int d = 0; d < kFactors; ++d) {
    sum[d] = totals[d / 4][d % 4];
    pairs += sum[d] * sum[d] - squares[d / 4][d % 4];
  }
  return linear + 0.5f * pairs;
}

template <int kFactors>
inline void Pilot::Collect(int64_t begin, int64_t end, const float* sum, float gradient) {
  for (int64_t t = begin; t < end; ++t) {
    float* const bucket = terms_[t].bucket;
    const float slope = gradient * terms_[t].share;
    uint32_t index;
    std::memcpy(&index, bucket + kFactors + 3, sizeof(index));
    if (index == 0) {
      // Where memory ends, all that is there is still sound.
      gradients_.resize((learning_.size() + 1) * (kFactors + 1), 0.0f);
      learning_.push_back(bucket);
      index = static_cast<uint32_t>(learning_.size());
      std::memcpy(bucket + kFactors + 3, &index, sizeof(index));
    }
    float* const gradients = gradients_.data() + (index - 1) * (kFactors + 1);
    for (int d = 0; d < kFactors; ++d) {
      gradients[d] += slope * (sum[d] - terms_[t].share * bucket[d]);
    }
    gradients[kFactors] += slope;
  }
}

template <int kFactors>
inline void Pilot::Learn() {
  const auto rate_after = [](float square, float* accumulator) {
    *accumulator += square;
    return static_cast<float>(kLearningRate) /
           std::sqrt(*accumulator + static_cast<float>(kFirstAccumulator));
  };
  const float* gradients = gradients_.data();
  for (float* const bucket : learning_) {
    const float slope = gradients[kFactors];
    bucket[kFactors] -= slope * rate_after(slope * slope, &bucket[kFactors + 1]);
    if constexpr (kFactors > 0) {
      float squares = 0.0f;
      for (int d = 0; d < kFactors; ++d) squares += gradients[d] * gradients[d];
      const float rate = rate_after(squares / kFactors, &bucket[kFactors + 2]);
      for (int d = 0; d < kFactors; ++d) bucket[d] -= rate * gradients[d];
    }
    bucket[kFactors + 3] = 0.0f;
    gradients += kFactors + 1;
  }
  gradients_.clear();
  learning_.clear();
}

template <int kFactors, class Decide>
inline void Pilot::ForEachOf(const std::vector<FeatureView>& features, int num_tables,
                             int64_t batch, const Decide& decide) {
  float sum[kFactors + 1];
  for (int64_t begin = 0; begin < batch; begin += kExamplesAtOnce) {
    const int64_t end = std::min(batch, begin + kExamplesAtOnce);
    List(features, num_tables, begin, end);
    int64_t term = 0;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t term_end = ends_[i - begin];
      const float probability = Probability(LogOdds<kFactors>(term, term_end, sum));
      const Lesson lesson = decide(i, probability);
      labels_ += lesson.label;
      ++examples_;
      if (lesson.weight > 0.0f) {
        Collect<kFactors>(term, term_end, sum, lesson.weight * (probability - lesson.label));
      }
      term = term_end;
    }
    if (end % kExamplesOfAStep == 0 || end == batch) {
      Learn<kFactors>();
      FollowBaseRate();
    }
  }
}

template <class Decide>
void Pilot::ForEach(const std::vector<FeatureView>& features, int num_tables, int64_t batch,
                    const Decide& decide) {
  if (padded_ == 8) {
    ForEachOf<8>(features, num_tables, batch, decide);
  } else if (padded_ == 4) {
    ForEachOf<4>(features, num_tables, batch, decide);
  } else {
    ForEachOf<0>(features, num_tables, batch, decide);
  }
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_PILOT_H_
