// A table that spills to disk is bit-identical to a table in memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cc_ops/core/saturation/measurement.h"
#include "cc_ops/core/testing/test_rules.h"
#include "cc_ops/core/testing/test_training.h"
#include "cc_ops/core/update/policy_update.h"

namespace slipstream {
namespace {

TableOptions Options(const std::string& rule, int64_t dim, int64_t max_rows) {
  TableOptions options;
  options.name = "t";
  options.dim = dim;
  options.rule = RuleNamed(rule);
  options.initializer.kind = RowInitializer::Kind::kUniform;
  options.initializer.a = -1.f;
  options.initializer.b = 1.f;
  options.initializer.seed = 3;
  if (max_rows > 0) {
    options.memory = max_rows * options.layout().bytes();
    options.spill = testing::TempDir();
  }
  return options;
}

// Runs the same steps on a table that spills and on a table in memory.
class Pair {
 public:
  Pair(TableOptions options, int64_t max_rows) {
    memory = std::make_unique<Training>(options);
    options.memory = max_rows * options.layout().bytes();
    options.spill = testing::TempDir();
    spilled = std::make_unique<Training>(options, 3);
    EXPECT_TRUE(spilled->table->Open().ok());
  }

  template <class Fn>
  void Both(const Fn& fn) {
    fn(memory.get());
    fn(spilled.get());
  }

  void Step(const std::vector<int64_t>& keys, const std::vector<float>& gradients) {
    Both([&](Training* training) { training->Step(keys, gradients); });
  }

  // Returns the rows of keys as evaluations read them.
  std::vector<float> Evaluate(Training* training, const std::vector<int64_t>& keys) {
    FeatureView view;
    view.batch = view.num_keys = static_cast<int64_t>(keys.size());
    view.keys = keys.data();
    std::vector<float> rows(keys.size() * static_cast<size_t>(training->dim));
    EXPECT_TRUE(FlushBeforeReading({training->table.get()}, training->parallel).ok());
    const Status status = LookupForEvaluation({training->table.get()}, {view}, {Combiner::kSum},
                                              {{rows.data(), training->dim}}, training->parallel);
    EXPECT_TRUE(status.ok()) << status.message();
    return rows;
  }

  void ExpectSame() {
    Status status;
    const TableContents ours = spilled->table->Export(&status);
    ASSERT_TRUE(status.ok()) << status.message();
    const TableContents theirs = memory->table->Export();
    ASSERT_EQ(ours.keys, theirs.keys);
    ASSERT_EQ(ours.rows, theirs.rows);
    ASSERT_EQ(ours.slots, theirs.slots);
    ASSERT_EQ(ours.counts, theirs.counts);
    ASSERT_EQ(ours.update_step, theirs.update_step);
    const SpillStatistics found = spilled->table->rows().spilled()->statistics();
    ASSERT_EQ(found.rows_in_memory + found.rows_on_disk, static_cast<int64_t>(ours.keys.size()));
  }

