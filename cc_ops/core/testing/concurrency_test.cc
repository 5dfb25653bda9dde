// Runs lookups, updates, window ends, evictions, exports and imports concurrently on the same
// tables for SLIPSTREAM_CONCURRENCY_SECONDS (default 5). Locks are taken as in the op layer.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "cc_ops/core/exchange/pull.h"
#include "cc_ops/core/exchange/pulled_lookup.h"
#include "cc_ops/core/lookup/batch_lookup.h"
#include "cc_ops/core/saturation/measurement.h"
#include "cc_ops/core/table/embedding_table.h"
#include "cc_ops/core/testing/test_threads.h"
#include "cc_ops/core/update/deferred_export.h"
#include "cc_ops/core/update/gradient_update.h"
#include "cc_ops/core/update/policy_update.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 2, kKeys = 3000, kCapacity = 500, kBatch = 64;
constexpr float kRate = 1.f;
// Largest integer up to which a float counts exactly.
constexpr int64_t kMaxExact = 1 << 24;

std::unique_ptr<EmbeddingTable> MakeTable(const char* name, int64_t capacity,
                                          TableOptions::Eviction eviction) {
  TableOptions options;
  options.name = name;
  options.dim = kDim;
  options.capacity = capacity;
  options.eviction = eviction;
  return std::make_unique<EmbeddingTable>(options);  // Rows start at 0; SGD.
}

// Keys that a window end may mask. Their gradients may be lost by design.
bool MayBeMasked(int64_t key) { return key % 8 == 0; }

// Number of gradients of 1 per key, in updates that have begun and in updates that have returned.
struct Ledger {
  std::vector<std::atomic<int64_t>> begun = std::vector<std::atomic<int64_t>>(kKeys);
  std::vector<std::atomic<int64_t>> done = std::vector<std::atomic<int64_t>>(kKeys);
};

// A sequence of readers could otherwise starve writers.
void LetOthersIn() { std::this_thread::sleep_for(std::chrono::microseconds(200)); }

class Concurrency : public testing::Test {
 protected:
  // Looks up and updates. Every second thread passes the tables in reverse order.
  void Train(int thread) {
    std::mt19937_64 random(thread);
    const bool is_swapped = thread % 2 == 1;
    const std::vector<EmbeddingTable*> tables =
        is_swapped ? std::vector<EmbeddingTable*>{lru_.get(), unbounded_.get(), lfu_.get()}
                   : std::vector<EmbeddingTable*>{unbounded_.get(), lfu_.get(), lru_.get()};
    std::vector<std::vector<float>> pooled(3, std::vector<float>(kBatch * kDim));
    const std::vector<float> ones(kBatch * kDim, 1.f);
    std::vector<PooledOutput> outputs;
    for (auto& values : pooled) outputs.push_back({values.data(), kDim});
    const std::vector<PooledGradient> gradients(3, {ones.data(), kDim});
    LookupWorkspace workspace;
    while (!is_over_) {
      std::vector<int64_t> keys(kBatch);
      const int64_t spread = int64_t{1} << random() % 12;
      for (int64_t& key : keys) key = static_cast<int64_t>(random() % spread) % kKeys;
      std::vector<FeatureView> views(3);
      for (int t = 0; t < 3; ++t) {
        views[t].table = t;
        views[t].batch = views[t].num_keys = kBatch;
        views[t].keys = keys.data();
      }
      ASSERT_TRUE(LookupForTraining(tables, views, std::vector<Combiner>(3, Combiner::kSum),
                                    outputs, Threads(2), &workspace)
                      .ok());
      lookups_ += kBatch;
      if (random() % 8 == 0) continue;  // A step without an update.
      std::set<int64_t> distinct(keys.begin(), keys.end());
      for (int64_t key : keys) ++ledger_.begun[key];
      updates_ += static_cast<int64_t>(distinct.size());
      ASSERT_TRUE(ApplyGradients(workspace.plan, gradients, kRate, Threads(2)).ok());
      for (int64_t key : keys) ++ledger_.done[key];
      ++steps_;
    }
  }

