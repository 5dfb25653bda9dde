// Tests rows that are stored in 16 bits, or in 24 bits with bits of a slot. Every update equals the
// update of a float row, rounded to one of the two neighbors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "cc_ops/core/testing/test_rules.h"
#include "cc_ops/core/testing/test_training.h"
#include "cc_ops/core/update/policy_update.h"

namespace slipstream {
namespace {

struct Dtypes {
  RowDtype values, slots;
};
constexpr Dtypes kNarrow[] = {{RowDtype::kBfloat16, RowDtype::kFloat32},
                              {RowDtype::kFloat16, RowDtype::kFloat32},
                              {RowDtype::kBfloat16, RowDtype::kBfloat16},
                              {RowDtype::kFloat16, RowDtype::kBfloat16},
                              {RowDtype::kFloat32, RowDtype::kBfloat16}};

TableOptions Options(const std::string& rule, int64_t dim, Dtypes dtypes) {
  TableOptions options;
  options.name = "t";
  options.dim = dim;
  options.rule = RuleNamed(rule);
  options.initializer.kind = RowInitializer::Kind::kUniform;
  options.initializer.a = -.05f;
  options.initializer.b = .05f;
  options.initializer.seed = 9;
  options.dtype = dtypes.values;
  options.slot_dtype = dtypes.slots;
  return options;
}

// Rounds to nearest; ties are rounded up.
float Nearest(RowDtype dtype, float value) {
  const uint32_t bits = BitsOf(value);
  if (dtype == RowDtype::kFloat32) return value;
  return FloatOf(dtype == RowDtype::kBfloat16
                     ? Bfloat16Rounding::Widen<0>(Bfloat16Rounding::Round<0>(bits, kToNearest))
                     : Float16Rounding::Widen<0>(Float16Rounding::Round<0>(bits, kToNearest)));
}

constexpr Dtypes kFloats = {RowDtype::kFloat32, RowDtype::kFloat32};

// Returns the largest distance of the two neighbors of a value. lent: in 24 bits.
float StepOf(RowDtype dtype, bool lent, float value) {
  const float magnitude = std::fabs(value), finer = lent ? 0x1p-8f : 1.f;
  if (dtype == RowDtype::kFloat32) return lent ? magnitude * 0x1p-15f : 0.f;
  if (dtype == RowDtype::kBfloat16) return finer * magnitude / 128 + 1e-38f;
  return finer * (magnitude / 1024 + 0x1p-24f);
}

// Expects every value in `narrow` to be a neighbor of the value in `floats`.
void ExpectRounded(const std::vector<float>& narrow, const std::vector<float>& floats,
                   RowDtype dtype, bool lent, const std::string& what) {
  ASSERT_EQ(narrow.size(), floats.size());
  for (size_t i = 0; i < floats.size(); ++i) {
    ASSERT_NEAR(narrow[i], floats[i], StepOf(dtype, lent, floats[i])) << what << " " << i;
  }
}

void ExpectRounded(const EmbeddingTable& narrow, const EmbeddingTable& floats,
                   const std::string& what) {
  const TableContents ours = narrow.Export(), theirs = floats.Export();
  ASSERT_EQ(ours.keys, theirs.keys);
  const TableOptions& options = narrow.options();
  const bool lends = narrow.rows().layout().lends();
  ExpectRounded(ours.rows, theirs.rows, options.dtype, lends, what + " values");
  ExpectRounded(ours.slots, theirs.slots, options.slot_dtype, lends, what + " slots");
}

// Trains a step on a part of 40 keys.
void TrainKnownKeys(Training* training, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> keys;
  std::vector<float> gradients;
  for (int i = 0; i < 50; ++i) {
    keys.push_back(static_cast<int64_t>(random() % 40));
    gradients.push_back(static_cast<float>(random() % 2001) / 1000.f - 1.f);
  }
  training->Step(keys, gradients);
}

// Trains tables of all rules and dtypes together with float tables that start each step from the
// same rows. Calls prepare(&training) before the first step.
template <class Prepare>
void ExpectEveryStepRounded(const std::vector<int64_t>& dims, const Prepare& prepare) {
  for (const std::string& rule : AllRuleNames()) {
    for (const Dtypes dtypes : kNarrow) {
      for (const int64_t dim : dims) {
        Training narrow(Options(rule, dim, dtypes)), floats(Options(rule, dim, kFloats));
        std::vector<int64_t> keys(40);
        std::iota(keys.begin(), keys.end(), 0);
        narrow.Step(keys, std::vector<float>(40, .3f));
        prepare(&narrow);
        ASSERT_TRUE(floats.table->Import(narrow.table->Export()).ok());
        prepare(&floats);
        for (int step = 0; step < 3; ++step) {
          TrainKnownKeys(&narrow, 100 + step);
          TrainKnownKeys(&floats, 100 + step);
          ExpectRounded(*narrow.table, *floats.table, rule + " of dim " + std::to_string(dim));
          const TableContents contents = narrow.table->Export();
          ASSERT_TRUE(floats.table->Import(contents).ok());
          prepare(&floats);
          prepare(&narrow);
        }
      }
    }
  }
}

TEST(NarrowRows, EveryStepEqualsRoundedFloat32Step) {
  ExpectEveryStepRounded({1, 3, 16, 32, 64, 70}, [](Training*) {});
}

TEST(NarrowRows, MaskedStepEqualsRoundedFloat32Step) {
  ExpectEveryStepRounded({4, 16}, [](Training* training) {
    UpdatePolicy policy;
    policy.mode = UpdatePolicy::Mode::kMask;
    policy.decay_skipped = true;
    training->table->updates().SetPolicy(policy);
    training->SetFlags({1, 2, 3}, kSaturated);
  });
}

TEST(NarrowRows, SimulatedRanksEqualRoundedFloat32Step) {
  ExpectEveryStepRounded({4}, [](Training* training) {
    UpdatePolicy policy;
    policy.mode = UpdatePolicy::Mode::kMask;
    policy.ranks = 2;
    training->table->updates().SetPolicy(policy);
    training->SetFlags({1, 2, 3}, kSaturated);
  });
}

TEST(NarrowRows, IsBitwiseEqualForAnyNumberOfThreads) {
  for (const Dtypes dtypes : kNarrow) {
    Training one(Options("adagrad", 16, dtypes), 1), three(Options("adagrad", 16, dtypes), 3);
    TrainAtRandom(&one, 20);
    TrainAtRandom(&three, 20);
    EXPECT_EQ(one.State(), three.State());
  }
}

TEST(NarrowRows, RestoredTableContinuesIdentically) {
  for (const Dtypes dtypes : kNarrow) {
    Training whole(Options("adam", 16, dtypes)), resumed(Options("adam", 16, dtypes));
    TrainAtRandom(&whole, 10);
    ASSERT_TRUE(resumed.table->Import(whole.table->Export()).ok());
    EXPECT_EQ(whole.State(), resumed.State());
    TrainAtRandom(&whole, 5, 1, 8);
    TrainAtRandom(&resumed, 5, 1, 8);
    EXPECT_EQ(whole.State(), resumed.State());
  }
}

// Written values keep the stored precision and do not change the slots.
TEST(NarrowRows, SlotsStoreExtraRowBits) {
  for (const RowDtype dtype : {RowDtype::kBfloat16, RowDtype::kFloat16}) {
    const TableOptions options = Options("adam", 16, {dtype, RowDtype::kFloat32});
    ASSERT_TRUE(options.layout().lends());
    ASSERT_FALSE(Options("rowwise_adagrad", 16, {dtype, RowDtype::kFloat32}).layout().lends());
    Training training(options);
    TrainAtRandom(&training, 5);
    const TableContents before = training.table->Export();
    std::vector<float> values = before.rows;
    for (float& value : values) value = 1.f + value / 1000;
    ASSERT_TRUE(training.table->Write(before.keys.data(), values.data(), before.keys.size()).ok());
    const TableContents after = training.table->Export();
    EXPECT_EQ(after.slots, before.slots);
    for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(after.rows[i], values[i], 0x1p-16f);
  }
}

// A hundred steps, each at most a tenth of the distance between neighbors, are not lost.
TEST(NarrowRows, SmallStepsAccumulate) {
  for (const RowDtype dtype : {RowDtype::kBfloat16, RowDtype::kFloat16}) {
    TableOptions options = Options("sgd", 64, {dtype, RowDtype::kFloat32});
    options.initializer.kind = RowInitializer::Kind::kConstant;
    options.initializer.a = 1.f;
    Training training(options);
    const float step = (dtype == RowDtype::kBfloat16 ? 0x1p-7f : 0x1p-10f) / 10;
    training.rate = 1.f;
    std::vector<float> gradient(1);
    // The gradient of value j is j + 1 times as large.
    for (int i = 0; i < 100; ++i) {
      gradient[0] = -step / 64;
      training.Step({7}, gradient);
    }
    float moved = 0.f, expected = 0.f;
    const std::vector<float> row = training.table->Export().rows;
    for (int64_t j = 0; j < 64; ++j) {
      moved += row[j] - 1.f;
      expected += 100 * step * static_cast<float>(j + 1) / 64;
    }
    EXPECT_NEAR(moved, expected, .2f * expected);
  }
}

// Lookups read 16 bits, even if 24 are stored.
TEST(NarrowRows, LookupEqualsExport) {
  for (const Dtypes dtypes : kNarrow) {
    for (const int64_t dim : {3, 16, 32, 64, 128}) {
      Training training(Options("adagrad", dim, dtypes));
      TrainAtRandom(&training, 3);
      TableContents contents = training.table->Export();
      const int64_t n = static_cast<int64_t>(contents.keys.size());
      for (float& value : contents.rows) value = Nearest(dtypes.values, value);
      // Look up single keys, bags of three with the absent key -5, and both in one batch.
      FeatureView alone, bags;
      alone.batch = alone.num_keys = n;
      alone.keys = contents.keys.data();
      std::vector<int64_t> keys, splits = {0};
      for (int64_t i = 0; i < n; ++i) {
        keys.insert(keys.end(), {contents.keys[i], contents.keys[n - 1 - i], -5});
        splits.push_back(static_cast<int64_t>(keys.size()));
      }
      bags.batch = n;
      bags.keys = keys.data();
      bags.num_keys = 3 * n;
      bags.row_splits = splits.data();
      std::vector<float> initial(static_cast<size_t>(dim));
      training.table->rows().CopyRow(-5, nullptr, initial.data());
      std::vector<float> rows(contents.rows.size()), sums(contents.rows.size());
      const std::vector<PooledOutput> outputs = {{rows.data(), dim}, {sums.data(), dim}};
      for (const bool trains : {false, true}) {
        std::fill(rows.begin(), rows.end(), 42.f);
        const Status status = trains ? LookupForTraining({training.table.get()}, {alone, bags},
                                                         {Combiner::kSum, Combiner::kSum}, outputs,
                                                         training.parallel, &training.workspace)
                                     : LookupForEvaluation({training.table.get()}, {alone, bags},
                                                           {Combiner::kSum, Combiner::kSum},
                                                           outputs, training.parallel);
        ASSERT_TRUE(status.ok());
        EXPECT_EQ(rows, contents.rows);
        for (int64_t i = 0; i < n; ++i) {
          for (int64_t j = 0; j < dim; ++j) {
            const float sum = contents.rows[i * dim + j] + contents.rows[(n - 1 - i) * dim + j];
            ASSERT_EQ(sums[i * dim + j], sum + initial[j]);
          }
        }
      }
    }
  }
}

TEST(NarrowRows, RowsHaveExpectedBytes) {
  const auto bytes = [](const std::string& rule, int64_t dim, Dtypes dtypes) {
    return Options(rule, dim, dtypes).layout().bytes();
  };
  EXPECT_EQ(bytes("adagrad", 16, kFloats), 128);
  EXPECT_EQ(bytes("adagrad", 16, kNarrow[0]), 96);
  EXPECT_EQ(bytes("adagrad", 16, kNarrow[2]), 64);
  EXPECT_EQ(bytes("adagrad", 64, kNarrow[3]), 256);
  EXPECT_EQ(bytes("rowwise_adagrad", 16, kNarrow[1]), 48);
  EXPECT_EQ(bytes("sgd", 3, kNarrow[1]), 16);
}

TEST(NarrowRows, RejectsValuesBeyondDtypeRange) {
  TableOptions options = Options("sgd", 4, {RowDtype::kFloat16, RowDtype::kFloat32});
  EXPECT_TRUE(ValidateTableOptions(options).ok());
  EmbeddingTable table(options);
  const int64_t key = 3;
  const float rows[] = {1.f, -65504.f, 65505.f, 0.f};
  Status status = table.Write(&key, rows, 1);
  EXPECT_NE(status.message().find("contains 65505"), std::string::npos) << status.message();
  EXPECT_NE(status.message().find("at most 65504"), std::string::npos) << status.message();
  TableContents contents;
  contents.keys = {3};
  contents.rows.assign(rows, rows + 4);
  contents.counts = {1.f};
  status = table.Import(contents);
  EXPECT_NE(status.message().find("at most 65504"), std::string::npos) << status.message();
  options.rule.transforms.decay = .1f;
  options.rule.transforms.of_all_rows = true;
  EXPECT_FALSE(ValidateTableOptions(options).ok());
  options.dtype = RowDtype::kBfloat16;
  EXPECT_TRUE(ValidateTableOptions(options).ok());
  options.slot_dtype = RowDtype::kFloat16;
  EXPECT_FALSE(ValidateTableOptions(options).ok());
}

}  // namespace
}  // namespace slipstream
