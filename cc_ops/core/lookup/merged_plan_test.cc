#include "cc_ops/core/lookup/merged_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cc_ops/core/testing/test_rules.h"
#include "cc_ops/core/testing/test_training.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 3, kBatch = 40;

TableOptions Options(const std::string& name = "t") {
  TableOptions options;
  options.name = name;
  options.dim = kDim;
  options.rule = RuleNamed("adam");
  return options;
}

// A batch of one feature with one weighted key per example.
struct Batch {
  Batch(uint64_t seed, bool is_weighted) {
    std::mt19937_64 random(seed);
    for (int64_t i = 0; i < kBatch; ++i) {
      keys.push_back(static_cast<int64_t>(random() % 25));
      weights.push_back(is_weighted ? static_cast<float>(random() % 9) / 4.f : 1.f);
      for (int64_t j = 0; j < kDim; ++j) {
        gradient.push_back(static_cast<float>(random() % 2001) / 1000.f - 1.f);
      }
    }
  }
  void Append(const Batch& other) {
    keys.insert(keys.end(), other.keys.begin(), other.keys.end());
    weights.insert(weights.end(), other.weights.begin(), other.weights.end());
    gradient.insert(gradient.end(), other.gradient.begin(), other.gradient.end());
  }
  // Looks the batch up. With `is_weighted`, the plan has a scale per key.
  void LookUp(EmbeddingTable* table, bool is_weighted, LookupWorkspace* workspace) const {
    FeatureView view;
    view.batch = view.num_keys = static_cast<int64_t>(keys.size());
    view.keys = keys.data();
    if (is_weighted) view.weights = weights.data();
    std::vector<float> pooled(gradient.size());
    ASSERT_TRUE(LookupForTraining({table}, {view}, {Combiner::kSum}, {{pooled.data(), kDim}},
                                  Threads(2), workspace, /*joins_step=*/true)
                    .ok());
  }
  std::vector<int64_t> keys;
  std::vector<float> weights, gradient;
};

std::vector<float> State(const EmbeddingTable& table) {
  TableContents contents = table.Export();
  contents.rows.insert(contents.rows.end(), contents.slots.begin(), contents.slots.end());
  contents.rows.insert(contents.rows.end(), contents.counts.begin(), contents.counts.end());
  return contents.rows;
}

// Trains one table with three lookups per update, and another with one lookup of all keys.
void ExpectEqualRows(const TableOptions& options, const std::vector<bool>& is_weighted) {
  EmbeddingTable merged_table(options), plain_table(options);
  for (uint64_t step = 0; step < 5; ++step) {
    Batch all(0, false);
    all.keys.clear();
    all.weights.clear();
    all.gradient.clear();
    std::vector<std::unique_ptr<LookupWorkspace>> workspaces;
    std::vector<Batch> batches;
    std::vector<const LookupPlan*> plans;
    for (size_t i = 0; i < is_weighted.size(); ++i) {
      batches.emplace_back(step * 10 + i, is_weighted[i]);
      all.Append(batches.back());
      workspaces.push_back(std::make_unique<LookupWorkspace>());
      batches.back().LookUp(&merged_table, is_weighted[i], workspaces.back().get());
      plans.push_back(&workspaces.back()->plan);
    }
    std::vector<PooledGradient> gradients;
    for (const Batch& batch : batches) gradients.push_back({batch.gradient.data(), kDim});
    LookupPlan merged;
    ASSERT_TRUE(MergePlans(plans, Threads(3), &merged).ok());
    ASSERT_TRUE(ApplyGradients(merged, gradients, 0.1f, Threads(3)).ok());
    LookupWorkspace plain;
    all.LookUp(&plain_table, true, &plain);
    ASSERT_TRUE(ApplyGradients(plain.plan, {{all.gradient.data(), kDim}}, 0.1f, Threads(2)).ok());
  }
  EXPECT_EQ(State(merged_table), State(plain_table));
  EXPECT_EQ(merged_table.updates().step(), 5);
  EXPECT_EQ(merged_table.rows().lookup_step(), 5);
}

TEST(MergedPlan, EqualsOneLookupOfAllKeys) { ExpectEqualRows(Options(), {false, false, false}); }

TEST(MergedPlan, KeepsTheWeightsOfEachLookup) { ExpectEqualRows(Options(), {true, false, true}); }

TEST(MergedPlan, UpdatesRowsThatMovedBetweenLookups) {
  EmbeddingTable table(Options());
  const Batch first(1, false), second(2, false);
  LookupWorkspace a, b;
  first.LookUp(&table, false, &a);
  ASSERT_EQ(table.Remove(first.keys.data(), 1), 1);
  second.LookUp(&table, false, &b);
  LookupPlan merged;
  ASSERT_TRUE(MergePlans({&a.plan, &b.plan}, Threads(2), &merged).ok());
  const std::vector<PooledGradient> gradients = {{first.gradient.data(), kDim},
                                                 {second.gradient.data(), kDim}};
  EXPECT_TRUE(ApplyGradients(merged, gradients, 0.1f, Threads(2)).ok());
  EXPECT_EQ(table.updates().step(), 1);
}

TEST(MergedPlan, RequiresTheSameTables) {
  EmbeddingTable one(Options("one")), two(Options("two"));
  const Batch batch(1, false);
  LookupWorkspace a, b;
  batch.LookUp(&one, false, &a);
  batch.LookUp(&two, false, &b);
  LookupPlan merged;
  EXPECT_EQ(MergePlans({&a.plan, &b.plan}, Parallel(), &merged).message(),
            "the plans have different tables; expected lookups of the same tables");
}

TEST(MergedPlan, CountsALookupOnceUnlessTheTableWasUpdated) {
  EmbeddingTable table(Options());
  const Batch batch(1, false);
  LookupWorkspace workspace;
  for (int i = 0; i < 3; ++i) batch.LookUp(&table, false, &workspace);
  EXPECT_EQ(table.rows().lookup_step(), 1);
  ASSERT_TRUE(
      ApplyGradients(workspace.plan, {{batch.gradient.data(), kDim}}, 0.1f, Parallel()).ok());
  batch.LookUp(&table, false, &workspace);
  EXPECT_EQ(table.rows().lookup_step(), 2);
}

}  // namespace
}  // namespace slipstream
