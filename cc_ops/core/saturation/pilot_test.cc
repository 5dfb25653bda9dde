#include "cc_ops/core/saturation/pilot.h"

#include <cmath>
#include <limits>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/saturation/input_classifier.h"
#include "gtest/gtest.h"

namespace slipstream {
namespace {

PilotOptions Options(PilotKind kind, int factors = 4, int64_t bytes = 1 << 16) {
  PilotOptions options;
  options.kind = kind;
  options.factors = factors;
  options.memory_bytes = bytes;
  return options;
}

// Two features with one key each.
struct Batch {
  std::vector<int64_t> first, second;
  std::vector<float> labels;

  std::vector<FeatureView> features() const {
    std::vector<FeatureView> views(2);
    for (int f = 0; f < 2; ++f) {
      views[f].table = 0;
      views[f].batch = views[f].num_keys = static_cast<int64_t>(labels.size());
      views[f].keys = f == 0 ? first.data() : second.data();
    }
    return views;
  }
};

// The label is 1 if both keys are even or both are odd, which no sum of two numbers per key
// predicts.
Batch Parity(int64_t n, uint64_t seed) {
  Batch batch;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t random = CounterRandom(seed, static_cast<uint64_t>(i));
    batch.first.push_back(static_cast<int64_t>(random % 8));
    batch.second.push_back(static_cast<int64_t>((random >> 8) % 8));
    batch.labels.push_back((batch.first.back() + batch.second.back()) % 2 == 0 ? 1.0f : 0.0f);
  }
  return batch;
}

// Returns the mean of |label - prediction|, with or without learning.
double MeanResidual(Pilot* pilot, const Batch& batch, bool is_learning) {
  double sum = 0.0;
  const auto n = static_cast<int64_t>(batch.labels.size());
  pilot->ForEach(batch.features(), 1, n, [&](int64_t i, float probability) {
    sum += std::fabs(batch.labels[i] - probability);
    return Lesson{batch.labels[i], is_learning ? 1.0f : 0.0f};
  });
  return sum / static_cast<double>(n);
}

TEST(PilotTest, FactorsLearnKeyPairs) {
  for (int factors : {1, 4, 5, 8}) {
    Pilot pilot(Options(PilotKind::kFm, factors));
    MeanResidual(&pilot, Parity(200000, 1), true);
    EXPECT_LT(MeanResidual(&pilot, Parity(1000, 2), false), 0.05) << factors;
  }
  Pilot linear(Options(PilotKind::kLinear));
  MeanResidual(&linear, Parity(200000, 1), true);
  EXPECT_GT(MeanResidual(&linear, Parity(1000, 2), false), 0.45);
}

TEST(PilotTest, LinearLearnsKeysAndLabelLearnsBaseRate) {
  Batch batch = Parity(200000, 3);
  for (size_t i = 0; i < batch.labels.size(); ++i) batch.labels[i] = batch.first[i] == 0;
  Pilot linear(Options(PilotKind::kLinear)), label(Options(PilotKind::kLabel));
  MeanResidual(&linear, batch, true);
  // The base rate would give 2 * 1/8 * 7/8 = 0.22.
  EXPECT_LT(MeanResidual(&linear, batch, false), 0.1);
  MeanResidual(&label, batch, true);
  label.ForEach(batch.features(), 1, 1, [](int64_t, float probability) {
    EXPECT_NEAR(probability, 1.0 / 8.0, 0.03);
    return Lesson();
  });
}

TEST(PilotTest, AveragesMultipleKeysAndIgnoresPadding) {
  // A feature with three keys, including padding, and a feature with the two other keys.
  const std::vector<int64_t> padded = {5, -1, 7}, alone = {5, 7};
  FeatureView wide;
  wide.batch = 1;
  wide.keys = padded.data();
  wide.num_keys = wide.width = wide.stride = 3;
  wide.has_padding = true;
  FeatureView narrow = wide;
  narrow.keys = alone.data();
  narrow.num_keys = narrow.width = narrow.stride = 2;
  narrow.has_padding = false;
  Pilot pilot(Options(PilotKind::kFm));
  for (int turn = 0; turn < 5; ++turn) {
    pilot.ForEach({wide}, 1, 1, [&](int64_t, float) { return Lesson{1.0f, 1.0f}; });
  }
  Pilot::State state = pilot.Export();
  state.base = {0.5, 1.0};
  const auto predicted = [&](const FeatureView& feature) {
    Pilot fresh(Options(PilotKind::kFm));
    EXPECT_TRUE(fresh.Import(state).ok());
    float found = 0.0f;
    fresh.ForEach({feature}, 1, 1, [&](int64_t, float probability) {
      found = probability;
      return Lesson();
    });
    return found;
  };
  EXPECT_EQ(predicted(wide), predicted(narrow));
  EXPECT_GT(predicted(wide), 0.5f);
  // A feature of table num_tables is ignored, which leaves the base rate.
  narrow.table = 1;
  EXPECT_EQ(predicted(narrow), 0.5f);
  EXPECT_LT(predicted(narrow), predicted(wide));
}

TEST(PilotTest, ContinuesIdenticallyAfterExport) {
  Pilot pilot(Options(PilotKind::kFm)), other(Options(PilotKind::kFm));
  MeanResidual(&pilot, Parity(500, 4), true);
  const Pilot::State state = pilot.Export();
  EXPECT_FALSE(state.buckets.empty());
  ASSERT_TRUE(other.Import(state).ok());
  EXPECT_EQ(MeanResidual(&pilot, Parity(500, 5), true), MeanResidual(&other, Parity(500, 5), true));

  Pilot::State wrong = state;
  wrong.numbers.pop_back();
  EXPECT_FALSE(other.Import(wrong).ok());
  wrong = state;
  wrong.buckets.back() = pilot.num_buckets();
  EXPECT_FALSE(other.Import(wrong).ok());
  wrong = state;
  wrong.numbers[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(other.Import(wrong).ok());
  // The failed imports changed nothing.
  EXPECT_EQ(MeanResidual(&pilot, Parity(500, 6), false),
            MeanResidual(&other, Parity(500, 6), false));
}

TEST(PilotTest, RejectsOptionsOutOfRange) {
  EXPECT_FALSE(Pilot::Validate(Options(PilotKind::kFm, 0)).ok());
  EXPECT_FALSE(Pilot::Validate(Options(PilotKind::kFm, 9)).ok());
  EXPECT_FALSE(Pilot::Validate(Options(PilotKind::kLinear, 4, 1023)).ok());
  EXPECT_TRUE(Pilot::Validate(Options(PilotKind::kLabel, 4, 0)).ok());
}

ClassifierOptions OptionsWith(PilotKind kind) {
  ClassifierOptions options;
  options.pilot = Options(kind);
  return options;
}

TEST(SubsamplingTest, KeptExamplesAreUnbiasedSample) {
  InputClassifier classifier(OptionsWith(PilotKind::kFm));
  ClassifierSettings settings;
  settings.mode = SkipMode::kPredictedLoss;
  settings.threshold = 0.8f;
  settings.keep_rate = 0.05;
  ASSERT_TRUE(classifier.Configure(settings).ok());
  double stands_for = 0.0, positives = 0.0, true_positives = 0.0;
  int64_t kept_inputs = 0;
  constexpr int64_t kBatch = 1000, kBatches = 100;
  for (int64_t b = 0; b < kBatches; ++b) {
    const Batch batch = Parity(kBatch, static_cast<uint64_t>(b));
    KeptInputs kept;
    ASSERT_TRUE(classifier.Subsample(batch.features(), kBatch, {batch.labels.data()}, &kept).ok());
    for (size_t k = 0; k < kept.rows.size(); ++k) {
      stands_for += kept.weights[k];
      positives += kept.weights[k] * batch.labels[kept.rows[k]];
      EXPECT_LE(kept.weights[k], 20.001f);
      EXPECT_EQ(kept.weights[k] > 1.0f, kept.skippable[k] != 0);
    }
    for (const float label : batch.labels) true_positives += label;
    kept_inputs += static_cast<int64_t>(kept.rows.size());
  }
  constexpr double kAll = kBatch * kBatches;
  // The pilot learned the pairs, therefore it predicts nearly all labels, and few examples are
  // kept.
  EXPECT_LT(static_cast<double>(kept_inputs), 0.2 * kAll);
  EXPECT_NEAR(stands_for / kAll, 1.0, 0.05);
  EXPECT_NEAR(positives / true_positives, 1.0, 0.05);
  const ClassifierCounts counts = classifier.EndWindow();
  EXPECT_EQ(counts.inputs_seen, kBatch * kBatches);
  EXPECT_EQ(counts.inputs_skipped, kBatch * kBatches - kept_inputs);
}

TEST(SubsamplingTest, KeepsAllBeforeConfigurationAndInShadowMode) {
  InputClassifier classifier(OptionsWith(PilotKind::kLabel));
  const Batch batch = Parity(100, 1);
  for (const bool is_shadow : {false, true}) {
    if (is_shadow) {
      ClassifierSettings settings;
      settings.mode = SkipMode::kPredictedLoss;
      settings.threshold = 1.0f;
      settings.keep_rate = 0.1;
      settings.is_shadow = true;
      ASSERT_TRUE(classifier.Configure(settings).ok());
    }
    KeptInputs kept;
    ASSERT_TRUE(classifier.Subsample(batch.features(), 100, {batch.labels.data()}, &kept).ok());
    EXPECT_EQ(kept.rows.size(), 100u);
    for (size_t k = 0; k < kept.rows.size(); ++k) {
      EXPECT_EQ(kept.weights[k], 1.0f);
      EXPECT_EQ(kept.offsets[k], 0.0f);
    }
  }
  EXPECT_EQ(classifier.ReservoirLosses().size(), 200u);
  EXPECT_GT(classifier.EndWindow().inputs_skippable, 90);
}

TEST(SubsamplingTest, OffsetIsRatioOfKeepProbabilities) {
  InputClassifier classifier(OptionsWith(PilotKind::kModel));
  ClassifierSettings settings;
  settings.mode = SkipMode::kPredictedLoss;
  settings.threshold = 0.5f;
  settings.keep_rate = 0.01;
  ASSERT_TRUE(classifier.Configure(settings).ok());
  const Batch batch = Parity(1000, 2);
  const std::vector<float> predictions(1000, 0.1f);
  KeptInputs kept;
  const LabeledInputs inputs = {batch.labels.data(), nullptr, predictions.data()};
  ASSERT_TRUE(classifier.Subsample(batch.features(), 1000, inputs, &kept).ok());
  int64_t negatives = 0;
  for (size_t k = 0; k < kept.rows.size(); ++k) {
    EXPECT_FLOAT_EQ(kept.offsets[k], std::log(1.0f / 0.2f));
    const bool is_negative = batch.labels[kept.rows[k]] == 0.0f;
    EXPECT_FLOAT_EQ(kept.weights[k], is_negative ? 5.0f : 1.0f);
    negatives += is_negative;
  }
  EXPECT_NEAR(static_cast<double>(negatives), 100.0, 40.0);
}

TEST(SubsamplingTest, RejectsInvalidInputAndStaysUnchanged) {
  InputClassifier classifier(OptionsWith(PilotKind::kFm));
  Batch batch = Parity(10, 1);
  std::vector<float> weights(10, 1.0f);
  weights[3] = -1.0f;
  KeptInputs kept;
  const LabeledInputs weighted = {batch.labels.data(), weights.data()};
  Status status = classifier.Subsample(batch.features(), 10, weighted, &kept);
  EXPECT_NE(status.message().find("sample_weights[3] is -1"), std::string::npos);
  batch.labels[7] = 1.5f;
  status = classifier.Subsample(batch.features(), 10, {batch.labels.data()}, &kept);
  EXPECT_NE(status.message().find("labels[7] is 1.5"), std::string::npos);
  EXPECT_EQ(classifier.EndWindow().inputs_seen, 0);
  EXPECT_TRUE(classifier.ExportPilot().buckets.empty());

  ClassifierSettings settings;
  settings.mode = SkipMode::kPredictedLoss;
  // Without a minimum probability, all examples might be dropped.
  EXPECT_FALSE(classifier.Configure(settings).ok());
  settings.keep_rate = 0.1;
  EXPECT_TRUE(classifier.Configure(settings).ok());
  InputClassifier without{ClassifierOptions()};
  EXPECT_FALSE(without.Configure(settings).ok());
}

}  // namespace
}  // namespace slipstream
