// Allocations that fail in the parts of tables and engines leave existing data unchanged.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "cc_ops/core/containers/hash_index.h"
#include "cc_ops/core/deferral/deferred_buffers.h"
#include "cc_ops/core/memory/index_memory.h"
#include "cc_ops/core/saturation/input_classifier.h"
#include "cc_ops/core/table/embedding_table.h"
#include "cc_ops/core/testing/failing_memory.h"
#include "cc_ops/core/testing/followed_rows.h"
#include "cc_ops/core/testing/test_rules.h"
#include "cc_ops/core/testing/test_threads.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 5;

TEST(OutOfMemory, IndexGrowsLaterIfPreparationFails) {
  // Allocations fail for 300 of every 600 keys, or always.
  for (const bool comes_back : {false, true}) {
    IndexMemory memory(1);
    HashIndex index(&memory);
    size_t refused = 0, last_refused = 0, grown = 0;
    for (int64_t key = 0; key < 150'000; ++key) {
      const size_t before = index.entries().size();
      if (!comes_back || key / 300 % 2 == 0) allocations_left = 0;
      try {
        index.Insert(key, static_cast<uint32_t>(key));
      } catch (const std::bad_alloc&) {
        ++refused;
        ASSERT_EQ(index.size(), key);
        index.Insert(key, static_cast<uint32_t>(key));
      }
      allocations_left = -1;
      const bool has_grown = index.entries().size() != before;
      grown += has_grown;
      // Prepared entries need no memory to grow.
      ASSERT_FALSE(has_grown && comes_back && before >= 1 << 16 && refused > last_refused);
      last_refused = refused;
    }
    if (!comes_back) {
      EXPECT_EQ(refused, grown);
    }
    EXPECT_GT(index.entries().size(), 150'000u);
    for (int64_t key = 0; key < 150'000; ++key) {
      ASSERT_EQ(index.Find(key)->index, static_cast<uint32_t>(key));
    }
  }
}

TEST(OutOfMemory, DeferredGradientsOfVariableAreKept) {
  std::vector<int64_t> deferred_keys(8, DeferredBuffers::kFree), since(8, 0);
  std::vector<float> deferred_sums(8 * kDim, 0.f);
  deferred_keys[2] = 5;
  deferred_keys[4] = 9;
  const DeferralRule rule = {7, 3, 8, true, false, true};
  const std::vector<int64_t> keys = {5, 6, 7}, indices = {2, -1, -1};
  const std::vector<float> sums(3 * kDim, 1.f);
  const bool may_wait[] = {false, true, true};
  const StepRows rows = {keys.data(), 3, indices.data(), sums.data(), may_wait, {}};
  bool has_ended = false;
  for (int64_t n = 0; !has_ended; ++n) {
    StepPlan plan;
    FailsAt(
        n,
        [&] {
          return FindDue({deferred_keys.data(), since.data(), deferred_sums.data(), 8, kDim}, rule,
                         rows, &plan);
        },
        &has_ended);
    EXPECT_EQ(deferred_keys[2], 5);
    EXPECT_EQ(deferred_keys[4], 9);
    EXPECT_EQ(std::count(deferred_keys.begin(), deferred_keys.end(), DeferredBuffers::kFree), 6);
  }
}

TEST(OutOfMemory, RowChangesAreKept) {
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  options.rule = RuleNamed("adagrad", {0.5f, 1e-7f});
  // The first call of TakeChanges, which starts the tracking, and a later call.
  for (const bool is_first : {true, false}) {
    bool has_ended = false;
    for (int64_t n = 0; !has_ended; ++n) {
      EmbeddingTable table(options);
      std::vector<int64_t> keys(200);
      std::iota(keys.begin(), keys.end(), 0);
      std::vector<float> rows(keys.size() * kDim, 1.f);
      ASSERT_TRUE(table.Write(keys.data(), rows.data(), 200).ok());
      FollowedRows copy;
      if (!is_first) copy.Follow(&table);
      rows[0] = 2.f;
      ASSERT_TRUE(table.Write(keys.data(), rows.data(), 1).ok());
      EXPECT_EQ(table.Remove(keys.data() + 100, 50), 50);
      table.rows().DecayCounts(0.5f);
      FailsAt(
          n,
          [&] {
            table.rows().TakeChanges(copy.number);
            copy.number = 0;  // Discard the result.
            return OkStatus();
          },
          &has_ended);
      copy.Follow(&table);
      ASSERT_EQ(copy.rows, RowsOf(table, table.rows().Entries())) << n;
    }
  }
}

TEST(OutOfMemory, ClassifierContinues) {
  ClassifierOptions options;
  options.reservoir_size = 40;
  std::vector<int64_t> keys(30);
  std::iota(keys.begin(), keys.end(), 0);
  FeatureView view;
  view.batch = view.num_keys = 30;
  view.keys = keys.data();
  const std::vector<FeatureView> features = {view};
  const std::vector<float> losses(30, 0.5f), labels(30, 1.f);
  std::unique_ptr<bool[]> skippable(new bool[30]());
  std::vector<float> scores(30), weights(30);
  const Classified result = {skippable.get(), scores.data(), weights.data()};
  ClassifierWindow window;
  std::vector<float> sampled_scores;
  const auto step = [&](InputClassifier* classifier) {
    const Status status = classifier->Classify(features, 30, true, result);
    if (!status.ok()) return status;
    classifier->RecordLosses(losses.data(), labels.data(), skippable.get(), nullptr, 30);
    window = classifier->ExportWindow();
    const std::vector<int32_t> tables(30, 0);
    Status set = classifier->SetDrift(tables.data(), keys.data(), losses.data(), 30);
    if (!set.ok()) return set;
    set =
        classifier->ReservoirScores(tables.data(), keys.data(), losses.data(), 30, &sampled_scores);
    return set.ok() ? classifier->ImportWindow(window) : set;
  };
  bool has_ended = false;
  for (int64_t n = 0; !has_ended; ++n) {
    InputClassifier classifier(options);
    FailsAt(n, [&] { return step(&classifier); }, &has_ended);
    // The sample is consistent, which sanitizers check.
    for (int again = 0; again < 3; ++again) ASSERT_TRUE(step(&classifier).ok());
    EXPECT_EQ(sampled_scores.size(), 40u);
    EXPECT_EQ(classifier.ReservoirLosses().size() <= 40u, true);
  }
}

TEST(OutOfMemory, TaskExceptionReachesCaller) {
  const Parallel parallel = Threads(3);
  EXPECT_THROW(parallel.run(3,
                            [](int task) {
                              if (task == 1) throw std::bad_alloc();
                            }),
               std::bad_alloc);
  int done = 0;
  parallel.run(1, [&](int) { ++done; });
  EXPECT_EQ(done, 1);
}

}  // namespace
}  // namespace slipstream
