#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "cc_ops/core/base/drift.h"
#include "cc_ops/core/lookup/batch_lookup.h"
#include "cc_ops/core/saturation/measurement.h"
#include "cc_ops/core/table/embedding_table.h"
#include "cc_ops/core/testing/test_threads.h"
#include "cc_ops/core/update/gradient_update.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 5, kKeys = 300;

class FlaggedTable {
 public:
  explicit FlaggedTable(int64_t capacity = 0, int threads = 2) : parallel(Threads(threads)) {
    TableOptions options;
    options.name = "t";
    options.dim = kDim;
    options.capacity = capacity;
    options.initializer.kind = RowInitializer::Kind::kUniform;
    options.initializer.a = -1.f;
    options.initializer.b = 1.f;
    table = std::make_unique<EmbeddingTable>(options);
  }

  void Train(const std::vector<int64_t>& keys, float gradient) {
    FeatureView view;
    view.batch = view.num_keys = static_cast<int64_t>(keys.size());
    view.keys = keys.data();
    std::vector<float> pooled(keys.size() * kDim), upstream(pooled.size(), gradient);
    ASSERT_TRUE(LookupForTraining({table.get()}, {view}, {Combiner::kSum}, {{pooled.data(), kDim}},
                                  parallel, &workspace)
                    .ok());
    ASSERT_TRUE(ApplyGradients(workspace.plan, {{upstream.data(), kDim}}, 0.1f, parallel).ok());
  }

  void SetFlags(const std::vector<int64_t>& keys, const std::vector<uint8_t>& flags) {
    EXPECT_TRUE(
        table->SetFlags(keys.data(), flags.data(), static_cast<int64_t>(keys.size()), parallel)
            .ok());
  }

  // Descending keys disable the comparison with the last list, so that all flags are set.
  void SetFlagsAnew(std::vector<int64_t> keys, std::vector<uint8_t> flags) {
    std::reverse(keys.begin(), keys.end());
    std::reverse(flags.begin(), flags.end());
    SetFlags(keys, flags);
  }

  std::vector<uint8_t> Flags(const std::vector<int64_t>& keys) const {
    std::vector<uint8_t> flags(keys.size());
    table->flags().Get(keys.data(), static_cast<int64_t>(keys.size()), table->rows(), flags.data());
    return flags;
  }

  bool Has(int64_t key) const { return table->rows().Find(key) != nullptr; }

  Parallel parallel;
  std::unique_ptr<EmbeddingTable> table;
  LookupWorkspace workspace;
};

std::vector<int64_t> Range(int64_t begin, int64_t end) {
  std::vector<int64_t> keys;
  for (int64_t key = begin; key < end; ++key) keys.push_back(key);
  return keys;
}

// Sets the same flags in two tables, by ascending keys and so that all flags are set. Hot keys have
// rows, except in one of eight windows. Returns the number of windows that were set by changes.
int FlagsAlike(int64_t capacity, uint64_t seed) {
  FlaggedTable changes(capacity), anew(capacity);
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(n));
  };
  const std::vector<int64_t> everyone = Range(-5, kKeys + 5);
  std::vector<int64_t> hot = Range(0, kKeys);
  std::vector<uint8_t> flags(hot.size(), kSaturated);
  int64_t changed_generation = -1;
  int by_changes = 0;
  for (int window = 0; window < 80; ++window) {
    const bool may_evict = window == 0 || below(3) == 0;
    for (int step = 0; step < 2; ++step) {
      std::vector<int64_t> keys;
      while (keys.size() < 60) {
        const int64_t key = below(kKeys);
        if (may_evict || changes.Has(key)) keys.push_back(key);
      }
      const float gradient = static_cast<float>(below(9)) - 4.f;
      changes.Train(keys, gradient);
      anew.Train(keys, gradient);
    }
    if (below(4) != 0) {  // As in most windows, most keys equal the previous ones.
      std::set<int64_t> others(hot.begin(), hot.end());
      for (int64_t i = below(5); i > 0; --i) others.erase(below(kKeys));
      for (int64_t i = below(5); i > 0; --i) others.insert(below(kKeys));
      hot.assign(others.begin(), others.end());
    }
    if (below(8) != 0) {
      const auto is_gone = [&](int64_t key) { return !changes.Has(key); };
      hot.erase(std::remove_if(hot.begin(), hot.end(), is_gone), hot.end());
    }
    flags.resize(hot.size(), kSaturated);
    for (uint8_t& flag : flags) {
      if (below(8) == 0) flag = static_cast<uint8_t>(below(2));
    }
    by_changes += changes.table->rows().generation() == changed_generation;
    changes.SetFlags(hot, flags);
    anew.SetFlagsAnew(hot, flags);
    bool have_rows = true;
    for (size_t i = 0; i < hot.size(); ++i) have_rows &= flags[i] == 0 || changes.Has(hot[i]);
    changed_generation = have_rows ? changes.table->rows().generation() : -1;
    EXPECT_EQ(changes.Flags(everyone), anew.Flags(everyone)) << window;
    EXPECT_EQ(changes.table->Export().rows, anew.table->Export().rows) << window;
    if (window % 20 == 19) {
      EXPECT_TRUE(changes.table->Import(changes.table->Export()).ok());
      EXPECT_TRUE(anew.table->Import(anew.table->Export()).ok());
    }
  }
  EXPECT_EQ(capacity > 0, changes.table->rows().num_evicted() > 0);
  return by_changes;
}

