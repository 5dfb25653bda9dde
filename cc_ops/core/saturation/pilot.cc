#include "cc_ops/core/saturation/pilot.h"

#include <cmath>
#include <cstring>
#include <string>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/simd_clones.h"

namespace slipstream {
namespace {

// Factors are initialized uniformly within this bound.
constexpr float kFirstFactor = 0.05f;

float LogOddsOf(double rate) {
  constexpr double kMin = 1e-6;  // The first step may have only one label.
  const double bounded = std::clamp(rate, kMin, 1.0 - kMin);
  return static_cast<float>(std::log(bounded / (1.0 - bounded)));
}

// Type of a key's factor. GCC vectorizes this type, but not an equivalent loop.
template <int kFactors>
struct FactorOf;
template <>
struct FactorOf<0> {
  using Type = float;  // Unused, because there is no factor.
};
template <>
struct FactorOf<4> {
  using Type = float __attribute__((vector_size(16), may_alias));
};
template <>
struct FactorOf<8> {
  using Type = float __attribute__((vector_size(32), may_alias));
};
template <int kFactors>
using Factor = typename FactorOf<kFactors>::Type;

template <class Vector>
SLIPSTREAM_ALWAYS_INLINE float SumOf(const Vector& values) {
  float sum = 0.0f;
  for (size_t d = 0; d < sizeof(values) / sizeof(float); ++d) sum += values[d];
  return sum;
}

}  // namespace

Status Pilot::Validate(const PilotOptions& options) {
  const bool has_keys = options.kind == PilotKind::kLinear || options.kind == PilotKind::kFm;
  if (!has_keys) return OkStatus();
  if (options.factors < 1 || options.factors > kMaxFactors) {
    return InvalidArgument("pilot_factors is " + std::to_string(options.factors) +
                           "; expected an integer from 1 to " + std::to_string(kMaxFactors));
  }
  constexpr int64_t kMin = 1024;
  if (options.memory_bytes < kMin) {
    return InvalidArgument("pilot_memory_bytes is " + std::to_string(options.memory_bytes) +
                           "; expected at least " + std::to_string(kMin));
  }
  return OkStatus();
}

Pilot::Pilot(const PilotOptions& options) : options_(options) {
  const bool is_fm = options.kind == PilotKind::kFm;
  if (!is_fm && options.kind != PilotKind::kLinear) return;
  padded_ = !is_fm ? 0 : options.factors <= 4 ? 4 : 8;
  // Buckets do not cross cache lines.
  width_ = padded_ == 0 ? 4 : padded_ == 4 ? 8 : 16;
  const int64_t bucket_bytes = width_ * static_cast<int64_t>(sizeof(float));
  num_buckets_ = options.memory_bytes / bucket_bytes;
  memory_ = PageMemory(static_cast<size_t>(num_buckets_ * bucket_bytes));
  numbers_ = reinterpret_cast<float*>(memory_.data());
  Start();
}

void Pilot::Start() {
  learning_.clear();
  factor_gradients_.clear();
  number_gradients_.clear();
  labels_ = 0.0;
  labelled_ = 0;
  base_rate_ = 0.5;
  base_steps_ = 0;
  base_log_odds_ = 0.0f;
  const int factors = padded_ == 0 ? 0 : options_.factors;
  for (int64_t b = 0; b < num_buckets_; ++b) {
    float* const bucket = numbers_ + b * width_;
    std::fill_n(bucket, width_, 0.0f);
    for (int d = 0; d < factors; ++d) {
      const uint64_t random = Mix64(static_cast<uint64_t>(b * kMaxFactors + d));
      bucket[d] = kFirstFactor * (static_cast<float>(random >> 40) * 0x1.0p-23f - 1.0f);
    }
  }
}

void Pilot::FollowBaseRate() {
  // Mean over at most this many steps, because the base rate may change.
  constexpr int64_t kMaxSteps = 1000;
  if (labelled_ == 0) return;
  base_steps_ = std::min(base_steps_ + 1, kMaxSteps);
  const double rate = labels_ / static_cast<double>(labelled_);
  base_rate_ += (rate - base_rate_) / static_cast<double>(base_steps_);
  base_log_odds_ = LogOddsOf(base_rate_);
  labels_ = 0.0;
  labelled_ = 0;
}

inline float* Pilot::BucketOf(int64_t key, uint64_t salt) const {
  const uint64_t hash = Mix64(static_cast<uint64_t>(key) ^ salt);
  const uint64_t index = ScaleHash(hash, static_cast<uint64_t>(num_buckets_));
  float* const bucket = numbers_ + index * static_cast<uint64_t>(width_);
  __builtin_prefetch(bucket, 1);
  return bucket;
}

Pilot::Term* Pilot::ListKeys(const FeatureView& feature, uint64_t salt, int64_t example,
                             Term* term) const {
  Term* const first = term;
  const int64_t end = feature.end(example);
  for (int64_t position = feature.begin(example); position < end; ++position) {
    if (!feature.is_key(position)) continue;
    *term++ = {BucketOf(feature.keys[position], salt), 1.0f, 0};
  }
  const auto keys = static_cast<float>(term - first);
  if (keys > 1.0f) {
    for (Term* t = first; t < term; ++t) t->share = 1.0f / keys;
  }
  return term;
}

void Pilot::List(const std::vector<FeatureView>& features, int num_tables, int64_t begin,
                 int64_t end) {
  examples_.resize(static_cast<size_t>(end - begin));
  for (Example& example : examples_) example.end = 0;
  if (num_buckets_ == 0) return;
  int64_t maximum = 0;
  for (const FeatureView& feature : features) {
    // The keys of consecutive examples are adjacent in both layouts.
    maximum += feature.row_splits != nullptr ? feature.begin(end) - feature.begin(begin)
                                             : (end - begin) * feature.width;
  }
  if (terms_.size() < static_cast<size_t>(maximum)) terms_.resize(static_cast<size_t>(maximum));
  // The number of a feature separates its keys from the keys of other features with the same table.
  while (salts_.size() < features.size()) salts_.push_back(Mix64(~uint64_t{salts_.size()}));
  Term* term = terms_.data();
  for (int64_t i = begin; i < end; ++i) {
    for (size_t f = 0; f < features.size(); ++f) {
      const FeatureView& feature = features[f];
      if (feature.table == num_tables) continue;
      if (feature.row_splits == nullptr && feature.width == 1) {
        const int64_t position = i * feature.stride;
        if (!feature.is_key(position)) continue;
        *term++ = {BucketOf(feature.keys[position], salts_[f]), 1.0f, 0};
      } else {
        term = ListKeys(feature, salts_[f], i, term);
      }
    }
    examples_[static_cast<size_t>(i - begin)].end = term - terms_.data();
  }
}

template <int kFactors>
SLIPSTREAM_ALWAYS_INLINE void Pilot::PredictWith() {
  const Term* term = terms_.data();
  for (Example& example : examples_) {
    Factor<kFactors> sum = {}, squares = {};
    float log_odds = base_log_odds_;
    for (const Term* const end = terms_.data() + example.end; term < end; ++term) {
      log_odds += term->share * term->bucket[kFactors];
      if constexpr (kFactors > 0) {
        const auto factor = term->share * *reinterpret_cast<Factor<kFactors>*>(term->bucket);
        sum += factor;
        squares += factor * factor;
      }
    }
    if constexpr (kFactors > 0) {
      *reinterpret_cast<Factor<kFactors>*>(example.sum) = sum;
      log_odds += 0.5f * SumOf(sum * sum - squares);
    }
    example.probability = 1.0f / (1.0f + std::exp(-log_odds));
  }
}

SLIPSTREAM_SIMD_CLONES void Pilot::Predict() {
  if (padded_ == 8) {
    PredictWith<8>();
  } else if (padded_ == 4) {
    PredictWith<4>();
  } else {
    PredictWith<0>();
  }
}

// Adds the buckets of the listed examples to the current step.
void Pilot::Enlist() {
  // Allocate here, before anything changes.
  const size_t maximum = learning_.size() + static_cast<size_t>(examples_.back().end);
  if (number_gradients_.size() < maximum) {
    learning_.reserve(2 * maximum);
    factor_gradients_.resize((2 * maximum * padded_ + 7) / 8);
    number_gradients_.resize(2 * maximum);
  }
  Term* term = terms_.data();
  for (const Example& example : examples_) {
    Term* const end = terms_.data() + example.end;
    for (; example.slope != 0.0f && term < end; ++term) {
      float* const note = term->bucket + padded_ + 3;
      std::memcpy(&term->index, note, sizeof(term->index));
      if (term->index == 0) {
        learning_.push_back(term->bucket);
        term->index = static_cast<uint32_t>(learning_.size());
        std::memcpy(note, &term->index, sizeof(term->index));
      }
      --term->index;
      __builtin_prefetch(factor_gradients() + term->index * padded_, 1);
    }
    term = end;
  }
}

template <int kFactors>
SLIPSTREAM_ALWAYS_INLINE void Pilot::CollectOf() {
  float* const gradients = factor_gradients();
  const Term* term = terms_.data();
  for (const Example& example : examples_) {
    const Term* const end = terms_.data() + example.end;
    for (; example.slope != 0.0f && term < end; ++term) {
      const float slope = example.slope * term->share;
      number_gradients_[term->index] += slope;
      if constexpr (kFactors > 0) {
        const auto& sum = *reinterpret_cast<const Factor<kFactors>*>(example.sum);
        const auto& factor = *reinterpret_cast<const Factor<kFactors>*>(term->bucket);
        *reinterpret_cast<Factor<kFactors>*>(gradients + term->index * kFactors) +=
            slope * (sum - term->share * factor);
      }
    }
    term = end;
  }
}

SLIPSTREAM_SIMD_CLONES void Pilot::Collect() {
  if (num_buckets_ == 0) return;
  Enlist();
  if (padded_ == 8) {
    CollectOf<8>();
  } else if (padded_ == 4) {
    CollectOf<4>();
  } else {
    CollectOf<0>();
  }
}

template <int kFactors>
SLIPSTREAM_ALWAYS_INLINE void Pilot::LearnOf() {
  float* const gradients = factor_gradients();
  for (size_t i = 0; i < learning_.size(); ++i) {
    float* const bucket = learning_[i];
    const float slope = number_gradients_[i];
    auto* const gradient = reinterpret_cast<Factor<kFactors>*>(gradients + i * kFactors);
    // Mean squared gradients of the number and of the factor.
    float squares[2] = {slope * slope, 0.0f}, rates[2];
    if constexpr (kFactors > 0) squares[1] = SumOf(*gradient * *gradient) / kFactors;
    for (int d = 0; d < 2; ++d) {
      float* const accumulator = &bucket[kFactors + 1 + d];
      *accumulator += squares[d];
      rates[d] = static_cast<float>(kLearningRate) /
                 std::sqrt(*accumulator + static_cast<float>(kFirstAccumulator));
    }
    bucket[kFactors] -= slope * rates[0];
    number_gradients_[i] = 0.0f;
    if constexpr (kFactors > 0) {
      *reinterpret_cast<Factor<kFactors>*>(bucket) -= rates[1] * *gradient;
      *gradient = Factor<kFactors>{};
    }
    bucket[kFactors + 3] = 0.0f;
  }
  learning_.clear();
}

SLIPSTREAM_SIMD_CLONES void Pilot::Learn() {
  if (padded_ == 8) {
    LearnOf<8>();
  } else if (padded_ == 4) {
    LearnOf<4>();
  } else {
    LearnOf<0>();
  }
}

Pilot::State Pilot::Export() const {
  State state;
  state.width = width_;
  state.base = {base_rate_, static_cast<double>(base_steps_)};
  for (int64_t b = 0; b < num_buckets_; ++b) {
    const float* const bucket = numbers_ + b * width_;
    if (bucket[padded_ + 1] == 0.0f) continue;
    state.buckets.push_back(b);
    state.numbers.insert(state.numbers.end(), bucket, bucket + width_);
    state.numbers[state.numbers.size() - width_ + padded_ + 3] = 0.0f;
  }
  return state;
}

Status Pilot::Import(const State& state) {
  if (state.base.size() != 2 || state.numbers.size() != state.buckets.size() * width_) {
    return InvalidArgument("the pilot state to import has " + std::to_string(state.numbers.size()) +
                           " numbers for " + std::to_string(state.buckets.size()) +
                           " buckets; expected " + std::to_string(width_) + " per bucket");
  }
  int64_t minimum = 0;
  for (const int64_t bucket : state.buckets) {
    if (bucket < minimum || bucket >= num_buckets_) {
      return InvalidArgument("the pilot state to import has bucket " + std::to_string(bucket) +
                             "; expected ascending buckets, the next from " +
                             std::to_string(minimum) + " to " + std::to_string(num_buckets_ - 1));
    }
    minimum = bucket + 1;
  }
  const auto is_finite = [](float number) { return std::isfinite(number); };
  if (!std::all_of(state.numbers.begin(), state.numbers.end(), is_finite) ||
      !(state.base[0] >= 0.0 && state.base[0] <= 1.0 && state.base[1] >= 0.0)) {
    return InvalidArgument("the pilot state to import has base [" + std::to_string(state.base[0]) +
                           ", " + std::to_string(state.base[1]) +
                           "] or numbers that are not finite; expected finite numbers, a base rate "
                           "from 0 to 1 and at least 0 steps");
  }
  Start();
  base_rate_ = state.base[0];
  base_steps_ = static_cast<int64_t>(std::min(state.base[1], 1e6));
  base_log_odds_ = LogOddsOf(base_rate_);
  for (size_t i = 0; i < state.buckets.size(); ++i) {
    float* const bucket = numbers_ + state.buckets[i] * width_;
    std::copy_n(state.numbers.begin() + i * width_, width_, bucket);
    bucket[padded_ + 3] = 0.0f;
  }
  return OkStatus();
}

}  // namespace slipstream
