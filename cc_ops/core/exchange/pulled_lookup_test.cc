#include "cc_ops/core/exchange/pulled_lookup.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cc_ops/core/testing/pull_request.h"
#include "cc_ops/core/testing/test_threads.h"

namespace slipstream {
namespace {

// A lookup of a batch with one feature.
struct Lookup {
  explicit Lookup(std::vector<int64_t> batch) : keys(std::move(batch)) {
    views.resize(1);
    views[0].batch = views[0].num_keys = static_cast<int64_t>(keys.size());
    views[0].keys = keys.data();
  }
  std::vector<int64_t> Route(EmbeddingTable* replicas, int ranks = 1) {
    EXPECT_TRUE(
        RouteKeys({replicas}, views, {Combiner::kSum}, ranks, Parallel(), &workspace, &requests)
            .ok());
    return requests.keys;
  }
  Status LookUp(const Request& request, bool training) {
    pooled.assign(keys.size() * kDim, 0.f);
    return LookUpPulled(views, {Combiner::kSum}, {{pooled.data(), kDim}}, request.Messages(),
                        training, Parallel(), &workspace);
  }
  std::vector<int64_t> keys;
  std::vector<FeatureView> views;
  LookupWorkspace workspace;
  SendBuffer requests;
  std::vector<float> pooled;
};

TEST(Route, RequestsDistinctKeysFromOwners) {
  auto replicas = MakeTable("sgd");
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < 500; ++i) keys.push_back(i * i % 97 - 20);
  Lookup lookup(keys);
  const std::vector<int64_t> requested = lookup.Route(replicas.get(), 3);
  const std::vector<int64_t>& sizes = lookup.requests.sizes;
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
  EXPECT_TRUE(Lookup({}).Route(replicas.get(), 2).empty());
}

TEST(Replicas, EqualRowsOfOwner) {
  auto owner = MakeTable("adagrad"), replicas = MakeTable("adagrad", 50);
  Lookup lookup({5, 6, 5});
  Request request(lookup.Route(replicas.get()));
  ASSERT_TRUE(request.Pull({owner.get()}, true).ok());
  ASSERT_TRUE(lookup.LookUp(request, true).ok());
  for (const int64_t key : {5, 6}) {
    const float* own = RowLayout::Floats(owner->rows().Find(key));
    const float* replica = RowLayout::Floats(replicas->rows().Find(key));
    EXPECT_TRUE(std::equal(own, own + kDim, replica));
    EXPECT_TRUE(std::equal(own, own + kDim, lookup.pooled.data() + (key - 5) * kDim));
  }
  EXPECT_TRUE(std::equal(lookup.pooled.begin(), lookup.pooled.begin() + kDim,
                         lookup.pooled.begin() + 2 * kDim));
  std::vector<int64_t> keys;
  std::vector<float> counts;
  replicas->rows().HotKeys(9, RowStore::HotKeyOrder::kByCount, Parallel(), &keys, &counts);
  EXPECT_EQ(counts, (std::vector<float>{2.f, 1.f}));
  // A later pull replaces the replica.
  RowLayout::Floats(owner->rows().Find(5))[0] = 42.f;
  ASSERT_TRUE(request.Pull({owner.get()}, true).ok());
  EXPECT_EQ(lookup.Route(replicas.get()), request.keys);
  ASSERT_TRUE(lookup.LookUp(request, true).ok());
  EXPECT_EQ(RowLayout::Floats(replicas->rows().Find(5))[0], 42.f);
}

TEST(Replicas, EvaluationStoresNoReplicas) {
  auto owner = MakeTable("adagrad"), replicas = MakeTable("adagrad", 50);
  Lookup known({5});
  Request of_known(known.Route(replicas.get()));
  ASSERT_TRUE(of_known.Pull({owner.get()}, true).ok());
  ASSERT_TRUE(known.LookUp(of_known, true).ok());
  RowLayout::Floats(owner->rows().Find(5))[0] = 42.f;
  Lookup lookup({6, 5, 5});
  Request request(lookup.Route(replicas.get()));
  ASSERT_TRUE(request.Pull({owner.get()}, false).ok());
  ASSERT_TRUE(lookup.LookUp(request, false).ok());
  EXPECT_EQ(lookup.pooled[kDim], 42.f);
  EXPECT_EQ(lookup.pooled[2 * kDim], 42.f);
  std::vector<float> initial(kDim);
  owner->options().initializer.Fill(6, kDim, initial.data());
  EXPECT_TRUE(std::equal(initial.begin(), initial.end(), lookup.pooled.begin()));
  EXPECT_EQ(replicas->rows().size(), 1);
  EXPECT_NE(RowLayout::Floats(replicas->rows().Find(5))[0], 42.f);
}

// For random features, tables and ranks: the vectors, accesses and gradients equal a lookup in the
// owner's tables.
TEST(Replicas, LookupEqualsLookupOfOwnerRows) {
  std::mt19937_64 random(3);
  for (const int ranks : {1, 3}) {
    for (const int threads : {1, 3}) {
      auto first = MakeTable("sgd"), second = MakeTable("sgd");
      std::vector<std::unique_ptr<EmbeddingTable>> owners, replicas;
      for (int i = 0; i < 2 * ranks; ++i) owners.push_back(MakeTable("sgd"));
      for (int i = 0; i < 2; ++i) replicas.push_back(MakeTable("sgd"));
      const std::vector<EmbeddingTable*> tables = {first.get(), second.get()};
      const std::vector<EmbeddingTable*> copies = {replicas[0].get(), replicas[1].get()};
      std::vector<int64_t> single(40), bags(40 * 3);
      for (int64_t& key : single) key = static_cast<int64_t>(random() % 30);
      for (int64_t& key : bags) key = static_cast<int64_t>(random() % 60) - 1;
      std::vector<FeatureView> views(3);
      views[0].batch = views[0].num_keys = 40;
      views[0].keys = single.data();
      views[1] = views[0];
      views[1].table = 1;
      views[2].table = 1;
      views[2].batch = 40;
      views[2].width = views[2].stride = 3;
      views[2].num_keys = 120;
      views[2].keys = bags.data();
      views[2].has_padding = true;
      const std::vector<Combiner> combiners = {Combiner::kSum, Combiner::kSum, Combiner::kMean};
      std::vector<float> wanted(3 * 40 * kDim), got(wanted.size());
      const auto outputs = [](std::vector<float>* all) {
        std::vector<PooledOutput> of_features;
        for (int f = 0; f < 3; ++f) of_features.push_back({all->data() + f * 40 * kDim, kDim});
        return of_features;
      };
      LookupWorkspace plain, pulled;
      const Parallel parallel = Threads(threads);
      ASSERT_TRUE(
          LookupForTraining(tables, views, combiners, outputs(&wanted), parallel, &plain).ok());
      SendBuffer requests;
      ASSERT_TRUE(RouteKeys(copies, views, combiners, ranks, parallel, &pulled, &requests).ok());
      Request whole(requests.keys);
      whole.sizes = requests.sizes;
      std::vector<uint8_t> messages;
      const int64_t* keys = requests.keys.data();
      for (int rank = 0; rank < ranks; ++rank) {
        Request of_rank({});
        of_rank.sizes = {requests.sizes[2 * rank], requests.sizes[2 * rank + 1]};
        of_rank.keys.assign(keys, keys + of_rank.sizes[0] + of_rank.sizes[1]);
        keys += of_rank.keys.size();
        ASSERT_TRUE(of_rank.Pull({owners[2 * rank].get(), owners[2 * rank + 1].get()}, true).ok());
        messages.insert(messages.end(), of_rank.message.begin(), of_rank.message.end());
      }
      const PulledMessages came = {{ranks, whole.sizes.data(), whole.keys.data(),
                                    static_cast<int64_t>(whole.keys.size()), nullptr, 0},
                                   messages.data(),
                                   static_cast<int64_t>(messages.size())};
      for (const bool training : {true, false}) {
        std::fill(got.begin(), got.end(), -1.f);
        ASSERT_TRUE(
            LookUpPulled(views, combiners, outputs(&got), came, training, parallel, &pulled).ok());
        EXPECT_EQ(got, wanted);
      }
      for (int t = 0; t < 2; ++t) {
        const TableContents one = tables[t]->Export(), other = copies[t]->Export();
        EXPECT_EQ(std::set<int64_t>(one.keys.begin(), one.keys.end()),
                  std::set<int64_t>(other.keys.begin(), other.keys.end()));
        EXPECT_EQ(std::accumulate(one.counts.begin(), one.counts.end(), 0.f),
                  std::accumulate(other.counts.begin(), other.counts.end(), 0.f));
      }
      EXPECT_EQ(plain.plan.unique_key, pulled.plan.unique_key);
      EXPECT_EQ(plain.plan.uses_end, pulled.plan.uses_end);
      EXPECT_EQ(plain.plan.scale, pulled.plan.scale);
    }
  }
}

TEST(Replicas, RejectPlanOfOtherBatch) {
  auto owner = MakeTable("sgd"), replicas = MakeTable("sgd");
  Lookup lookup({1, 2}), other({1, 3});
  Request request(lookup.Route(replicas.get()));
  other.Route(replicas.get());
  ASSERT_TRUE(request.Pull({owner.get()}, true).ok());
  const Status status = other.LookUp(request, true);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("plan belongs to another batch"), std::string::npos);
  EXPECT_EQ(replicas->rows().size(), 0);
}

