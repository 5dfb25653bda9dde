#include "cc_ops/core/saturation/loss_memory.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <unordered_map>
#include <vector>

namespace slipstream {
namespace {

TEST(LossMemory, RemembersWhatAMapRemembers) {
  LossMemory memory(1 << 20);
  std::unordered_map<int64_t, std::pair<float, int64_t>> model;
  std::mt19937_64 random(3);
  for (int step = 0; step < 50000; ++step) {
    const int64_t id = static_cast<int64_t>(random() % 4000) - 2000;
    if (random() % 5 == 0) {
      memory.Record(id, std::numeric_limits<float>::quiet_NaN(), step);
      model.erase(id);
    } else {
      const float loss = static_cast<float>(random() % 100);
      memory.Record(id, loss, step);
      model[id] = {loss, step};
    }
    ASSERT_EQ(memory.size(), static_cast<int64_t>(model.size()));
    const int64_t wanted = static_cast<int64_t>(random() % 4000) - 2000;
    const LossMemory::Entry* entry = memory.Find(wanted);
    ASSERT_EQ(entry != nullptr, model.count(wanted) == 1);
    if (entry != nullptr) {
      ASSERT_EQ(entry->loss, model[wanted].first);
      ASSERT_EQ(entry->window, model[wanted].second);
    }
  }
}

TEST(LossMemory, RemembersTheSameSampleInEveryEpochWhenFull) {
  LossMemory memory(1024 * 16);
  std::vector<int64_t> before;
  for (int64_t epoch = 0; epoch < 4; ++epoch) {
    int64_t remembered = 0;
    std::vector<int64_t> sample;
    for (int64_t i = 0; i < 5000; ++i) {
      const int64_t id = epoch % 2 == 0 ? i : 4999 - i;
      remembered += memory.Find(id) != nullptr;
      memory.Record(id, 1.f, epoch);
    }
    ASSERT_LE(memory.bytes(), 1024 * 16);
    for (const LossMemory::Entry& entry : memory.Export()) sample.push_back(entry.id);
    EXPECT_GT(sample.size(), 600u);
    if (epoch > 0) {
      EXPECT_EQ(remembered, static_cast<int64_t>(sample.size()));
      EXPECT_EQ(sample, before);
    }
    before = sample;
  }
}

TEST(LossMemory, StaysWithinTheSmallestBudget) {
  LossMemory memory(16 * 16);
  for (int64_t id = 0; id < 100000; ++id) memory.Record(id, 1.f, 5);
  EXPECT_LE(memory.size(), 12);
  EXPECT_GE(memory.size(), 1);
  const int64_t known = memory.Export()[0].id;
  memory.Record(known, 2.f, 6);
  EXPECT_EQ(memory.Find(known)->loss, 2.f);
}

TEST(LossMemory, AVisitStartsTheSkipsAnew) {
  LossMemory memory(1 << 10);
  memory.Record(7, 1.f, 0);
  memory.Find(7)->skips = 3;
  memory.Record(7, 2.f, 1);
  EXPECT_EQ(memory.Find(7)->skips, 0u);
}

TEST(LossMemory, ExportsAndImports) {
  LossMemory memory(1 << 10), other(1 << 10);
  for (int64_t id : {5, -3, 9}) memory.Record(id, static_cast<float>(id), 2);
  memory.Find(9)->skips = 4;
  other.Record(1, 1.f, 1);
  other.Import(memory.Export());
  EXPECT_EQ(other.size(), 3);
  EXPECT_EQ(other.Find(1), nullptr);
  EXPECT_EQ(other.Find(9)->skips, 4u);
  EXPECT_EQ(other.Export()[0].id, -3);
}

TEST(LossMemory, RemembersNothingWithoutABudget) {
  LossMemory memory(0);
  memory.Record(1, 1.f, 0);
  EXPECT_EQ(memory.Find(1), nullptr);
  EXPECT_EQ(memory.bytes(), 0);
}

TEST(LossMemory, RefusesABudgetWithoutRoom) {
  EXPECT_NE(LossMemory::ValidateBudget(255).message().find("at least 256, 16 entries of 16"),
            std::string::npos);
  EXPECT_TRUE(LossMemory::ValidateBudget(256).ok());
}

TEST(LossMemory, AnyBudgetIsABudget) {
  for (int shift = 10; shift < 62; ++shift) {
    for (int64_t budget : {int64_t{1} << shift, (int64_t{1} << shift) * 2 - 1}) {
      if (!LossMemory::ValidateBudget(budget).ok()) continue;
      LossMemory memory(budget);
      memory.Record(3, 0.5f, 1);
      EXPECT_EQ(memory.size(), 1) << budget;
    }
  }
  EXPECT_EQ(LossMemory(std::numeric_limits<int64_t>::max()).size(), 0);
}

}  // namespace
}  // namespace slipstream
