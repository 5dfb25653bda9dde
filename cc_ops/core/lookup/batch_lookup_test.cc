#include "cc_ops/core/lookup/batch_lookup.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cc_ops/core/testing/test_rules.h"
#include "cc_ops/core/testing/test_threads.h"
#include "cc_ops/core/update/gradient_update.h"

namespace slipstream {
namespace {

std::unique_ptr<EmbeddingTable> MakeTable(int64_t dim, int64_t capacity = 0) {
  TableOptions options;
  options.name = "t" + std::to_string(dim);
  options.dim = dim;
  options.capacity = capacity;
  options.initializer.kind = RowInitializer::Kind::kNormal;
  options.initializer.b = 1.f;
  options.rule = RuleNamed("adagrad", {0.f, 1e-8f});
  return std::make_unique<EmbeddingTable>(options);
}

FeatureView OneKeyEach(int table, const std::vector<int64_t>& keys) {
  FeatureView f;
  f.table = table;
  f.batch = f.num_keys = static_cast<int64_t>(keys.size());
  f.keys = keys.data();
  return f;
}

// Trains two tables on random batches (one key each, and ragged weighted bags) and returns all rows
// and slots.
std::vector<float> Train(int threads) {
  auto a = MakeTable(5), b = MakeTable(16);
  const std::vector<EmbeddingTable*> tables = {a.get(), b.get()};
  const std::vector<Combiner> combiners = {Combiner::kSum, Combiner::kSqrtn};
  std::mt19937_64 random(3);
  const int64_t batch = 257;
  for (int step = 0; step < 5; ++step) {
    std::vector<int64_t> single(batch), bag, splits = {0};
    std::vector<float> weights;
    for (int64_t i = 0; i < batch; ++i) {
      single[i] = static_cast<int64_t>(random() % 40);
      for (uint64_t n = random() % 5; n > 0; --n) {
        bag.push_back(static_cast<int64_t>(random() % 1000));
        weights.push_back(static_cast<float>(random() % 100) / 50.f);
      }
      splits.push_back(static_cast<int64_t>(bag.size()));
    }
    FeatureView f0 = OneKeyEach(0, single), f1;
    f1.table = 1;
    f1.batch = batch;
    f1.keys = bag.data();
    f1.num_keys = static_cast<int64_t>(bag.size());
    f1.row_splits = splits.data();
    f1.weights = weights.data();
    std::vector<float> out0(batch * 5), out1(batch * 16);
    LookupWorkspace workspace;
    EXPECT_TRUE(LookupForTraining(tables, {f0, f1}, combiners,
                                  {{out0.data(), 5}, {out1.data(), 16}}, Threads(threads),
                                  &workspace)
                    .ok());
    // The outputs serve as gradients, so that they depend on every earlier update.
    EXPECT_TRUE(ApplyGradients(workspace.plan, {{out0.data(), 5}, {out1.data(), 16}}, 0.1f,
                               Threads(threads))
                    .ok());
  }
  std::vector<float> all;
  for (const EmbeddingTable* table : tables) {
    const TableContents contents = table->Export();
    all.insert(all.end(), contents.rows.begin(), contents.rows.end());
    all.insert(all.end(), contents.slots.begin(), contents.slots.end());
    all.insert(all.end(), contents.counts.begin(), contents.counts.end());
  }
  return all;
}

TEST(BatchLookup, IsBitwiseEqualForAnyNumberOfThreads) {
  const std::vector<float> one = Train(1);
  EXPECT_FALSE(one.empty());
  EXPECT_EQ(one, Train(2));
  EXPECT_EQ(one, Train(7));
}

TEST(BatchLookup, EvaluationNeitherAllocatesNorCountsRows) {
  auto table = MakeTable(4);
  const std::vector<int64_t> keys = {1, 2, 1};
  std::vector<float> evaluated(12), trained(12);
  ASSERT_TRUE(LookupForEvaluation({table.get()}, {OneKeyEach(0, keys)}, {Combiner::kSum},
                                  {{evaluated.data(), 4}}, Threads(2))
                  .ok());
  EXPECT_EQ(table->rows().size(), 0);
  LookupWorkspace workspace;
  ASSERT_TRUE(LookupForTraining({table.get()}, {OneKeyEach(0, keys)}, {Combiner::kSum},
                                {{trained.data(), 4}}, Threads(2), &workspace)
                  .ok());
  EXPECT_EQ(evaluated, trained);
  EXPECT_EQ(table->rows().size(), 2);
  EXPECT_EQ(table->Export().counts, (std::vector<float>{2, 1}));
}

TEST(BatchLookup, AcceptsEmptyBatch) {
  auto table = MakeTable(4);
  const std::vector<int64_t> keys;
  LookupWorkspace workspace;
  ASSERT_TRUE(LookupForTraining({table.get()}, {OneKeyEach(0, keys)}, {Combiner::kMean},
                                {{nullptr, 4}}, Threads(2), &workspace)
                  .ok());
  EXPECT_TRUE(ApplyGradients(workspace.plan, {{nullptr, 4}}, 0.1f, Threads(2)).ok());
  EXPECT_EQ(table->rows().size(), 0);
}

TEST(BatchLookup, NonFiniteGradientChangesNothing) {
  auto table = MakeTable(2);
  const std::vector<int64_t> keys = {1, 2};
  std::vector<float> out(4);
  LookupWorkspace workspace;
  ASSERT_TRUE(LookupForTraining({table.get()}, {OneKeyEach(0, keys)}, {Combiner::kSum},
                                {{out.data(), 2}}, Threads(1), &workspace)
                  .ok());
  const TableContents before = table->Export();
  for (float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    const std::vector<float> gradient = {1.f, 1.f, 1.f, bad};
    const Status status = ApplyGradients(workspace.plan, {{gradient.data(), 2}}, 0.1f, Threads(2));
    EXPECT_NE(status.message().find("example 1, element 1"), std::string::npos);
    EXPECT_EQ(table->Export().rows, before.rows);
  }
}

TEST(BatchLookup, FullTableRejectsBatchThatDoesNotFit) {
  auto table = MakeTable(2, 3);
  const std::vector<int64_t> fits = {1, 2, 3}, too_many = {4, 5, 6, 7};
  std::vector<float> out(8);
  LookupWorkspace workspace;
  ASSERT_TRUE(LookupForTraining({table.get()}, {OneKeyEach(0, fits)}, {Combiner::kSum},
                                {{out.data(), 2}}, Threads(2), &workspace)
                  .ok());
  LookupWorkspace refused;
  const Status status =
      LookupForTraining({table.get()}, {OneKeyEach(0, too_many)}, {Combiner::kSum},
                        {{out.data(), 2}}, Threads(2), &refused);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(table->Export().keys, fits);
}

TEST(BatchLookup, UpdateOfAnEvictedKeyIsDroppedAndCounted) {
  auto table = MakeTable(2, 2);
  const std::vector<int64_t> first = {1, 2}, second = {3, 2};
  std::vector<float> out(4);
  LookupWorkspace workspace, later;
  ASSERT_TRUE(LookupForTraining({table.get()}, {OneKeyEach(0, first)}, {Combiner::kSum},
                                {{out.data(), 2}}, Threads(1), &workspace)
                  .ok());
  ASSERT_TRUE(LookupForTraining({table.get()}, {OneKeyEach(0, second)}, {Combiner::kSum},
                                {{out.data(), 2}}, Threads(1), &later)
                  .ok());
  const TableContents before = table->Export();
  const std::vector<float> gradient = {1.f, 1.f, 1.f, 1.f};
  ASSERT_TRUE(ApplyGradients(workspace.plan, {{gradient.data(), 2}}, 0.1f, Threads(1)).ok());
  EXPECT_EQ(table->updates().num_dropped(), 1);
  const TableContents after = table->Export();
  EXPECT_NE(after.rows[0], before.rows[0]);  // The row of key 2 was updated.
  // Key 3 reuses the memory of key 1 and must not be updated.
  EXPECT_EQ(after.rows[2], before.rows[2]);
}

TEST(BatchLookup, CopiesMatrixColumnsAndPadsWithZeros) {
  // Two columns of one matrix in two tables, with enough examples for thousands of keys per bucket.
  auto a = MakeTable(16), b = MakeTable(5);
  const std::vector<EmbeddingTable*> tables = {a.get(), b.get()};
  constexpr int64_t kBatch = 200000;
  std::vector<int64_t> keys(2 * kBatch);
  std::mt19937_64 random(5);
  for (int64_t& key : keys) key = static_cast<int64_t>(random() % 150000) - 1;
  std::vector<FeatureView> features(2);
  for (int f = 0; f < 2; ++f) {
    features[f].table = f;
    features[f].batch = kBatch;
    features[f].keys = keys.data() + f;
    features[f].num_keys = 2 * kBatch - f;
    features[f].stride = 2;
    features[f].has_padding = true;
  }
  keys[0] = keys[2 * kBatch - 1] = -1;
  std::vector<float> first(16 * kBatch, 7.f), second(5 * kBatch, 7.f);
  LookupWorkspace workspace;
  ASSERT_TRUE(LookupForTraining(tables, features, {Combiner::kSum, Combiner::kMean},
                                {{first.data(), 16}, {second.data(), 5}}, Threads(3), &workspace)
                  .ok());
  std::vector<float> counts(2, 0.f);
  for (int64_t i = 0; i < kBatch; ++i) {
    for (int f = 0; f < 2; ++f) {
      const int64_t key = keys[2 * i + f];
      const float* row = key == -1 ? nullptr : RowLayout::Floats(tables[f]->rows().Find(key));
      ASSERT_EQ(row == nullptr, key == -1);
      const int64_t dim = tables[f]->dim();
      const float* pooled = f == 0 ? first.data() + i * dim : second.data() + i * dim;
      for (int64_t j = 0; j < dim; ++j) ASSERT_EQ(pooled[j], row == nullptr ? 0.f : row[j]);
      counts[f] += key == -1 ? 0.f : 1.f;
    }
  }
  for (int f = 0; f < 2; ++f) {
    const TableContents contents = tables[f]->Export();
    double total = 0;
    for (float count : contents.counts) total += count;
    EXPECT_EQ(total, counts[f]);
  }
}

TEST(BatchLookup, UnpooledKeysCountAsSeparateExamples) {
  // A padded matrix without pooling and a bag of the same table, with 6 and 2 examples.
  const std::vector<int64_t> matrix = {5, 7, -1, 7, -1, -1}, bag = {7, 9, 7};
  const std::vector<int64_t> splits = {0, 2, 3};
  FeatureView apart;
  apart.batch = 2;
  apart.keys = matrix.data();
  apart.num_keys = 6;
  apart.width = apart.stride = 3;
  apart.has_padding = true;
  apart.SplitPositions();
  FeatureView pooled;
  pooled.batch = 2;
  pooled.keys = bag.data();
  pooled.num_keys = 3;
  pooled.row_splits = splits.data();
  const std::vector<Combiner> combiners = {Combiner::kSum, Combiner::kSum};
  const std::vector<float> gradient(6, 1.f);
  for (int threads : {1, 5}) {
    auto table = MakeTable(1);
    std::vector<float> rows(6, 3.f), sums(2, 3.f), again(6, 3.f), sums_again(2, 3.f);
    LookupWorkspace workspace;
    ASSERT_TRUE(LookupForTraining({table.get()}, {apart, pooled}, combiners,
                                  {{rows.data(), 1}, {sums.data(), 1}}, Threads(threads),
                                  &workspace)
                    .ok());
    ASSERT_TRUE(LookupForEvaluation({table.get()}, {apart, pooled}, combiners,
                                    {{again.data(), 1}, {sums_again.data(), 1}}, Threads(threads))
                    .ok());
    EXPECT_EQ(rows, again);
    EXPECT_EQ(sums, sums_again);
    const float five = *RowLayout::Floats(table->rows().Find(5)),
                seven = *RowLayout::Floats(table->rows().Find(7));
    EXPECT_EQ(rows, (std::vector<float>{five, seven, 0.f, seven, 0.f, 0.f}));
    EXPECT_EQ(sums[1], seven);
    // Key 7 is used twice without pooling and twice pooled, all in one update.
    ASSERT_TRUE(ApplyGradients(workspace.plan, {{gradient.data(), 1}, {gradient.data(), 1}}, 0.1f,
                               Threads(threads))
                    .ok());
    EXPECT_EQ(table->Export().keys, (std::vector<int64_t>{5, 7, 9}));
    EXPECT_EQ(table->Export().counts, (std::vector<float>{1.f, 4.f, 1.f}));
    EXPECT_NE(*RowLayout::Floats(table->rows().Find(7)), seven);
  }
}

TEST(BatchLookup, RejectsMoreExamplesThanInt32) {
  auto table = MakeTable(1);
  FeatureView without_keys;
  without_keys.batch = int64_t{1} << 31;
  without_keys.width = without_keys.stride = 0;
  float out = 0.f;  // The output is not written, because the lookup fails.
  LookupWorkspace workspace;
  const Status status = LookupForTraining({table.get()}, {without_keys}, {Combiner::kSum},
                                          {{&out, 0}}, Parallel(), &workspace);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("2147483648"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace slipstream
