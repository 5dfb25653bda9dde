#include "cc_ops/core/saturation/input_classifier.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>

#include "cc_ops/core/saturation/skip_score.h"

namespace slipstream {
namespace {

// Appends the lookups of input i.
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

// Lists the lookups input by input; input i's end at (*ends)[i].
void ListLookups(const std::vector<FeatureView>& features, int64_t batch, int num_tables,
                 std::vector<Lookup>* lookups, std::vector<int64_t>* ends) {
  lookups->clear();
  ends->resize(batch);
  for (int64_t i = 0; i < batch; ++i) {
    AppendLookups(features, i, num_tables, lookups);
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
  if (options.max_skips < 0 || options.max_skips > static_cast<int>(LossMemory::kLargestSkips)) {
    return InvalidArgument("max_skips is " + std::to_string(options.max_skips) +
                           "; allowed: 0 to " + std::to_string(LossMemory::kLargestSkips));
  }
  if (options.loss_memory_bytes == 0) return OkStatus();
  return LossMemory::ValidateBudget(options.loss_memory_bytes);
}

InputClassifier::InputClassifier(const ClassifierOptions& options)
    : options_(options),
      memory_(options.loss_memory_bytes),
      reservoir_(options.reservoir_size, options.seed) {}

Status InputClassifier::Check(const std::vector<FeatureView>& features) const {
  for (size_t f = 0; f < features.size(); ++f) {
    if (features[f].table < 0 || features[f].table > options_.num_tables) {
      return InvalidArgument("table of feature " + std::to_string(f) + " is " +
                             std::to_string(features[f].table) + "; allowed: 0 to " +
                             std::to_string(options_.num_tables - 1) + ", or " +
                             std::to_string(options_.num_tables) + " to pass the feature over");
    }
  }
  return OkStatus();
}

void InputClassifier::ScoreByDrift(const std::vector<FeatureView>& features, int64_t batch,
                                   Scratch* scratch, float* scores) const {
  if (index_.size() == 0) {
    std::fill(scores, scores + batch, DriftIndex::kUntracked);
    return;
  }
  ListLookups(features, batch, options_.num_tables, &scratch->lookups, &scratch->ends);
  scratch->drifts.resize(scratch->lookups.size());
  float* drifts = scratch->drifts.data();
  index_.Find(scratch->lookups.data(), static_cast<int64_t>(scratch->lookups.size()), drifts);
  for (int64_t i = 0, begin = 0; i < batch; begin = scratch->ends[i], ++i) {
    scores[i] = SkipScore(options_.alpha, drifts + begin, scratch->ends[i] - begin);
  }
}

int64_t InputClassifier::StrideOf(int64_t batch, int64_t window_batches) const {
  // Chosen inputs are to be few among those classified, as they are among all.
  constexpr int64_t kInputsPerChosen = 4;
  const bool keeps_all = settings_.is_shadow || settings_.mode == SkipMode::kNone;
  if (window_batches <= 0 || batch <= 0 || !keeps_all) return 1;
  const double inputs = static_cast<double>(window_batches) * static_cast<double>(batch);
  const double enough = static_cast<double>(kInputsPerChosen * options_.reservoir_size);
  return static_cast<int64_t>(std::clamp(inputs / enough, 1.0, static_cast<double>(kMostStride)));
}

bool InputClassifier::IsInStride(int64_t batch, int64_t stride) const {
  if (stride == 1) return true;
  // One of every `stride` batches, at random: data may come in periods.
  constexpr uint64_t kStrideStream = 0x9fb21c651e98df25ULL;
  const uint64_t number = inputs_observed_ / static_cast<uint64_t>(batch);
  const auto n = static_cast<uint64_t>(stride);
  return number % n == CounterRandom(options_.seed ^ kStrideStream, number / n) % n;
}

Status InputClassifier::Classify(const std::vector<FeatureView>& features, int64_t batch,
                                 const int64_t* ids, bool observe, const Classified& result,
                                 int64_t window_batches) {
  const Status status = Check(features);
  if (!status.ok()) return status;
  const std::lock_guard<std::mutex> one_at_a_time(classifying_);
  std::unique_lock<std::mutex> lock(mutex_);
  const ClassifierSettings settings = settings_;
  const bool by_loss = settings.mode == SkipMode::kRememberedLoss;
  if (by_loss && ids == nullptr) {
    return InvalidArgument("there are no ids; skipping by remembered loss needs one per input");
  }
  const int64_t stride = observe && !by_loss ? StrideOf(batch, window_batches) : 1;
  if (!IsInStride(batch, stride)) {
    std::fill(result.skippable, result.skippable + batch, false);
    std::fill(result.score, result.score + batch, DriftIndex::kUntracked);
    std::fill(result.weight, result.weight + batch, 1.0f);
    inputs_observed_ += static_cast<uint64_t>(batch);
    counts_.inputs_seen += batch;
    return OkStatus();
  }
  if (by_loss) {
    ListLookups(features, batch, options_.num_tables, &scratch_.lookups, &scratch_.ends);
  } else {
    lock.unlock();
    ScoreByDrift(features, batch, &scratch_, result.score);
    lock.lock();
  }
  ClassifierCounts counts;
  for (int64_t i = 0; i < batch; ++i) {
    LossMemory::Entry* entry = ids == nullptr ? nullptr : memory_.Find(ids[i]);
    if (by_loss) {
      const int64_t begin = i == 0 ? 0 : scratch_.ends[i - 1];
      result.score[i] =
          RememberedScore(entry, scratch_.lookups.data() + begin, scratch_.ends[i] - begin);
    }
    const float score = result.score[i];
    if (observe) {
      const float nothing = std::numeric_limits<float>::quiet_NaN();
      reservoir_.OfferListed(entry == nullptr ? nothing : entry->loss, [&] {
        of_input_.clear();
        AppendLookups(features, i, options_.num_tables, &of_input_);
        return std::pair<const Lookup*, int64_t>(of_input_.data(), of_input_.size());
      });
    }
    const uint64_t number = inputs_observed_ + static_cast<uint64_t>(i);
    const bool is_skippable = IsSkippable(settings, options_.seed, score, number);
    const bool returns = by_loss && is_skippable && MustReturn(entry);
    float weight = returns ? 1.0f : WeightOf(settings, options_.seed, is_skippable, number);
    if (by_loss && entry != nullptr) {
      // With a keep rate, the inputs that were kept already stand for the skipped ones.
      const bool weighs = options_.weighs_visits && settings.keep_rate == 0.0;
      if (weight == 1.0f && weighs) weight += static_cast<float>(entry->skips);
      if (observe && returns) {
        entry->has_returned = 1;
        // A visit does that, but in shadow mode those that were to be skipped are visited, too.
        if (settings.is_shadow) entry->skips = 0;
      }
      if (observe && weight == 0.0f && entry->skips < LossMemory::kLargestSkips) ++entry->skips;
    }
    result.skippable[i] = is_skippable;
    const bool is_kept = weight > 0.0f;
    result.weight[i] = settings.is_shadow ? 1.0f : weight;
    counts.inputs_skippable += is_skippable;
    counts.inputs_skipped += !is_kept && !settings.is_shadow;
    counts.inputs_kept += is_skippable && is_kept;
    counts.hot_inputs += std::isfinite(score);
  }
  if (observe) {
    inputs_observed_ += static_cast<uint64_t>(batch);
    counts_.inputs_seen += batch;
    counts_.inputs_skipped += counts.inputs_skipped;
    counts_.hot_inputs += stride * counts.hot_inputs;
    counts_.inputs_skippable += stride * counts.inputs_skippable;
    counts_.inputs_kept += stride * counts.inputs_kept;
  }
  return OkStatus();
}

float InputClassifier::RememberedScore(const LossMemory::Entry* entry, const Lookup* lookups,
                                       int64_t m) {
  if (entry == nullptr) return DriftIndex::kUntracked;
  // Of the lookups that must be saturated, the one that became so last.
  const float since = SkipScore(since_, options_.alpha, lookups, m, &since_of_input_);
  return since <= static_cast<float>(entry->window) ? entry->loss : DriftIndex::kUntracked;
}

bool InputClassifier::MustReturn(const LossMemory::Entry* entry) const {
  if (options_.max_skips == 0) return false;
  const uint64_t most = static_cast<uint64_t>(options_.max_skips);
  const uint64_t limit = entry->has_returned ? most : HashKey(entry->id) % (most + 1);
  return entry->skips >= limit;
}

Status InputClassifier::SetDrift(const int32_t* tables, const int64_t* keys, const float* drifts,
                                 int64_t n, const Parallel& parallel) {
  DriftIndex index;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    index.Swap(&spare_);
  }
  // Built outside the locks: classification goes on meanwhile.
  const Status status = index.Rebuild(options_.num_tables, tables, keys, drifts, n, parallel);
  const std::lock_guard<std::mutex> between_batches(classifying_);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (status.ok()) index_.Swap(&index);
  spare_.Swap(&index);
  return status;
}

Status InputClassifier::SetSaturated(const int32_t* tables, const int64_t* keys, const float* since,
                                     int64_t n, const Parallel& parallel) {
  DriftIndex index;
  Status status = index.Build(options_.num_tables, tables, keys, since, n, parallel);
  if (!status.ok()) return status;
  const std::lock_guard<std::mutex> lock(mutex_);
  since_.Swap(&index);
  return OkStatus();
}

Status InputClassifier::Configure(const ClassifierSettings& settings) {
  const Status status = ValidateSettings(settings);
  if (!status.ok()) return status;
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
    std::vector<float> scratch;
    const TaskRange range = RangeOf(task, scorers, reservoir_.size());
    for (int64_t i = range.begin; i < range.end; ++i) {
      const std::vector<Lookup>& lookups = reservoir_.input(i);
      (*scores)[static_cast<size_t>(i)] = SkipScore(index, options_.alpha, lookups.data(),
                                                    static_cast<int64_t>(lookups.size()), &scratch);
    }
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

void InputClassifier::RecordLosses(const int64_t* ids, const float* losses, const float* labels,
                                   const bool* skippable, const float* weights, int64_t n) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t i = 0; i < n; ++i) {
    const bool is_finite = std::isfinite(losses[i]);
    if (ids != nullptr) {
      const LossMemory::Entry* entry = memory_.Find(ids[i]);
      if (entry != nullptr && skippable[i] && is_finite) {
        statistics_.paired.Add(static_cast<double>(losses[i]) - entry->loss);
      }
      // In shadow mode: would have been skipped, so that the loss would not be known.
      const bool is_unknown =
          settings_.is_shadow && skippable[i] && entry != nullptr && entry->skips > 0 && is_finite;
      if (!is_unknown) memory_.Record(ids[i], losses[i], settings_.window);
    }
    if (is_finite) {
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

std::vector<LossMemory::Entry> InputClassifier::ExportMemory() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return memory_.Export();
}

void InputClassifier::ImportMemory(const std::vector<LossMemory::Entry>& entries) {
  const std::lock_guard<std::mutex> lock(mutex_);
  memory_.Import(entries);
}

ClassifierWindow InputClassifier::ExportWindow() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  ClassifierWindow window;
  window.statistics = statistics_;
  window.counts = counts_;
  window.inputs_observed = inputs_observed_;
  window.largest_hash = memory_.largest_hash();
  window.reservoir = reservoir_.Export();
  return window;
}

Status InputClassifier::ImportWindow(const ClassifierWindow& window) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!reservoir_.Fits(window.reservoir)) {
    return InvalidArgument(
        "the sample of a window has " + std::to_string(window.reservoir.ends.size()) + " of " +
        std::to_string(window.reservoir.offered_in_window) +
        " inputs; allowed: all of them or reservoir_size, " +
        std::to_string(options_.reservoir_size) + ", each with its lookups and a loss");
  }
  for (const Lookup& lookup : window.reservoir.lookups) {
    if (lookup.table < 0 || lookup.table >= options_.num_tables) {
      return InvalidArgument("a sampled input looks up table " + std::to_string(lookup.table) +
                             "; allowed: 0 to " + std::to_string(options_.num_tables - 1));
    }
  }
  reservoir_.Import(window.reservoir);
  statistics_ = window.statistics;
  counts_ = window.counts;
  inputs_observed_ = window.inputs_observed;
  memory_.set_largest_hash(window.largest_hash);
  return OkStatus();
}

ClassifierCounts InputClassifier::EndWindow() {
  const std::lock_guard<std::mutex> lock(mutex_);
  reservoir_.Clear();
  ClassifierCounts counts = std::exchange(counts_, ClassifierCounts());
  // A window may have begun or ended between two batches that count for others.
  for (int64_t* count : {&counts.hot_inputs, &counts.inputs_skippable, &counts.inputs_kept}) {
    *count = std::min(*count, counts.inputs_seen);
  }
  return counts;
}

}  // namespace slipstream
