// Decay of all rows gives the same values as a loop over them, wherever rows are read.
#include "cc_ops/core/update/row_sweep.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <vector>

#include "cc_ops/core/exchange/push.h"
#include "cc_ops/core/lookup/batch_lookup.h"
#include "cc_ops/core/testing/test_rules.h"
#include "cc_ops/core/testing/test_threads.h"
#include "cc_ops/core/update/gradient_update.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 3;

TableOptions OptionsOf(const UpdateRule& rule) {
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  options.initializer.kind = RowInitializer::Kind::kUniform;
  options.initializer.a = -1.f;
  options.initializer.b = 1.f;
  options.rule = rule;
  return options;
}

// Reference: updates every row of a table in every step, one by one.
class Expected {
 public:
  explicit Expected(const TableOptions& options) : options_(options) {}

  std::vector<float>& Row(int64_t key) {
    std::vector<float>& row = rows_[key];
    if (row.empty()) {
      row.resize(kDim + options_.rule.SlotsPerRow(kDim));
      options_.initializer.Fill(key, kDim, row.data());
      options_.rule.InitSlots(kDim, row.data() + kDim);
    }
    return row;
  }

  // gradients: of existing keys.
  void Update(float rate, int64_t step, std::map<int64_t, std::vector<float>> gradients) {
    const RowTransforms& transforms = options_.rule.transforms;
    UpdateRule rule = options_.rule;
    rule.transforms.of_all_rows = false;
    for (auto& [key, row] : rows_) {
      std::vector<float> gradient(kDim, 0.f);
      const auto found = gradients.find(key);
      if (found == gradients.end() && !transforms.SweepsAll()) {
        for (int64_t j = 0; j < kDim; ++j) row[j] *= 1.f - rate * transforms.decay;
        continue;
      }
      if (found != gradients.end()) gradient = found->second;
      rule.Update(rule.RatesOf(rate, step), kDim, gradient.data(), row.data());
    }
  }

  void ExpectNear(const EmbeddingTable& table) {
    const TableContents contents = table.Export();
    ASSERT_EQ(contents.keys.size(), rows_.size());
    const int64_t slots = options_.rule.SlotsPerRow(kDim);
    for (size_t i = 0; i < contents.keys.size(); ++i) {
      const std::vector<float>& row = rows_[contents.keys[i]];
      for (int64_t j = 0; j < kDim; ++j) {
        EXPECT_NEAR(contents.rows[i * kDim + j], row[j], 2e-5f * std::max(1.f, std::abs(row[j])))
            << options_.rule.name();
      }
      for (int64_t j = 0; j < slots; ++j) {
        EXPECT_NEAR(contents.slots[i * slots + j], row[kDim + j], 1e-4f) << options_.rule.name();
      }
    }
  }

 private:
  const TableOptions options_;
  std::map<int64_t, std::vector<float>> rows_;
};

// Looks up two keys in each of many steps and updates them, with a plan or as ranks do.
void ExpectSameAsLoop(const UpdateRule& rule, bool as_ranks, float learning_rate, int steps) {
  EmbeddingTable table(OptionsOf(rule));
  Expected expected(table.options());
  const Parallel parallel = Threads(2);
  LookupWorkspace workspace;
  for (int step = 1; step <= steps; ++step) {
    const std::vector<int64_t> keys = {step % 7, (step * step) % 11 + 7};
    FeatureView view;
    view.keys = keys.data();
    view.batch = 2;
    view.width = 1;
    std::vector<float> looked_up(2 * kDim), evaluated(2 * kDim);
    const std::vector<PooledOutput> outputs = {{looked_up.data(), kDim}};
    ASSERT_TRUE(
        LookupForTraining({&table}, {view}, {Combiner::kSum}, outputs, parallel, &workspace).ok());
    ASSERT_TRUE(LookupForEvaluation({&table}, {view}, {Combiner::kSum}, {{evaluated.data(), kDim}},
                                    parallel)
                    .ok());
    EXPECT_EQ(looked_up, evaluated);
    const float rate = learning_rate / (1.f + 0.1f * static_cast<float>(step));
    std::vector<float> gradients;
    std::map<int64_t, std::vector<float>> by_key;
    for (int i = 0; i < 2; ++i) {
      const std::vector<float>& row = expected.Row(keys[i]);
      for (int64_t j = 0; j < kDim; ++j) {
        EXPECT_NEAR(looked_up[i * kDim + j], row[j], 2e-5f * std::max(1.f, std::abs(row[j])));
        gradients.push_back(std::sin(static_cast<float>(step + i * 5 + j)));
      }
      by_key[keys[i]] = {gradients.end() - kDim, gradients.end()};
    }
    if (as_ranks) {
      const int64_t size = 2;
      const SendBufferView rows = {1, &size, keys.data(), 2, gradients.data(), 2 * kDim};
      ApplyOptions options;
      options.learning_rate = rate;
      ASSERT_TRUE(ApplyRows({&table}, rows, options, parallel).ok());
    } else {
      ASSERT_TRUE(ApplyGradients(workspace.plan, {{gradients.data(), kDim}}, rate, parallel).ok());
    }
    expected.Update(rate, step, by_key);
    if (step % 10 == 0) expected.ExpectNear(table);
  }
}

