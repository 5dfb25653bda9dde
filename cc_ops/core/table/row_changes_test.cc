// Changes of a table's rows: a replica that applies them equals the table.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "cc_ops/core/table/embedding_table.h"
#include "cc_ops/core/testing/followed_rows.h"
#include "cc_ops/core/testing/test_rules.h"
#include "cc_ops/core/testing/test_training.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 3;

TableOptions Options(int64_t capacity = 0) {
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  options.capacity = capacity;
  options.eviction = capacity == 0 ? TableOptions::Eviction::kLfu : TableOptions::Eviction::kLru;
  options.rule = RuleNamed("adagrad", {0.5f, 1e-7f});
  return options;
}

TEST(RowChanges, LookedUpAndWrittenRowsHaveChanged) {
  EmbeddingTable table(Options());
  const int64_t keys[] = {1, 2, 3, 4};
  const float rows[4 * kDim] = {};
  ASSERT_TRUE(table.Write(keys, rows, 4).ok());
  FollowedRows copy;
  RowChanges taken = copy.Follow(&table);
  EXPECT_TRUE(taken.is_all);
  EXPECT_EQ(taken.rows.size(), 4u);
  taken = copy.Follow(&table);
  EXPECT_FALSE(taken.is_all);
  EXPECT_TRUE(taken.rows.empty());
  ASSERT_TRUE(table.Write(keys + 1, rows, 1).ok());
  uint32_t index = 0;
  table.rows().FindOrInsert(4, 1.f, &index);
  EXPECT_EQ(table.Remove(keys + 2, 1), 1);
  taken = copy.Follow(&table);
  ASSERT_EQ(taken.rows.size(), 2u);
  EXPECT_EQ(taken.rows[0].key, 2);
  EXPECT_EQ(taken.rows[1].key, 4);
  EXPECT_EQ(taken.removed, (std::vector<int64_t>{3}));
  EXPECT_EQ(copy.rows, RowsOf(table, table.rows().Entries()));
}

TEST(RowChanges, OutdatedNumberReturnsAllRows) {
  EmbeddingTable table(Options());
  const int64_t keys[] = {1, 2};
  const float rows[2 * kDim] = {};
  ASSERT_TRUE(table.Write(keys, rows, 2).ok());
  const int64_t first = table.rows().TakeChanges(0).number;
  const int64_t second = table.rows().TakeChanges(first).number;
  EXPECT_NE(first, second);
  const RowChanges late = table.rows().TakeChanges(first);
  EXPECT_TRUE(late.is_all);
  EXPECT_EQ(late.rows.size(), 2u);
  EXPECT_FALSE(table.rows().TakeChanges(late.number).is_all);
}

TEST(RowChanges, OperationsOnAllRowsChangeAll) {
  EmbeddingTable table(Options());
  const int64_t keys[] = {1, 2};
  const float rows[2 * kDim] = {};
  ASSERT_TRUE(table.Write(keys, rows, 2).ok());
  int64_t number = table.rows().TakeChanges(0).number;
  table.rows().DecayCounts(0.5f);
  const RowChanges changes = table.rows().TakeChanges(number);
  EXPECT_FALSE(changes.is_all);
  EXPECT_TRUE(changes.rows.empty());
  EXPECT_EQ(changes.decays, (std::vector<float>{0.5f}));
  ASSERT_TRUE(table.Import(table.Export()).ok());
  EXPECT_TRUE(table.rows().TakeChanges(changes.number).is_all);

  TableOptions decays = Options();
  decays.rule.transforms.decay = 0.1f;
  decays.rule.transforms.of_all_rows = true;
  EmbeddingTable shrinking(decays);
  ASSERT_TRUE(shrinking.Write(keys, rows, 2).ok());
  number = shrinking.rows().TakeChanges(0).number;
  EXPECT_TRUE(shrinking.rows().TakeChanges(number).is_all);
}

TEST(RowChanges, ManyDecaysChangeAll) {
  EmbeddingTable table(Options());
  const int64_t number = table.rows().TakeChanges(0).number;
  for (int i = 0; i < 100; ++i) table.rows().DecayCounts(0.9f);
  const RowChanges changes = table.rows().TakeChanges(number);
  EXPECT_TRUE(changes.is_all);
  EXPECT_TRUE(changes.decays.empty());
}

TEST(RowChanges, TrackingUsesNoMemoryBeforeFirstCall) {
  EmbeddingTable table(Options(/*capacity=*/8));
  const float row[kDim] = {};
  ASSERT_FALSE(table.rows().tracks_changes());
  for (int64_t key = 0; key < 1000; ++key) ASSERT_TRUE(table.Write(&key, row, 1).ok());
  const int64_t bytes = table.bytes();
  const int64_t number = table.rows().TakeChanges(0).number;
  ASSERT_TRUE(table.rows().tracks_changes());
  for (int64_t key = 0; key < 1000; ++key) ASSERT_TRUE(table.Write(&key, row, 1).ok());
  EXPECT_FALSE(table.rows().tracks_changes());
  EXPECT_LE(table.bytes(), bytes);
  EXPECT_TRUE(table.rows().TakeChanges(number).is_all);
}

// Runs steps that may begin before a call of TakeChanges and end after it, and other changes of
// plain rows, in any order. The fuzzer of tables also covers policies, flags and evictions.
TEST(RowChanges, ReplicaThatAppliesChangesEqualsTable) {
  for (const int64_t capacity : {0, 40}) {
    std::mt19937 draw(static_cast<uint32_t>(7 + capacity));
    Training training(Options(capacity));
    EmbeddingTable& table = *training.table;
    FollowedRows copy;
    training.between = [&] {
      if (draw() % 3 == 0) copy.Follow(&table);
    };
    for (int round = 0; round < 3000; ++round) {
      const auto key = static_cast<int64_t>(draw() % 60);
      switch (draw() % 8) {
        case 0: {
          const float row[kDim] = {static_cast<float>(round), 1.f, 2.f};
          ASSERT_TRUE(table.Write(&key, row, 1).ok());
          break;
        }
        case 1:
          table.Remove(&key, 1);
          break;
        case 2:
          if (draw() % 4 == 0) table.rows().DecayCounts(0.75f);
          break;
        case 3:
          if (draw() % 50 == 0) {
            ASSERT_TRUE(table.Import(table.Export()).ok());
          }
          break;
        case 4:
          copy.Follow(&table);
          ASSERT_EQ(copy.rows, RowsOf(table, table.rows().Entries()))
              << "round " << round << ", capacity " << capacity;
          break;
        default:
          training.Step({key, key + 1, static_cast<int64_t>(draw() % 60)}, {0.5f, -1.f, 0.25f});
      }
    }
  }
}

}  // namespace
}  // namespace slipstream