TEST(Flags, IncrementalUpdateEqualsFullUpdate) {
  for (uint64_t seed = 1; seed <= 5; ++seed) EXPECT_GT(FlagsAlike(0, seed), 40);
}

TEST(Flags, IncrementalUpdateEqualsFullUpdateWithEviction) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    const int by_changes = FlagsAlike(150, seed);
    EXPECT_GT(by_changes, 15);
    EXPECT_LT(by_changes, 65);
  }
}

TEST(Flags, AcceptUnsortedAndDuplicateKeys) {
  FlaggedTable flagged;
  flagged.Train({1, 2, 3, 4}, 1.f);
  const std::vector<int64_t> again = {4, 3, 3, 1, 1};
  const std::vector<uint8_t> flags = {kSaturated, 0, kSaturated, kSaturated, 0};
  for (const uint8_t before : {0, 1}) {
    flagged.SetFlags({1, 2, 3, 4}, std::vector<uint8_t>(4, before));
    flagged.SetFlags(again, flags);
    EXPECT_EQ(flagged.Flags({1, 2, 3, 4}),
              std::vector<uint8_t>({kSaturated, 0, kSaturated, kSaturated}));
  }
}

TEST(Flags, NextListSetsFlagsOfRowsCreatedLater) {
  FlaggedTable flagged;
  flagged.Train({1, 2}, 1.f);
  flagged.SetFlags({1, 2, 3}, {kSaturated, kSaturated, kSaturated});
  flagged.Train({3}, 1.f);
  EXPECT_EQ(flagged.Flags({3}), std::vector<uint8_t>({0}));
  flagged.SetFlags({1, 2, 3}, {kSaturated, kSaturated, kSaturated});
  EXPECT_EQ(flagged.Flags({3}), std::vector<uint8_t>({kSaturated}));
}

TEST(Flags, NextListSetsFlagsOfRecreatedRows) {
  FlaggedTable flagged(60);
  const std::vector<uint8_t> flags(60, kSaturated);
  flagged.Train(Range(0, 60), 1.f);
  flagged.SetFlags(Range(0, 60), flags);
  flagged.Train(Range(100, 160), 1.f);
  flagged.Train(Range(0, 60), 1.f);
  EXPECT_EQ(flagged.Flags(Range(0, 60)), std::vector<uint8_t>(60));
  flagged.SetFlags(Range(0, 60), flags);
  EXPECT_EQ(flagged.Flags(Range(0, 60)), flags);
}

