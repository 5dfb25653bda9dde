// Admission of keys and expiry of rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "cc_ops/core/testing/test_rules.h"
#include "cc_ops/core/testing/test_training.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 3;
int64_t seconds = 0;
int64_t TestSeconds() { return seconds; }

TableOptions Options() {
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  options.rule = RuleNamed("adagrad");
  options.initializer.kind = RowInitializer::Kind::kUniform;
  options.initializer.a = -1.f;
  options.initializer.b = 1.f;
  return options;
}

void OnDisk(TableOptions* options) {
  options->memory = 70 * options->layout().bytes();
  options->spill = testing::TempDir();
}

std::unique_ptr<Training> Make(const TableOptions& options) {
  auto training = std::make_unique<Training>(options, 3);
  EXPECT_TRUE(training->table->Open().ok());
  return training;
}

// Runs a training lookup of one key per example and an update. Returns the pooled rows.
std::vector<float> Step(Training* training, const std::vector<int64_t>& keys,
                        const std::vector<int64_t>& splits = {}) {
  FeatureView view;
  view.num_keys = static_cast<int64_t>(keys.size());
  view.batch = splits.empty() ? view.num_keys : static_cast<int64_t>(splits.size()) - 1;
  view.keys = keys.data();
  if (!splits.empty()) view.row_splits = splits.data();
  std::vector<float> pooled(static_cast<size_t>(view.batch * kDim));
  const Status status =
      LookupForTraining({training->table.get()}, {view}, {Combiner::kSum}, {{pooled.data(), kDim}},
                        training->parallel, &training->workspace);
  EXPECT_TRUE(status.ok()) << status.message();
  const std::vector<float> gradient(pooled.size(), 1.f);
  EXPECT_TRUE(
      ApplyGradients(training->workspace.plan, {{gradient.data(), kDim}}, 0.1f, training->parallel)
          .ok());
  return pooled;
}

std::vector<float> InitialRow(const Training& training, int64_t key) {
  std::vector<float> row(kDim);
  training.table->rows().CopyRow(key, nullptr, row.data());
  return row;
}

void ExpectSame(Training* ours, Training* theirs) {
  Status status;
  const TableContents a = ours->table->Export(&status), b = theirs->table->Export();
  ASSERT_TRUE(status.ok()) << status.message();
  ASSERT_EQ(a.keys, b.keys);
  ASSERT_EQ(a.rows, b.rows);
  ASSERT_EQ(a.slots, b.slots);
  ASSERT_EQ(a.counts, b.counts);
  ASSERT_EQ(a.last_used, b.last_used);
}

class RowLifetime : public testing::TestWithParam<bool> {
 public:
  RowLifetime() : options(Options()) {}
  std::unique_ptr<Training> MakeHere() {
    if (GetParam()) OnDisk(&options);
    return Make(options);
  }
  TableOptions options;
};

TEST_P(RowLifetime, RareKeysReadInitialRow) {
  options.admit_after = 3;
  const auto training = MakeHere();
  for (const std::vector<int64_t>& splits : {std::vector<int64_t>(), {0, 1, 3}}) {
    const int64_t key = splits.empty() ? 7 : 8, other = key + 100;
    const std::vector<float> initial = InitialRow(*training, key);
    for (int step = 0; step < 2; ++step) {
      const std::vector<float> pooled = Step(training.get(), {key, other, other}, splits);
      EXPECT_EQ(std::vector<float>(pooled.begin(), pooled.begin() + kDim), initial);
      EXPECT_FALSE(training->table->rows().Has(key));
      // Its third access is in the second batch.
      EXPECT_EQ(training->table->rows().Has(other), step == 1);
    }
    // The key is admitted with its initial values and is then trained.
    std::vector<float> pooled = Step(training.get(), {key, other, other}, splits);
    EXPECT_EQ(std::vector<float>(pooled.begin(), pooled.begin() + kDim), initial);
    EXPECT_TRUE(training->table->rows().Has(key));
    pooled = Step(training.get(), {key, other, other}, splits);
    EXPECT_NE(std::vector<float>(pooled.begin(), pooled.begin() + kDim), initial);
  }
  EXPECT_EQ(training->table->rows().num_not_admitted(), 2 * (2 + 1));
  EXPECT_EQ(training->table->updates().num_dropped(), 0);
}

TEST_P(RowLifetime, RareKeysLeaveNoStateUnderAnyPolicy) {
  using Mode = UpdatePolicy::Mode;
  for (const Mode mode : {Mode::kMask, Mode::kDefer}) {
    for (const RowDtype dtype : {RowDtype::kFloat32, RowDtype::kBfloat16}) {
      options = Options();
      options.admit_after = 2;
      options.dtype = dtype;
      const auto training = MakeHere();
      UpdatePolicy policy;
      policy.mode = mode;
      policy.max_age = 3;
      policy.max_rows = 1000;
      training->table->updates().SetPolicy(policy);
      training->SetFlags({1, 2}, kSaturated);
      std::mt19937_64 random(1);
      std::map<int64_t, int64_t> accesses;
      for (int step = 0; step < 50; ++step) {
        std::vector<int64_t> keys;
        for (int i = 0; i < 40; ++i) keys.push_back(static_cast<int64_t>(random() % 3000));
        for (const int64_t key : keys) ++accesses[key];
        Step(training.get(), keys);
        for (const auto& [key, count] : accesses) {
          ASSERT_EQ(training->table->rows().Has(key), count >= 2) << key;
        }
      }
      const int64_t offered = training->table->updates().counts().offered;
      EXPECT_GT(offered, 0);
      EXPECT_LT(offered, 50 * 40 / 2);
    }
  }
}

