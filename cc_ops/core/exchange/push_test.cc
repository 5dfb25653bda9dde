#include "cc_ops/core/exchange/push.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "cc_ops/core/lookup/batch_lookup.h"
#include "cc_ops/core/testing/test_rules.h"
#include "cc_ops/core/testing/test_threads.h"
#include "cc_ops/core/update/policy_update.h"

namespace slipstream {
namespace {

std::unique_ptr<EmbeddingTable> MakeTable(const std::string& kind, int64_t dim, int64_t capacity) {
  TableOptions options;
  options.name = "t" + std::to_string(dim);
  options.dim = dim;
  options.capacity = capacity;
  options.rule = RuleNamed(kind);
  return std::make_unique<EmbeddingTable>(options);
}

// A process with a table of dim 4 and one of dim 3, and a feature of each.
struct Process {
  explicit Process(const std::string& kind, int64_t capacity = 0, int threads = 3)
      : parallel(Threads(threads)) {
    owned.push_back(MakeTable(kind, 4, capacity));
    owned.push_back(MakeTable(kind, 3, capacity));
    for (auto& table : owned) tables.push_back(table.get());
  }

  // Looks up keys[f] of each feature. All values of the gradient of example i are gradient[f][i].
  void Lookup(const std::vector<std::vector<int64_t>>& keys,
              const std::vector<std::vector<float>>& gradient) {
    std::vector<FeatureView> views(2);
    std::vector<std::vector<float>> pooled(2);
    std::vector<PooledOutput> outputs;
    upstream.assign(2, {});
    views_of_gradients.clear();
    for (int f = 0; f < 2; ++f) {
      const int64_t batch = static_cast<int64_t>(keys[f].size()), dim = tables[f]->dim();
      views[f].table = f;
      views[f].batch = views[f].num_keys = batch;
      views[f].keys = keys[f].data();
      pooled[f].resize(static_cast<size_t>(batch * dim));
      for (const float g : gradient[f]) upstream[f].insert(upstream[f].end(), dim, g);
      outputs.push_back({pooled[f].data(), dim});
    }
    for (int f = 0; f < 2; ++f) {
      views_of_gradients.push_back({upstream[f].data(), tables[f]->dim()});
    }
    ASSERT_TRUE(LookupForTraining(tables, views, {Combiner::kSum, Combiner::kSum}, outputs,
                                  parallel, &workspace)
                    .ok());
  }

  SendBuffer Collect(int ranks = 1) {
    SendBuffer buffer;
    EXPECT_TRUE(
        CollectGradients(workspace.plan, views_of_gradients, {0.1f, ranks}, parallel, &buffer)
            .ok());
    return buffer;
  }

  Status Apply(const SendBuffer& buffer, float scale = 1.f, bool create_missing = true) {
    return ApplyRows(tables, View(buffer), {0.1f, {scale, scale}, create_missing}, parallel);
  }

  static SendBufferView View(const SendBuffer& buffer) {
    return {buffer.ranks,         buffer.sizes.data(),
            buffer.keys.data(),   static_cast<int64_t>(buffer.keys.size()),
            buffer.values.data(), static_cast<int64_t>(buffer.values.size())};
  }

  std::vector<float> State() const {
    std::vector<float> state;
    for (const EmbeddingTable* table : tables) {
      const TableContents contents = table->Export();
      state.insert(state.end(), contents.rows.begin(), contents.rows.end());
      state.insert(state.end(), contents.slots.begin(), contents.slots.end());
    }
    return state;
  }

