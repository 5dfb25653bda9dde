// Rows that are written and removed by users: values, slots, flags and deferred gradients.
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
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

TEST(WrittenRows, ClearRemovesAllStateAndFreesMemory) {
  TableOptions options = Options();
  options.admit_after = 2;
  EmbeddingTable table(options);
  std::vector<int64_t> keys(100000);
  std::iota(keys.begin(), keys.end(), -5);
  const std::vector<float> rows(2 * keys.size(), 1.f);
  ASSERT_TRUE(table.Write(keys.data(), rows.data(), 100000).ok());
  const uint8_t flags[] = {kSaturated, kSaturated};
  ASSERT_TRUE(table.SetFlags(keys.data(), flags, 2, Parallel()).ok());
  table.BeginUpdate(0.1f);
  table.BeginLookup();
  uint32_t index = 0;
  EXPECT_EQ(table.rows().FindOrAdmit(-9, 1.f, &index), nullptr);
  EXPECT_TRUE(table.rows().WouldAdmit(-9, 1));
  const int64_t bytes = table.bytes(), generation = table.rows().generation();
  ASSERT_TRUE(table.Clear().ok());
  EXPECT_EQ(table.rows().size(), 0);
  EXPECT_LT(table.bytes(), bytes / 10);
  EXPECT_NE(table.rows().generation(), generation);
  EXPECT_EQ(table.updates().step(), 1);
  EXPECT_EQ(table.rows().lookup_step(), 1);
  EXPECT_FALSE(table.rows().WouldAdmit(-9, 1));
  ASSERT_TRUE(table.Write(keys.data(), rows.data(), 2).ok());
  uint8_t found[2];
  table.flags().Get(keys.data(), 2, table.rows(), found);
  EXPECT_EQ(found[0], 0);
}

TEST(WrittenRows, ShrinkKeepsRowsAndFreesMemory) {
  for (const RowDtype dtype : {RowDtype::kFloat32, RowDtype::kBfloat16}) {
    TableOptions options = Options();
    options.dtype = dtype;
    options.expire_after = 1000;
    EmbeddingTable table(options);
    std::vector<int64_t> keys(100000);
    std::iota(keys.begin(), keys.end(), -5);
    std::vector<float> rows(2 * keys.size());
    std::iota(rows.begin(), rows.end(), 0.5f);
    ASSERT_TRUE(table.Write(keys.data(), rows.data(), 100000).ok());
    const uint8_t flags[] = {0, kSaturated, 0};
    table.rows().TakeChanges(0);
    EXPECT_EQ(table.Remove(keys.data(), 99900), 99900);
    ASSERT_TRUE(table.SetFlags(&keys[99901], flags, 3, Parallel()).ok());
    const int64_t number = table.rows().TakeChanges(1).number;
    ASSERT_TRUE(table.Write(&keys[99950], rows.data(), 1).ok());
    const TableContents before = table.Export();
    const int64_t bytes = table.bytes(), generation = table.rows().generation();
    table.Shrink();
    EXPECT_LT(table.bytes(), bytes / 10);
    EXPECT_NE(table.rows().generation(), generation);
    const TableContents after = table.Export();
    EXPECT_EQ(after.keys, before.keys);
    EXPECT_EQ(after.rows, before.rows);
    EXPECT_EQ(after.slots, before.slots);
    EXPECT_EQ(after.counts, before.counts);
    EXPECT_EQ(after.last_used, before.last_used);
    uint8_t found[3];
    table.flags().Get(&keys[99901], 3, table.rows(), found);
    EXPECT_EQ(std::vector<uint8_t>(found, found + 3), std::vector<uint8_t>(flags, flags + 3));
    const RowChanges changes = table.rows().TakeChanges(number);
    EXPECT_FALSE(changes.is_all);
    ASSERT_EQ(changes.rows.size(), 1u);
    EXPECT_EQ(changes.rows[0].key, keys[99950]);
  }
}

}  // namespace
}  // namespace slipstream