TEST_P(RowLifetime, UnusedRowsExpire) {
  for (const bool by_seconds : {false, true}) {
    options = Options();
    options.expire_after = 100;
    options.expires_by_seconds = by_seconds;
    options.clock = TestSeconds;
    seconds = 2000000000;
    const auto training = MakeHere();
    std::mt19937_64 random(1);
    std::map<int64_t, int> last;
    int64_t expired = 0;
    for (int step = 1; step <= 600; ++step) {
      std::vector<int64_t> keys;
      for (int i = 0; i < 20; ++i) {
        keys.push_back(static_cast<int64_t>(random() % (i % 2 == 0 ? 30 : 5000)));
      }
      ++seconds;
      Step(training.get(), keys);
      for (const int64_t key : keys) last[key] = step;
      for (auto known = last.begin(); known != last.end();) {
        const bool is_present = training->table->rows().Has(known->first);
        const int age = step - known->second;
        if (age <= 100) {
          ASSERT_TRUE(is_present) << age;
        } else if (age > 126) {
          ASSERT_FALSE(is_present) << age;
        }
        expired += is_present ? 0 : 1;
        known = is_present ? std::next(known) : last.erase(known);
      }
    }
    EXPECT_GT(expired, 1000);
    // The next batch created a part of the expired rows again.
    EXPECT_GE(training->table->rows().num_expired(), expired);
    EXPECT_LE(training->table->rows().num_expired(), expired + 50);
    EXPECT_EQ(training->table->rows().size(), static_cast<int64_t>(last.size()));
  }
}

TEST_P(RowLifetime, ReturningKeyStartsWithNewRow) {
  options.expire_after = 10;
  const auto training = MakeHere();
  Step(training.get(), {7});
  training->SetFlags({7}, kSaturated);
  for (int step = 0; step < 20; ++step) Step(training.get(), {8});
  EXPECT_FALSE(training->table->rows().Has(7));
  EXPECT_EQ(Step(training.get(), {7}), InitialRow(*training, 7));
  uint32_t index = 0;
  ASSERT_NE(training->table->rows().Find(7, &index), nullptr);
  EXPECT_EQ(training->table->flags().shard(ShardOf(7))->Of(index), 0);
}

TEST_P(RowLifetime, SpilledTableEqualsTableInMemory) {
  options.admit_after = 2;
  options.expire_after = 40;
  options.capacity = 900;
  const auto training = MakeHere();
  TableOptions in_memory = options;
  in_memory.memory = 0;
  in_memory.spill.clear();
  const auto memory = Make(in_memory);
  std::mt19937_64 random(3);
  for (int step = 0; step < 300; ++step) {
    std::vector<int64_t> keys;
    for (int i = 0; i < 50; ++i) {
      keys.push_back(static_cast<int64_t>(random() % (i % 2 == 0 ? 100 : 4000)));
    }
    EXPECT_EQ(Step(training.get(), keys), Step(memory.get(), keys));
    // A small number of rows more during admission.
    EXPECT_LE(memory->table->rows().size(), 900 + 2);
    if (step % 50 == 0) ExpectSame(training.get(), memory.get());
  }
  ExpectSame(training.get(), memory.get());
  EXPECT_GT(memory->table->rows().num_expired(), 0);
  EXPECT_GT(memory->table->rows().num_not_admitted(), 0);
}

TEST_P(RowLifetime, ContinuesIdenticallyAfterImport) {
  options.expire_after = 50;
  const auto training = MakeHere(), other = Make(options);
  for (int step = 0; step < 30; ++step) Step(training.get(), {step, 1000});
  Status status;
  ASSERT_TRUE(other->table->Import(training->table->Export(&status)).ok());
  for (int step = 0; step < 60; ++step) {
    Step(training.get(), {2000});
    Step(other.get(), {2000});
    ASSERT_EQ(training->table->rows().Keys(), other->table->rows().Keys());
  }
  EXPECT_LT(training->table->rows().size(), 10);
  // Rows of a table without recorded times count as accessed now.
  TableContents contents = training->table->Export(&status);
  contents.last_used.clear();
  ASSERT_TRUE(other->table->Import(contents).ok());
  for (int step = 0; step < 50; ++step) Step(other.get(), {3000});
  EXPECT_EQ(other->table->rows().size(), static_cast<int64_t>(contents.keys.size()) + 1);
}

TEST_P(RowLifetime, TimesInSecondsContinueLruAfterImport) {
  options.capacity = 4;
  options.eviction = TableOptions::Eviction::kLru;
  options.expire_after = 100;
  options.expires_by_seconds = true;
  options.clock = TestSeconds;
  seconds = 2000000000;
  const auto training = MakeHere(), other = Make(options);
  for (const int64_t key : {1, 2, 3, 4, 1}) {
    ++seconds;
    Step(training.get(), {key});
  }
  Status status;
  const Status imported = other->table->Import(training->table->Export(&status));
  ASSERT_TRUE(imported.ok()) << imported.message();
  Step(other.get(), {5});
  EXPECT_TRUE(other->table->rows().Has(1));
  EXPECT_FALSE(other->table->rows().Has(2));
}

INSTANTIATE_TEST_SUITE_P(, RowLifetime, testing::Bool(),
                         [](const auto& info) { return info.param ? "OnDisk" : "InMemory"; });

TEST(RowLifetimeOptions, RejectsInvalidOptions) {
  for (const int64_t admit_after : {0, 256}) {
    TableOptions options = Options();
    options.admit_after = admit_after;
    EXPECT_EQ(ValidateTableOptions(options).code(), StatusCode::kInvalidArgument);
  }
  TableOptions options = Options();
  options.expire_after = -1;
  EXPECT_NE(ValidateTableOptions(options).message().find("expire_after of table 't' is -1"),
            std::string::npos);
}

}  // namespace
}  // namespace slipstream
