#include "cc_ops/core/update/rules/update_rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace slipstream {
namespace {

// One step from a known state, against the formulas worked out by hand.
TEST(UpdateRule, Sgd) {
  UpdateRule rule;
  std::vector<float> row = {1.f, 2.f};
  const float gradient[] = {10.f, -10.f};
  rule.Apply(rule.EffectiveRate(0.1f, 1), 2, gradient, row.data());
  EXPECT_FLOAT_EQ(row[0], 0.f);
  EXPECT_FLOAT_EQ(row[1], 3.f);
  EXPECT_EQ(rule.SlotsPerRow(2), 0);
}

TEST(UpdateRule, Adagrad) {
  UpdateRule rule;
  rule.kind = UpdateRule::Kind::kAdagrad;
  rule.a = 7.f;
  rule.b = 2.f;
  std::vector<float> row(4);
  rule.InitSlots(2, row.data() + 2);
  EXPECT_EQ(row[2], 7.f);
  const float gradient[] = {4.f, 0.f};
  rule.Apply(rule.EffectiveRate(1.f, 1), 2, gradient, row.data());
  EXPECT_FLOAT_EQ(row[0], -4.f / 5.f);  // sqrt(7 + 16 + 2) = 5
  EXPECT_FLOAT_EQ(row[1], 0.f);
  EXPECT_FLOAT_EQ(row[2], 23.f);
  EXPECT_FLOAT_EQ(row[3], 7.f);
}

TEST(UpdateRule, RowWiseAdagradSharesOneAccumulator) {
  UpdateRule rule;
  rule.kind = UpdateRule::Kind::kRowWiseAdagrad;
  rule.b = 3.5f;
  std::vector<float> row(3);
  rule.InitSlots(2, row.data() + 2);
  const float gradient[] = {3.f, 4.f};
  rule.Apply(rule.EffectiveRate(1.f, 1), 2, gradient, row.data());
  EXPECT_FLOAT_EQ(row[2], 12.5f);  // mean of 9 and 16
  EXPECT_FLOAT_EQ(row[0], -3.f / 4.f);
  EXPECT_FLOAT_EQ(row[1], -4.f / 4.f);
}

TEST(UpdateRule, FirstAdamStepMovesByTheLearningRate) {
  UpdateRule rule;
  rule.kind = UpdateRule::Kind::kAdam;
  rule.a = 0.9f;
  rule.b = 0.999f;
  rule.c = 1e-9f;
  std::vector<float> row(3);
  rule.InitSlots(1, row.data() + 1);
  const float gradient[] = {0.5f};
  rule.Apply(rule.EffectiveRate(0.01f, 1), 1, gradient, row.data());
  EXPECT_NEAR(row[0], -0.01f, 1e-6);
  EXPECT_NEAR(row[1], 0.05f, 1e-7);
  EXPECT_NEAR(row[2], 0.00025f, 1e-8);
}

TEST(UpdateRule, MovementIsHowFarTheRowWouldMove) {
  const float gradient[] = {0.5f, -2.f, 1.f};
  for (const auto kind :
       {UpdateRule::Kind::kSgd, UpdateRule::Kind::kAdagrad, UpdateRule::Kind::kRowWiseAdagrad}) {
    UpdateRule rule;
    rule.kind = kind;
    rule.a = 0.3f;
    rule.b = 1e-6f;
    std::vector<float> row(9, 0.f);
    rule.InitSlots(3, row.data() + 3);
    for (int step = 0; step < 3; ++step) {
      const float predicted = rule.Movement(0.1f, 3, gradient, row.data());
      const std::vector<float> before = row;
      rule.Apply(0.1f, 3, gradient, row.data());
      float moved = 0.f;
      for (int j = 0; j < 3; ++j) moved = std::max(moved, std::fabs(row[j] - before[j]));
      EXPECT_NEAR(predicted, moved, 1e-6);
    }
  }
}

TEST(UpdateRule, AdamsMovementGrowsWithTheSum) {
  UpdateRule rule;
  rule.kind = UpdateRule::Kind::kAdam;
  rule.a = 0.9f;
  rule.b = 0.999f;
  rule.c = 1e-9f;
  // A second moment of 1: a gradient of 1 counts as one learning rate.
  const std::vector<float> row = {0.f, 0.f, 1.f};
  const float one[] = {1.f}, ten[] = {10.f};
  EXPECT_NEAR(rule.Movement(0.01f, 1, one, row.data()), 0.01f, 1e-6);
  EXPECT_NEAR(rule.Movement(0.01f, 1, ten, row.data()), 0.1f / std::sqrt(1.099f), 1e-6);
}

TEST(UpdateRule, MovementOfANotANumberIsNone) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto kind : {UpdateRule::Kind::kSgd, UpdateRule::Kind::kAdagrad,
                          UpdateRule::Kind::kRowWiseAdagrad, UpdateRule::Kind::kAdam}) {
    UpdateRule rule;
    rule.kind = kind;
    const float gradient[] = {nan, 1.f};
    const std::vector<float> row(6, 1.f);
    EXPECT_TRUE(std::isnan(rule.Movement(0.1f, 2, gradient, row.data())));
  }
}

}  // namespace
}  // namespace slipstream