TEST(Flags, ReplicaFlagsAreSetUnconditionally) {
  FlaggedTable flagged;
  flagged.Train({1, 2}, 1.f);
  const std::vector<int64_t> keys = {1, 2};
  const std::vector<uint8_t> saturated(2, kSaturated), none(2, 0);
  flagged.SetFlags(keys, saturated);
  EXPECT_TRUE(flagged.table->SetFlags(keys.data(), none.data(), 2, flagged.parallel, true).ok());
  EXPECT_EQ(flagged.Flags(keys), none);
  flagged.SetFlags(keys, saturated);
  EXPECT_EQ(flagged.Flags(keys), saturated);
}

TEST(Measure, ReturnsRowsAndDriftsOfSingleCalls) {
  for (const int threads : {1, 3}) {
    FlaggedTable flagged(0, threads);
    flagged.Train(Range(0, kKeys), 1.f);
    const std::vector<int64_t> keys = Range(-3, kKeys + 3);  // Includes absent keys.
    const int64_t n = static_cast<int64_t>(keys.size());
    std::vector<float> snapshot(n * kDim), rows(n * kDim), measured(n * kDim);
    const auto found = std::make_unique<bool[]>(n), seen = std::make_unique<bool[]>(n);
    flagged.table->rows().Gather(keys.data(), n, flagged.parallel, snapshot.data(), found.get());
    flagged.Train(Range(7, 200), 1.f);
    flagged.Train(Range(100, kKeys), -1.5f);
    RowLayout::Floats(flagged.table->rows().Find(150))[2] = std::numeric_limits<float>::quiet_NaN();
    flagged.table->rows().Gather(keys.data(), n, flagged.parallel, rows.data(), found.get());
    for (const DriftMetric metric : {DriftMetric::kLinf, DriftMetric::kL2}) {
      std::vector<float> expected(n), drift(n);
      RowDrift(rows.data(), snapshot.data(), 0, n, kDim, metric, expected.data());
      MeasureRows(*flagged.table, keys.data(), snapshot.data(), n, metric, flagged.parallel,
                  measured.data(), seen.get(), drift.data());
      for (int64_t i = 0; i < n; ++i) {
        EXPECT_EQ(seen[i], found[i]) << keys[i];
        EXPECT_EQ(found[i], keys[i] >= 0 && keys[i] < kKeys) << keys[i];
        if (keys[i] == 150) {
          EXPECT_FALSE(std::isfinite(drift[i]));
        } else {
          EXPECT_EQ(drift[i], expected[i]) << keys[i];
          const float* row = rows.data() + i * kDim;
          EXPECT_TRUE(std::equal(row, row + kDim, measured.data() + i * kDim));
        }
      }
    }
  }
}

TEST(RowFlags, CreatedRowsStayWithinTheCapacity) {
  FlaggedTable flagged(4);
  flagged.Train({1, 2, 3, 4}, 1.f);
  const std::vector<int64_t> many = {11, 12, 13, 14, 15}, some = {11, 12, 13};
  const std::vector<uint8_t> flags(many.size(), kSaturated);
  const Status status =
      flagged.table->SetFlags(many.data(), flags.data(), 5, flagged.parallel, true);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("5 rows of table 't' at once, but its capacity is 4"),
            std::string::npos)
      << status.message();
  EXPECT_TRUE(flagged.Has(1) && !flagged.Has(11));
  ASSERT_TRUE(flagged.table->SetFlags(some.data(), flags.data(), 3, flagged.parallel, true).ok());
  EXPECT_EQ(flagged.table->rows().size(), 4);
  EXPECT_EQ(flagged.Flags(some), std::vector<uint8_t>(3, kSaturated));
}

TEST(RowFlags, RejectsUnknownFlagBits) {
  FlaggedTable flagged;
  flagged.Train({1, 2}, 1.f);
  flagged.SetFlags({1}, {kSaturated});
  const int64_t keys[] = {1, 2};
  const uint8_t flags[] = {0, 2};
  const Status status = flagged.table->SetFlags(keys, flags, 2, flagged.parallel);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find(
                "flags[1] is 2 for key 2 of table 't'; expected an integer from 0 to 1"),
            std::string::npos)
      << status.message();
  EXPECT_EQ(flagged.Flags({1}), std::vector<uint8_t>(1, kSaturated));
}

}  // namespace
}  // namespace slipstream
