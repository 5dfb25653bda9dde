#include "cc_ops/core/saturation/skip_score.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace slipstream {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(RequiredLookups, IsExactForEveryPercentage) {
  for (int64_t percent = 1; percent <= 100; ++percent) {
    for (int64_t m = 1; m <= 1000; ++m) {
      const double alpha = static_cast<double>(percent) / 100.0;
      EXPECT_EQ(RequiredLookups(alpha, m), (percent * m + 99) / 100) << percent << "% of " << m;
    }
  }
}

TEST(RequiredLookups, IsExactForThirds) {
  EXPECT_EQ(RequiredLookups(1.0 / 3.0, 3), 1);
  EXPECT_EQ(RequiredLookups(2.0 / 3.0, 3), 2);
  EXPECT_EQ(RequiredLookups(2.0 / 3.0, 30000), 20000);
}

TEST(RequiredLookups, IsAtLeastOne) {
  EXPECT_EQ(RequiredLookups(std::numeric_limits<double>::denorm_min(), 1), 1);
  EXPECT_EQ(RequiredLookups(1e-9, 5), 1);
}

class SkipScoreTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::vector<int32_t> tables(10, 0);
    const std::vector<int64_t> keys = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    const std::vector<float> drifts = {9, 8, 7, 6, 5, 4, 3, 2, 1, 0};
    ASSERT_TRUE(index_.Build(1, tables.data(), keys.data(), drifts.data(), 10).ok());
  }

  float Score(double alpha, const std::vector<int64_t>& keys) {
    inputs_.Clear();
    inputs_.EndInput();
    for (const int64_t key : keys) inputs_.lookups.push_back({key, 0});
    inputs_.EndInput();
    float scores[2];
    SkipScores(index_, alpha, &inputs_, scores);
    EXPECT_EQ(scores[0], kInf);
    return scores[1];
  }

  DriftIndex index_;
  InputLookups inputs_;
};

TEST_F(SkipScoreTest, AlphaOneGivesLargestDrift) {
  EXPECT_EQ(Score(1.0, {9, 4, 6}), 5.0f);
  EXPECT_EQ(Score(1.0, {9}), 0.0f);
  EXPECT_EQ(Score(1.0, {9, 77}), kInf);
}

TEST_F(SkipScoreTest, AlphaNineTenthsOfTenGivesNinthSmallest) {
  EXPECT_EQ(Score(0.9, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}), 8.0f);
}

TEST_F(SkipScoreTest, UntrackedKeysCountAsInfinite) {
  EXPECT_EQ(Score(0.5, {77, 9, 78, 0}), 9.0f);
  EXPECT_EQ(Score(0.5, {77, 9, 78, 79}), kInf);
}

TEST_F(SkipScoreTest, EqualsSortForAnyNumberOfLookups) {
  std::mt19937 random(1);
  for (int64_t m = 1; m <= 60; ++m) {
    std::vector<float> drifts;
    for (int64_t i = 0; i < m; ++i) {
      drifts.push_back(random() % 5 == 0 ? kInf : static_cast<float>(random() % 20));
    }
    std::vector<float> ordered = drifts;
    std::sort(ordered.begin(), ordered.end());
    for (const double alpha : {0.05, 0.5, 0.8, 0.9, 1.0}) {
      std::vector<float> own = drifts;
      EXPECT_EQ(SkipScore(alpha, own.data(), m), ordered[RequiredLookups(alpha, m) - 1]) << m;
    }
  }
}

TEST_F(SkipScoreTest, DuplicateLookupsCountEachTime) {
  EXPECT_EQ(Score(0.5, {9, 9, 0, 0}), 0.0f);
  EXPECT_EQ(Score(0.75, {9, 9, 0, 0}), 9.0f);
}

TEST_F(SkipScoreTest, InputWithoutLookupsIsNeverSkippable) { EXPECT_EQ(Score(1.0, {}), kInf); }

}  // namespace
}  // namespace slipstream
