// Copies that ranks keep: routed, pulled and stored beside those that are read once.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cc_ops/core/exchange/pull.h"
#include "cc_ops/core/testing/test_rules.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 4;

std::unique_ptr<EmbeddingTable> MakeTable(int64_t capacity = 0) {
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  options.capacity = capacity;
  options.eviction = TableOptions::Eviction::kLru;
  options.initializer.kind = RowInitializer::Kind::kUniform;
  options.initializer.a = -1.f;
  options.initializer.b = 1.f;
  options.rule = RuleNamed("adagrad", {0.1f, 1e-7f});
  return std::make_unique<EmbeddingTable>(options);
}

// One owner, number 0, and ranks that request rows of it.
class Job {
 public:
  Job(int ranks, RowFormat format) : ranks_(ranks), format_(format), owner_(MakeTable()) {
    format_.refreshed = true;
    for (int rank = 0; rank < ranks; ++rank) replicas_.push_back(MakeTable());
  }

  EmbeddingTable* owner() { return owner_.get(); }
  EmbeddingTable* replicas(int rank) { return replicas_[static_cast<size_t>(rank)].get(); }

  void SetReplicated(const std::vector<int64_t>& keys, float movement) {
    const int64_t stride = owner_->dim() + owner_->slots_per_row();
    ASSERT_TRUE(
        owner_->replicas()
            .SetReplicated(keys.data(), static_cast<int64_t>(keys.size()), stride, ranks_, movement)
            .ok());
  }

  // Every rank looks up its keys. Returns the bytes that went to each.
  std::vector<int64_t> LookUp(const std::vector<std::vector<int64_t>>& keys) {
    std::vector<int64_t> sizes, all;
    std::vector<SendBuffer> requests;
    for (int rank = 0; rank < ranks_; ++rank) {
      requests.push_back(Route(rank, keys[static_cast<size_t>(rank)]));
      sizes.insert(sizes.end(), requests.back().sizes.begin(), requests.back().sizes.end());
      all.insert(all.end(), requests.back().keys.begin(), requests.back().keys.end());
    }
    PullOptions options;
    options.create_missing = true;
    options.format = format_;
    options.own_rank = 0;
    PulledRows pulled;
    const SendBufferView view = {
        ranks_, sizes.data(), all.data(), static_cast<int64_t>(all.size()), nullptr, 0};
    EXPECT_TRUE(PullRows({owner_.get()}, view, options, &lengths_, &pulled).ok());
    const uint8_t* message = pulled.messages.data();
    for (int rank = 0; rank < ranks_; ++rank) {
      const int32_t length = pulled.lengths[static_cast<size_t>(rank)];
      const Status status = Store(rank, requests[static_cast<size_t>(rank)], message, length);
      EXPECT_TRUE(status.ok()) << status.message();
      message += length;
    }
    EXPECT_EQ(message, pulled.messages.data() + pulled.messages.size());
    return pulled.row_bytes;
  }

  SendBuffer Route(int rank, const std::vector<int64_t>& keys) {
    FeatureView view;
    view.batch = view.num_keys = static_cast<int64_t>(keys.size());
    view.keys = keys.data();
    RouteOptions options;
    options.refreshed = true;
    SendBuffer requests;
    EXPECT_TRUE(RouteKeys({replicas(rank)}, {view}, options, Parallel(), &requests).ok());
    EXPECT_EQ(requests.sizes.size(), 2u);
    return requests;
  }

  Status Store(int rank, const SendBuffer& requests, const uint8_t* message, int64_t length) {
    const SendBufferView view = {1,
                                 requests.sizes.data(),
                                 requests.keys.data(),
                                 static_cast<int64_t>(requests.keys.size()),
                                 nullptr,
                                 0};
    ReplicaOptions options;
    options.refreshed = true;
    return StoreReplicas({replicas(rank)}, view, message, length, options);
  }

  // As replicas of a rank have it; NaN: it has none.
  float Value(EmbeddingTable* table, int64_t key) {
    const float* row = table->rows().Find(key);
    return row == nullptr ? std::nanf("") : row[0];
  }
  void Move(int64_t key, float by) { owner_->rows().Find(key)[0] += by; }
  bool IsRefreshed(int rank, int64_t key) {
    uint8_t flag = 0;
    replicas(rank)->flags().Get(&key, 1, replicas(rank)->rows(), &flag);
    return (flag & kRefreshedReplica) != 0;
  }

