#include "cc_ops/core/input_classifier.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>

#include "cc_ops/core/skip_score.h"

namespace slipstream {
namespace {

// Apart from the reservoir's stream, so that skipping at random does not bias the sample.
constexpr uint64_t kRandomSkipStream = 0x5851f42d4c957f2dULL;
// Lookups ahead of the one being read; hides the latency of an index beyond the caches.
constexpr size_t kPrefetchDistance = 16;

// Uniform in [0, 1): the 53 bits that a double holds.
double UnitInterval(uint64_t random) { return static_cast<double>(random >> 11) * 0x1.0p-53; }

// Lists the lookups input by input; input i's end at (*ends)[i].
void ListLookups(const std::vector<FeatureView>& features, int64_t batch,
                 std::vector<Lookup>* lookups, std::vector<int64_t>* ends) {
  lookups->clear();
  ends->resize(batch);
  for (int64_t i = 0; i < batch; ++i) {
    for (const FeatureView& feature : features) {
      const int64_t end = feature.end(i);
      for (int64_t position = feature.begin(i); position < end; ++position) {
        if (feature.is_key(position)) lookups->push_back({feature.keys[position], feature.table});
      }
    }
    (*ends)[i] = static_cast<int64_t>(lookups->size());
  }
}

}  // namespace

Status InputClassifier::Validate(const ClassifierOptions& options) {
  if (!(options.alpha > 0.0 && options.alpha <= 1.0)) {
    return InvalidArgument("alpha is " + std::to_string(options.alpha) +
                           "; allowed: above 0, at most 1");
  }
  if (options.num_tables < 1) {
    return InvalidArgument("num_tables is " + std::to_string(options.num_tables) +
                           "; allowed: at least 1");
  }
  if (options.reservoir_size < 1) {
    return InvalidArgument("reservoir_size is " + std::to_string(options.reservoir_size) +
                           "; allowed: at least 1 input");
  }
  return OkStatus();
}

InputClassifier::InputClassifier(const ClassifierOptions& options)
    : options_(options), reservoir_(options.reservoir_size, options.seed) {}

Status InputClassifier::Classify(const std::vector<FeatureView>& features, int64_t batch,
                                 bool observe, bool* skippable, float* score) {
  for (size_t f = 0; f < features.size(); ++f) {
    if (features[f].table < 0 || features[f].table >= options_.num_tables) {
      return InvalidArgument("table of feature " + std::to_string(f) + " is " +
                             std::to_string(features[f].table) + "; allowed: 0 to " +
                             std::to_string(options_.num_tables - 1));
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool has_drifts = index_.size() > 0;
  if (has_drifts || observe) ListLookups(features, batch, &lookups_, &ends_);
  const uint64_t random_seed = options_.seed ^ kRandomSkipStream;
  ClassifierCounts counts;
  counts.inputs_seen = batch;
  size_t prefetched = 0;
  for (int64_t i = 0, begin = 0; i < batch; ++i) {
    score[i] = DriftIndex::kUntracked;
    if (has_drifts || observe) {
      const int64_t end = ends_[i];
      if (has_drifts) {
        const size_t ahead = std::min(lookups_.size(), end + kPrefetchDistance);
        for (; prefetched < ahead; ++prefetched) index_.Prefetch(lookups_[prefetched]);
        score[i] =
            SkipScore(index_, options_.alpha, lookups_.data() + begin, end - begin, &scratch_);
      }
      if (observe) reservoir_.Offer(lookups_.data() + begin, end - begin);
      begin = end;
    }
    switch (mode_) {
      case SkipMode::kNone:
        skippable[i] = false;
        break;
      case SkipMode::kDrift:
        skippable[i] = score[i] < threshold_;
        break;
      case SkipMode::kRandom:
        skippable[i] =
            UnitInterval(CounterRandom(random_seed, inputs_observed_ + i)) < random_share_;
        break;
    }
    counts.inputs_skipped += skippable[i] ? 1 : 0;
    counts.hot_inputs += std::isfinite(score[i]) ? 1 : 0;
  }
  if (observe) {
    inputs_observed_ += batch;
    counts_.inputs_seen += counts.inputs_seen;
    counts_.inputs_skipped += counts.inputs_skipped;
    counts_.hot_inputs += counts.hot_inputs;
  }
  return OkStatus();
}

Status InputClassifier::SetDrift(const int32_t* tables, const int64_t* keys, const float* drifts,
                                 int64_t n) {
  DriftIndex index;  // built outside the lock: classification goes on meanwhile
  Status status = index.Build(options_.num_tables, tables, keys, drifts, n);
  if (!status.ok()) return status;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::swap(index_, index);
  return OkStatus();
}

Status InputClassifier::Configure(SkipMode mode, float threshold, double random_share) {
  if (!(threshold >= 0.0f)) {
    return InvalidArgument("threshold is " + std::to_string(threshold) + "; allowed: at least 0");
  }
  if (!(random_share >= 0.0 && random_share <= 1.0)) {
    return InvalidArgument("random_share is " + std::to_string(random_share) + "; allowed: 0 to 1");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  mode_ = mode;
  threshold_ = threshold;
  random_share_ = random_share;
  return OkStatus();
}

std::vector<float> InputClassifier::ReservoirScores() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<float> scores(reservoir_.size());
  std::vector<float> scratch;
  for (int64_t i = 0; i < reservoir_.size(); ++i) {
    const std::vector<Lookup>& lookups = reservoir_.input(i);
    scores[i] = SkipScore(index_, options_.alpha, lookups.data(),
                          static_cast<int64_t>(lookups.size()), &scratch);
  }
  return scores;
}

ClassifierCounts InputClassifier::EndWindow() {
  const std::lock_guard<std::mutex> lock(mutex_);
  reservoir_.Clear();
  return std::exchange(counts_, ClassifierCounts());
}

}  // namespace slipstream
