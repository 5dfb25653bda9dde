#include "cc_ops/core/saturation/input_classifier.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>

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

// Scores each input by what `index` has for its lookups.
void ScoreInputs(const DriftIndex& index, const ClassifierOptions& options,
                 const std::vector<FeatureView>& features, int64_t batch, InputLookups* inputs,
                 float* scores) {
  if (index.size() == 0) {
    std::fill(scores, scores + batch, DriftIndex::kUntracked);
    return;
  }
  inputs->Clear();
  for (int64_t i = 0; i < batch; ++i) {
    AppendLookups(features, i, options.num_tables, &inputs->lookups);
    inputs->EndInput();
  }
  SkipScores(index, options.alpha, inputs, scores);
}

// The loss that an input is scored by, if it has an entry and enough of its lookups have been
// saturated since the visit: `since` is the window from which on they are.
float RememberedScore(const LossMemory::Entry* entry, float since) {
  const bool is_valid = entry != nullptr && since <= static_cast<float>(entry->window);
  return is_valid ? entry->loss : DriftIndex::kUntracked;
}

Visit VisitOf(const LossMemory::Entry& entry, const ClassifierOptions& options, double keep_rate) {
  Visit visit;
  if (options.max_skips > 0) {
    const uint64_t most = static_cast<uint64_t>(options.max_skips);
    visit.is_due = entry.skips >= (entry.has_returned ? most : HashKey(entry.id) % (most + 1));
  }
  // With a keep rate, the inputs that were kept already stand for the skipped ones.
  if (options.weighs_visits && keep_rate == 0.0) visit.weight += static_cast<float>(entry.skips);
  return visit;
}

// What is remembered of an input after a decision on it.
void NoteDecision(const SkipDecision& decision, const Visit& visit, bool is_shadow,
                  LossMemory::Entry* entry) {
  if (decision.is_skippable && visit.is_due) {
    entry->has_returned = 1;
    // A visit does that, but in shadow mode those that were to be skipped are visited, too.
    if (is_shadow) entry->skips = 0;
  }
  if (!decision.is_kept && entry->skips < LossMemory::kLargestSkips) ++entry->skips;
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
  const Status status = Pilot::Validate(options.pilot);
  if (!status.ok() || options.loss_memory_bytes == 0) return status;
  return LossMemory::ValidateBudget(options.loss_memory_bytes);
}

InputClassifier::InputClassifier(const ClassifierOptions& options)
    : options_(options),
      pilot_(options.pilot),
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

std::pair<const Lookup*, int64_t> InputClassifier::LookupsOf(
    const std::vector<FeatureView>& features, int64_t i) {
  of_input_.clear();
  AppendLookups(features, i, options_.num_tables, &of_input_);
  return {of_input_.data(), static_cast<int64_t>(of_input_.size())};
}

int64_t InputClassifier::StrideOf(int64_t batch, int64_t window_batches) const {
  // Chosen inputs are to be few among those classified, as they are among all.
  constexpr int64_t kInputsPerChosen = 4;
  const bool skips_none = settings_.is_shadow || settings_.mode == SkipMode::kNone;
  if (window_batches <= 0 || batch <= 0 || !skips_none) return 1;
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
  if (settings.mode == SkipMode::kForeseenLoss) {
    return InvalidArgument("there are no labels; skipping by foreseen loss needs one per input");
  }
  const int64_t stride = observe && !by_loss ? StrideOf(batch, window_batches) : 1;
  ClassifierCounts counts;
  if (IsInStride(batch, stride)) {
    // Other calls may go on meanwhile: only since_ is guarded by mutex_.
    if (!by_loss) lock.unlock();
    ScoreInputs(by_loss ? since_ : index_, options_, features, batch, &scratch_, result.score);
    if (!by_loss) lock.lock();
    for (int64_t i = 0; i < batch; ++i) {
      LossMemory::Entry* const entry = ids == nullptr ? nullptr : memory_.Find(ids[i]);
      const float score = by_loss ? RememberedScore(entry, result.score[i]) : result.score[i];
      if (observe) {
        const float nothing = std::numeric_limits<float>::quiet_NaN();
        reservoir_.OfferListed(entry == nullptr ? nothing : entry->loss,
                               [&] { return LookupsOf(features, i); });
      }
      const bool has_visit = by_loss && entry != nullptr;
      const Visit visit = has_visit ? VisitOf(*entry, options_, settings.keep_rate) : Visit();
      const SkipDecision decision = slipstream::Classify(
          settings, options_.seed, score, inputs_observed_ + static_cast<uint64_t>(i), visit);
      if (has_visit && observe) NoteDecision(decision, visit, settings.is_shadow, entry);
      result.Write(i, score, decision);
      counts.inputs_skippable += decision.is_skippable;
      counts.inputs_skipped += decision.weight == 0.0f;
      counts.inputs_kept += decision.is_skippable && decision.is_kept;
      counts.hot_inputs += std::isfinite(score);
    }
  } else {
    for (int64_t i = 0; i < batch; ++i) result.Write(i, DriftIndex::kUntracked, SkipDecision());
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
  if (settings.mode == SkipMode::kForeseenLoss && options_.pilot.kind == PilotKind::kNone) {
    return InvalidArgument("the classifier has no pilot; skipping by foreseen loss needs one");
  }
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
    const TaskRange range = RangeOf(task, scorers, reservoir_.size());
    InputLookups inputs;
    for (int64_t i = range.begin; i < range.end; ++i) {
      const std::vector<Lookup>& lookups = reservoir_.input(i);
      inputs.lookups.insert(inputs.lookups.end(), lookups.begin(), lookups.end());
      inputs.EndInput();
    }
    SkipScores(index, options_.alpha, &inputs, scores->data() + range.begin);
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
