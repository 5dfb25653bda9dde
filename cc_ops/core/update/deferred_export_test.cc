#include "cc_ops/core/update/deferred_export.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "cc_ops/core/base/hash.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 3;

std::unique_ptr<EmbeddingTable> MakeTable(int64_t keys, int ranks = 2, bool is_exchanged = false) {
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  auto table = std::make_unique<EmbeddingTable>(options);
  uint32_t index = 0;
  for (int64_t key = 0; key < keys; ++key) table->rows().FindOrInsert(key, 1.f, &index);
  UpdatePolicy policy;
  policy.mode = UpdatePolicy::Mode::kDefer;
  policy.max_age = 1000;
  policy.max_rows = 1000;
  policy.ranks = ranks;
  policy.is_exchanged = is_exchanged;
  table->updates().SetPolicy(policy);
  for (int i = 0; i < 50; ++i) table->updates().NextStep();
  return table;
}

DeferredContents Some(int64_t keys) {
  DeferredContents contents;
  for (int64_t key = 0; key < keys; ++key) {
    contents.keys.push_back(key);
    contents.ages.push_back(keys - key);  // Oldest first.
    contents.ranks.push_back(static_cast<int32_t>(key % 2));
    for (int64_t j = 0; j < kDim; ++j) contents.sums.push_back(static_cast<float>(10 * key + j));
  }
  return contents;
}

TEST(DeferredExport, RoundTrips) {
  const auto table = MakeTable(200);
  ASSERT_TRUE(ImportDeferred(table.get(), Some(200)).ok());
  EXPECT_EQ(table->updates().num_deferred(), 200);
  const DeferredContents first = ExportDeferred(table.get());
  ASSERT_EQ(first.keys.size(), 200u);
  for (size_t i = 0; i < first.keys.size(); ++i) {
    EXPECT_EQ(first.ages[i], 200 - first.keys[i]);
    EXPECT_EQ(first.ranks[i], first.keys[i] % 2);
    EXPECT_EQ(first.sums[i * kDim + 2], static_cast<float>(10 * first.keys[i] + 2));
  }
  // Import into a table with another number of updates, because only ages count.
  const auto other = MakeTable(200);
  other->updates().NextStep();
  ASSERT_TRUE(ImportDeferred(other.get(), first).ok());
  const DeferredContents second = ExportDeferred(other.get());
  EXPECT_EQ(first.keys, second.keys);
  EXPECT_EQ(first.ages, second.ages);
  EXPECT_EQ(first.ranks, second.ranks);
  EXPECT_EQ(first.sums, second.sums);
}

TEST(DeferredExport, EmptyImportReplacesExistingSums) {
  const auto table = MakeTable(20);
  ASSERT_TRUE(ImportDeferred(table.get(), Some(20)).ok());
  ASSERT_TRUE(ImportDeferred(table.get(), DeferredContents()).ok());
  EXPECT_EQ(table->updates().num_deferred(), 0);
}

TEST(DeferredExport, RejectsInvalidContentsAndStaysUnchanged) {
  const auto table = MakeTable(20);
  ASSERT_TRUE(ImportDeferred(table.get(), Some(10)).ok());
  const auto message_of = [&](const DeferredContents& contents) {
    const Status status = ImportDeferred(table.get(), contents);
    EXPECT_EQ(table->updates().num_deferred(), 10);
    EXPECT_FALSE(status.ok());
    return status.message();
  };
  DeferredContents wrong = Some(12);
  wrong.sums.pop_back();
  EXPECT_NE(message_of(wrong).find("have 12 keys"), std::string::npos);
  wrong = Some(12);
  wrong.ranks[11] = 2;
  EXPECT_NE(message_of(wrong).find("ranks[11] of table"), std::string::npos);
  wrong = Some(12);
  wrong.ages[5] = -1;
  EXPECT_NE(message_of(wrong).find("ages[5] of table"), std::string::npos);
  wrong = Some(12);
  wrong.keys[7] = wrong.keys[5];  // Repeats a key of the same rank.
  EXPECT_NE(message_of(wrong).find("each key at most once per rank"), std::string::npos);
  wrong = Some(12);
  wrong.keys[3] = 12345;
  EXPECT_NE(message_of(wrong).find("a key that has a row"), std::string::npos);
}

TEST(DeferredExport, ExchangedGradientsRequireNoRow) {
  const auto table = MakeTable(0, 2, true);
  EXPECT_TRUE(ImportDeferred(table.get(), Some(5)).ok());
  EXPECT_EQ(table->updates().num_deferred(), 5);
}

TEST(DeferredExport, RejectsSumsWithoutDeferringPolicy) {
  const auto table = MakeTable(5);
  table->updates().SetPolicy(UpdatePolicy());
  EXPECT_FALSE(ImportDeferred(table.get(), Some(5)).ok());
  EXPECT_TRUE(ImportDeferred(table.get(), DeferredContents()).ok());
}

}  // namespace
}  // namespace slipstream
