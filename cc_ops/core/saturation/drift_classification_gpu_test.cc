// Compares the classification by drift on the CPU and, if available, on a GPU with an
// InputClassifier.
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/lookup/feature_view.h"
#include "cc_ops/core/saturation/drift_classification.h"
#include "cc_ops/core/saturation/drift_index.h"
#include "cc_ops/core/saturation/input_classifier.h"
#include "cc_ops/core/saturation/skip_score.h"
#include "cc_ops/core/testing/test_gpu.h"
#include "gtest/gtest.h"

#ifdef SLIPSTREAM_WITH_CUDA
#include "cc_ops/core/saturation/drift_classification.cu.h"
#endif

namespace slipstream {
namespace {

constexpr int kTables = 2;

// Examples with ragged lists of keys. Both tables look up the same list.
struct Inputs {
  std::vector<int64_t> keys, row_splits;
  // Lookups with padding in between.
  std::vector<int64_t> lookup_keys, offsets;
  std::vector<int32_t> lookup_tables;

  void Add(int64_t key, int32_t table) {
    lookup_keys.push_back(key);
    lookup_tables.push_back(table);
  }
  int64_t batch() const { return static_cast<int64_t>(offsets.size()) - 1; }
  LookupLists view() const {
    return {lookup_keys.data(), lookup_tables.data(), static_cast<int64_t>(lookup_keys.size()),
            offsets.data(), batch()};
  }
};

struct Classes {
  explicit Classes(int64_t batch)
      : skippable(new bool[static_cast<size_t>(batch) + 1]), score(batch, -1), weight(batch, -1) {}
  Classified view() { return {skippable.get(), score.data(), weight.data()}; }

  std::unique_ptr<bool[]> skippable;  // std::vector<bool> has no data().
  std::vector<float> score, weight;
};

// Returns examples with sizes[i] keys out of `different` ones; every third example also has
// padding.
Inputs SomeInputs(const std::vector<int64_t>& sizes, int64_t different, uint64_t seed) {
  Inputs inputs;
  inputs.row_splits = inputs.offsets = {0};
  for (int64_t size : sizes) {
    for (int64_t j = 0; j < size; ++j) {
      const uint64_t random = Mix64(seed + inputs.keys.size());
      inputs.keys.push_back(static_cast<int64_t>(random % static_cast<uint64_t>(different)));
    }
    inputs.row_splits.push_back(static_cast<int64_t>(inputs.keys.size()));
    for (int32_t table = 0; table < kTables; ++table) {
      for (int64_t j = size; j > 0; --j) {
        inputs.Add(inputs.keys[inputs.keys.size() - j], table);
        if (inputs.offsets.size() % 3 == 0) inputs.Add(j, -1);
      }
    }
    inputs.offsets.push_back(static_cast<int64_t>(inputs.lookup_keys.size()));
  }
  return inputs;
}

// Drifts of most keys of both tables; a part are anomalies or 0.
struct Drifts {
  std::vector<int32_t> tables;
  std::vector<int64_t> keys;
  std::vector<float> drifts;
};

Drifts SomeDrifts(int64_t different) {
  Drifts drifts;
  for (int64_t key = 0; key < different; ++key) {
    for (int32_t table = 0; table < kTables; ++table) {
      const uint64_t random = Mix64(static_cast<uint64_t>(key * kTables + table) + 99);
      if (random % 29 == 0) continue;
      float drift = static_cast<float>((random >> 8) % 1000) / 1000.0f;
      if (random % 31 == 1) drift = std::numeric_limits<float>::quiet_NaN();
      if (random % 31 == 2) drift = -0.0f;
      if (random % 31 == 3) drift = std::numeric_limits<float>::denorm_min();
      drifts.tables.push_back(table);
      drifts.keys.push_back(key);
      drifts.drifts.push_back(drift);
    }
  }
  return drifts;
}

class DriftClassificationTest : public OnProcessors {
 protected:
  Classes Classify(const DriftIndex& index, const DriftClassifier& classifier, const Inputs& inputs,
                   uint64_t first_number) {
    Classes classes(inputs.batch());
#ifdef SLIPSTREAM_WITH_CUDA
    if (GetParam() == Processor::kGpu) {
      const auto batch = static_cast<size_t>(inputs.batch());
      DriftIndexView view = index.view();
      OnDevice<DriftEntry> entries(
          std::vector<DriftEntry>(view.entries, view.entries + view.capacity));
      view.entries = entries.data();
      OnDevice<int64_t> keys(inputs.lookup_keys), offsets(inputs.offsets);
      OnDevice<int32_t> tables(inputs.lookup_tables);
      OnDevice<uint32_t> scratch(inputs.lookup_keys.size());
      OnDevice<bool> skippable(batch);
      OnDevice<float> score(batch), weight(batch);
      LookupLists lookups = inputs.view();
      lookups.keys = keys.data();
      lookups.tables = tables.data();
      lookups.offsets = offsets.data();
      const TestStream stream;
      EXPECT_EQ(LaunchClassifyByDrift(stream.get(), view, classifier, lookups, first_number,
                                      classifier.alpha == 1.0 ? nullptr : scratch.data(),
                                      {skippable.data(), score.data(), weight.data()}),
                cudaSuccess);
      stream.Wait();
      EXPECT_EQ(
          cudaMemcpy(classes.skippable.get(), skippable.data(), batch, cudaMemcpyDeviceToHost),
          cudaSuccess);
      classes.score = score.ToHost();
      classes.weight = weight.ToHost();
      return classes;
    }
#endif
    ClassifyByDrift(index, classifier, inputs.view(), first_number, classes.view());
    return classes;
  }