  Parallel parallel;
  std::vector<std::unique_ptr<EmbeddingTable>> owned;
  std::vector<EmbeddingTable*> tables;
  LookupWorkspace workspace;
  std::vector<std::vector<float>> upstream;
  std::vector<PooledGradient> views_of_gradients;
};

// Concatenates the send buffers of multiple processes.
SendBuffer Gather(const std::vector<SendBuffer>& parts) {
  SendBuffer all;
  all.ranks = static_cast<int>(parts.size());
  for (const SendBuffer& part : parts) {
    all.sizes.insert(all.sizes.end(), part.sizes.begin(), part.sizes.end());
    all.keys.insert(all.keys.end(), part.keys.begin(), part.keys.end());
    all.values.insert(all.values.end(), part.values.begin(), part.values.end());
  }
  return all;
}

struct Batch {
  std::vector<std::vector<int64_t>> keys{2};
  std::vector<std::vector<float>> gradients{2};
  void Append(const Batch& other) {
    for (int f = 0; f < 2; ++f) {
      keys[f].insert(keys[f].end(), other.keys[f].begin(), other.keys[f].end());
      gradients[f].insert(gradients[f].end(), other.gradients[f].begin(), other.gradients[f].end());
    }
  }
};

Batch RandomBatch(std::mt19937_64* random, int size) {
  Batch batch;
  for (int f = 0; f < 2; ++f) {
    for (int i = 0; i < size; ++i) {
      batch.keys[f].push_back(static_cast<int64_t>((*random)() % (1u << ((*random)() % 9))));
      batch.gradients[f].push_back(static_cast<float>((*random)() % 2001) / 1000.f - 1.f);
    }
  }
  return batch;
}

UpdatePolicy Defer(float movement, int64_t max_age) {
  UpdatePolicy policy;
  policy.mode = UpdatePolicy::Mode::kDefer;
  policy.movement = movement;
  policy.max_age = max_age;
  policy.max_rows = 1 << 20;
  policy.is_exchanged = true;
  return policy;
}

TEST(Exchange, SingleProcessEqualsUpdate) {
  for (const std::string kind : {"sgd", "adagrad"}) {
    Process direct(kind), exchanged(kind, 0, 1);
    std::mt19937_64 random(3);
    for (int step = 0; step < 10; ++step) {
      const Batch batch = RandomBatch(&random, 50);
      direct.Lookup(batch.keys, batch.gradients);
      ASSERT_TRUE(
          ApplyGradients(direct.workspace.plan, direct.views_of_gradients, 0.1f, direct.parallel)
              .ok());
      exchanged.Lookup(batch.keys, batch.gradients);
      ASSERT_TRUE(exchanged.Apply(exchanged.Collect()).ok());
    }
    EXPECT_EQ(direct.State(), exchanged.State());
    EXPECT_EQ(direct.tables[0]->updates().step(), exchanged.tables[0]->updates().step());
  }
}

TEST(Exchange, RanksStayEqualAndEqualUpdateOfWholeBatch) {
  for (const std::string kind : {"sgd", "adagrad"}) {
    constexpr int kRanks = 3;
    Process whole(kind);
    std::vector<std::unique_ptr<Process>> ranks;
    for (int r = 0; r < kRanks; ++r) ranks.push_back(std::make_unique<Process>(kind, 0, r + 1));
    std::mt19937_64 random(4);
    for (int step = 0; step < 10; ++step) {
      Batch all;
      std::vector<SendBuffer> buffer;
      for (int r = 0; r < kRanks; ++r) {
        // The last rank has no examples in some steps.
        const Batch batch = RandomBatch(&random, r == 2 && step % 2 ? 0 : 30);
        all.Append(batch);
        ranks[r]->Lookup(batch.keys, batch.gradients);
        buffer.push_back(ranks[r]->Collect());
      }
      for (auto& rank : ranks) ASSERT_TRUE(rank->Apply(Gather(buffer), 0.5f).ok());
      for (auto& of_feature : all.gradients) {
        for (float& g : of_feature) g *= 0.5f;
      }
      whole.Lookup(all.keys, all.gradients);
      ASSERT_TRUE(
          ApplyGradients(whole.workspace.plan, whole.views_of_gradients, 0.1f, whole.parallel)
              .ok());
    }
    EXPECT_EQ(ranks[0]->State(), ranks[1]->State());
    EXPECT_EQ(ranks[0]->State(), ranks[2]->State());
    const std::vector<float> wanted = whole.State(), got = ranks[0]->State();
    ASSERT_EQ(wanted.size(), got.size());
    for (size_t i = 0; i < wanted.size(); ++i) ASSERT_NEAR(wanted[i], got[i], 1e-4);
  }
}

TEST(Exchange, LosesNoDeferredGradient) {
  // Rows are evicted from a bounded table. Their deferred gradients must survive.
  for (const int64_t capacity : {0, 600}) {
    Process process("sgd", capacity);
    std::mt19937_64 random(5);
    std::vector<std::map<int64_t, double>> given(2), taken(2);
    const auto take = [&](const SendBuffer& buffer) {
      size_t key = 0, value = 0;
      for (size_t t = 0; t < 2; ++t) {
        for (int64_t i = 0; i < buffer.sizes[t]; ++i) {
          taken[t][buffer.keys[key++]] += buffer.values[value];
          value += static_cast<size_t>(process.tables[t]->dim());
        }
      }
      EXPECT_EQ(key, buffer.keys.size());
      EXPECT_EQ(value, buffer.values.size());
    };
    for (int step = 0; step < 60; ++step) {
      if (step == 5) {
        for (EmbeddingTable* table : process.tables) table->updates().SetPolicy(Defer(0.15f, 8));
      }
      Batch batch = RandomBatch(&random, 200);
      for (auto& of_feature : batch.keys) {
        for (int64_t& key : of_feature) key += step * 20;
      }
      for (int f = 0; f < 2; ++f) {
        for (size_t i = 0; i < batch.keys[f].size(); ++i) {
          given[f][batch.keys[f][i]] += batch.gradients[f][i];
        }
      }
      process.Lookup(batch.keys, batch.gradients);
      const SendBuffer buffer = process.Collect();
      take(buffer);
      ASSERT_TRUE(process.Apply(buffer, 1.f, capacity == 0).ok());
      // Must not apply the deferred gradients.
      EXPECT_TRUE(FlushDeferred(process.tables[0], process.parallel).ok());
    }
    EXPECT_GT(process.tables[0]->updates().num_deferred(), 0);
    EXPECT_EQ(process.tables[0]->rows().num_evicted() > 0, capacity > 0);
    // No gradient leaves if memory for the buffer cannot be reserved.
    CollectOptions without_memory;
    int64_t max_rows = 0, max_values = 0;
    without_memory.reserve = [&](int64_t rows, int64_t values, SendTarget* /*target*/) {
      max_rows = rows;
      max_values = values;
      return ResourceExhausted("no memory for outputs");
    };
    const int64_t deferred = process.tables[0]->updates().num_deferred();
    SendBuffer collected;
    EXPECT_EQ(CollectAllDeferred(process.tables, without_memory, &collected).message(),
              "no memory for outputs");
    EXPECT_EQ(process.tables[0]->updates().num_deferred(), deferred);
    EXPECT_EQ(max_rows, deferred + process.tables[1]->updates().num_deferred());
    EXPECT_EQ(max_values, 3 * max_rows + deferred);  // Dims 4 and 3.
    process.Lookup({{1, 2}, {3, 4}}, {{0.f, 0.f}, {0.f, 0.f}});
    without_memory.learning_rate = 0.1f;
    EXPECT_FALSE(CollectGradients(process.workspace.plan, process.views_of_gradients,
                                  without_memory, process.parallel, &collected)
                     .ok());
    EXPECT_GE(process.tables[0]->updates().num_deferred(), capacity > 0 ? 1 : deferred);
    ASSERT_TRUE(CollectAllDeferred(process.tables, {}, &collected).ok());
    EXPECT_GT(collected.keys.size(), 0u);
    take(collected);
    EXPECT_EQ(
        process.tables[0]->updates().num_deferred() + process.tables[1]->updates().num_deferred(),
        0);
    for (int f = 0; f < 2; ++f) {
      for (const auto& [key, sum] : given[f]) {
        ASSERT_NEAR(sum, taken[f][key], 1e-4) << "key " << key;
      }
    }
  }
}

TEST(Exchange, SendBuffersAreAddressedToOwners) {
  Process process("sgd");
  std::mt19937_64 random(6);
  const Batch batch = RandomBatch(&random, 300);
  process.Lookup(batch.keys, batch.gradients);
  constexpr int kRanks = 3;
  const SendBuffer buffer = process.Collect(kRanks);
  ASSERT_EQ(buffer.sizes.size(), 6u);
  size_t key = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int t = 0; t < 2; ++t) {
      EXPECT_GT(buffer.sizes[rank * 2 + t], 0);
      for (int64_t i = 0; i < buffer.sizes[rank * 2 + t]; ++i) {
        EXPECT_EQ(OwnerOf(buffer.keys[key++], kRanks), rank);
      }
    }
  }
  EXPECT_EQ(key, buffer.keys.size());
  // The same rows, ignoring their destination.
  Process whole("sgd");
  whole.Lookup(batch.keys, batch.gradients);
  ASSERT_TRUE(whole.Apply(whole.Collect()).ok());
  ASSERT_TRUE(process.Apply(buffer).ok());
  EXPECT_EQ(whole.State(), process.State());
}

