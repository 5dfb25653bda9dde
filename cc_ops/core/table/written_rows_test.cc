// Rows that are written and removed by users: values, slots, flags and deferred gradients.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "cc_ops/core/table/embedding_table.h"
#include "cc_ops/core/testing/test_rules.h"

namespace slipstream {
namespace {

TableOptions Options(int64_t capacity = 0) {
  TableOptions options;
  options.name = "t";
  options.dim = 2;
  options.capacity = capacity;
  options.rule = RuleNamed("adagrad", {0.5f, 1e-7f});
  return options;
}

std::vector<float> RowOf(const EmbeddingTable& table, int64_t key) {
  const float* row = RowLayout::Floats(table.rows().Find(key));
  return row == nullptr ? std::vector<float>() : std::vector<float>(row, row + 4);
}

TEST(WrittenRows, NewRowsReceiveSlotsAndExistingRowsKeepSlots) {
  EmbeddingTable table(Options());
  const int64_t keys[] = {7, -3};
  const float rows[] = {1.f, 2.f, 3.f, 4.f}, others[] = {5.f, 6.f};
  ASSERT_TRUE(table.Write(keys, rows, 2).ok());
  EXPECT_EQ(RowOf(table, 7), (std::vector<float>{1.f, 2.f, 0.5f, 0.5f}));
  RowLayout::Floats(table.rows().Find(7))[2] = 9.f;
  ASSERT_TRUE(table.Write(keys, others, 1).ok());
  EXPECT_EQ(RowOf(table, 7), (std::vector<float>{5.f, 6.f, 9.f, 0.5f}));
  EXPECT_EQ(table.rows().Keys(), (std::vector<int64_t>{-3, 7}));
  EXPECT_TRUE(table.Write(keys, rows, 0).ok());
}

TEST(WrittenRows, InvalidWriteChangesNothing) {
  EmbeddingTable table(Options());
  const int64_t twice[] = {4, 4};
  const float rows[] = {1.f, 2.f, 3.f, 4.f};
  const float bad[] = {1.f, std::numeric_limits<float>::infinity(), 3.f, 4.f};
  const int64_t keys[] = {4, 5};
  EXPECT_NE(table.Write(twice, rows, 2).message().find("key 4"), std::string::npos);
  EXPECT_NE(table.Write(keys, bad, 2).message().find("inf"), std::string::npos);
  EXPECT_EQ(table.rows().size(), 0);
  EmbeddingTable bounded(Options(1));
  EXPECT_EQ(bounded.Write(keys, rows, 2).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(bounded.rows().size(), 0);
}

TEST(WrittenRows, RemovedRowsLeaveNoState) {
  EmbeddingTable table(Options());
  const int64_t keys[] = {1, 2}, leaving[] = {2, 2, 9};
  const float rows[] = {1.f, 2.f, 3.f, 4.f};
  const uint8_t flags[] = {kSaturated, kSaturated};
  ASSERT_TRUE(table.Write(keys, rows, 2).ok());
  ASSERT_TRUE(table.SetFlags(keys, flags, 2, Parallel()).ok());
  UpdatePolicy policy;
  policy.mode = UpdatePolicy::Mode::kDefer;
  policy.is_exchanged = true;  // Gradients to be exchanged would survive an eviction.
  table.updates().SetPolicy(policy);
  table.updates().shard(ShardOf(2))->deferred[0].Insert(2, 0);
  ASSERT_EQ(table.updates().num_deferred(), 1);
  const int64_t generation = table.rows().generation();
  EXPECT_EQ(table.Remove(leaving, 3), 1);
  EXPECT_EQ(table.updates().num_deferred(), 0);
  EXPECT_NE(table.rows().generation(), generation);
  EXPECT_EQ(table.rows().num_evicted(), 0);
  EXPECT_EQ(table.rows().Keys(), (std::vector<int64_t>{1}));
  ASSERT_TRUE(table.Write(keys, rows, 2).ok());
  uint8_t found[2];
  table.flags().Get(keys, 2, table.rows(), found);
  EXPECT_EQ(found[0], kSaturated);
  EXPECT_EQ(found[1], 0);
}

}  // namespace
}  // namespace slipstream
