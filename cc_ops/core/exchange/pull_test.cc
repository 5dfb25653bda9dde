#include "cc_ops/core/exchange/pull.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "cc_ops/core/testing/pull_request.h"

namespace slipstream {
namespace {

TEST(Pull, CreatesRowsInTrainingOnly) {
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

TEST(Pull, ReportsBytesOfEachRank) {
  auto owner = MakeTable("sgd");
  const std::vector<int64_t> keys = {1, 2, 3}, sizes = {1, 0, 2};
  for (const int64_t key : keys) {
    uint32_t index = 0;
    RowLayout::Floats(owner->rows().FindOrInsert(key, 0.f, &index))[0] = 42.f;
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

TEST(Pull, RejectsRowsThatCannotBeSent) {
  auto owner = MakeTable("sgd");
  const Request request({1, 2});
  PullOptions options;
  options.create_missing = true;
  SteadyLengths lengths;
  PulledRows pulled;
  ASSERT_TRUE(PullRows({owner.get()}, request.Keys(), options, &lengths, &pulled).ok());
  for (const int64_t key : request.keys) RowLayout::Floats(owner->rows().Find(key))[0] += 0.5f;
  options.max_rank_bytes = 8;
  SteadyLengths unsent;
  const Status status = PullRows({owner.get()}, request.Keys(), options, &unsent, &pulled);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("have 33 bytes; expected at most 8"), std::string::npos)
      << status.message();
  EXPECT_EQ(unsent.Of(0, 1), 1024) << "what was not sent is not remembered";
}

TEST(Pull, BoundedTableRejectsRequestBeyondCapacity) {
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

TEST(Pull, FailedRequestEvictsNothingInAnyTable) {
  auto first = MakeTable("sgd", 3), second = MakeTable("sgd", 3);
  ASSERT_TRUE(Request({1, 2, 3}).Pull({first.get()}, true).ok());
  Request request({4, 5, 1, 2, 3, 4});
  request.sizes = {2, 4};
  const Status status = request.Pull({first.get(), second.get()}, true);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(first->rows().size(), 3);
  EXPECT_EQ(first->rows().num_evicted(), 0);
}

TEST(SlotSummary, NeverUnderestimatesMovement) {
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
