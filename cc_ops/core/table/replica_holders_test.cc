#include "cc_ops/core/table/replica_holders.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace slipstream {
namespace {

constexpr int64_t kDim = 2, kStride = 3;

Status SetReplicated(const std::vector<int64_t>& keys, float movement, ReplicaHolders* rows,
                     int ranks = 3) {
  return rows->SetReplicated(keys.data(), static_cast<int64_t>(keys.size()), kStride, ranks,
                             movement);
}

TEST(ReplicaHolders, FindsWhatIsReplicated) {
  ReplicaHolders rows;
  EXPECT_EQ(rows.Find(5), ReplicaHolders::kNowhere);
  ASSERT_TRUE(SetReplicated({5, -7}, 0.1f, &rows).ok());
  EXPECT_EQ(rows.size(), 2);
  EXPECT_EQ(rows.Find(-7), 1);
  EXPECT_EQ(rows.Find(6), ReplicaHolders::kNowhere);
  EXPECT_GT(rows.bytes(), 2 * kStride * 4);
}

TEST(ReplicaHolders, AreSentAnewWhenTheyMovedFurther) {
  ReplicaHolders rows;
  ASSERT_TRUE(SetReplicated({5}, 0.5f, &rows).ok());
  const std::vector<float> first = {1.f, 2.f, 9.f}, near = {1.5f, 1.5f, 8.f},
                           far = {1.f, 2.6f, 7.f};
  EXPECT_EQ(rows.Current(0, first.data(), kDim)[1], 2.f);
  rows.SetHasReplica(0, 1);
  // Slots do not count as movement.
  EXPECT_EQ(rows.Current(0, near.data(), kDim)[2], 9.f);
  EXPECT_TRUE(rows.HasReplica(0, 1));
  EXPECT_FALSE(rows.HasReplica(0, 0));
  EXPECT_EQ(rows.Current(0, far.data(), kDim)[2], 7.f);
  EXPECT_FALSE(rows.HasReplica(0, 1));
}

TEST(ReplicaHolders, OfNobodyAreAsTheyAre) {
  ReplicaHolders rows;
  ASSERT_TRUE(SetReplicated({5}, 10.f, &rows).ok());
  const std::vector<float> first = {1.f, 2.f, 0.f}, second = {1.1f, 2.f, 0.f};
  rows.Current(0, first.data(), kDim);
  EXPECT_EQ(rows.Current(0, second.data(), kDim)[0], 1.1f);
}

TEST(ReplicaHolders, WhatIsNoNumberIsFarFromAll) {
  ReplicaHolders rows;
  ASSERT_TRUE(SetReplicated({5}, 10.f, &rows).ok());
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> first = {1.f, 2.f, 0.f}, second = {nan, 2.f, 0.f};
  rows.Current(0, first.data(), kDim);
  rows.SetHasReplica(0, 2);
  EXPECT_NE(rows.Current(0, second.data(), kDim)[0], 1.f);
  EXPECT_FALSE(rows.HasReplica(0, 2));
}

TEST(ReplicaHolders, ThatStayAreRemembered) {
  ReplicaHolders rows;
  ASSERT_TRUE(SetReplicated({5, 6}, 10.f, &rows, 12).ok());
  const std::vector<float> row = {1.f, 2.f, 3.f}, now = {4.f, 4.f, 4.f};
  for (const int32_t index : {0, 1}) {
    rows.Current(index, row.data(), kDim);
    rows.SetHasReplica(index, 11);
  }
  ASSERT_TRUE(SetReplicated({7, 6}, 10.f, &rows, 12).ok());
  EXPECT_TRUE(rows.HasReplica(rows.Find(6), 11));
  EXPECT_EQ(rows.Current(rows.Find(6), now.data(), kDim)[0], 1.f);
  EXPECT_FALSE(rows.HasReplica(rows.Find(7), 11));
  // Of other ranks nothing is known.
  ASSERT_TRUE(SetReplicated({7, 6}, 10.f, &rows, 2).ok());
  EXPECT_FALSE(rows.HasReplica(rows.Find(6), 1));
  EXPECT_EQ(rows.Current(rows.Find(6), now.data(), kDim)[0], 4.f);
}

TEST(ReplicaHolders, AreSavedAndGivenBack) {
  ReplicaHolders rows, other;
  ASSERT_TRUE(SetReplicated({5, 6}, 10.f, &rows).ok());
  ASSERT_TRUE(SetReplicated({9}, 10.f, &other).ok());
  const std::vector<float> row = {1.f, 2.f, 3.f}, now = {4.f, 4.f, 4.f};
  rows.Current(1, row.data(), kDim);
  rows.SetHasReplica(1, 2);
  ASSERT_TRUE(other.Import(rows.Export(), kStride, 3).ok());
  EXPECT_EQ(other.Find(9), ReplicaHolders::kNowhere);
  EXPECT_TRUE(other.HasReplica(other.Find(6), 2));
  EXPECT_EQ(other.Current(other.Find(6), now.data(), kDim)[2], 3.f);
  ReplicaContents wrong = rows.Export();
  wrong.holders.pop_back();
  EXPECT_EQ(other.Import(wrong, kStride, 3).code(), StatusCode::kInvalidArgument);
  wrong = rows.Export();
  wrong.rows[4] = std::numeric_limits<float>::infinity();
  const Status status = other.Import(wrong, kStride, 3);
  EXPECT_NE(status.message().find("key 6"), std::string::npos);
  EXPECT_TRUE(other.HasReplica(other.Find(6), 2));
}

TEST(ReplicaHolders, AnyNumberOfRanksHasItsBytes) {
  EXPECT_EQ(ReplicaHolders::HolderBytes(9), 2);
  EXPECT_EQ(ReplicaHolders::HolderBytes(std::numeric_limits<int>::max()), 268435456);
}

}  // namespace
}  // namespace slipstream
