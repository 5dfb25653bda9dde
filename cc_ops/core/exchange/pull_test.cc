#include "cc_ops/core/exchange/pull.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cc_ops/core/testing/test_rules.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 4;

std::unique_ptr<EmbeddingTable> MakeTable(const std::string& kind, int64_t capacity = 0) {
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  options.capacity = capacity;
  options.eviction = TableOptions::Eviction::kLru;
  options.initializer.kind = RowInitializer::Kind::kUniform;
  options.initializer.a = -1.f;
  options.initializer.b = 1.f;
  options.rule = RuleNamed(kind);
  return std::make_unique<EmbeddingTable>(options);
}

// What one rank requests of one table.
struct Request {
  explicit Request(std::vector<int64_t> wanted) : keys(std::move(wanted)) {
    sizes = {static_cast<int64_t>(keys.size())};
  }
  SendBufferView Keys() const {
    return {1, sizes.data(), keys.data(), static_cast<int64_t>(keys.size()), nullptr, 0};
  }
  Status Pull(const std::vector<EmbeddingTable*>& tables, bool create_missing,
              bool with_summary = false) {
    PullOptions options;
    options.create_missing = create_missing;
    options.format.with_summary = with_summary;
    return Pull(tables, options);
  }
  Status Pull(const std::vector<EmbeddingTable*>& tables, const PullOptions& options) {
    SteadyLengths lengths;
    PulledRows pulled;
    const Status status = PullRows(tables, Keys(), options, &lengths, &pulled);
    if (status.ok()) {
      EXPECT_EQ(pulled.lengths, std::vector<int32_t>{static_cast<int>(pulled.messages.size())});
      message = pulled.messages;
    }
    return status;
  }
  Status Store(const std::vector<EmbeddingTable*>& replicas, const ReplicaOptions& options) const {
    return StoreReplicas(replicas, Keys(), message.data(), static_cast<int64_t>(message.size()),
                         options);
  }
  std::vector<int64_t> keys, sizes;
  std::vector<uint8_t> message;
};

std::vector<int64_t> Route(EmbeddingTable* replicas, const std::vector<int64_t>& keys, int ranks,
                           bool skip_read_only = true, std::vector<int64_t>* sizes = nullptr) {
  FeatureView view;
  view.batch = view.num_keys = static_cast<int64_t>(keys.size());
  view.keys = keys.data();
  SendBuffer requests;
  RouteOptions options;
  options.ranks = ranks;
  options.skip_read_only = skip_read_only;
  EXPECT_TRUE(RouteKeys({replicas}, {view}, options, Parallel(), &requests).ok());
  if (sizes != nullptr) *sizes = requests.sizes;
  return requests.keys;
}

TEST(Route, RequestsDistinctKeysFromOwners) {
  auto replicas = MakeTable("sgd");
  std::vector<int64_t> keys, sizes;
  for (int64_t i = 0; i < 500; ++i) keys.push_back(i * i % 97 - 20);
  const std::vector<int64_t> requested = Route(replicas.get(), keys, 3, true, &sizes);
  EXPECT_EQ(std::set<int64_t>(requested.begin(), requested.end()),
            std::set<int64_t>(keys.begin(), keys.end()));
  EXPECT_EQ(std::set<int64_t>(requested.begin(), requested.end()).size(), requested.size());
  ASSERT_EQ(sizes.size(), 3u);
  size_t index = 0;
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_GT(sizes[rank], 0);
    for (int64_t i = 0; i < sizes[rank]; ++i) EXPECT_EQ(OwnerOf(requested[index++], 3), rank);
  }
  EXPECT_EQ(index, requested.size());
  EXPECT_EQ(replicas->rows().size(), 0);
  EXPECT_TRUE(Route(replicas.get(), {}, 2).empty());
}

