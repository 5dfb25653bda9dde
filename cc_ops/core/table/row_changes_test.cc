// What became of a table's rows since they were looked at: a copy that follows it is the same.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "cc_ops/core/table/embedding_table.h"
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

// Key -> all that is exported of its row, as bits.
using Copy = std::map<int64_t, std::vector<uint32_t>>;

std::vector<uint32_t> Bits(const TableContents& contents, size_t i) {
  std::vector<float> values(contents.rows.begin() + i * kDim,
                            contents.rows.begin() + (i + 1) * kDim);
  values.insert(values.end(), contents.slots.begin() + i * kDim,
                contents.slots.begin() + (i + 1) * kDim);
  values.push_back(contents.counts[i]);
  values.push_back(contents.last_used.empty() ? 0.f : static_cast<float>(contents.last_used[i]));
  std::vector<uint32_t> bits(values.size());
  std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
  return bits;
}

TableContents Arrays(const EmbeddingTable& table, const std::vector<HashIndex::Entry>& entries) {
  TableContents contents;
  contents.keys.resize(entries.size());
  contents.rows.resize(entries.size() * kDim);
  contents.slots.resize(entries.size() * kDim);
  contents.counts.resize(entries.size());
  if (table.rows().tracks_use()) contents.last_used.resize(entries.size());
  const ContentsRoom room = {contents.keys.data(), contents.rows.data(), contents.slots.data(),
                             contents.counts.data(), contents.last_used.data()};
  EXPECT_TRUE(table.rows().Export(entries, room).ok());
  return contents;
}

// Brings a copy up to the table.
void Follow(EmbeddingTable* table, int64_t* number, Copy* copy, RowChanges* taken = nullptr) {
  const RowChanges changes = table->rows().TakeChanges(*number);
  if (changes.is_all) copy->clear();
  for (const int64_t key : changes.removed) copy->erase(key);
  for (const float factor : changes.decays) {
    for (auto& [key, bits] : *copy) {
      float count = 0.f;
      std::memcpy(&count, &bits[2 * kDim], sizeof(count));
      count *= factor;
      std::memcpy(&bits[2 * kDim], &count, sizeof(count));
    }
  }
  const TableContents contents = Arrays(*table, changes.rows);
  for (size_t i = 0; i < contents.keys.size(); ++i) {
    if (i > 0) {
      EXPECT_LT(contents.keys[i - 1], contents.keys[i]);
    }
    (*copy)[contents.keys[i]] = Bits(contents, i);
  }
  *number = changes.number;
  if (taken != nullptr) *taken = changes;
}

Copy All(const EmbeddingTable& table) {
  Copy copy;
  const TableContents contents = table.Export();
  for (size_t i = 0; i < contents.keys.size(); ++i) copy[contents.keys[i]] = Bits(contents, i);
  return copy;
}

TEST(RowChanges, WhatIsLookedUpOrWrittenHasChanged) {
  EmbeddingTable table(Options());
  const int64_t keys[] = {1, 2, 3, 4};
  const float rows[4 * kDim] = {};
  ASSERT_TRUE(table.Write(keys, rows, 4).ok());
  int64_t number = 0;
  Copy copy;
  RowChanges taken;
  Follow(&table, &number, &copy, &taken);
  EXPECT_TRUE(taken.is_all);
  EXPECT_EQ(taken.rows.size(), 4u);
  Follow(&table, &number, &copy, &taken);
  EXPECT_FALSE(taken.is_all);
  EXPECT_TRUE(taken.rows.empty());
  ASSERT_TRUE(table.Write(keys + 1, rows, 1).ok());
  uint32_t index = 0;
  table.rows().FindOrInsert(4, 1.f, &index);
  EXPECT_EQ(table.Remove(keys + 2, 1), 1);
  Follow(&table, &number, &copy, &taken);
  ASSERT_EQ(taken.rows.size(), 2u);
  EXPECT_EQ(taken.rows[0].key, 2);
  EXPECT_EQ(taken.rows[1].key, 4);
  EXPECT_EQ(taken.removed, (std::vector<int64_t>{3}));
  EXPECT_EQ(copy, All(table));
}

TEST(RowChanges, OfAnyCallButTheLastAllRowsCome) {
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

TEST(RowChanges, WhatTouchesAllRowsChangesAll) {
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

TEST(RowChanges, NobodyWhoAsksCostsNoMemory) {
  EmbeddingTable table(Options(/*capacity=*/8));
  const float row[kDim] = {};
  ASSERT_FALSE(table.rows().hears_of_changes());
  const int64_t number = table.rows().TakeChanges(0).number;
  ASSERT_TRUE(table.rows().hears_of_changes());
  for (int64_t key = 0; key < 1000; ++key) ASSERT_TRUE(table.Write(&key, row, 1).ok());
  EXPECT_FALSE(table.rows().hears_of_changes());
  EXPECT_TRUE(table.rows().TakeChanges(number).is_all);
}

// Everything that changes rows, in any order, with steps that begin before and end after a look.
TEST(RowChanges, ACopyThatFollowsIsTheTable) {
  for (const int64_t capacity : {0, 40}) {
    std::mt19937 draw(static_cast<uint32_t>(7 + capacity));
    Training training(Options(capacity));
    EmbeddingTable& table = *training.table;
    int64_t number = 0;
    Copy copy;
    training.between = [&] {
      if (draw() % 3 == 0) Follow(&table, &number, &copy);
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
          Follow(&table, &number, &copy);
          ASSERT_EQ(copy, All(table)) << "round " << round << ", capacity " << capacity;
          break;
        default:
          training.Step({key, key + 1, static_cast<int64_t>(draw() % 60)}, {0.5f, -1.f, 0.25f});
      }
    }
  }
}

}  // namespace
}  // namespace slipstream