 private:
  const int ranks_;
  RowFormat format_;
  SteadyLengths lengths_;
  std::unique_ptr<EmbeddingTable> owner_;
  std::vector<std::unique_ptr<EmbeddingTable>> replicas_;
};

std::vector<RowFormat> Formats() {
  std::vector<RowFormat> formats(2);
  formats[1].with_summary = true;
  return formats;
}

TEST(Replicas, OfHotRowsStandUntilTheyMoved) {
  for (const RowFormat format : Formats()) {
    Job job(3, format);
    job.LookUp({{}, {1, 2, 3}, {1}});
    job.SetReplicated({1, 2}, 0.5f);
    job.Move(1, 0.125f);
    job.LookUp({{1}, {1, 2, 3}, {}});
    EXPECT_FALSE(job.IsRefreshed(0, 1)) << "the owner needs no replica";
    EXPECT_TRUE(job.IsRefreshed(1, 1));
    EXPECT_FALSE(job.IsRefreshed(1, 3));
    const float before = job.Value(job.owner(), 1);
    EXPECT_EQ(job.Value(job.replicas(1), 1), before);

    job.Move(1, 0.25f);
    job.Move(3, 0.25f);
    const std::vector<int64_t> bytes = job.LookUp({{1}, {1, 2, 3}, {1}});
    EXPECT_EQ(job.Value(job.replicas(0), 1), job.Value(job.owner(), 1));
    EXPECT_EQ(job.Value(job.replicas(1), 1), before);
    EXPECT_EQ(job.Value(job.replicas(2), 1), before) << "as all ranks have it";
    EXPECT_EQ(job.Value(job.replicas(1), 3), job.Value(job.owner(), 3));
    EXPECT_TRUE(job.IsRefreshed(2, 1));
    // Two bits each, and the row of 3.
    const int64_t row = 4 * kDim + (format.with_summary ? 2 : 0);
    EXPECT_EQ(bytes[1], 2 + 2 + row);

    job.Move(1, 0.5f);
    job.LookUp({{}, {1}, {}});
    EXPECT_EQ(job.Value(job.replicas(1), 1), job.Value(job.owner(), 1));
    EXPECT_EQ(job.Value(job.replicas(2), 1), before);
    job.LookUp({{}, {}, {1}});
    EXPECT_EQ(job.Value(job.replicas(2), 1), job.Value(job.owner(), 1));
  }
}

TEST(Replicas, OfRowsThatAreNoLongerHotAreGivenBack) {
  Job job(2, RowFormat());
  job.SetReplicated({1, 2}, 0.5f);
  job.LookUp({{}, {1, 2}});
  EXPECT_TRUE(job.IsRefreshed(1, 1)) << "a row that is as it starts, too";
  job.Move(1, 0.25f);
  job.SetReplicated({2}, 0.5f);
  job.LookUp({{}, {1, 2}});
  EXPECT_FALSE(job.IsRefreshed(1, 1));
  EXPECT_EQ(job.Value(job.replicas(1), 1), job.Value(job.owner(), 1));
  EXPECT_TRUE(job.IsRefreshed(1, 2));
}

TEST(Replicas, OutlastFlagsButNotOtherReplicas) {
  Job job(2, RowFormat());
  job.SetReplicated({1, 2}, 0.5f);
  job.LookUp({{}, {1, 2}});
  const int64_t flagged[] = {1, 1};
  const uint8_t flags[] = {kWatched, kSaturated};
  EXPECT_TRUE(job.replicas(1)->SetFlags(flagged, flags, 2, Parallel()).ok());
  uint8_t flag = 0;
  job.replicas(1)->flags().Get(flagged, 1, job.replicas(1)->rows(), &flag);
  EXPECT_EQ(flag, kSaturated | kRefreshedReplica) << "the last one counts";
  // As an evaluation reads it.
  const std::vector<int64_t> key = {1}, size = {1};
  const SendBufferView view = {1, size.data(), key.data(), 1, nullptr, 0};
  SteadyLengths lengths;
  PulledRows pulled;
  ASSERT_TRUE(PullRows({job.owner()}, view, PullOptions(), &lengths, &pulled).ok());
  ASSERT_TRUE(StoreReplicas({job.replicas(1)}, view, pulled.messages.data(), pulled.lengths[0],
                            ReplicaOptions())
                  .ok());
  EXPECT_FALSE(job.IsRefreshed(1, 1));
  EXPECT_TRUE(job.IsRefreshed(1, 2));
}

