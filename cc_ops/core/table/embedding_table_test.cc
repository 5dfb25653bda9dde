#include "cc_ops/core/table/embedding_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "cc_ops/core/testing/test_threads.h"

namespace slipstream {
namespace {

TableOptions Options(int64_t capacity = 0) {
  TableOptions options;
  options.name = "item";
  options.dim = 3;
  options.capacity = capacity;
  options.initializer.kind = RowInitializer::Kind::kUniform;
  options.initializer.a = -1.f;
  options.initializer.b = 1.f;
  options.initializer.seed = 5;
  return options;
}

void Touch(EmbeddingTable* table, int64_t key, int times = 1) {
  uint32_t index = 0;
  for (int i = 0; i < times; ++i) table->rows().FindOrInsert(key, 1.f, &index);
}

bool Has(const EmbeddingTable& table, int64_t key) { return table.rows().Find(key) != nullptr; }

TEST(TableOptions, ErrorNamesInvalidOptions) {
  TableOptions options = Options();
  options.dim = 0;
  EXPECT_NE(ValidateTableOptions(options).message().find("dim of table 'item' is 0"),
            std::string::npos);
  options = Options(-3);
  EXPECT_NE(ValidateTableOptions(options).message().find("-3"), std::string::npos);
  options = Options();
  options.initializer.b = NAN;
  EXPECT_FALSE(ValidateTableOptions(options).ok());
  EXPECT_TRUE(ValidateTableOptions(Options()).ok());
}

TEST(EmbeddingTable, InitialRowsDependOnSeedAndKeyOnly) {
  EmbeddingTable forward(Options()), backward(Options());
  for (int64_t key = 0; key < 500; ++key) Touch(&forward, key);
  for (int64_t key = 499; key >= 0; --key) Touch(&backward, key);
  const TableContents a = forward.Export(), b = backward.Export();
  EXPECT_EQ(a.keys, b.keys);
  EXPECT_EQ(a.rows, b.rows);
  EXPECT_TRUE(std::is_sorted(a.keys.begin(), a.keys.end()));
  for (float value : a.rows) EXPECT_LT(std::abs(value), 1.f);
  TableOptions other = Options();
  other.initializer.seed = 6;
  EmbeddingTable different(other);
  Touch(&different, 0);
  EXPECT_NE(different.Export().rows[0], a.rows[0]);
}

TEST(EmbeddingTable, NormalRowsHaveExpectedMoments) {
  TableOptions options = Options();
  options.initializer.kind = RowInitializer::Kind::kNormal;
  options.initializer.a = 2.f;
  options.initializer.b = 0.5f;
  EmbeddingTable table(options);
  for (int64_t key = 0; key < 20000; ++key) Touch(&table, key);
  double sum = 0, squares = 0;
  const TableContents contents = table.Export();
  for (float value : contents.rows) {
    sum += value;
    squares += (value - 2.0) * (value - 2.0);
  }
  const double n = static_cast<double>(contents.rows.size());
  EXPECT_NEAR(sum / n, 2.0, 0.02);
  EXPECT_NEAR(std::sqrt(squares / n), 0.5, 0.01);
}

TEST(EmbeddingTable, TruncatedNormalRowsHaveExpectedMoments) {
  TableOptions options = Options();
  options.initializer.kind = RowInitializer::Kind::kTruncatedNormal;
  options.initializer.a = 2.f;
  options.initializer.b = 0.5f;
  EmbeddingTable table(options);
  for (int64_t key = 0; key < 20000; ++key) Touch(&table, key);
  double sum = 0, squares = 0;
  float furthest = 0.f;
  const TableContents contents = table.Export();
  for (float value : contents.rows) {
    sum += value;
    squares += (value - 2.0) * (value - 2.0);
    furthest = std::max(furthest, std::abs(value - 2.f));
  }
  const double n = static_cast<double>(contents.rows.size());
  EXPECT_NEAR(sum / n, 2.0, 0.02);
  // The standard deviation of a standard normal distribution that is truncated at 2.
  EXPECT_NEAR(std::sqrt(squares / n), 0.5 * 0.87963, 0.005);
  EXPECT_LE(furthest, 1.f);
  EXPECT_GT(furthest, 0.99f);
}

TEST(EmbeddingTable, GatherReturnsInitialRowsOfAbsentKeys) {
  EmbeddingTable table(Options());
  Touch(&table, 1);
  const int64_t keys[] = {1, 2};
  float rows[6];
  bool found[2];
  table.rows().Gather(keys, 2, Parallel(), rows, found);
  EXPECT_TRUE(found[0]);
  EXPECT_FALSE(found[1]);
  EXPECT_EQ(table.rows().size(), 1);
  Touch(&table, 2);
  EXPECT_EQ(RowLayout::Floats(table.rows().Find(2))[1], rows[4]);
}

TEST(EmbeddingTable, IndexIsAtMostFourFifthsFull) {
  EmbeddingTable table(Options());
  EXPECT_EQ(table.rows().index_capacity(), 0);
  int64_t before = 0;
  for (int64_t key = 0; key < 20000; ++key) {
    Touch(&table, key);
    ASSERT_GE(4 * table.rows().index_capacity(), 5 * table.rows().size());
    ASSERT_GE(table.rows().index_capacity(), before);
    before = table.rows().index_capacity();
  }
  EXPECT_LE(table.rows().index_capacity(), 4 * table.rows().size());
  EXPECT_LE(table.rows().index_capacity() * 16, table.bytes());
}

TEST(EmbeddingTable, HotKeysAreSortedAndDecay) {
  EmbeddingTable table(Options());
  for (int64_t key = 0; key < 3000; ++key) Touch(&table, key, 1 + static_cast<int>(key % 7));
  std::vector<int64_t> keys;
  std::vector<float> counts;
  table.rows().HotKeys(3, RowStore::HotKeyOrder::kByCount, Parallel(), &keys, &counts);
  EXPECT_EQ(keys, (std::vector<int64_t>{6, 13, 20}));
  EXPECT_EQ(counts, (std::vector<float>{7, 7, 7}));
  table.rows().DecayCounts(0.5f);
  table.rows().HotKeys(1, RowStore::HotKeyOrder::kByCount, Parallel(), &keys, &counts);
  EXPECT_EQ(counts[0], 3.5f);
  table.rows().DecayCounts(0.f);
  table.rows().HotKeys(10, RowStore::HotKeyOrder::kByCount, Parallel(), &keys, &counts);
  EXPECT_TRUE(keys.empty());
}

TEST(EmbeddingTable, HotKeysInKeyOrderAreSameKeys) {
  using Order = RowStore::HotKeyOrder;
  EmbeddingTable table(Options());
  for (int64_t key = -2000; key < 3000; ++key) Touch(&table, key, 1 + static_cast<int>(key & 7));
  for (const int64_t k : {0, 1, 700, 5000, 9000}) {
    std::vector<int64_t> keys, by_key;
    std::vector<float> counts, of_keys;
    table.rows().HotKeys(k, Order::kByCount, Threads(2), &keys, &counts);
    std::map<int64_t, float> expected;
    for (size_t i = 0; i < keys.size(); ++i) expected[keys[i]] = counts[i];
    for (const int threads : {1, 3}) {
      table.rows().HotKeys(k, Order::kByKey, Threads(threads), &by_key, &of_keys);
      EXPECT_TRUE(std::is_sorted(by_key.begin(), by_key.end()));
      std::map<int64_t, float> found;
      for (size_t i = 0; i < by_key.size(); ++i) found[by_key[i]] = of_keys[i];
      EXPECT_EQ(by_key.size(), keys.size());
      EXPECT_EQ(found, expected);
    }
  }
}

TEST(EmbeddingTable, GatherFindsManyKeysWithAnyNumberOfThreads) {
  EmbeddingTable table(Options());
  for (int64_t key = 0; key < 100; key += 2) {
    Touch(&table, key);
    *RowLayout::Floats(table.rows().Find(key)) = static_cast<float>(key);
  }
  for (const int64_t n : {0, 1, 7, 8, 9, 17, 100}) {
    std::vector<int64_t> keys(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) keys[i] = 99 - i;
    std::vector<float> rows(static_cast<size_t>(n * table.dim()));
    const std::unique_ptr<bool[]> found(new bool[n + 1]);
    for (const int threads : {1, 3, 5}) {
      table.rows().Gather(keys.data(), n, Threads(threads), rows.data(), found.get());
      for (int64_t i = 0; i < n; ++i) {
        EXPECT_EQ(found[i], keys[i] % 2 == 0);
        if (!found[i]) continue;
        EXPECT_EQ(rows[i * table.dim()], static_cast<float>(keys[i]));
      }
    }
  }
}

TEST(EmbeddingTable, LfuEvictsLeastFrequentRow) {
  EmbeddingTable table(Options(4));
  for (int64_t key = 0; key < 4; ++key) Touch(&table, key, static_cast<int>(4 - key));
  table.Evict(1, {});
  EXPECT_EQ(table.rows().size(), 3);
  EXPECT_FALSE(Has(table, 3));
  // Key 2 has the lowest count but is pinned, therefore the next one is evicted.
  table.Evict(2, {2});
  EXPECT_TRUE(Has(table, 2));
  EXPECT_FALSE(Has(table, 1));
  EXPECT_EQ(table.rows().num_evicted(), 2);
}

TEST(EmbeddingTable, LruEvictsLeastRecentlyUsedRow) {
  TableOptions options = Options(3);
  options.eviction = TableOptions::Eviction::kLru;
  EmbeddingTable table(options);
  for (int64_t key : {0, 1, 2, 0}) {
    table.rows().NextLookupStep();
    Touch(&table, key);
  }
  table.Evict(1, {});
  EXPECT_FALSE(Has(table, 1));
  EXPECT_TRUE(Has(table, 0));
  EXPECT_EQ(table.Export().last_used, (std::vector<int64_t>{4, 3}));
}

// With equal counts, many more rows than are evicted, and pinned rows with low counts, the same
// rows stay as after sorting all rows.
TEST(EmbeddingTable, EvictionEqualsSortedReference) {
  constexpr int64_t kRows = 2000;
  for (const bool is_lru : {false, true}) {
    for (const int64_t incoming : {1, 31, 32, 700}) {
      TableOptions options = Options(kRows);
      if (is_lru) options.eviction = TableOptions::Eviction::kLru;
      EmbeddingTable table(options);
      std::vector<std::tuple<int64_t, int64_t, uint64_t, int64_t>> order;
      std::vector<int64_t> pinned;
      for (int64_t key = 0; key < kRows; ++key) {
        const int64_t count = 1 + (key * 7919) % 5;
        if (key % 400 == 0) table.rows().NextLookupStep();
        Touch(&table, key, static_cast<int>(count));
        const int64_t last_used = is_lru ? 1 + key / 400 : 0;
        if (key % 3 == 0) {
          pinned.push_back(key);
        } else {
          order.emplace_back(last_used, count, HashKey(key), key);
        }
      }
      std::sort(order.begin(), order.end());
      const int64_t leaving = std::max<int64_t>(incoming, kRows / 64);
      table.Evict(incoming, pinned);
      EXPECT_EQ(table.rows().num_evicted(), leaving);
      EXPECT_EQ(table.rows().size(), kRows - leaving);
      for (int64_t i = 0; i < static_cast<int64_t>(order.size()); ++i) {
        const int64_t key = std::get<3>(order[i]);
        EXPECT_EQ(Has(table, key), i >= leaving) << key << " " << incoming << " " << is_lru;
      }
      for (const int64_t key : pinned) EXPECT_TRUE(Has(table, key)) << key;
    }
  }
}

TEST(EmbeddingTable, PinnedRowsAreNotEvicted) {
  EmbeddingTable table(Options(4));
  for (int64_t key = 0; key < 4; ++key) Touch(&table, key);
  table.Evict(1, {0, 1, 2, 3});
  EXPECT_EQ(table.rows().size(), 4);
  EXPECT_EQ(table.rows().num_evicted(), 0);
}

TEST(EmbeddingTable, ImportIsAllOrNothing) {
  EmbeddingTable table(Options(4));
  for (int64_t key = 0; key < 4; ++key) Touch(&table, key, 2);
  const TableContents good = table.Export();
  EmbeddingTable copy(Options(4));
  ASSERT_TRUE(copy.Import(good).ok());
  EXPECT_EQ(copy.Export().rows, good.rows);
  EXPECT_EQ(copy.Export().counts, good.counts);
  TableContents twice = good;
  twice.keys[1] = twice.keys[0];
  EXPECT_NE(copy.Import(twice).message().find("occurs twice"), std::string::npos);
  TableContents short_rows = good;
  short_rows.rows.pop_back();
  EXPECT_FALSE(copy.Import(short_rows).ok());
  EmbeddingTable small(Options(3));
  EXPECT_NE(small.Import(good).message().find("capacity"), std::string::npos);
  EXPECT_EQ(copy.Export().keys, good.keys);
}

}  // namespace
}  // namespace slipstream
