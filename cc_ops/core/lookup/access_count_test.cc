#include "cc_ops/core/lookup/access_count.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cc_ops/core/lookup/batch_lookup.h"
#include "cc_ops/core/testing/test_rules.h"
#include "cc_ops/core/testing/test_threads.h"

namespace slipstream {
namespace {

std::unique_ptr<EmbeddingTable> MakeTable(TableOptions options) {
  options.name = "t";
  options.dim = 1;
  options.rule = RuleNamed("sgd", {});
  return std::make_unique<EmbeddingTable>(options);
}

FeatureView Keys(const std::vector<int64_t>& keys, int table = 0) {
  FeatureView view;
  view.table = table;
  view.batch = view.num_keys = static_cast<int64_t>(keys.size());
  view.keys = keys.data();
  return view;
}

void Count(EmbeddingTable* table, const std::vector<int64_t>& keys) {
  LookupWorkspace workspace;
  ASSERT_TRUE(CountAccesses({table}, {Keys(keys)}, Threads(1), &workspace).ok());
}

// A batch of one key each, a padded column of a matrix, padded bags and ragged bags. The last
// feature has another table than the others.
struct Batch {
  explicit Batch(std::mt19937_64* random) {
    const auto draw = [&](std::vector<int64_t>* keys, size_t n) {
      for (size_t i = 0; i < n; ++i) {
        const auto bits = static_cast<int>((*random)() % 12);
        keys->push_back(static_cast<int64_t>((*random)() & ((1u << bits) - 1)) - 3);
      }
    };
    const int64_t n = static_cast<int64_t>((*random)() % 300);
    draw(&single, n);
    draw(&matrix, 3 * n);
    draw(&bags, 2 * n);
    for (int64_t i = 0; i < n; ++i) {
      splits.push_back(splits.back() + static_cast<int64_t>((*random)() % 4));
    }
    draw(&ragged, splits.back());
    views.assign(4, Keys(single));
    views[1].keys = matrix.data() + 1;
    views[1].num_keys = 3 * n;
    views[1].stride = 3;
    views[2].keys = bags.data();
    views[2].num_keys = 2 * n;
    views[2].width = views[2].stride = 2;
    views[1].has_padding = views[2].has_padding = true;
    views[3].keys = ragged.data();
    views[3].num_keys = splits.back();
    views[3].row_splits = splits.data();
    views[3].table = 1;
  }
  Batch(const Batch&) = delete;

  std::vector<int64_t> single, matrix, bags, ragged, splits = {0};
  std::vector<FeatureView> views;
};

void LookUp(const std::vector<EmbeddingTable*>& tables, const std::vector<FeatureView>& views) {
  std::vector<std::vector<float>> vectors;
  std::vector<PooledOutput> outputs;
  for (const FeatureView& view : views) {
    vectors.emplace_back(view.batch);
    outputs.push_back({vectors.back().data(), 1});
  }
  LookupWorkspace workspace;
  const std::vector<Combiner> combiners(views.size(), Combiner::kSum);
  ASSERT_TRUE(LookupForTraining(tables, views, combiners, outputs, Threads(1), &workspace).ok());
}

class CountsEqualLookups : public testing::TestWithParam<std::pair<std::string, TableOptions>> {};

TEST_P(CountsEqualLookups, ForAnyLayoutAndNumberOfThreads) {
  for (const int threads : {1, 4}) {
    std::mt19937_64 random(1);
    std::vector<std::unique_ptr<EmbeddingTable>> owned;
    for (int i = 0; i < 4; ++i) owned.push_back(MakeTable(GetParam().second));
    const std::vector<EmbeddingTable*> counted = {owned[0].get(), owned[1].get()};
    const std::vector<EmbeddingTable*> looked_up = {owned[2].get(), owned[3].get()};
    LookupWorkspace workspace;
    for (int step = 0; step < 20; ++step) {
      const Batch batch(&random);
      ASSERT_TRUE(CountAccesses(counted, batch.views, Threads(threads), &workspace).ok());
      LookUp(looked_up, batch.views);
      for (EmbeddingTable* table : counted) table->rows().DecayCounts(0.5f);
      for (EmbeddingTable* table : looked_up) table->rows().DecayCounts(0.5f);
    }
    for (int t = 0; t < 2; ++t) {
      const TableContents found = counted[t]->Export(), expected = looked_up[t]->Export();
      EXPECT_EQ(found.keys, expected.keys);
      EXPECT_EQ(found.counts, expected.counts);
      EXPECT_EQ(found.last_used, expected.last_used);
      EXPECT_GT(found.keys.size(), 50);
    }
  }
}

std::vector<std::pair<std::string, TableOptions>> AllOptions() {
  TableOptions plain, admits, expires, lru;
  admits.admit_after = 3;
  expires.expire_after = 8;
  lru.capacity = 4000;
  lru.eviction = TableOptions::Eviction::kLru;
  return {{"plain", plain}, {"admits", admits}, {"expires", expires}, {"lru", lru}};
}

INSTANTIATE_TEST_SUITE_P(AccessCount, CountsEqualLookups, testing::ValuesIn(AllOptions()),
                         [](const auto& info) { return info.param.first; });

TEST(AccessCount, ExtremeKeysAreCounted) {
  auto table = MakeTable({});
  std::vector<int64_t> keys = {0, -1, std::numeric_limits<int64_t>::min(),
                               std::numeric_limits<int64_t>::max()};
  // Fill all shards, so that the index is used.
  for (int64_t key = 1; key < 1000; ++key) keys.push_back(key);
  for (int i = 0; i < 3; ++i) Count(table.get(), keys);
  const TableContents contents = table->Export();
  EXPECT_EQ(contents.keys.size(), keys.size());
  EXPECT_EQ(contents.counts, std::vector<float>(keys.size(), 3.f));
}

TEST(AccessCount, LargeCountsStillGrow) {
  auto table = MakeTable({});
  std::vector<int64_t> keys(1000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int64_t>(i);
  TableContents contents;
  contents.keys = keys;
  contents.rows.resize(keys.size());
  contents.counts.assign(keys.size(), 1 << 24);
  ASSERT_TRUE(table->Import(contents).ok());
  Count(table.get(), std::vector<int64_t>(4096, 7));
  EXPECT_EQ(table->Export().counts[7], (1 << 24) + 4096);
}

TEST(AccessCount, FullTableKeepsFrequentKeys) {
  TableOptions options;
  options.capacity = 2000;
  auto table = MakeTable(options);
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < 1000; ++key) keys.insert(keys.end(), 2, key);
  Count(table.get(), keys);
  for (int64_t step = 1; step < 10; ++step) {
    for (size_t i = 0; i < keys.size(); i += 2) keys[i] = 1000 * step + static_cast<int64_t>(i / 2);
    Count(table.get(), keys);
  }
  const TableContents contents = table->Export();
  EXPECT_LE(contents.keys.size(), 2000);
  ASSERT_GE(contents.keys.size(), 1000);
  for (size_t i = 0; i < 1000; ++i) {
    EXPECT_EQ(contents.keys[i], static_cast<int64_t>(i));
    EXPECT_EQ(contents.counts[i], 11.f);
  }
  for (int64_t key = 0; key < 2001; ++key) keys.push_back(100000 + key);
  LookupWorkspace workspace;
  const Status status = CountAccesses({table.get()}, {Keys(keys)}, Threads(1), &workspace);
  EXPECT_NE(status.message().find("a batch needs"), std::string::npos);
}

}  // namespace
}  // namespace slipstream