TEST(Pull, MakesRowsInTrainingOnly) {
  for (const std::string& kind : AllRuleNames()) {
    auto owner = MakeTable(kind);
    Request evaluated({3, -7, 3}), trained = evaluated;
    ASSERT_TRUE(evaluated.Pull({owner.get()}, false, true).ok());
    EXPECT_EQ(owner->rows().size(), 0);
    ASSERT_TRUE(trained.Pull({owner.get()}, true, true).ok());
    EXPECT_EQ(owner->rows().size(), 2);
    EXPECT_EQ(evaluated.message, trained.message);
    std::vector<int64_t> keys;
    std::vector<float> counts;
    owner->rows().HotKeys(9, RowStore::HotKeyOrder::kByCount, Parallel(), &keys, &counts);
    EXPECT_EQ(keys, (std::vector<int64_t>{3, -7}));
    EXPECT_EQ(counts, (std::vector<float>{2.f, 1.f}));
  }
}

TEST(Pull, TellsTheBytesOfEachRank) {
  auto owner = MakeTable("sgd");
  const std::vector<int64_t> keys = {1, 2, 3}, sizes = {1, 0, 2};
  for (const int64_t key : keys) {
    uint32_t index = 0;
    owner->rows().FindOrInsert(key, 0.f, &index)[0] = 42.f;
  }
  SteadyLengths lengths;
  PulledRows pulled;
  ASSERT_TRUE(PullRows({owner.get()}, {3, sizes.data(), keys.data(), 3, nullptr, 0}, PullOptions(),
                       &lengths, &pulled)
                  .ok());
  EXPECT_EQ(pulled.row_bytes, (std::vector<int64_t>{1 + 4 * kDim, 0, 1 + 8 * kDim}));
  EXPECT_EQ(pulled.lengths, std::vector<int32_t>(3, 1024));
  EXPECT_EQ(pulled.messages.size(), 3u * 1024);
}

TEST(Pull, RowsThatCannotBeSentAreRefused) {
  auto owner = MakeTable("sgd");
  const Request request({1, 2});
  PullOptions options;
  options.create_missing = true;
  SteadyLengths lengths;
  PulledRows pulled;
  ASSERT_TRUE(PullRows({owner.get()}, request.Keys(), options, &lengths, &pulled).ok());
  for (const int64_t key : request.keys) owner->rows().Find(key)[0] += 0.5f;
  options.most_rank_bytes = 8;
  SteadyLengths unsent;
  const Status status = PullRows({owner.get()}, request.Keys(), options, &unsent, &pulled);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("take 33 bytes; at most 8 can be sent"), std::string::npos)
      << status.message();
  EXPECT_EQ(unsent.Of(0, 1), 1024) << "what was not sent is not remembered";
}

TEST(Pull, BoundedTablesRefuseWhatTheyCannotHold) {
  auto owner = MakeTable("sgd", 3);
  const Status status = Request({1, 2, 3, 4}).Pull({owner.get()}, true);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("need 4 rows of table 't'"), std::string::npos);
  EXPECT_EQ(owner->rows().size(), 0);
  ASSERT_TRUE(Request({1, 2, 3}).Pull({owner.get()}, true).ok());
  ASSERT_TRUE(Request({4, 3}).Pull({owner.get()}, true).ok());
  EXPECT_EQ(owner->rows().size(), 3);
  EXPECT_NE(owner->rows().Find(3), nullptr);
}

TEST(Pull, BoundedTablesGiveNothingUpIfOneCannotHoldItsKeys) {
  auto first = MakeTable("sgd", 3), second = MakeTable("sgd", 3);
  ASSERT_TRUE(Request({1, 2, 3}).Pull({first.get()}, true).ok());
  Request request({4, 5, 1, 2, 3, 4});
  request.sizes = {2, 4};
  const Status status = request.Pull({first.get(), second.get()}, true);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(first->rows().size(), 3);
  EXPECT_EQ(first->rows().num_evicted(), 0);
}

TEST(Replicas, AreWhatTheOwnerGave) {
  auto owner = MakeTable("adagrad"), replicas = MakeTable("adagrad", 50);
  Request request({5, 6});
  ASSERT_TRUE(request.Pull({owner.get()}, true, false).ok());
  ASSERT_TRUE(request.Store({replicas.get()}, ReplicaOptions()).ok());
  for (const int64_t key : {5, 6}) {
    const float *own = owner->rows().Find(key), *replica = replicas->rows().Find(key);
    EXPECT_TRUE(std::equal(own, own + kDim, replica));
  }
  std::vector<int64_t> keys;
  std::vector<float> counts;
  replicas->rows().HotKeys(9, RowStore::HotKeyOrder::kByCount, Parallel(), &keys, &counts);
  EXPECT_TRUE(keys.empty());  // a replica is no access
  // What comes later replaces it.
  owner->rows().Find(5)[0] = 42.f;
  ASSERT_TRUE(request.Pull({owner.get()}, true, false).ok());
  ASSERT_TRUE(request.Store({replicas.get()}, ReplicaOptions()).ok());
  EXPECT_EQ(replicas->rows().Find(5)[0], 42.f);
}