  // Two batches, so that the numbers of examples continue.
  void ExpectClassifiers(const Drifts& drifts, const DriftClassifier& given,
                         const std::vector<int64_t>& sizes, int64_t different) {
    ClassifierOptions options;
    options.num_tables = kTables;
    options.alpha = given.alpha;
    options.seed = given.seed;
    InputClassifier classifier(options);
    DriftIndex index;
    const auto n = static_cast<int64_t>(drifts.keys.size());
    ASSERT_TRUE(classifier.Configure(given.settings).ok());
    ASSERT_TRUE(
        classifier.SetDrift(drifts.tables.data(), drifts.keys.data(), drifts.drifts.data(), n)
            .ok());
    ASSERT_TRUE(
        index.Build(kTables, drifts.tables.data(), drifts.keys.data(), drifts.drifts.data(), n)
            .ok());
    uint64_t first_number = 0;
    for (uint64_t seed : {1000, 900000}) {
      const Inputs inputs = SomeInputs(sizes, different, seed);
      const int64_t batch = inputs.batch();
      std::vector<FeatureView> features(kTables);
      for (int table = 0; table < kTables; ++table) {
        features[table].table = table;
        features[table].batch = batch;
        features[table].keys = inputs.keys.data();
        features[table].num_keys = static_cast<int64_t>(inputs.keys.size());
        features[table].row_splits = inputs.row_splits.data();
      }
      Classes expected(batch);
      ASSERT_TRUE(classifier.Classify(features, batch, true, expected.view()).ok());
      const Classes found = Classify(index, given, inputs, first_number);
      const auto count = static_cast<size_t>(batch);
      const std::string where = "alpha " + std::to_string(given.alpha) + ", mode " +
                                std::to_string(static_cast<int>(given.settings.mode));
      ASSERT_EQ(found.score.size(), count);
      if (count == 0) continue;
      EXPECT_EQ(std::memcmp(found.skippable.get(), expected.skippable.get(), count), 0) << where;
      EXPECT_EQ(std::memcmp(found.score.data(), expected.score.data(), 4 * count), 0) << where;
      EXPECT_EQ(std::memcmp(found.weight.data(), expected.weight.data(), 4 * count), 0) << where;
      first_number += static_cast<uint64_t>(batch);
    }
  }
};

ClassifierSettings SettingsOf(SkipMode mode) {
  ClassifierSettings settings;
  settings.mode = mode;
  settings.threshold = 0.6f;
  settings.random_fraction = 0.4;
  return settings;
}

// Examples without keys, and with as many lookups as a warp has lanes, one less and one more. They
// are two rounds of the 24 warps in three blocks.
std::vector<int64_t> MixedSizes() {
  std::vector<int64_t> sizes = {0, 1, 15, 16, 17, 100, 3, 0};
  for (int64_t i = 0; i < 41; ++i) sizes.push_back(i % 24);
  return sizes;
}

TEST_P(DriftClassificationTest, EqualsTheClassifier) {
  const Drifts drifts = SomeDrifts(400);
  // The score depends on alpha, the decision about a score on the settings.
  for (double alpha : {1.0, 0.9, 0.55, 1.0 / 3, 0.01}) {
    ExpectClassifiers(drifts, {alpha, 17, SettingsOf(SkipMode::kDrift)}, MixedSizes(), 410);
  }
  for (SkipMode mode : {SkipMode::kNone, SkipMode::kDrift, SkipMode::kRandom}) {
    DriftClassifier classifier = {0.5, 17, SettingsOf(mode)};
    ExpectClassifiers(drifts, classifier, MixedSizes(), 410);
    classifier.settings.keep_rate = 0.3;
    ExpectClassifiers(drifts, classifier, MixedSizes(), 410);
    classifier.settings.is_shadow = true;
    ExpectClassifiers(drifts, classifier, MixedSizes(), 410);
  }
}

TEST_P(DriftClassificationTest, AcceptsEmptyIndexAndEmptyBatch) {
  for (double alpha : {1.0, 0.5}) {
    const DriftClassifier classifier = {alpha, 3, SettingsOf(SkipMode::kDrift)};
    ExpectClassifiers({}, classifier, MixedSizes(), 50);
    ExpectClassifiers({{1}, {7}, {std::numeric_limits<float>::infinity()}}, classifier,
                      MixedSizes(), 50);
    ExpectClassifiers(SomeDrifts(50), classifier, {}, 50);
    ExpectClassifiers(SomeDrifts(50), classifier, {0, 0, 0}, 50);
  }
}

TEST_P(DriftClassificationTest, FindsSkippableAndOtherExamples) {
  const Drifts drifts = SomeDrifts(400);
  DriftIndex index;
  ASSERT_TRUE(index
                  .Build(kTables, drifts.tables.data(), drifts.keys.data(), drifts.drifts.data(),
                         static_cast<int64_t>(drifts.keys.size()))
                  .ok());
  const DriftClassifier classifier = {0.5, 17, SettingsOf(SkipMode::kDrift)};
  const Inputs inputs = SomeInputs(MixedSizes(), 410, 1);
  const Classes classes = Classify(index, classifier, inputs, 0);
  int64_t skippable = 0;
  for (int64_t i = 0; i < inputs.batch(); ++i) skippable += classes.skippable[i];
  EXPECT_GT(skippable, 10);
  EXPECT_LT(skippable, inputs.batch() - 10);
}

INSTANTIATE_TEST_SUITE_P(Devices, DriftClassificationTest,
                         testing::Values(Processor::kCpu, Processor::kGpu),
                         [](const auto& processor) { return NameOfProcessor(processor); });

}  // namespace
}  // namespace slipstream