// Two plans with as many keys and new rows differ only in their tables.
TEST(Replicas, RejectTablesOfOtherPlan) {
  auto first = MakeTable("sgd"), second = MakeTable("sgd");
  const std::vector<EmbeddingTable*> tables = {first.get(), second.get()};
  const std::vector<int64_t> keys = {1, 2, 3};
  std::vector<FeatureView> views(2);
  for (int t = 0; t < 2; ++t) {
    views[t].table = t;
    views[t].batch = views[t].num_keys = 3 - t;
    views[t].keys = keys.data();
  }
  const std::vector<Combiner> combiners(2, Combiner::kSum);
  LookupWorkspace workspace;
  SendBuffer requests;
  ASSERT_TRUE(RouteKeys(tables, views, combiners, 1, Parallel(), &workspace, &requests).ok());
  EXPECT_EQ(requests.sizes, (std::vector<int64_t>{3, 2}));
  Request other(requests.keys);
  other.sizes = {2, 3};
  auto owner = MakeTable("sgd"), another = MakeTable("sgd");
  ASSERT_TRUE(other.Pull({owner.get(), another.get()}, true).ok());
  std::vector<float> pooled(5 * kDim);
  const std::vector<PooledOutput> outputs = {{pooled.data(), kDim},
                                             {pooled.data() + 3 * kDim, kDim}};
  const Status status =
      LookUpPulled(views, combiners, outputs, other.Messages(), true, Parallel(), &workspace);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(first->rows().size() + second->rows().size(), 0);
}