// Frozen ones, too: their slots may be read after the switch to judging movements.
TEST(Replicas, WithoutSummaryNeverUnderestimateAMovement) {
  for (const std::string& kind : AllRuleNames()) {
    auto owner = MakeTable(kind), replicas = MakeTable(kind, 50);
    const UpdateRule rule = owner->options().rule;
    Request request({5});
    ASSERT_TRUE(request.Pull({owner.get()}, true, true).ok());
    float* own = owner->rows().Find(5);
    const std::vector<float> gradient = {0.5f, 0.1f, -0.2f, 0.3f};
    rule.Apply(0.1f, kDim, gradient.data(), own);
    ASSERT_TRUE(request.Pull({owner.get()}, true, true).ok());
    ReplicaOptions options;
    ASSERT_TRUE(request.Store({replicas.get()}, options).ok());
    options.read_only = true;
    // The owner's may have become smaller since. FTRL's rows are what their slots make of them.
    if (kind != "ftrl") rule.InitSlots(kDim, own + kDim);
    ASSERT_TRUE(request.Pull({owner.get()}, false, false).ok());
    ASSERT_TRUE(request.Store({replicas.get()}, options).ok());
    const float* replica = replicas->rows().Find(5);
    EXPECT_TRUE(std::equal(own, own + kDim, replica));
    EXPECT_GE(rule.Movement(0.1f, kDim, gradient.data(), replica),
              rule.Movement(0.1f, kDim, gradient.data(), own));
  }
}

TEST(Replicas, ReadOnlyOnesAreNotRequestedUntilFlagsAreSetAnew) {
  auto owner = MakeTable("sgd"), replicas = MakeTable("sgd");
  Request request({5, 6});
  ASSERT_TRUE(request.Pull({owner.get()}, true, false).ok());
  ReplicaOptions options;
  options.read_only = true;
  ASSERT_TRUE(request.Store({replicas.get()}, options).ok());
  EXPECT_EQ(Route(replicas.get(), {5, 6, 7, 5}, 1), (std::vector<int64_t>{7}));
  EXPECT_EQ(Route(replicas.get(), {5, 6, 7}, 1, false).size(), 3u);
  EXPECT_TRUE(replicas->SetFlags(nullptr, nullptr, 0, Parallel()).ok());
  EXPECT_EQ(Route(replicas.get(), {5, 6, 7}, 1).size(), 3u);
  options.ignored_rank = 0;
  ASSERT_TRUE(request.Store({replicas.get()}, options).ok());
  EXPECT_EQ(Route(replicas.get(), {5, 6, 7}, 1).size(), 3u);
}

TEST(Replicas, StayWithinTheirBound) {
  auto owner = MakeTable("sgd"), replicas = MakeTable("sgd", 8);
  ReplicaOptions options;
  options.evict = true;
  for (int64_t first = 0; first < 100; first += 5) {
    Request request({first, first + 1, first + 2, first + 3, first + 4});
    ASSERT_TRUE(request.Pull({owner.get()}, true, false).ok());
    ASSERT_TRUE(request.Store({replicas.get()}, options).ok());
    EXPECT_LE(replicas->rows().size(), 8);
    for (const int64_t key : request.keys) EXPECT_NE(replicas->rows().Find(key), nullptr);
  }
}