TEST(Exchange, DropsRowsOfEvictedKeys) {
  Process process("sgd");
  SendBuffer buffer;
  buffer.sizes = {1, 0};
  buffer.keys = {7};
  buffer.values = {1.f, 1.f, 1.f, 1.f};
  ASSERT_TRUE(process.Apply(buffer, 1.f, false).ok());
  EXPECT_EQ(process.tables[0]->updates().num_dropped(), 1);
  EXPECT_EQ(process.tables[0]->rows().size(), 0);
  ASSERT_TRUE(process.Apply(buffer, 1.f, true).ok());
  EXPECT_EQ(process.tables[0]->rows().size(), 1);
  std::vector<int64_t> keys;
  std::vector<float> counts;
  process.tables[0]->rows().HotKeys(5, RowStore::HotKeyOrder::kByCount, process.parallel, &keys,
                                    &counts);
  EXPECT_TRUE(keys.empty());  // An update is not an access.
}

TEST(Exchange, RejectsInvalidBuffers) {
  Process process("sgd");
  SendBuffer buffer;
  buffer.sizes = {2, 0};
  buffer.keys = {7};
  buffer.values = {1.f, 1.f, 1.f, 1.f};
  EXPECT_NE(process.Apply(buffer).message().find("sizes[0, 0] is 2 rows of table 't4'"),
            std::string::npos);
  buffer.ranks = 0;
  EXPECT_NE(process.Apply(buffer).message().find("entries for 0 ranks"), std::string::npos);
  buffer.ranks = 1;
  buffer.sizes = {0, 0};
  EXPECT_NE(process.Apply(buffer).message().find("sizes adds up to 0 keys"), std::string::npos);
  buffer.sizes = {-1, 0};
  EXPECT_NE(process.Apply(buffer).message().find("is -1"), std::string::npos);
  buffer.sizes = {1, 0};
  buffer.values[2] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_NE(process.Apply(buffer).message().find("key 7 of table 't4'"), std::string::npos);
  EXPECT_EQ(process.tables[0]->rows().size(), 0);
}

}  // namespace
}  // namespace slipstream
