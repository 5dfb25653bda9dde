#include "cc_ops/core/update/policy_update.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cc_ops/core/testing/test_rules.h"
#include "cc_ops/core/testing/test_training.h"
#include "cc_ops/core/update/deferred_export.h"

namespace slipstream {
namespace {

using Mode = UpdatePolicy::Mode;
using Trigger = UpdatePolicy::Trigger;
constexpr int64_t kDim = 4;

// A table with the given rule.
struct RuleTraining : Training {
  explicit RuleTraining(const std::string& kind, int64_t capacity = 0, int threads = 2,
                        int64_t dim = kDim, RowTransforms transforms = {})
      : Training(OptionsOf(kind, capacity, dim, transforms), threads) {}

  static TableOptions OptionsOf(const std::string& kind, int64_t capacity, int64_t dim,
                                const RowTransforms& transforms) {
    TableOptions options;
    options.name = "t";
    options.dim = dim;
    options.capacity = capacity;
    options.rule = RuleNamed(kind);
    options.rule.transforms = transforms;
    return options;
  }
};

UpdatePolicy Defer(float movement, int64_t max_age, int ranks = 1) {
  UpdatePolicy policy;
  policy.mode = Mode::kDefer;
  policy.movement = movement;
  policy.max_age = max_age;
  policy.max_rows = 1 << 20;
  policy.ranks = ranks;
  return policy;
}

TEST(Flush, ImportedSumsJoinFirstUpdate) {
  DeferredContents contents;
  contents.keys = {3, 8, 11};
  contents.ages = {0, 0, 0};
  contents.ranks = {0, 0, 0};
  const std::vector<float> gradients = {0.5f, -1.f, 0.25f};
  for (const float gradient : gradients) {
    for (int64_t j = 1; j <= kDim; ++j) contents.sums.push_back(gradient * static_cast<float>(j));
  }
  for (const std::string& kind : AllRuleNames()) {
    RuleTraining updated(kind), flushed(kind);
    uint32_t index = 0;
    for (const int64_t key : contents.keys) {
      flushed.table->rows().FindOrInsert(key, 1.f, &index);
    }
    const std::vector<float> initial = flushed.State();
    flushed.table->updates().SetPolicy(Defer(1e9f, 1000));
    ASSERT_TRUE(ImportDeferred(flushed.table.get(), contents).ok());
    ASSERT_TRUE(FlushDeferred(flushed.table.get(), flushed.parallel).ok());
    EXPECT_EQ(flushed.table->updates().num_deferred(), 3);
    EXPECT_EQ(flushed.State(), initial);
    flushed.table->updates().set_last_learning_rate(updated.rate);
    ASSERT_TRUE(FlushDeferred(flushed.table.get(), flushed.parallel).ok());
    EXPECT_EQ(flushed.table->updates().num_deferred(), 0);
    updated.Step(contents.keys, gradients);
    EXPECT_EQ(flushed.State(), updated.State());
    EXPECT_NE(flushed.State(), initial);
  }
}

TEST(Flush, ShadowSumsBeforeFirstUpdateAreDropped) {
  RuleTraining training("sgd");
  DeferredContents contents;
  uint32_t index = 0;
  for (int64_t key = 0; key < 500; ++key) {
    training.table->rows().FindOrInsert(key, 1.f, &index);
    contents.keys.push_back(key);
    contents.sums.insert(contents.sums.end(), kDim, 1.f);
  }
  contents.ages.assign(500, 0);
  contents.ranks.assign(500, 0);
  UpdatePolicy policy = Defer(1e9f, 1000);
  policy.is_shadow = true;
  training.table->updates().SetPolicy(policy);
  ASSERT_TRUE(ImportDeferred(training.table.get(), contents).ok());
  EXPECT_GT(training.table->updates().num_deferred(), 0);
  ASSERT_TRUE(FlushDeferred(training.table.get(), training.parallel).ok());
  EXPECT_EQ(training.table->updates().num_deferred(), 0);
}

TEST(Defer, LosesNoGradient) {
  for (const Trigger trigger : {Trigger::kMovement, Trigger::kInterval}) {
    for (const int ranks : {1, 4}) {
      RuleTraining plain("sgd"), deferred("sgd");
      UpdatePolicy policy = Defer(0.1f, 7, ranks);
      policy.trigger = trigger;
      deferred.table->updates().SetPolicy(policy);
      if (trigger == Trigger::kInterval) {
        TrainAtRandom(&plain, 1);
        TrainAtRandom(&deferred, 1);
        deferred.SetFlags({0, 1, 2, 3, 5, 8, 13}, kSaturated);
      }
      TrainAtRandom(&plain, 60, 2, 6);
      TrainAtRandom(&deferred, 60, 2, 6);
      EXPECT_GT(deferred.table->updates().num_deferred(), 0);
      ASSERT_TRUE(FlushDeferred(deferred.table.get(), deferred.parallel).ok());
      EXPECT_EQ(deferred.table->updates().num_deferred(), 0);
      const std::vector<float> expected = plain.State(), actual = deferred.State();
      ASSERT_EQ(expected.size(), actual.size());
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_NEAR(actual[i], expected[i], 2e-5) << i << " ranks " << ranks;
      }
      const UpdateCounts counts = deferred.table->updates().counts();
      // Gradients are deferred or sent; a deferred sum is sent again when it is due.
      EXPECT_GE(counts.deferred + counts.sent, counts.offered);
      EXPECT_LT(counts.sent, counts.offered);
      EXPECT_GT(counts.due_by_age, 0);
      EXPECT_GT(counts.flushed, 0);
    }
  }
}

TEST(Defer, DefersUntilMovementReachesLimit) {
  RuleTraining training("sgd");
  training.table->updates().SetPolicy(Defer(0.1f, 1000));
  // The fourth value moves most: 0.1 * 4 * 0.1 = 0.04 per step.
  training.Step({7}, {0.1f});
  training.Step({7}, {0.1f});
  EXPECT_EQ(training.Row(7), std::vector<float>(kDim, 0.f));
  training.Step({7}, {0.1f});
  EXPECT_NEAR(training.Row(7)[3], -0.12f, 1e-6);
  EXPECT_EQ(training.table->updates().num_deferred(), 0);
  const UpdateCounts counts = training.table->updates().counts();
  EXPECT_EQ(counts.offered, 3);
  EXPECT_EQ(counts.deferred, 2);
  EXPECT_EQ(counts.sent, 1);
  EXPECT_EQ(counts.due_by_movement, 1);
}

TEST(Defer, AppliesSumsAtMaxAge) {
  for (const int ranks : {1, 3}) {
    RuleTraining training("sgd");
    training.table->updates().SetPolicy(Defer(1e9f, 3, ranks));
    training.Step({7, 8, 7}, {1.f, 1.f, 1.f});
    for (int step = 1; step <= 2; ++step) {
      training.Step({9}, {0.f});
      EXPECT_EQ(training.Row(7)[0], 0.f) << step;
    }
    training.Step({9}, {0.f});
    EXPECT_NEAR(training.Row(7)[0], -0.2f, 1e-6);
    EXPECT_NEAR(training.Row(8)[0], -0.1f, 1e-6);
  }
}

TEST(Defer, AppliesSumsOfRanksAsOneGradient) {
  // The first step of Adagrad has the same length for any gradient. Two gradients applied one after
  // the other would move the row farther.
  RuleTraining one("adagrad"), two("adagrad");
  one.table->updates().SetPolicy(Defer(1e9f, 2, 1));
  two.table->updates().SetPolicy(Defer(1e9f, 2, 2));
  for (Training* training : {&one, &two}) {
    training->Step({7, 7}, {1.f, 2.f});
    training->Step({9, 9}, {0.f, 0.f});
    training->Step({9, 9}, {0.f, 0.f});
  }
  EXPECT_EQ(one.Row(7), two.Row(7));
  EXPECT_EQ(one.Row(7)[0], -0.1f);
  EXPECT_EQ(two.table->updates().counts().due_by_age, 2 * one.table->updates().counts().due_by_age);
}

TEST(Defer, DefersOnlySaturatedRowsByInterval) {
  RuleTraining training("sgd");
  training.Step({1, 2}, {0.f, 0.f});
  UpdatePolicy policy = Defer(0.f, 100);
  policy.trigger = Trigger::kInterval;
  training.table->updates().SetPolicy(policy);
  training.SetFlags({1}, kSaturated);
  training.Step({1, 2}, {1.f, 1.f});
  EXPECT_EQ(training.Row(1)[0], 0.f);
  EXPECT_NEAR(training.Row(2)[0], -0.1f, 1e-7);
  // The sum of a row that is no longer saturated is applied with its next gradient.
  training.SetFlags({}, 0);
  training.Step({1}, {1.f});
  EXPECT_NEAR(training.Row(1)[0], -0.2f, 1e-7);
}

TEST(Defer, AppliesSumsBeyondCapacityAtOnce) {
  RuleTraining plain("adagrad"), training("adagrad");
  UpdatePolicy policy = Defer(1e9f, 1000);
  policy.max_rows = 0;
  training.table->updates().SetPolicy(policy);
  TrainAtRandom(&plain, 5);
  TrainAtRandom(&training, 5);
  EXPECT_EQ(plain.State(), training.State());
  const UpdateCounts counts = training.table->updates().counts();
  EXPECT_EQ(counts.over_budget, counts.offered);
  EXPECT_GT(counts.over_budget, 0);
}

TEST(Defer, DoesNotDeferNonFiniteRow) {
  RuleTraining training("adagrad");
  training.Step({1}, {1.f});
  RowLayout::Floats(training.table->rows().Find(1))[kDim] = std::numeric_limits<float>::quiet_NaN();
  training.table->updates().SetPolicy(Defer(1e9f, 1000));
  training.Step({1}, {1.f});
  EXPECT_EQ(training.table->updates().num_deferred(), 0);
}

TEST(Defer, DropsSumsOfEvictedRows) {
  RuleTraining training("sgd", 4);
  training.table->updates().SetPolicy(Defer(1e9f, 1000));
  training.Step({1, 2, 3, 4}, {1.f, 1.f, 1.f, 1.f});
  training.Step({5, 6, 7, 8}, {1.f, 1.f, 1.f, 1.f});
  EXPECT_EQ(training.table->updates().num_deferred(), 4);
  EXPECT_EQ(training.table->updates().counts().evicted, 4);
  training.Step({1}, {0.f});
  ASSERT_TRUE(FlushDeferred(training.table.get(), training.parallel).ok());
  EXPECT_EQ(training.Row(1)[0], 0.f);
}

TEST(Defer, IsBitwiseEqualForAnyNumberOfThreads) {
  std::vector<std::vector<float>> states;
  for (const int threads : {1, 2, 7}) {
    RuleTraining training("adagrad", 0, threads);
    UpdatePolicy policy = Defer(0.05f, 9, 2);
    policy.max_rows = 200;
    training.table->updates().SetPolicy(policy);
    TrainAtRandom(&training, 40, 2);
    ASSERT_TRUE(FlushDeferred(training.table.get(), training.parallel).ok());
    states.push_back(training.State());
  }
  EXPECT_EQ(states[0], states[1]);
  EXPECT_EQ(states[0], states[2]);
}

TEST(Defer, EvaluationIncludesDeferredGradients) {
  RuleTraining training("sgd");
  training.table->updates().SetPolicy(Defer(1e9f, 1000));
  training.Step({7}, {1.f});
  const int64_t key = 7;
  FeatureView view;
  view.batch = view.num_keys = 1;
  view.keys = &key;
  std::vector<float> pooled(kDim);
  ASSERT_TRUE(FlushBeforeReading({training.table.get()}, training.parallel).ok());
  ASSERT_TRUE(LookupForEvaluation({training.table.get()}, {view}, {Combiner::kSum},
                                  {{pooled.data(), kDim}}, training.parallel)
                  .ok());
  EXPECT_NEAR(pooled[0], -0.1f, 1e-7);
  EXPECT_EQ(training.table->updates().counts().flushed, 1);
}

TEST(Mask, KeepsSaturatedRowsAndSlots) {
  for (const std::string& kind : AllRuleNames()) {
    RuleTraining training(kind);
    training.Step({1, 2}, {1.f, 1.f});
    UpdatePolicy policy;
    policy.mode = Mode::kMask;
    training.table->updates().SetPolicy(policy);
    training.SetFlags({1, 99}, kSaturated);
    const std::vector<float> saturated = training.Row(1), varying = training.Row(2);
    training.Step({1, 2, 1}, {1.f, 1.f, 1.f});
    EXPECT_EQ(training.Row(1), saturated);
    EXPECT_NE(training.Row(2), varying);
    const UpdateCounts counts = training.table->updates().counts();
    EXPECT_EQ(counts.masked, 1);
    EXPECT_EQ(counts.offered, 4);
    EXPECT_EQ(counts.sent, 3);
  }
}

TEST(Mask, DecaysAdamMomentsOnRequest) {
  RuleTraining training("adam");
  training.Step({1}, {1.f});
  UpdatePolicy policy;
  policy.mode = Mode::kMask;
  policy.decay_skipped = true;
  training.table->updates().SetPolicy(policy);
  training.SetFlags({1}, kSaturated);
  std::vector<float> expected = training.Row(1);
  training.Step({1}, {1.f});
  for (int64_t j = 0; j < kDim; ++j) {
    expected[kDim + j] *= 0.9f;
    expected[2 * kDim + j] *= 0.999f;
  }
  EXPECT_EQ(training.Row(1), expected);
}

TEST(Shadow, EqualsPlainTrainingAndCountsHypotheticalSavings) {
  for (const Mode mode : {Mode::kMask, Mode::kDefer}) {
    RuleTraining plain("adagrad"), shadow("adagrad");
    UpdatePolicy policy = Defer(0.05f, 9);
    policy.mode = mode;
    policy.is_shadow = true;
    shadow.table->updates().SetPolicy(policy);
    TrainAtRandom(&plain, 5);
    TrainAtRandom(&shadow, 5);
    std::vector<int64_t> keys;
    for (int64_t key = 0; key < 300; ++key) keys.push_back(key);
    shadow.SetFlags(keys, kSaturated);
    TrainAtRandom(&plain, 30);
    TrainAtRandom(&shadow, 30);
    ASSERT_TRUE(FlushDeferred(shadow.table.get(), shadow.parallel).ok());
    EXPECT_EQ(plain.State(), shadow.State());
    const UpdateCounts counts = shadow.table->updates().counts();
    EXPECT_GT(counts.offered, 0);
    EXPECT_GT(mode == Mode::kMask ? counts.masked : counts.deferred, 0);
    const double offered = static_cast<double>(plain.table->updates().counts().offered);
    EXPECT_NEAR(static_cast<double>(counts.offered), offered, 0.6 * offered);
  }
}

// The vectorized update masks the rows of one rank, the general update masks the rows of multiple
// ranks. Both must produce the same rows.
TEST(Mask, SimulatedRanksGiveSameUpdate) {
  for (const std::string& kind : AllRuleNames()) {
    for (const int64_t dim : {4, 16, 32, 64}) {
      for (const bool is_shadow : {false, true}) {
        for (const bool decays : {false, true}) {
          const bool can_decay = decays && kind == "adam" && !is_shadow;
          if (decays && !can_decay) continue;
          RowTransforms transforms;
          if (dim != 4) transforms = {.1f, 1.5f, 3.f, .1f, 2.f};
          RuleTraining one(kind, 0, 2, dim, transforms), several(kind, 0, 3, dim, transforms);
          std::vector<int64_t> keys(40);
          std::iota(keys.begin(), keys.end(), 0);
          for (Training* training : {&one, &several}) {
            UpdatePolicy policy;
            policy.mode = Mode::kMask;
            policy.decay_skipped = decays;
            policy.is_shadow = is_shadow;
            policy.ranks = training == &one ? 1 : 3;
            TrainAtRandom(training, 2);
            training->table->updates().SetPolicy(policy);
            std::vector<uint8_t> flags;
            for (const int64_t key : keys) flags.push_back(key % 2 == 0 ? 0 : kSaturated);
            EXPECT_TRUE(
                training->table->SetFlags(keys.data(), flags.data(), 40, training->parallel).ok());
            TrainAtRandom(training, 20, 2, 6);
          }
          EXPECT_EQ(one.State(), several.State());
          const UpdateCounts counts = one.table->updates().counts();
          EXPECT_GT(counts.masked, 0);
          EXPECT_GT(counts.sent, 0);
          EXPECT_EQ(counts.masked + counts.sent, counts.offered);
        }
      }
    }
  }
}

TEST(Policy, RejectsInvalidSettings) {
  UpdatePolicy policy = Defer(-1.f, 1);
  EXPECT_NE(ValidateUpdatePolicy(policy).message().find("movement is -1"), std::string::npos);
  policy = Defer(1.f, 0);
  EXPECT_NE(ValidateUpdatePolicy(policy).message().find("max_age is 0"), std::string::npos);
  policy = Defer(1.f, 1, 65);
  EXPECT_NE(ValidateUpdatePolicy(policy).message().find("ranks is 65"), std::string::npos);
  policy = Defer(1.f, 1);
  policy.max_rows = -1;
  EXPECT_NE(ValidateUpdatePolicy(policy).message().find("max_rows is -1"), std::string::npos);
}

}  // namespace
}  // namespace slipstream