TEST(Replicas, RefuseRowsThatAreNotFinite) {
  for (const RowDtype dtype :
       {RowDtype::kFloat32, RowDtype::kBfloat16, RowDtype::kFloat16, RowDtype::kInt8}) {
    auto owner = MakeTable("adagrad"), replicas = MakeTable("adagrad");
    Request request({1, 2});
    ASSERT_TRUE(request.Pull({owner.get()}, true).ok());
    owner->rows().Find(2)[3] = std::numeric_limits<float>::infinity();
    PullOptions pull;
    pull.format.dtype = dtype;
    ASSERT_TRUE(request.Pull({owner.get()}, pull).ok());
    const Status status = request.Store({replicas.get()}, ReplicaOptions());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("row of key 2 of table 't' that came from its owner is not"),
              std::string::npos)
        << status.message();
    EXPECT_EQ(replicas->rows().size(), 0);
  }
}

TEST(Replicas, RefuseMessagesThatDoNotFit) {
  auto owner = MakeTable("adagrad"), replicas = MakeTable("adagrad");
  Request request({1, 2});
  ASSERT_TRUE(request.Pull({owner.get()}, true).ok());
  for (const int64_t key : {1, 2}) owner->rows().Find(key)[0] = 5.f;
  ASSERT_TRUE(request.Pull({owner.get()}, true).ok());
  const Request whole = request;
  const auto refusal = [&] {
    const Status status = request.Store({replicas.get()}, ReplicaOptions());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  const auto refused_with = [&](size_t word, int64_t value) {
    request = whole;
    std::memcpy(request.message.data() + 8 * word, &value, sizeof(value));
    return refusal();
  };
  EXPECT_NE(refused_with(1, 32).find("from rank 0 take at least 33 bytes; left are 32"),
            std::string::npos);
  EXPECT_NE(refused_with(1, 0).find("left are 0"), std::string::npos);
  EXPECT_NE(refused_with(1, 34).find("from rank 0 take 33 bytes; there are 34"), std::string::npos);
  for (const int64_t length : {int64_t{-1}, int64_t{31}, int64_t{1025}, int64_t{1} << 62}) {
    EXPECT_NE(refused_with(0, length).find("from rank 0 say that they are 33 of"),
              std::string::npos);
  }
  for (const int64_t bytes : {-1, 1024 - 31}) {
    EXPECT_NE(refused_with(1, bytes).find("bytes are left of 1024"), std::string::npos);
  }
  EXPECT_NE(refused_with(2, 4).find("of dtype 4"), std::string::npos);
  EXPECT_NE(refused_with(2, -1).find("of dtype -1"), std::string::npos);
  EXPECT_NE(refused_with(2, 1).find("take 17 bytes; there are 33"), std::string::npos);
  EXPECT_NE(refused_with(3, 2).find("say that"), std::string::npos);
  EXPECT_NE(refused_with(0, 1016).find("8 of 1024 bytes lie behind"), std::string::npos);
  request = whole;
  request.message.resize(16);
  EXPECT_NE(refusal().find("16 bytes are left of 16"), std::string::npos);
  request = whole;
  request.sizes = {1};
  EXPECT_NE(refusal().find("sizes name 1 keys"), std::string::npos);
  request.sizes = {-1};
  EXPECT_NE(refusal().find("is -1"), std::string::npos);
  EXPECT_EQ(request.Pull({owner.get()}, false).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(replicas->rows().size(), 0);
}

TEST(SlotSummary, NeverUnderestimatesAMovement) {
  std::mt19937_64 random(1);
  const auto uniform = [&] { return static_cast<float>(random() % 10001) / 5000.f - 1.f; };
  for (const std::string& kind : AllRuleNames()) {
    auto table = MakeTable(kind);
    const UpdateRule rule = table->options().rule;
    for (int i = 0; i < 200; ++i) {
      std::vector<float> row(static_cast<size_t>(kDim + table->slots_per_row())), gradient(kDim);
      rule.InitSlots(kDim, row.data() + kDim);
      for (int step = 0; step < 5; ++step) {
        for (float& g : gradient) g = uniform();
        rule.Apply(0.1f, kDim, gradient.data(), row.data());
      }
      std::vector<float> replica = row;
      rule.FillSlots(kDim, rule.SlotSummary(kDim, row.data()), replica.data());
      for (float& g : gradient) g = uniform();
      EXPECT_GE(rule.Movement(0.1f, kDim, gradient.data(), replica.data()) * 1.00001f,
                rule.Movement(0.1f, kDim, gradient.data(), row.data()));
    }
  }
}

}  // namespace
}  // namespace slipstream