  std::unique_ptr<Training> memory, spilled;
};

std::vector<int64_t> DrawKeys(std::mt19937_64* random, int n, int64_t maximum) {
  std::vector<int64_t> keys;
  for (int i = 0; i < n; ++i) {
    // A part of the keys is hot.
    const int64_t range = (*random)() % 3 == 0 ? maximum : maximum / 20 + 1;
    keys.push_back(static_cast<int64_t>((*random)() % range) * 977);
  }
  return keys;
}

std::vector<float> DrawGradients(std::mt19937_64* random, size_t n) {
  std::vector<float> gradients;
  for (size_t i = 0; i < n; ++i) {
    gradients.push_back(static_cast<float>((*random)() % 2001) / 1000.f - 1.f);
  }
  return gradients;
}

std::vector<int64_t> Distinct(std::vector<int64_t> keys) {
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

TEST(SpilledTraining, EqualsTableInMemory) {
  for (const int64_t max_rows : {100, 300, 5000}) {
    for (const char* rule : {"sgd", "adagrad", "adam"}) {
      for (const int64_t dim : {3, 32, 600}) {
        std::mt19937_64 random(static_cast<uint64_t>(max_rows * dim));
        Pair pair(Options(rule, dim, 0), max_rows);
        for (int step = 0; step < 60; ++step) {
          const std::vector<int64_t> keys = DrawKeys(&random, 80, 2000);
          if (step % 3 == 0) {
            pair.spilled->table->rows().spilled()->PrefetchRows(keys.data(), 80);
          }
          pair.Step(keys, DrawGradients(&random, keys.size()));
        }
        pair.ExpectSame();
        const SpillStatistics found = pair.spilled->table->rows().spilled()->statistics();
        EXPECT_LE(found.rows_in_memory, max_rows + 200);
        if (max_rows < 1000) {
          EXPECT_GT(found.rows_on_disk, 0);
        }
        // Small rows may all be in pages that are not full yet.
        if (max_rows < 1000 && dim > 3) {
          EXPECT_GT(found.rows_read, 0);
        }
      }
    }
  }
}

// Runs all operations of tables in a random order.
TEST(SpilledTraining, RandomOperationsEqualTableInMemory) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const std::vector<std::string> rules = {"sgd", "adagrad", "rowwise_adagrad", "ftrl"};
    TableOptions options = Options(rules[seed % 4], seed % 3 == 0 ? 5 : 16, 0);
    if (seed % 5 == 1) options.dtype = RowDtype::kBfloat16;
    if (seed % 5 == 2) options.slot_dtype = RowDtype::kBfloat16;
    if (seed % 4 == 3) options.capacity = 900;
    Pair pair(options, 80 + static_cast<int64_t>(random() % 400));
    for (int operation = 0; operation < 80; ++operation) {
      const std::vector<int64_t> keys = DrawKeys(&random, 50, 1500);
      const std::vector<int64_t> distinct = Distinct(keys);
      const auto n = static_cast<int64_t>(distinct.size());
      switch (random() % 12) {
        case 0:
          EXPECT_EQ(pair.Evaluate(pair.memory.get(), keys),
                    pair.Evaluate(pair.spilled.get(), keys));
          break;
        case 1: {
          std::vector<float> rows(distinct.size() * static_cast<size_t>(options.dim));
          for (float& value : rows) value = static_cast<float>(random() % 100) / 128.f;
          pair.Both([&](Training* training) {
            EXPECT_TRUE(training->table->Write(distinct.data(), rows.data(), n).ok());
          });
          break;
        }
        case 2: {
          const int64_t removed = pair.memory->table->Remove(distinct.data(), n / 4);
          EXPECT_EQ(pair.spilled->table->Remove(distinct.data(), n / 4), removed);
          break;
        }
        case 3: {
          std::vector<uint8_t> flags;
          for (int64_t i = 0; i < n; ++i) flags.push_back(static_cast<uint8_t>(random() % 2));
          pair.Both([&](Training* training) {
            EXPECT_TRUE(
                training->table->SetFlags(distinct.data(), flags.data(), n, Parallel()).ok());
          });
          break;
        }
        case 4: {
          UpdatePolicy policy;
          policy.mode = static_cast<UpdatePolicy::Mode>(random() % 3);
          policy.movement = .05f;
          policy.max_age = 6;
          policy.max_rows = 1 << 20;
          pair.Both([&](Training* training) {
            EXPECT_TRUE(FlushDeferred(training->table.get(), training->parallel).ok());
            training->table->updates().SetPolicy(policy);
          });
          break;
        }
        case 5:
          pair.Both([](Training* training) { training->table->rows().DecayCounts(.5f); });
          break;
        case 6: {
          const size_t values = distinct.size() * static_cast<size_t>(options.dim);
          const std::vector<float> snapshot(values, .1f);
          std::vector<std::vector<float>> found;
          pair.Both([&](Training* training) {
            RowStore& store = training->table->rows();
            std::vector<float> rows(values), drift(distinct.size());
            std::unique_ptr<bool[]> is_present(new bool[distinct.size()]);
            const Status status = store.ForPartsInMemory(
                distinct.data(), n, /*reads=*/true, "to be measured are", Parallel(),
                [&](int64_t begin, int64_t end) {
                  const int64_t first = begin * options.dim;
                  MeasureRows(*training->table, distinct.data() + begin, snapshot.data() + first,
                              end - begin, DriftMetric::kLinf, Parallel(), rows.data() + first,
                              is_present.get() + begin, drift.data() + begin);
                });
            EXPECT_TRUE(status.ok()) << status.message();
            rows.insert(rows.end(), drift.begin(), drift.end());
            for (int64_t i = 0; i < n; ++i) rows.push_back(is_present[i] ? 1.f : 0.f);
            found.push_back(rows);
          });
          EXPECT_EQ(found[0], found[1]);
          break;
        }
        case 7: {
          const TableContents contents = pair.memory->table->Export();
          if (random() % 4 != 0) break;
          pair.Both(
              [&](Training* training) { EXPECT_TRUE(training->table->Import(contents).ok()); });
          break;
        }
        default:
          if (random() % 2 == 0)
            pair.spilled->table->rows().spilled()->PrefetchRows(keys.data(), 50);
          pair.Step(keys, DrawGradients(&random, keys.size()));
      }
    }
    pair.Both([](Training* training) {
      EXPECT_TRUE(FlushDeferred(training->table.get(), training->parallel).ok());
    });
    pair.ExpectSame();
  }
}

// Other lookups may evict rows from memory between a lookup and its update.
TEST(SpilledTraining, UpdatesFindRowsSpilledSinceLookup) {
  Pair pair(Options("adagrad", 8, 0), 100);
  std::mt19937_64 random(1);
  for (int step = 0; step < 40; ++step) {
    const std::vector<int64_t> keys = Distinct(DrawKeys(&random, 60, 2000));
    const std::vector<float> upstream(keys.size() * 8, .25f);
    pair.Both([&](Training* training) {
      FeatureView view;
      view.batch = view.num_keys = static_cast<int64_t>(keys.size());
      view.keys = keys.data();
      std::vector<float> pooled(upstream.size());
      ASSERT_TRUE(LookupForTraining({training->table.get()}, {view}, {Combiner::kSum},
                                    {{pooled.data(), 8}}, training->parallel, &training->workspace)
                      .ok());
    });
    for (int other = 0; other < 5; ++other) {
      pair.Evaluate(pair.spilled.get(), DrawKeys(&random, 60, 2000));
    }
    pair.Both([&](Training* training) {
      const Status status =
          ApplyGradients(training->workspace.plan, {{upstream.data(), 8}}, .1f, training->parallel);
      ASSERT_TRUE(status.ok()) << status.message();
    });
  }
  pair.ExpectSame();
}

TEST(SpilledTraining, DiskUsageIsBounded) {
  const int64_t rows = 4000, dim = 32;
  TableOptions options = Options("adagrad", dim, 400);
  Training training(options);
  ASSERT_TRUE(training.table->Open().ok());
  std::mt19937_64 random(1);
  int64_t maximum = 0;
  for (int step = 0; step < 1500; ++step) {
    std::vector<int64_t> keys;
    for (int i = 0; i < 100; ++i) keys.push_back(static_cast<int64_t>(random() % rows));
    training.Step(keys, DrawGradients(&random, keys.size()));
    maximum = std::max(maximum, training.table->rows().spilled()->statistics().disk_bytes);
  }
  const SpillStatistics found = training.table->rows().spilled()->statistics();
  EXPECT_GT(found.rows_written, 20 * rows);
  // Four thirds of the rows, and a few blocks of each shard.
  const int64_t page = PageLayout(options.layout().bytes()).bytes;
  const int64_t pages = rows / PageLayout(options.layout().bytes()).rows * 4 / 3;
  EXPECT_LE(maximum, (pages + 8 * kNumShards) * page);
}

TEST(SpilledTraining, RejectsBatchBeyondMemory) {
  Training training(Options("sgd", 4, 100));
  ASSERT_TRUE(training.table->Open().ok());
  std::vector<int64_t> keys(150);
  std::iota(keys.begin(), keys.end(), 0);
  FeatureView view;
  view.batch = view.num_keys = 150;
  view.keys = keys.data();
  std::vector<float> pooled(600);
  const Status status =
      LookupForTraining({training.table.get()}, {view}, {Combiner::kSum}, {{pooled.data(), 4}},
                        training.parallel, &training.workspace);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("a batch needs 150 rows of table 't'"), std::string::npos)
      << status.message();
  EXPECT_EQ(training.table->rows().size(), 0);

  TableOptions options = Options("sgd", 4, 100);
  options.spill = "/nowhere/at/all";
  EmbeddingTable nowhere(options);
  const Status opened = nowhere.Open();
  EXPECT_NE(opened.message().find("/nowhere/at/all"), std::string::npos) << opened.message();
  options.memory = 0;
  EXPECT_FALSE(ValidateTableOptions(options).ok());
  options = Options("sgd", 4, 100);
  options.rule.transforms.l2 = .1f;
  options.rule.transforms.of_all_rows = true;
  EXPECT_FALSE(ValidateTableOptions(options).ok());
}

}  // namespace
}  // namespace slipstream
