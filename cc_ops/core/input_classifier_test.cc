#include "cc_ops/core/input_classifier.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace slipstream {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Result {
  std::vector<uint8_t> skippable;
  std::vector<float> score;
};

Result Classify(InputClassifier* classifier, const std::vector<FeatureView>& features,
                int64_t batch, bool observe = true) {
  Result result = {std::vector<uint8_t>(batch), std::vector<float>(batch)};
  EXPECT_TRUE(classifier
                  ->Classify(features, batch, observe,
                             reinterpret_cast<bool*>(result.skippable.data()), result.score.data())
                  .ok());
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

void SetDrift(InputClassifier* classifier) {
  const std::vector<int32_t> tables = {0, 0, 1};
  const std::vector<int64_t> keys = {1, 2, 1};
  const std::vector<float> drifts = {0.1f, 0.2f, 0.3f};
  ASSERT_TRUE(classifier->SetDrift(tables.data(), keys.data(), drifts.data(), 3).ok());
}

TEST(InputClassifier, ReadsEveryLayout) {
  InputClassifier classifier(TwoTables());
  SetDrift(&classifier);
  ASSERT_TRUE(classifier.Configure(SkipMode::kDrift, 0.25f, 0.0).ok());
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

TEST(InputClassifier, NothingIsSkippableAtFirstAndAtThresholdZero) {
  InputClassifier classifier(TwoTables());
  const std::vector<int64_t> keys = {1, 2};
  EXPECT_EQ(Classify(&classifier, {Column(keys)}, 2).skippable, (std::vector<uint8_t>{0, 0}));
  SetDrift(&classifier);
  EXPECT_EQ(Classify(&classifier, {Column(keys)}, 2).skippable, (std::vector<uint8_t>{0, 0}));
  ASSERT_TRUE(classifier.Configure(SkipMode::kDrift, 0.0f, 0.0).ok());
  EXPECT_EQ(Classify(&classifier, {Column(keys)}, 2).skippable, (std::vector<uint8_t>{0, 0}));
  ASSERT_TRUE(classifier.Configure(SkipMode::kDrift, 0.2f, 0.0).ok());
  EXPECT_EQ(Classify(&classifier, {Column(keys)}, 2).skippable, (std::vector<uint8_t>{1, 0}));
}

TEST(InputClassifier, CountsObservedInputsOfTheWindow) {
  InputClassifier classifier(TwoTables());
  SetDrift(&classifier);
  ASSERT_TRUE(classifier.Configure(SkipMode::kDrift, 0.15f, 0.0).ok());
  const std::vector<int64_t> keys = {1, 2, 3};
  Classify(&classifier, {Column(keys)}, 3);
  Classify(&classifier, {Column(keys)}, 3, /*observe=*/false);
  EXPECT_EQ(classifier.ReservoirScores(), (std::vector<float>{0.1f, 0.2f, kInf}));
  const ClassifierCounts counts = classifier.EndWindow();
  EXPECT_EQ(counts.inputs_seen, 3);
  EXPECT_EQ(counts.inputs_skipped, 1);
  EXPECT_EQ(counts.hot_inputs, 2);
  EXPECT_TRUE(classifier.ReservoirScores().empty());
  EXPECT_EQ(classifier.EndWindow().inputs_seen, 0);
}

TEST(InputClassifier, RandomSkippingHitsItsShareWhateverTheBatches) {
  constexpr int64_t kInputs = 20000;
  const std::vector<int64_t> keys(kInputs, 1);
  InputClassifier whole(TwoTables()), parts(TwoTables());
  ASSERT_TRUE(whole.Configure(SkipMode::kRandom, 0.0f, 0.3).ok());
  ASSERT_TRUE(parts.Configure(SkipMode::kRandom, 0.0f, 0.3).ok());
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
  ASSERT_TRUE(parts.Configure(SkipMode::kRandom, 0.0f, 1.0).ok());
  EXPECT_EQ(Classify(&parts, {Column(part)}, 1000).skippable, std::vector<uint8_t>(1000, 1));
}

TEST(InputClassifier, EmptyBatch) {
  InputClassifier classifier(TwoTables());
  SetDrift(&classifier);
  EXPECT_TRUE(Classify(&classifier, {Column({})}, 0).score.empty());
}

TEST(InputClassifier, BadInputIsAnError) {
  ClassifierOptions options = TwoTables();
  for (const double alpha : {0.0, -1.0, 2.0, std::nan("")}) {
    options.alpha = alpha;
    EXPECT_EQ(InputClassifier::Validate(options).code(), StatusCode::kInvalidArgument);
  }
  InputClassifier classifier(TwoTables());
  EXPECT_FALSE(classifier.Configure(SkipMode::kDrift, -1.0f, 0.0).ok());
  EXPECT_FALSE(classifier.Configure(SkipMode::kDrift, std::nanf(""), 0.0).ok());
  EXPECT_FALSE(classifier.Configure(SkipMode::kRandom, 0.0f, 1.5).ok());
  const std::vector<int64_t> keys = {1};
  bool skippable;
  float score;
  const Status status = classifier.Classify({Column(keys, 2)}, 1, true, &skippable, &score);
  EXPECT_NE(status.message().find("table of feature 0 is 2"), std::string::npos);
  EXPECT_EQ(classifier.EndWindow().inputs_seen, 0);
}

TEST(InputClassifier, ThreadsMayShareIt) {
  InputClassifier classifier(TwoTables());
  const std::vector<int64_t> keys(100, 1);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        Classify(&classifier, {Column(keys)}, 100);
        SetDrift(&classifier);
        classifier.ReservoirScores();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(classifier.EndWindow().inputs_seen, 4 * 50 * 100);
}

}  // namespace
}  // namespace slipstream
