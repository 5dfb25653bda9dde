#include "cc_ops/core/update/rules/update_rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cc_ops/core/testing/test_rules.h"

namespace slipstream {
namespace {

// Compares one step from a known state with the formulas, computed by hand.
TEST(UpdateRule, SgdStepEqualsFormula) {
  UpdateRule rule;
  std::vector<float> row = {1.f, 2.f};
  const float gradient[] = {10.f, -10.f};
  rule.Apply(rule.EffectiveRate(0.1f, 1), 2, gradient, row.data());
  EXPECT_FLOAT_EQ(row[0], 0.f);
  EXPECT_FLOAT_EQ(row[1], 3.f);
  EXPECT_EQ(rule.SlotsPerRow(2), 0);
}

TEST(UpdateRule, AdagradStepEqualsFormula) {
  const UpdateRule rule = RuleNamed("adagrad", {7.f, 2.f});
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
  const UpdateRule rule = RuleNamed("rowwise_adagrad", {0.f, 3.5f});
  std::vector<float> row(3);
  rule.InitSlots(2, row.data() + 2);
  const float gradient[] = {3.f, 4.f};
  rule.Apply(rule.EffectiveRate(1.f, 1), 2, gradient, row.data());
  EXPECT_FLOAT_EQ(row[2], 12.5f);  // The mean of 9 and 16.
  EXPECT_FLOAT_EQ(row[0], -3.f / 4.f);
  EXPECT_FLOAT_EQ(row[1], -4.f / 4.f);
}

TEST(UpdateRule, FirstAdamStepMovesByTheLearningRate) {
  const UpdateRule rule = RuleNamed("adam", {0.9f, 0.999f, 1e-9f});
  std::vector<float> row(3);
  rule.InitSlots(1, row.data() + 1);
  const float gradient[] = {0.5f};
  rule.Apply(rule.EffectiveRate(0.01f, 1), 1, gradient, row.data());
  EXPECT_NEAR(row[0], -0.01f, 1e-6);
  EXPECT_NEAR(row[1], 0.05f, 1e-7);
  EXPECT_NEAR(row[2], 0.00025f, 1e-8);
}

TEST(UpdateRule, MomentumContinuesWithoutGradient) {
  const UpdateRule plain = RuleNamed("momentum", {0.5f, 0.f});
  std::vector<float> row = {0.f, 0.f};
  const float one[] = {1.f}, none[] = {0.f};
  plain.Apply(0.1f, 1, one, row.data());
  EXPECT_FLOAT_EQ(row[0], -0.1f);
  plain.Apply(0.1f, 1, none, row.data());
  EXPECT_FLOAT_EQ(row[0], -0.15f);
  EXPECT_FLOAT_EQ(row[1], -0.05f);
  const UpdateRule nesterov = RuleNamed("momentum", {0.5f, 1.f});
  row = {0.f, 0.f};
  nesterov.Apply(0.1f, 1, one, row.data());
  EXPECT_FLOAT_EQ(row[0], -0.15f);
  EXPECT_FLOAT_EQ(row[1], -0.1f);
}

TEST(UpdateRule, AdamPerRowEqualsAdamForRowInEveryUpdate) {
  const UpdateRule by_table = RuleNamed("adam"), by_row = RuleNamed("adam_per_row");
  std::vector<float> one(3), other(5);
  std::mt19937_64 random(1);
  for (int step = 1; step <= 3000; ++step) {
    const float gradient[] = {static_cast<float>(random() % 1001) / 500.f - 0.7f};
    by_table.Apply(by_table.EffectiveRate(0.01f, step), 1, gradient, one.data());
    // Step numbers of a table with many more updates.
    by_row.Apply(by_row.EffectiveRate(0.01f, 1000 * step), 1, gradient, other.data());
    ASSERT_NEAR(one[0], other[0], 1e-5f * std::fabs(one[0]) + 1e-6f);
  }
}

TEST(UpdateRule, RowWiseAdamSharesTheSecondMoment) {
  const UpdateRule rule = RuleNamed("rowwise_adam", {0.9f, 0.5f, 0.5f});
  std::vector<float> row(2 + rule.SlotsPerRow(2));
  const float gradient[] = {3.f, 4.f};
  rule.Apply(1.f, 2, gradient, row.data());
  EXPECT_FLOAT_EQ(row[4], 6.25f);  // Half of the mean of 9 and 16.
  EXPECT_FLOAT_EQ(row[0], -0.3f / 3.f);
  EXPECT_FLOAT_EQ(row[1], -0.4f / 3.f);
}

TEST(UpdateRule, FirstFtrlStepEqualsFormula) {
  // sum 4 -> 9 -> roots 2 and 3; linear term 2.236 - (3 - 2) / 0.5 * 1
  const UpdateRule rule = RuleNamed("ftrl", {-0.5f, 4.f, 0.1f, 0.25f, 0.f, 0.f});
  std::vector<float> row = {1.f, 0.f, 0.f};
  rule.InitSlots(1, row.data() + 1);
  const float gradient[] = {std::sqrt(5.f)};
  rule.Apply(0.5f, 1, gradient, row.data());
  const float linear = std::sqrt(5.f) - 2.f;
  EXPECT_FLOAT_EQ(row[1], 9.f);
  EXPECT_FLOAT_EQ(row[2], linear);
  EXPECT_FLOAT_EQ(row[0], -(linear - 0.1f) / (3.f / 0.5f + 0.5f));
  const std::vector<float> before = row;
  rule.Apply(0.f, 1, gradient, row.data());
  EXPECT_EQ(row, before);
}

TEST(UpdateRule, FtrlSquareRootEqualsGeneralPower) {
  const UpdateRule root = RuleNamed("ftrl", {-0.5f, 0.1f, 0.01f, 0.1f, 0.1f, 1.f});
  const UpdateRule power = RuleNamed("ftrl", {-0.500001f, 0.1f, 0.01f, 0.1f, 0.1f, 1.f});
  std::vector<float> one(9, 0.5f), other;
  root.InitSlots(3, one.data() + 3);
  other = one;
  for (int step = 0; step < 20; ++step) {
    const float gradient[] = {0.1f * step, -0.3f, 0.2f};
    root.Apply(0.1f, 3, gradient, one.data());
    power.Apply(0.1f, 3, gradient, other.data());
  }
  for (size_t j = 0; j < one.size(); ++j) EXPECT_NEAR(one[j], other[j], 1e-4f);
}

TEST(UpdateRule, FtrlL1SetsSmallValuesToZero) {
  const UpdateRule rule = RuleNamed("ftrl", {-0.5f, 0.1f, 10.f, 0.f, 0.f, 0.f});
  std::vector<float> row = {0.3f, 0.f, 0.f};
  rule.InitSlots(1, row.data() + 1);
  const float gradient[] = {1.f};
  rule.Apply(0.1f, 1, gradient, row.data());
  EXPECT_EQ(row[0], 0.f);
}

// Dimensions of one vector and more; the largest value is at each position in turn.
TEST(UpdateRule, MovementEqualsDistanceOfUpdate) {
  const UpdateRule ftrl = RuleNamed("ftrl", {-0.5f, 0.1f, 0.f, 0.1f, 0.2f, 0.5f});
  for (const UpdateRule& rule : {RuleNamed("sgd"), RuleNamed("adagrad", {0.3f, 1e-6f}),
                                 RuleNamed("rowwise_adagrad", {0.3f, 1e-6f}), ftrl}) {
    for (const int dim : {3, 8, 19}) {
      for (int largest = 0; largest < dim; ++largest) {
        std::vector<float> gradient(dim, 0.5f), row(3 * dim, 0.f);
        gradient[largest] = -2.f;
        for (int j = 0; j < dim; ++j) row[j] = 0.1f * static_cast<float>(j % 3);
        rule.InitSlots(dim, row.data() + dim);
        for (int step = 0; step < 3; ++step) {
          const float predicted = rule.Movement(0.1f, dim, gradient.data(), row.data());
          const std::vector<float> before = row;
          rule.Apply(0.1f, dim, gradient.data(), row.data());
          float moved = 0.f;
          for (int j = 0; j < dim; ++j) moved = std::max(moved, std::fabs(row[j] - before[j]));
          EXPECT_NEAR(predicted, moved, 1e-6) << rule.name();
        }
      }
    }
  }
}

TEST(UpdateRule, FtrlMovementIsUpperBoundForReplicas) {
  std::mt19937_64 random(1);
  const auto uniform = [&] { return static_cast<float>(random() % 10001) / 5000.f - 1.f; };
  const UpdateRule rule = RuleNamed("ftrl", {-0.5f, 0.1f, 0.3f, 0.1f, 0.2f, 0.5f});
  std::vector<float> row(12), gradient(4);
  rule.InitSlots(4, row.data() + 4);
  for (int step = 0; step < 2000; ++step) {
    for (float& g : gradient) g = uniform();
    std::vector<float> before = row, copy = row;
    rule.FillSlots(4, rule.SlotSummary(4, row.data()), copy.data());
    const float maximum = rule.Movement(0.1f, 4, gradient.data(), copy.data());
    const float own = rule.Movement(0.1f, 4, gradient.data(), row.data());
    rule.Apply(0.1f, 4, gradient.data(), row.data());
    for (int j = 0; j < 4; ++j) before[j] = std::fabs(row[j] - before[j]);
    ASSERT_NEAR(own, *std::max_element(before.begin(), before.begin() + 4), 1e-6f);
    ASSERT_LE(own, maximum + 1e-6f);
  }
  const float none[] = {0.f, 0.01f, 0.f, 0.f};
  rule.FillSlots(4, 0.f, row.data());
  EXPECT_TRUE(std::isfinite(rule.Movement(0.1f, 4, none, row.data())));
}

// Without momentum, the first step moves as far as Movement returns.
TEST(UpdateRule, MovementEqualsDistanceAtZeroMomentum) {
  const float gradient[] = {0.5f, -2.f, 1.f};
  for (const char* name : {"momentum", "adam", "adam_per_row", "rowwise_adam"}) {
    const UpdateRule rule = RuleNamed(name, {0.f});
    std::vector<float> row(3 + rule.SlotsPerRow(3), 0.f);
    for (int step = 1; step < 4; ++step) {
      const float rate = rule.EffectiveRate(0.1f, step);
      const float predicted = rule.Movement(rate, 3, gradient, row.data());
      const std::vector<float> before = row;
      rule.Apply(rate, 3, gradient, row.data());
      float moved = 0.f;
      for (int j = 0; j < 3; ++j) moved = std::max(moved, std::fabs(row[j] - before[j]));
      EXPECT_NEAR(predicted, moved, 1e-5) << name;
    }
  }
}

TEST(UpdateRule, DecaySlotsEqualsStepWithZeroGradient) {
  const std::vector<float> none(3, 0.f), some = {0.5f, -2.f, 1.f};
  for (const std::string& name : AllRuleNames()) {
    const UpdateRule rule = RuleNamed(name);
    std::vector<float> row(3 + rule.SlotsPerRow(3), 0.f);
    rule.InitSlots(3, row.data() + 3);
    rule.Apply(rule.EffectiveRate(0.1f, 1), 3, some.data(), row.data());
    std::vector<float> decayed = row;
    rule.DecaySlots(3, decayed.data());
    rule.Apply(rule.EffectiveRate(0.1f, 2), 3, none.data(), row.data());
    for (size_t j = 3; j < row.size(); ++j) EXPECT_NEAR(decayed[j], row[j], 1e-6f) << name;
  }
}

std::vector<float> Updated(const RowTransforms& transforms, std::vector<float> gradient,
                           std::vector<float> row, float learning_rate) {
  UpdateRule rule = RuleNamed("sgd");
  rule.transforms = transforms;
  const int64_t dim = static_cast<int64_t>(row.size());
  rule.Update(rule.RatesOf(learning_rate, 1), dim, gradient.data(), row.data());
  return row;
}

TEST(RowTransforms, EachTransformEqualsFormula) {
  RowTransforms transforms;
  transforms.l2 = 0.5f;
  EXPECT_EQ(Updated(transforms, {1.f, 0.f}, {2.f, 4.f}, 0.5f), (std::vector<float>{0.5f, 2.f}));
  transforms = RowTransforms();
  transforms.clip_value = 1.f;
  EXPECT_EQ(Updated(transforms, {-3.f, 0.5f}, {0.f, 0.f}, 1.f), (std::vector<float>{1.f, -0.5f}));
  transforms = RowTransforms();
  transforms.clip_norm = 1.f;
  EXPECT_EQ(Updated(transforms, {3.f, 4.f}, {0.f, 0.f}, 1.f), (std::vector<float>{-.6f, -.8f}));
  EXPECT_EQ(Updated(transforms, {.3f, .4f}, {0.f, 0.f}, 1.f), (std::vector<float>{-.3f, -.4f}));
  transforms = RowTransforms();
  transforms.decay = 0.5f;
  EXPECT_EQ(Updated(transforms, {1.f, 0.f}, {2.f, 4.f}, 0.5f), (std::vector<float>{1.f, 3.f}));
  EXPECT_EQ(transforms.Kept(3.f), 0.);
  transforms = RowTransforms();
  transforms.max_norm = 5.f;
  EXPECT_EQ(Updated(transforms, {-6.f, -8.f}, {0.f, 0.f}, 1.f), (std::vector<float>{3.f, 4.f}));
}

TEST(RowTransforms, ClipsEachValueForAnyDim) {
  RowTransforms transforms;
  transforms.clip_value = 1.5f;
  for (int64_t dim = 1; dim < 20; ++dim) {
    std::vector<float> gradient, expected;
    for (int64_t j = 0; j < dim; ++j) {
      gradient.push_back(static_cast<float>(j % 7) - 3.f);
      expected.push_back(-std::min(std::max(gradient.back(), -1.5f), 1.5f));
    }
    const std::vector<float> row(static_cast<size_t>(dim), 0.f);
    EXPECT_EQ(Updated(transforms, gradient, row, 1.f), expected) << dim;
  }
  // A NaN must not be hidden.
  std::vector<float> gradient(9, 0.f);
  gradient[2] = gradient[8] = std::nanf("");
  const std::vector<float> row = Updated(transforms, gradient, std::vector<float>(9, 0.f), 1.f);
  EXPECT_TRUE(std::isnan(row[2]) && std::isnan(row[8]) && row[0] == 0.f);
}

TEST(RowTransforms, TransformsApplyInOrder) {
  RowTransforms transforms;
  transforms.l2 = 0.5f;         // gradient 1 + 2 = 3
  transforms.clip_value = 2.f;  // 2
  transforms.clip_norm = 1.f;   // 1
  transforms.decay = 0.25f;     // row 2 -> 1
  transforms.max_norm = 0.5f;   // row 1 - 2 * 1 = -1 -> -0.5
  EXPECT_EQ(Updated(transforms, {1.f}, {2.f}, 2.f), (std::vector<float>{-0.5f}));
}

TEST(RowTransforms, MovementUsesTransformedGradient) {
  UpdateRule rule = RuleNamed("sgd");
  rule.transforms.l2 = 1.f;
  rule.transforms.clip_value = 3.f;
  const float gradient[] = {0.5f, 100.f}, row[] = {1.f, 0.f};
  EXPECT_FLOAT_EQ(rule.Movement(0.1f, 2, gradient, row), 0.3f);
  EXPECT_EQ(gradient[1], 100.f);
}

TEST(UpdateRule, ErrorNamesUnknownRule) {
  UpdateRule rule;
  EXPECT_TRUE(UpdateRule::Make("adagrad", {0.1f, 1e-7f}, &rule).ok());
  EXPECT_STREQ(rule.name(), "adagrad");
  EXPECT_EQ(rule.parameters[1], 1e-7f);
  const Status unknown = UpdateRule::Make("lion", {}, &rule);
  EXPECT_NE(unknown.message().find("'lion'; expected one of 'sgd'"), std::string::npos);
  const Status many = UpdateRule::Make("adagrad", {0.1f}, &rule);
  EXPECT_NE(many.message().find("1 parameters; expected 2"), std::string::npos);
}

TEST(UpdateRule, AdamMovementGrowsWithSum) {
  const UpdateRule rule = RuleNamed("adam", {0.9f, 0.999f, 1e-9f});
  // With a second moment of 1, a gradient of 1 moves the row by one learning rate.
  const std::vector<float> row = {0.f, 0.f, 1.f};
  const float one[] = {1.f}, ten[] = {10.f};
  EXPECT_NEAR(rule.Movement(0.01f, 1, one, row.data()), 0.01f, 1e-6);
  EXPECT_NEAR(rule.Movement(0.01f, 1, ten, row.data()), 0.1f / std::sqrt(1.099f), 1e-6);
}

TEST(UpdateRule, MovementOfNanGradientIsNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::string& name : AllRuleNames()) {
    const std::vector<float> row(80, 1.f);
    for (size_t bad = 0; bad < 19; ++bad) {
      std::vector<float> gradient(19, 1.f);
      gradient[bad] = nan;
      EXPECT_TRUE(std::isnan(RuleNamed(name).Movement(0.1f, 19, gradient.data(), row.data())))
          << name << " " << bad;
    }
  }
}

}  // namespace
}  // namespace slipstream