TEST(Replicas, NeverUnderestimateMovementWithoutSummary) {
  for (const std::string& kind : AllRuleNames()) {
    auto owner = MakeTable(kind), replicas = MakeTable(kind, 50);
    const UpdateRule rule = owner->options().rule;
    Request request({5});
    ASSERT_TRUE(request.Pull({owner.get()}, true, true).ok());
    float* own = RowLayout::Floats(owner->rows().Find(5));
    const std::vector<float> gradient = {0.5f, 0.1f, -0.2f, 0.3f};
    rule.Apply(0.1f, kDim, gradient.data(), own);
    ASSERT_TRUE(request.Pull({owner.get()}, true, true).ok());
    Lookup lookup({5});
    lookup.Route(replicas.get());
    ASSERT_TRUE(lookup.LookUp(request, true).ok());
    // The owner's slots may be smaller since then. The rows of FTRL are a function of their slots.
    if (kind != "ftrl") rule.InitSlots(kDim, own + kDim);
    ASSERT_TRUE(request.Pull({owner.get()}, false, false).ok());
    lookup.Route(replicas.get());
    ASSERT_TRUE(lookup.LookUp(request, true).ok());
    const float* replica = RowLayout::Floats(replicas->rows().Find(5));
    EXPECT_TRUE(std::equal(own, own + kDim, replica));
    EXPECT_GE(rule.Movement(0.1f, kDim, gradient.data(), replica),
              rule.Movement(0.1f, kDim, gradient.data(), own));
  }
}

