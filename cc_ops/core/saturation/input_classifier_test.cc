#include "cc_ops/core/saturation/input_classifier.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cc_ops/core/testing/test_threads.h"
#include "gtest/gtest.h"

namespace slipstream {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Result {
  std::vector<uint8_t> skippable;
  std::vector<float> score;
  std::vector<float> weight;
};

ClassifierSettings Settings(SkipMode mode, float threshold, double random_fraction) {
  ClassifierSettings settings;
  settings.mode = mode;
  settings.threshold = threshold;
  settings.random_fraction = random_fraction;
  return settings;
}

Result Classify(InputClassifier* classifier, const std::vector<FeatureView>& features,
                int64_t batch, bool observe = true) {
  Result result = {std::vector<uint8_t>(batch), std::vector<float>(batch),
                   std::vector<float>(batch)};
  const Classified out = {reinterpret_cast<bool*>(result.skippable.data()), result.score.data(),
                          result.weight.data()};
  EXPECT_TRUE(classifier->Classify(features, batch, observe, out).ok());
  return result;
}

FeatureView Column(const std::vector<int64_t>& keys, int table = 0) {
  FeatureView view;
  view.table = table;
  view.keys = keys.data();
  view.batch = view.num_keys = static_cast<int64_t>(keys.size());
  return view;
}

ClassifierOptions TwoTables() {
  ClassifierOptions options;
  options.num_tables = 2;
  options.reservoir_size = 16;
  return options;
}

constexpr int32_t kTables[] = {0, 0, 1};
constexpr int64_t kKeys[] = {1, 2, 1};
constexpr float kDrifts[] = {0.1f, 0.2f, 0.3f};

void SetDrift(InputClassifier* classifier) {
  ASSERT_TRUE(classifier->SetDrift(kTables, kKeys, kDrifts, 3).ok());
}

std::vector<float> ScoresOfSample(const InputClassifier& classifier) {
  std::vector<float> scores;
  EXPECT_TRUE(classifier.ReservoirScores(kTables, kKeys, kDrifts, 3, &scores).ok());
  return scores;
}

TEST(InputClassifier, ReadsEveryLayout) {
  InputClassifier classifier(TwoTables());
  SetDrift(&classifier);
  ASSERT_TRUE(classifier.Configure(Settings(SkipMode::kDrift, 0.25f, 0.0)).ok());
  const std::vector<int64_t> column = {1, 1, 2, 9};
  const std::vector<int64_t> padded = {-1, -1, 1, -1, 1, 2, 1, 1};
  const std::vector<int64_t> ragged = {1, 2, 1};
  const std::vector<int64_t> splits = {0, 0, 0, 0, 3};
  FeatureView bag = Column(padded, 0);
  bag.batch = 4;
  bag.width = bag.stride = 2;
  bag.has_padding = true;
  FeatureView rows = Column(ragged, 1);
  rows.batch = 4;
  rows.row_splits = splits.data();
  Result result = Classify(&classifier, {Column(column), bag}, 4);
  EXPECT_EQ(result.score, (std::vector<float>{0.1f, 0.1f, 0.2f, kInf}));
  EXPECT_EQ(result.skippable, (std::vector<uint8_t>{1, 1, 1, 0}));
  result = Classify(&classifier, {rows}, 4);
  EXPECT_EQ(result.score, (std::vector<float>{kInf, kInf, kInf, kInf}));
}

TEST(InputClassifier, NothingIsSkippableInitiallyOrAtThresholdZero) {
  InputClassifier classifier(TwoTables());
  const std::vector<int64_t> keys = {1, 2};
  EXPECT_EQ(Classify(&classifier, {Column(keys)}, 2).skippable, (std::vector<uint8_t>{0, 0}));
  SetDrift(&classifier);
  EXPECT_EQ(Classify(&classifier, {Column(keys)}, 2).skippable, (std::vector<uint8_t>{0, 0}));
  ASSERT_TRUE(classifier.Configure(Settings(SkipMode::kDrift, 0.0f, 0.0)).ok());
  EXPECT_EQ(Classify(&classifier, {Column(keys)}, 2).skippable, (std::vector<uint8_t>{0, 0}));
  ASSERT_TRUE(classifier.Configure(Settings(SkipMode::kDrift, 0.2f, 0.0)).ok());
  EXPECT_EQ(Classify(&classifier, {Column(keys)}, 2).skippable, (std::vector<uint8_t>{1, 0}));
}

TEST(InputClassifier, CountsObservedExamplesOfWindow) {
  InputClassifier classifier(TwoTables());
  SetDrift(&classifier);
  ASSERT_TRUE(classifier.Configure(Settings(SkipMode::kDrift, 0.15f, 0.0)).ok());
  const std::vector<int64_t> keys = {1, 2, 3};
  Classify(&classifier, {Column(keys)}, 3);
  Classify(&classifier, {Column(keys)}, 3, /*observe=*/false);
  EXPECT_EQ(ScoresOfSample(classifier), (std::vector<float>{0.1f, 0.2f, kInf}));
  const ClassifierCounts counts = classifier.EndWindow();
  EXPECT_EQ(counts.inputs_seen, 3);
  EXPECT_EQ(counts.inputs_skipped, 1);
  EXPECT_EQ(counts.hot_inputs, 2);
  EXPECT_TRUE(ScoresOfSample(classifier).empty());
  EXPECT_EQ(classifier.EndWindow().inputs_seen, 0);
}

TEST(InputClassifier, RandomSkippingMeetsFractionForAnyBatchSize) {
  constexpr int64_t kInputs = 20000;
  const std::vector<int64_t> keys(kInputs, 1);
  InputClassifier whole(TwoTables()), parts(TwoTables());
  ASSERT_TRUE(whole.Configure(Settings(SkipMode::kRandom, 0.0f, 0.3)).ok());
  ASSERT_TRUE(parts.Configure(Settings(SkipMode::kRandom, 0.0f, 0.3)).ok());
  const std::vector<uint8_t> expected = Classify(&whole, {Column(keys)}, kInputs).skippable;
  std::vector<uint8_t> got;
  const std::vector<int64_t> part(1000, 1);
  for (int i = 0; i < 20; ++i) {
    const Result result = Classify(&parts, {Column(part)}, 1000);
    got.insert(got.end(), result.skippable.begin(), result.skippable.end());
  }
  EXPECT_EQ(got, expected);
  const auto skipped = std::count(expected.begin(), expected.end(), 1);
  EXPECT_NEAR(static_cast<double>(skipped) / kInputs, 0.3, 0.02);
  ASSERT_TRUE(parts.Configure(Settings(SkipMode::kRandom, 0.0f, 1.0)).ok());
  EXPECT_EQ(Classify(&parts, {Column(part)}, 1000).skippable, std::vector<uint8_t>(1000, 1));
}

TEST(InputClassifier, AcceptsEmptyBatch) {
  InputClassifier classifier(TwoTables());
  SetDrift(&classifier);
  EXPECT_TRUE(Classify(&classifier, {Column({})}, 0).score.empty());
}

TEST(InputClassifier, RejectsInvalidInput) {
  ClassifierOptions options = TwoTables();
  for (const double alpha : {0.0, -1.0, 2.0, std::nan("")}) {
    options.alpha = alpha;
    EXPECT_EQ(InputClassifier::Validate(options).code(), StatusCode::kInvalidArgument);
  }
  InputClassifier classifier(TwoTables());
  EXPECT_FALSE(classifier.Configure(Settings(SkipMode::kDrift, -1.0f, 0.0)).ok());
  EXPECT_FALSE(classifier.Configure(Settings(SkipMode::kDrift, std::nanf(""), 0.0)).ok());
  EXPECT_FALSE(classifier.Configure(Settings(SkipMode::kRandom, 0.0f, 1.5)).ok());
  ClassifierSettings settings;
  settings.keep_rate = 1.0;
  EXPECT_NE(classifier.Configure(settings).message().find("keep_rate is 1"), std::string::npos);
  const std::vector<int64_t> keys = {1};
  bool skippable;
  float score, weight;
  const Classified out = {&skippable, &score, &weight};
  const Status status = classifier.Classify({Column(keys, 3)}, 1, true, out);
  EXPECT_NE(status.message().find("feature_table[0] is 3"), std::string::npos);
  EXPECT_EQ(classifier.EndWindow().inputs_seen, 0);
}

TEST(InputClassifier, IgnoresFeaturesWithoutTable) {
  InputClassifier classifier(TwoTables());
  SetDrift(&classifier);
  ASSERT_TRUE(classifier.Configure(Settings(SkipMode::kDrift, 0.15f, 0.0)).ok());
  const std::vector<int64_t> keys = {1, 2}, other = {99, 99};
  const Result result = Classify(&classifier, {Column(keys), Column(other, 2)}, 2);
  EXPECT_EQ(result.skippable, (std::vector<uint8_t>{1, 0}));
}

TEST(Thinning, KeepsWeightedSampleOfSkippableExamples) {
  InputClassifier classifier(TwoTables());
  SetDrift(&classifier);
  ClassifierSettings settings = Settings(SkipMode::kDrift, 0.15f, 0.0);
  settings.keep_rate = 0.125;
  ASSERT_TRUE(classifier.Configure(settings).ok());
  std::vector<int64_t> keys(20000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = 1 + static_cast<int64_t>(i % 2);
  const Result result = Classify(&classifier, {Column(keys)}, 20000);
  double total = 0.0;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (keys[i] == 2) {
      ASSERT_EQ(result.weight[i], 1.f);
    } else {
      ASSERT_TRUE(result.weight[i] == 0.f || result.weight[i] == 8.f);
      total += result.weight[i];
    }
  }
  EXPECT_NEAR(total / 10000, 1.0, 0.08);  // Three standard errors.
  const ClassifierCounts counts = classifier.EndWindow();
  EXPECT_EQ(counts.inputs_skippable, 10000);
  EXPECT_EQ(counts.inputs_skipped + counts.inputs_kept, 10000);
  EXPECT_EQ(counts.inputs_kept, static_cast<int64_t>(total / 8));
}

TEST(Shadow, FindsSkippableExamplesAndKeepsThem) {
  InputClassifier classifier(TwoTables());
  SetDrift(&classifier);
  ClassifierSettings settings = Settings(SkipMode::kDrift, 0.15f, 0.0);
  settings.is_shadow = true;
  ASSERT_TRUE(classifier.Configure(settings).ok());
  const std::vector<int64_t> keys = {1, 2};
  const Result result = Classify(&classifier, {Column(keys)}, 2);
  EXPECT_EQ(result.skippable, (std::vector<uint8_t>{1, 0}));
  EXPECT_EQ(result.weight, (std::vector<float>{1.f, 1.f}));
  const ClassifierCounts counts = classifier.EndWindow();
  EXPECT_EQ(counts.inputs_skippable, 1);
  EXPECT_EQ(counts.inputs_skipped, 0);
}

Status ClassifyBy(InputClassifier* classifier, const std::vector<FeatureView>& features,
                  int64_t batch, int64_t window_batches, Result* result) {
  *result = {std::vector<uint8_t>(batch), std::vector<float>(batch), std::vector<float>(batch)};
  const Classified out = {reinterpret_cast<bool*>(result->skippable.data()), result->score.data(),
                          result->weight.data()};
  return classifier->Classify(features, batch, true, out, window_batches);
}

TEST(Shadow, FractionOfBatchesIsScaledToAll) {
  constexpr int64_t kBatch = 100, kBatches = 160;
  const std::vector<int64_t> keys(kBatch, 1);
  for (const bool is_shadow : {true, false}) {
    InputClassifier classifier(TwoTables());
    SetDrift(&classifier);
    ClassifierSettings settings = Settings(SkipMode::kDrift, 0.15f, 0.0);
    settings.is_shadow = is_shadow;
    ASSERT_TRUE(classifier.Configure(settings).ok());
    int classified = 0;
    for (int64_t i = 0; i < kBatches; ++i) {
      Result result;
      ASSERT_TRUE(ClassifyBy(&classifier, {Column(keys)}, kBatch, kBatches, &result).ok());
      const bool is_classified = result.score[0] == 0.1f;
      classified += is_classified;
      EXPECT_EQ(result.skippable, std::vector<uint8_t>(kBatch, is_classified));
      EXPECT_EQ(result.weight, std::vector<float>(kBatch, is_shadow ? 1.f : 0.f));
    }
    EXPECT_EQ(classified, is_shadow ? kBatches / InputClassifier::kMaxStride : kBatches);
    EXPECT_EQ(ScoresOfSample(classifier).size(), 16u);
    const ClassifierCounts counts = classifier.EndWindow();
    EXPECT_EQ(counts.inputs_seen, kBatch * kBatches);
    EXPECT_EQ(counts.inputs_skippable, kBatch * kBatches);
    EXPECT_EQ(counts.hot_inputs, kBatch * kBatches);
    EXPECT_EQ(counts.inputs_skipped, is_shadow ? 0 : kBatch * kBatches);
  }
}

TEST(Shadow, FewBatchesAreAllClassifiedAndCountsStayWithinSeen) {
  constexpr int64_t kBatch = 100;
  const std::vector<int64_t> keys(kBatch, 1);
  InputClassifier classifier(TwoTables());
  SetDrift(&classifier);
  ClassifierSettings settings = Settings(SkipMode::kDrift, 0.15f, 0.0);
  settings.is_shadow = true;
  ASSERT_TRUE(classifier.Configure(settings).ok());
  Result result;
  // With one batch per window, there are 6 examples per sampled one, so that every batch is
  // classified.
  ASSERT_TRUE(ClassifyBy(&classifier, {Column(keys)}, kBatch, 1, &result).ok());
  EXPECT_EQ(classifier.EndWindow().inputs_skippable, kBatch);
  // One in 16 of the following batches, in windows that end after each.
  for (int i = 0; i < 64; ++i) {
    ASSERT_TRUE(ClassifyBy(&classifier, {Column(keys)}, kBatch, 1000, &result).ok());
    const ClassifierCounts counts = classifier.EndWindow();
    EXPECT_EQ(counts.inputs_seen, kBatch);
    EXPECT_EQ(counts.inputs_skippable, result.skippable[0] ? kBatch : 0);
  }
  ASSERT_TRUE(ClassifyBy(&classifier, {Column({})}, 0, 1000, &result).ok());
}

// Classifies `batch` examples with key 1, and returns the positions of the classified examples.
std::vector<int64_t> Sample(InputClassifier* classifier, int64_t batch, int64_t stride) {
  const std::vector<int64_t> keys(batch, 1);
  Result result = {std::vector<uint8_t>(batch), std::vector<float>(batch),
                   std::vector<float>(batch)};
  const Classified out = {reinterpret_cast<bool*>(result.skippable.data()), result.score.data(),
                          result.weight.data()};
  EXPECT_TRUE(classifier->Classify({Column(keys)}, batch, true, out, 0, stride).ok());
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < batch; ++i) {
    EXPECT_EQ(result.score[i], std::isfinite(result.score[i]) ? 0.1f : kInf);
    if (std::isfinite(result.score[i])) rows.push_back(i);
  }
  EXPECT_EQ(result.skippable, std::vector<uint8_t>(batch, 0));
  EXPECT_EQ(result.weight, std::vector<float>(batch, 1.f));
  return rows;
}