  void Evaluate(int thread) {
    std::mt19937_64 random(100 + thread);
    std::vector<float> pooled(kBatch * kDim);
    while (!is_over_) {
      std::vector<int64_t> keys(kBatch);
      for (int64_t& key : keys) key = static_cast<int64_t>(random() % kKeys);
      FeatureView view;
      view.batch = view.num_keys = kBatch;
      view.keys = keys.data();
      EmbeddingTable* const table = random() % 2 == 0 ? unbounded_.get() : lfu_.get();
      ASSERT_TRUE(FlushBeforeReading({table}, Threads(2)).ok());
      ASSERT_TRUE(LookupForEvaluation({table}, {view}, {Combiner::kSum}, {{pooled.data(), kDim}},
                                      Threads(2))
                      .ok());
      // Only whole updates are visible: both values of a row received the same gradients.
      for (int64_t i = 0; i < kBatch; ++i) ASSERT_EQ(pooled[i * kDim], pooled[i * kDim + 1]);
      LetOthersIn();
    }
  }

  void Measure(const EmbeddingTable& table, const std::vector<int64_t>& keys) {
    const int64_t n = static_cast<int64_t>(keys.size());
    std::vector<float> snapshot(keys.size() * kDim), rows(snapshot), drift(keys.size());
    const auto found = std::make_unique<bool[]>(keys.size());
    const std::shared_lock<std::shared_mutex> lock(table.mutex());
    MeasureRows(table, keys.data(), snapshot.data(), n, DriftMetric::kLinf, Threads(2), rows.data(),
                found.get(), drift.data());
    // Only whole updates are visible, and the drift belongs to the rows that were read.
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(rows[i * kDim], rows[i * kDim + 1]);
      ASSERT_EQ(drift[i], std::abs(rows[i * kDim]));
    }
  }

  // Ends windows: hot keys, drifts, flags, decay, and another policy.
  void EndWindows() {
    std::mt19937_64 random(200);
    while (!is_over_) {
      for (EmbeddingTable* table : {unbounded_.get(), lfu_.get(), lru_.get()}) {
        std::vector<int64_t> hot;
        std::vector<float> counts;
        // With ascending keys, the table compares the flags with the last list.
        const bool by_key = random() % 2 == 0;
        {
          const std::shared_lock<std::shared_mutex> lock(table->mutex());
          table->rows().HotKeys(
              100, by_key ? RowStore::HotKeyOrder::kByKey : RowStore::HotKeyOrder::kByCount,
              Threads(2), &hot, &counts);
        }
        ASSERT_TRUE(by_key ? std::is_sorted(hot.begin(), hot.end())
                           : std::is_sorted(counts.rbegin(), counts.rend()));
        Measure(*table, hot);
        std::vector<uint8_t> flags;
        for (int64_t key : hot) flags.push_back(MayBeMasked(key) ? kSaturated : 0);
        const std::unique_lock<std::shared_mutex> lock(table->mutex());
        EXPECT_TRUE(
            table->SetFlags(hot.data(), flags.data(), static_cast<int64_t>(hot.size()), Parallel())
                .ok());
        if (table != unbounded_.get()) table->rows().DecayCounts(0.5f);
        UpdatePolicy policy;
        policy.mode = random() % 2 == 0 ? UpdatePolicy::Mode::kDefer : UpdatePolicy::Mode::kMask;
        policy.trigger =
            random() % 2 == 0 ? UpdatePolicy::Trigger::kInterval : UpdatePolicy::Trigger::kMovement;
        policy.movement = static_cast<float>(random() % 20);
        policy.max_age = 1 + static_cast<int64_t>(random() % 50);
        policy.max_rows = 1000;
        EXPECT_TRUE(FlushDeferred(table, Threads(2)).ok());
        table->updates().SetPolicy(policy);
      }
      ++windows_;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  void Flush() {
    while (!is_over_) {
      for (EmbeddingTable* table : {unbounded_.get(), lfu_.get(), lru_.get()}) {
        const std::unique_lock<std::shared_mutex> lock(table->mutex());
        EXPECT_TRUE(FlushDeferred(table, Threads(2)).ok());
        ASSERT_EQ(table->updates().num_deferred(), 0);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  // A checkpoint is a consistent cut: it contains all gradients applied before, and none applied
  // later. It is imported into another table, and in some rounds into the same table.
  void Checkpoint() {
    std::mt19937_64 random(300);
    while (!is_over_) {
      for (EmbeddingTable* table : {unbounded_.get(), lfu_.get(), lru_.get()}) {
        std::vector<int64_t> before(kKeys), after(kKeys);
        TableContents contents;
        DeferredContents deferred;
        UpdatePolicy policy;
        for (int64_t k = 0; k < kKeys; ++k) before[k] = ledger_.done[k];
        {
          const std::unique_lock<std::shared_mutex> lock(table->mutex());
          contents = table->Export();
          deferred = ExportDeferred(table);
          policy = table->updates().policy();
          if (random() % 4 == 0) {
            ASSERT_TRUE(table->Import(contents).ok());
            ASSERT_TRUE(ImportDeferred(table, deferred).ok());
          }
        }
        for (int64_t k = 0; k < kKeys; ++k) after[k] = ledger_.begun[k];
        auto restored = MakeTable("restored", 0, TableOptions::Eviction::kLfu);
        restored->updates().SetPolicy(policy);
        if (!contents.last_used.empty()) contents.last_used.clear();
        ASSERT_TRUE(restored->Import(contents).ok());
        ASSERT_TRUE(ImportDeferred(restored.get(), deferred).ok());
        restored->updates().set_last_learning_rate(kRate);
        EXPECT_TRUE(FlushDeferred(restored.get(), Threads(1)).ok());
        CheckCut(*table, restored->Export(), before, after);
        ++checkpoints_;
      }
    }
  }

  void CheckCut(const EmbeddingTable& table, const TableContents& cut,
                const std::vector<int64_t>& before, const std::vector<int64_t>& after) {
    const bool is_bounded = table.options().capacity > 0;
    ASSERT_TRUE(std::adjacent_find(cut.keys.begin(), cut.keys.end(),
                                   std::greater_equal<int64_t>()) == cut.keys.end());
    if (is_bounded) {
      ASSERT_LE(static_cast<int64_t>(cut.keys.size()), kCapacity);
    }
    for (size_t i = 0; i < cut.keys.size(); ++i) {
      const int64_t key = cut.keys[i];
      ASSERT_GE(key, 0);
      ASSERT_LT(key, kKeys);
      ASSERT_EQ(cut.rows[i * kDim], cut.rows[i * kDim + 1]);
      const int64_t applied = -static_cast<int64_t>(cut.rows[i * kDim]);
      ASSERT_LE(applied, after[key]) << "key " << key << " of " << table.options().name;
      if (!is_bounded && !MayBeMasked(key)) {
        ASSERT_GE(applied, before[key]) << "key " << key;
      }
    }
    if (is_bounded) return;
    size_t known = 0;
    for (int64_t key = 0; key < kKeys; ++key) known += before[key] > 0;
    ASSERT_GE(cut.keys.size(), known) << "a row was lost";
  }

  // Pulls rows of a bounded and of an unbounded table to replicas.
  void Pull() {
    std::mt19937_64 random(400);
    const std::vector<EmbeddingTable*> owners = {unbounded_.get(), lfu_.get()};
    const std::vector<EmbeddingTable*> replicas = {replicas_[0].get(), replicas_[1].get()};
    while (!is_over_) {
      std::vector<int64_t> keys(kBatch);
      for (int64_t& key : keys) key = static_cast<int64_t>(random() % 200);
      std::vector<FeatureView> views(2);
      for (int t = 0; t < 2; ++t) {
        views[t].table = t;
        views[t].batch = views[t].num_keys = kBatch;
        views[t].keys = keys.data();
      }
      const std::vector<Combiner> combiners(2, Combiner::kSum);
      std::vector<float> pooled(2 * kBatch * kDim);
      LookupWorkspace workspace;
      SendBuffer requests;
      ASSERT_TRUE(RouteKeys(replicas, views, combiners, 1, Threads(2), &workspace, &requests).ok());
      const SendBufferView requested = {1,
                                        requests.sizes.data(),
                                        requests.keys.data(),
                                        static_cast<int64_t>(requests.keys.size()),
                                        nullptr,
                                        0};
      SteadyLengths lengths;
      PulledRows pulled;
      ASSERT_TRUE(PullRows(owners, requested, PullOptions(), &lengths, &pulled).ok());
      const PulledMessages messages = {requested, pulled.messages.data(),
                                       static_cast<int64_t>(pulled.messages.size())};
      ASSERT_TRUE(LookUpPulled(views, combiners,
                               {{pooled.data(), kDim}, {pooled.data() + kBatch * kDim, kDim}},
                               messages, true, Threads(2), &workspace)
                      .ok());
      LetOthersIn();
    }
  }

  std::unique_ptr<EmbeddingTable> unbounded_ =
      MakeTable("unbounded", 0, TableOptions::Eviction::kLfu);
  std::unique_ptr<EmbeddingTable> lfu_ = MakeTable("lfu", kCapacity, TableOptions::Eviction::kLfu);
  std::unique_ptr<EmbeddingTable> lru_ = MakeTable("lru", kCapacity, TableOptions::Eviction::kLru);
  std::unique_ptr<EmbeddingTable> replicas_[2] = {
      MakeTable("replicas of unbounded", 0, TableOptions::Eviction::kLfu),
      MakeTable("replicas of lfu", kCapacity, TableOptions::Eviction::kLru)};
  Ledger ledger_;
  std::atomic<bool> is_over_{false};
  std::atomic<int64_t> lookups_{0}, updates_{0}, steps_{0};
  int64_t windows_ = 0, checkpoints_ = 0;
};

TEST_F(Concurrency, ConcurrentCallsLoseNoUpdate) {
  UpdatePolicy policy;
  policy.mode = UpdatePolicy::Mode::kMask;
  for (EmbeddingTable* table : {unbounded_.get(), lfu_.get(), lru_.get()}) {
    table->updates().SetPolicy(policy);
  }
  const char* const seconds = std::getenv("SLIPSTREAM_CONCURRENCY_SECONDS");
  std::vector<std::thread> threads;
  const auto start = [&](std::function<void()> work) {
    threads.emplace_back([this, work = std::move(work)] {
      work();
      if (HasFatalFailure()) is_over_ = true;
    });
  };
  for (int t = 0; t < 3; ++t) start([this, t] { Train(t); });
  for (int t = 0; t < 2; ++t) start([this, t] { Evaluate(t); });
  start([this] { EndWindows(); });
  start([this] { Flush(); });
  start([this] { Checkpoint(); });
  start([this] { Pull(); });
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::seconds(seconds == nullptr ? 5 : std::atoll(seconds));
  int64_t maximum = 0;
  while (!is_over_ && maximum < kMaxExact / 2 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    maximum = 0;
    for (const auto& count : ledger_.begun) maximum = std::max<int64_t>(maximum, count);
  }
  is_over_ = true;
  for (std::thread& thread : threads) thread.join();
  if (HasFatalFailure()) return;

  int64_t offered = 0;
  for (EmbeddingTable* table : {unbounded_.get(), lfu_.get(), lru_.get()}) {
    EXPECT_TRUE(FlushDeferred(table, Threads(2)).ok());
    ASSERT_EQ(table->updates().num_deferred(), 0);
    EXPECT_EQ(table->updates().step(), steps_);
    const UpdateCounts counts = table->updates().counts();
    offered = counts.offered;
    // The gradient of an evicted key is dropped and counted there.
    EXPECT_EQ(offered + table->updates().num_dropped(), updates_) << table->options().name;
    EXPECT_LE(counts.sent + counts.masked, offered + counts.due_by_age + counts.flushed);
  }
  EXPECT_EQ(unbounded_->updates().num_dropped(), 0);
  EXPECT_LE(lfu_->rows().size(), kCapacity);
  EXPECT_LE(lru_->rows().size(), kCapacity);
  EXPECT_GT(lfu_->rows().num_evicted(), 0);
  EXPECT_GT(lru_->rows().num_evicted(), 0);
  EXPECT_GT(unbounded_->updates().counts().masked, 0);
  EXPECT_GT(unbounded_->updates().counts().deferred, 0);

  const TableContents contents = unbounded_->Export();
  double accesses = 0;
  for (size_t i = 0; i < contents.keys.size(); ++i) {
    const int64_t key = contents.keys[i], sent = ledger_.done[key];
    EXPECT_EQ(sent, ledger_.begun[key]);
    const float applied = -contents.rows[i * kDim];
    if (MayBeMasked(key)) {
      EXPECT_LE(applied, static_cast<float>(sent)) << key;
    } else {
      EXPECT_EQ(applied, static_cast<float>(sent)) << key;
    }
    accesses += contents.counts[i];
  }
  EXPECT_EQ(static_cast<int64_t>(accesses), lookups_);
  RecordProperty("steps", std::to_string(steps_));
  std::printf("%lld steps, %lld updates of rows, %lld window ends, %lld checkpoints\n",
              static_cast<long long>(steps_), static_cast<long long>(updates_),
              static_cast<long long>(windows_), static_cast<long long>(checkpoints_));
}

}  // namespace
}  // namespace slipstream