TEST(Replicas, StayWithinCapacity) {
  auto owner = MakeTable("sgd"), replicas = MakeTable("sgd", 8);
  for (int64_t first = 0; first < 100; first += 5) {
    Lookup lookup({first, first + 1, first + 2, first + 3, first + 4});
    Request request(lookup.Route(replicas.get()));
    ASSERT_TRUE(request.Pull({owner.get()}, true, false).ok());
    ASSERT_TRUE(lookup.LookUp(request, true).ok());
    EXPECT_LE(replicas->rows().size(), 8);
    for (const int64_t key : request.keys) EXPECT_NE(replicas->rows().Find(key), nullptr);
  }
}

TEST(Replicas, RejectNonFiniteRows) {
  for (const RowDtype dtype :
       {RowDtype::kFloat32, RowDtype::kBfloat16, RowDtype::kFloat16, RowDtype::kInt8}) {
    auto owner = MakeTable("adagrad"), replicas = MakeTable("adagrad");
    Lookup lookup({1, 2});
    Request request(lookup.Route(replicas.get()));
    ASSERT_TRUE(request.Pull({owner.get()}, true).ok());
    RowLayout::Floats(owner->rows().Find(2))[3] = std::numeric_limits<float>::infinity();
    PullOptions pull;
    pull.format.dtype = dtype;
    ASSERT_TRUE(request.Pull({owner.get()}, pull).ok());
    const Status status = lookup.LookUp(request, true);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("row of key 2 of table 't' from its owner rank is not"),
              std::string::npos)
        << status.message();
    EXPECT_EQ(replicas->rows().size(), 0);
  }
}

TEST(Replicas, RejectMessagesOfWrongSize) {
  auto owner = MakeTable("adagrad"), replicas = MakeTable("adagrad");
  Lookup lookup({1, 2});
  Request request(lookup.Route(replicas.get()));
  ASSERT_TRUE(request.Pull({owner.get()}, true).ok());
  for (const int64_t key : {1, 2}) RowLayout::Floats(owner->rows().Find(key))[0] = 5.f;
  ASSERT_TRUE(request.Pull({owner.get()}, true).ok());
  const Request whole = request;
  const auto refusal = [&] {
    const Status status = lookup.LookUp(request, true);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  const auto refused_with = [&](size_t word, int64_t value) {
    request = whole;
    std::memcpy(request.message.data() + 8 * word, &value, sizeof(value));
    return refusal();
  };
  EXPECT_NE(refused_with(1, 32).find(
                "from rank 0 has 32 bytes left for 2 rows of table 't'; expected at least 33"),
            std::string::npos);
  EXPECT_NE(refused_with(1, 0).find("has 0 bytes left"), std::string::npos);
  EXPECT_NE(refused_with(1, 34).find("from rank 0 has 34 bytes of rows; expected 33"),
            std::string::npos);
  for (const int64_t length : {int64_t{-1}, int64_t{31}, int64_t{1025}, int64_t{1} << 62}) {
    EXPECT_NE(refused_with(0, length).find("from rank 0 has a header with length " +
                                           std::to_string(length)),
              std::string::npos);
  }
  for (const int64_t bytes : {-1, 1024 - 31}) {
    EXPECT_NE(refused_with(1, bytes).find("the remaining 1024 of 1024 bytes"), std::string::npos);
  }
  EXPECT_NE(refused_with(2, 4).find("dtype number 4"), std::string::npos);
  EXPECT_NE(refused_with(2, -1).find("dtype number -1"), std::string::npos);
  EXPECT_NE(refused_with(2, 1).find("has 33 bytes of rows; expected 17"), std::string::npos);
  EXPECT_NE(refused_with(3, 2).find("expected a valid message"), std::string::npos);
  EXPECT_NE(refused_with(0, 1016).find("8 of 1024 bytes remain after"), std::string::npos);
  request = whole;
  request.message.resize(16);
  EXPECT_NE(refusal().find("the remaining 16 of 16 bytes"), std::string::npos);
  request = whole;
  for (const auto& [size, message] : {std::pair{1, "sizes adds up to 1 keys"}, {-1, "is -1"}}) {
    request.sizes = {size};
    EXPECT_NE(refusal().find("plan belongs to another batch"), std::string::npos);
    const Status status = request.Pull({owner.get()}, false);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(message), std::string::npos) << status.message();
  }
  EXPECT_EQ(replicas->rows().size(), 0);
}

}  // namespace
}  // namespace slipstream