TEST(Stride, ChoosesOneRandomExampleOfEachBlock) {
  constexpr int64_t kStride = 8, kInputs = 80000;
  InputClassifier classifier(TwoTables());
  SetDrift(&classifier);
  const std::vector<int64_t> rows = Sample(&classifier, kInputs, kStride);
  ASSERT_EQ(rows.size(), kInputs / kStride);
  std::vector<int> chosen(kStride);
  for (size_t block = 0; block < rows.size(); ++block) {
    ASSERT_EQ(rows[block] / kStride, block);
    ++chosen[rows[block] % kStride];
  }
  // Binomial with a standard deviation of 33.
  for (const int n : chosen) EXPECT_NEAR(n, kInputs / kStride / kStride, 165);
  const ClassifierCounts counts = classifier.EndWindow();
  EXPECT_EQ(counts.inputs_seen, kInputs);
  EXPECT_EQ(counts.hot_inputs, kInputs);
}

TEST(Stride, ChoiceDependsOnSeedAndExampleNumbersOnly) {
  ClassifierOptions options = TwoTables();
  InputClassifier whole(options), parts(options), resumed(options);
  options.seed = 1;
  InputClassifier other(options);
  for (InputClassifier* classifier : {&whole, &parts, &resumed, &other}) SetDrift(classifier);
  const std::vector<int64_t> expected = Sample(&whole, 1000, 8);
  EXPECT_NE(Sample(&other, 1000, 8), expected);
  std::vector<int64_t> found;
  int64_t begin = 0;
  for (const int64_t batch : {100, 37, 0, 3, 860}) {
    if (begin == 140) {
      ASSERT_TRUE(resumed.ImportWindow(parts.ExportWindow()).ok());
    }
    for (const int64_t row : Sample(begin < 140 ? &parts : &resumed, batch, 8)) {
      found.push_back(begin + row);
    }
    begin += batch;
  }
  EXPECT_EQ(found, expected);
}