TEST(DecayOfEveryRow, IsExactForEveryRule) {
  for (const std::string& name : AllRuleNames()) {
    UpdateRule rule = RuleNamed(name);
    rule.transforms.decay = 0.3f;
    rule.transforms.of_all_rows = true;
    for (const bool as_ranks : {false, true}) ExpectSameAsLoop(rule, as_ranks, 0.05f, 60);
    rule.transforms.max_norm = 0.8f;
    rule.transforms.clip_norm = 0.5f;
    ExpectSameAsLoop(rule, false, 0.05f, 60);
  }
}

TEST(DecayOfEveryRow, SmallDecaysAreNotLost) {
  UpdateRule rule = RuleNamed("sgd");
  rule.transforms.decay = 1e-5f;
  rule.transforms.of_all_rows = true;
  EmbeddingTable table(OptionsOf(rule));
  const int64_t key = 1;
  const float row[] = {1.f, 2.f, 3.f};
  ASSERT_TRUE(table.Write(&key, row, 1).ok());
  // 1 - 1e-8 rounds to 1 in float; its 1,000,000th power is e^-0.01.
  for (int i = 0; i < 1000000; ++i) {
    const StepRates rates = table.BeginUpdate(1e-3f);
    if (i % 1000 != 0) continue;
    float none[] = {0.f, 0.f, 0.f};
    rule.Update(rates, kDim, none, RowLayout::Floats(table.rows().Find(key)));
  }
  EXPECT_NEAR(table.Export().rows[2], 3.f * std::exp(-0.01f), 3e-4f);
}

TEST(DecayOfEveryRow, ContinuesBeyondFloatRange) {
  UpdateRule rule = RuleNamed("sgd");
  rule.transforms.decay = 0.9f;
  rule.transforms.of_all_rows = true;
  ExpectSameAsLoop(rule, false, 1.f, 500);
}

TEST(DecayOfEveryRow, PenaltiesSweepTable) {
  for (const std::string& name : AllRuleNames()) {
    UpdateRule rule = RuleNamed(name);
    rule.transforms.l2 = 0.2f;
    rule.transforms.of_all_rows = true;
    for (const bool as_ranks : {false, true}) ExpectSameAsLoop(rule, as_ranks, 0.01f, 30);
    rule.transforms.decay = 0.3f;
    ExpectSameAsLoop(rule, false, 0.01f, 30);
  }
}

TEST(DecayOfEveryRow, ReadersAndWritersSeeDecayedValues) {
  UpdateRule rule = RuleNamed("sgd");
  rule.transforms.decay = 0.5f;
  rule.transforms.of_all_rows = true;
  EmbeddingTable table(OptionsOf(rule));
  const int64_t keys[] = {1, 2};
  const float rows[] = {1.f, 2.f, 3.f, 4.f, 5.f, 6.f};
  ASSERT_TRUE(table.Write(keys, rows, 1).ok());
  table.BeginUpdate(1.f);
  ASSERT_TRUE(table.Write(keys + 1, rows + 3, 1).ok());
  std::vector<float> read(6);
  bool found[2];
  table.rows().Gather(keys, 2, Threads(1), read.data(), found);
  EXPECT_EQ(read, (std::vector<float>{0.5f, 1.f, 1.5f, 4.f, 5.f, 6.f}));
  EXPECT_EQ(table.Export().rows, read);
  EmbeddingTable restored(OptionsOf(rule));
  restored.BeginUpdate(0.5f);
  ASSERT_TRUE(restored.Import(table.Export()).ok());
  EXPECT_EQ(restored.Export().rows, read);
}

TEST(DecayOfEveryRow, RejectsDecayToZero) {
  UpdateRule rule = RuleNamed("sgd");
  rule.transforms.decay = 2.f;
  EXPECT_TRUE(EmbeddingTable(OptionsOf(rule)).CheckRate(1.f).ok());
  rule.transforms.of_all_rows = true;
  const EmbeddingTable table(OptionsOf(rule));
  EXPECT_TRUE(table.CheckRate(0.4f).ok());
  EXPECT_NE(
      table.CheckRate(0.5f).message().find("table 't' is 1.000000; expected a product below 1"),
      std::string::npos);
}

}  // namespace
}  // namespace slipstream