TEST(Replicas, ThatAreNotHereCannotStand) {
  Job job(2, RowFormat());
  SendBuffer requests;
  requests.sizes = {0, 1};
  requests.keys = {7};
  std::vector<uint8_t> message;
  RowMessage head(RowFormat(), &message);
  // Not given, to be kept.
  message.insert(message.end(), {0, 1});
  SteadyLengths lengths;
  EXPECT_EQ(head.row_bytes(), 2);
  const int64_t length = head.End(0, &lengths);
  const Status status = job.Store(1, requests, message.data(), length);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("key 7 of table 't' did not come from rank 0"),
            std::string::npos);
  EXPECT_EQ(job.replicas(1)->rows().size(), 0);
}

TEST(Replicas, OfRowsThatWereNotSentDoNotCount) {
  Job job(2, RowFormat());
  job.LookUp({{1, 2}, {}});
  job.Move(1, 0.5f);
  job.SetReplicated({1, 2}, 0.5f);
  const ReplicaContents before = job.owner()->replicas().Export();
  const std::vector<int64_t> keys = {1, 2}, sizes = {0, 0, 2, 0};
  const SendBufferView view = {2, sizes.data(), keys.data(), 2, nullptr, 0};
  PullOptions options;
  options.format.refreshed = true;
  options.own_rank = 0;
  options.most_rank_bytes = 8;
  SteadyLengths lengths;
  PulledRows pulled;
  const Status status = PullRows({job.owner()}, view, options, &lengths, &pulled);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("at most 8 can be sent"), std::string::npos);
  EXPECT_EQ(lengths.Of(1, 1), 1024) << "what was not sent is not remembered";
  EXPECT_EQ(job.owner()->replicas().Export().holders, before.holders);
  // Asked as one that has no replica, the rank is sent both rows.
  job.LookUp({{}, {1, 2}});
  EXPECT_TRUE(job.IsRefreshed(1, 1) && job.IsRefreshed(1, 2));
}

TEST(Replicas, AreThoseOfAsManyRanks) {
  Job job(2, RowFormat());
  job.SetReplicated({1}, 0.5f);
  const std::vector<int64_t> sizes(6, 0);
  const SendBufferView view = {3, sizes.data(), nullptr, 0, nullptr, 0};
  PullOptions options;
  options.format.refreshed = true;
  SteadyLengths lengths;
  PulledRows pulled;
  const Status status = PullRows({job.owner()}, view, options, &lengths, &pulled);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("are on 2 ranks; sizes are those of 3"), std::string::npos);
}

// Any sequence of lookups, moves, and sets of hot rows.
TEST(Replicas, AreNeverFurtherFromTheirRowThanTheMovement) {
  constexpr int kRanks = 3;
  constexpr int64_t kKeys = 12;
  for (const float movement : {0.f, 0.3f}) {
    for (const RowFormat format : Formats()) {
      Job job(kRanks, format);
      std::mt19937 random(7);
      const auto some_keys = [&] {
        std::vector<int64_t> keys;
        for (int64_t key = 0; key < kKeys; ++key) {
          if (random() % 2 == 0) keys.push_back(key);
        }
        return keys;
      };
      int64_t refreshed = 0;
      for (int step = 0; step < 400; ++step) {
        if (step % 20 == 0) job.SetReplicated(some_keys(), movement);
        const std::vector<std::vector<int64_t>> keys = {some_keys(), some_keys(), some_keys()};
        job.LookUp(keys);
        for (int rank = 0; rank < kRanks; ++rank) {
          for (const int64_t key : keys[static_cast<size_t>(rank)]) {
            const float distance =
                std::fabs(job.Value(job.replicas(rank), key) - job.Value(job.owner(), key));
            const bool may_be_old = rank != 0 && job.IsRefreshed(rank, key);
            EXPECT_LE(distance, may_be_old ? movement : 0.f);
            refreshed += distance > 0.f;
          }
        }
        for (const int64_t key : keys[1]) job.Move(key, random() % 2 == 0 ? 0.125f : -0.125f);
      }
      EXPECT_EQ(refreshed > 0, movement > 0.f);
    }
  }
}

}  // namespace
}  // namespace slipstream