TEST(Stride, OutOfRangeIsRejected) {
  InputClassifier classifier(TwoTables());
  const std::vector<int64_t> keys = {1};
  bool skippable;
  float score, weight;
  const Classified out = {&skippable, &score, &weight};
  for (const int64_t stride :
       {std::numeric_limits<int64_t>::min(), int64_t{0}, InputClassifier::kMaxStrideOfExamples + 1,
        std::numeric_limits<int64_t>::max()}) {
    const Status status = classifier.Classify({Column(keys)}, 1, true, out, 0, stride);
    EXPECT_NE(status.message().find("stride is " + std::to_string(stride)), std::string::npos);
  }
  EXPECT_EQ(classifier.EndWindow().inputs_seen, 0);
}

TEST(LossStatistics, AreSeparatedAndResetWhenTaken) {
  InputClassifier classifier(TwoTables());
  const std::vector<float> weights = {2.f, 1.f, 1.f};
  const std::vector<float> first = {0.5f, 1.f, std::nanf("")}, labels = {1.f, 0.f, 1.f};
  const bool skippable[] = {true, false, false};
  classifier.RecordLosses(first.data(), labels.data(), skippable, weights.data(), 3);
  const std::vector<float> second = {0.75f, 2.f, 3.f};
  classifier.RecordLosses(second.data(), labels.data(), skippable, weights.data(), 3);
  const LossStatistics statistics = classifier.TakeLossStatistics();
  EXPECT_EQ(statistics.skippable, 2);
  const auto residual = [](double loss) { return 1.0 - std::exp(-loss); };
  EXPECT_NEAR(statistics.skippable_squared_residuals,
              std::pow(residual(0.5), 2) + std::pow(residual(0.75), 2), 1e-6);
  EXPECT_EQ(statistics.not_finite, 1);
  EXPECT_EQ(statistics.weight, 7.0);
  EXPECT_NEAR(statistics.weighted_sum, 2 * 1.25 + 6.0, 1e-6);
  double positives = 0.0;
  for (double n : statistics.histogram[1]) positives += n;
  EXPECT_EQ(positives, 5.0);  // Two skippable examples of weight 2, and another one.
  EXPECT_EQ(classifier.TakeLossStatistics().weight, 0.0);
}

TEST(InputClassifier, SampleScoresEqualClassificationScores) {
  constexpr int64_t kInputs = 1000, kMany = 50000;
  ClassifierOptions options = TwoTables();
  options.alpha = 0.6;
  options.reservoir_size = kInputs;
  InputClassifier classifier(options);
  std::mt19937_64 random(1);
  std::vector<int32_t> tables;
  std::vector<int64_t> keys;
  std::vector<float> drifts;
  for (int64_t key = 0; key < kMany; ++key) {
    tables.push_back(static_cast<int32_t>(key % 2));
    keys.push_back(key / 2);
    drifts.push_back(key % 11 == 0 ? kInf : static_cast<float>(random() % 1000));
  }
  // Wide examples with keys that are not tracked.
  std::vector<int64_t> looked_up(kInputs * 5);
  for (int64_t& key : looked_up) key = static_cast<int64_t>(random() % (kMany / 2 + 500));
  FeatureView wide = Column(looked_up);
  wide.batch = kInputs;
  wide.width = wide.stride = 5;
  ASSERT_TRUE(classifier.SetDrift(tables.data(), keys.data(), drifts.data(), kMany).ok());
  const auto expected = Classify(&classifier, {wide}, kInputs).score;
  SetDrift(&classifier);  // Must have no effect.
  const auto score = [&](int threads, std::vector<float>* scores) {
    return classifier.ReservoirScores(tables.data(), keys.data(), drifts.data(), kMany, scores,
                                      Threads(threads));
  };
  std::vector<float> scores;
  for (const int threads : {1, 3}) {
    ASSERT_TRUE(score(threads, &scores).ok());
    EXPECT_EQ(scores, expected);
  }
  // Returns the first of two errors, whichever thread finds it.
  tables[kMany - 1] = 7;
  tables[kMany / 2] = 8;
  for (const int threads : {1, 3}) {
    EXPECT_NE(score(threads, &scores).message().find("tables[25000] is 8"), std::string::npos);
  }
}

TEST(InputClassifier, IsThreadSafe) {
  InputClassifier classifier(TwoTables());
  const std::vector<int64_t> keys(100, 1);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        Classify(&classifier, {Column(keys)}, 100);
        SetDrift(&classifier);
        ScoresOfSample(classifier);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(classifier.EndWindow().inputs_seen, 4 * 50 * 100);
}

}  // namespace
}  // namespace slipstream
