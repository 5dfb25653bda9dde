#include "cc_ops/core/saturation/drift_index.h"

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "cc_ops/core/testing/test_threads.h"
#include "gtest/gtest.h"

namespace slipstream {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

Status Build(DriftIndex* index, const std::vector<int32_t>& tables,
             const std::vector<int64_t>& keys, const std::vector<float>& drifts) {
  return index->Build(3, tables.data(), keys.data(), drifts.data(),
                      static_cast<int64_t>(keys.size()));
}

float DriftOf(const DriftIndex& index, const Lookup& lookup) {
  return index.view().Find(lookup).drift;
}

TEST(DriftIndex, EmptyIndexTracksNothing) {
  DriftIndex index;
  EXPECT_EQ(DriftOf(index, {7, 0}), kInf);
  EXPECT_TRUE(Build(&index, {}, {}, {}).ok());
  EXPECT_EQ(index.size(), 0);
  EXPECT_EQ(DriftOf(index, {7, 0}), kInf);
  const Lookup lookups[] = {{7, 0}, {8, 1}};
  float drifts[] = {0.f, 0.f};
  index.Find(lookups, 2, drifts);
  EXPECT_EQ(drifts[0], kInf);
  EXPECT_EQ(drifts[1], kInf);
}

TEST(DriftIndex, DistinguishesEqualKeysOfTwoTables) {
  DriftIndex index;
  ASSERT_TRUE(Build(&index, {0, 2}, {-1, -1}, {0.5f, 1.5f}).ok());
  EXPECT_EQ(DriftOf(index, {-1, 0}), 0.5f);
  EXPECT_EQ(DriftOf(index, {-1, 2}), 1.5f);
  EXPECT_EQ(DriftOf(index, {-1, 1}), kInf);
}

TEST(DriftIndex, EqualsStandardMap) {
  std::mt19937_64 random(1);
  std::unordered_map<int64_t, float> expected;
  std::vector<int32_t> tables;
  std::vector<int64_t> keys;
  std::vector<float> drifts;
  for (int i = 0; i < 20000; ++i) {
    // Dense ids and hashes, which differ in few and in many bits.
    const int64_t key = i % 2 == 0 ? i : static_cast<int64_t>(random());
    if (!expected.emplace(key, static_cast<float>(i)).second) continue;
    tables.push_back(1);
    keys.push_back(key);
    drifts.push_back(static_cast<float>(i));
  }
  DriftIndex index;
  ASSERT_TRUE(Build(&index, tables, keys, drifts).ok());
  EXPECT_EQ(index.size(), static_cast<int64_t>(expected.size()));
  for (const auto& [key, drift] : expected) EXPECT_EQ(DriftOf(index, {key, 1}), drift);
  for (int64_t key = 1; key < 20000; key += 2) EXPECT_EQ(DriftOf(index, {key, 1}), kInf);
  std::vector<Lookup> lookups;
  for (int64_t key = -50; key < 20000; key += 3) lookups.push_back({key, 1});
  // Includes fewer keys than are prefetched.
  for (const size_t n : {size_t{0}, size_t{1}, size_t{15}, size_t{17}, lookups.size()}) {
    std::vector<float> found(n);
    index.Find(lookups.data(), static_cast<int64_t>(n), found.data());
    for (size_t i = 0; i < n; ++i)
      ASSERT_EQ(found[i], DriftOf(index, lookups[i])) << i << " of " << n;
  }
}

TEST(DriftIndex, NonFiniteDriftIsUntracked) {
  DriftIndex index;
  ASSERT_TRUE(Build(&index, {0, 0, 0, 0}, {1, 2, 3, 4}, {kNan, kInf, -kInf, 0.0f}).ok());
  EXPECT_EQ(index.size(), 1);
  for (int64_t key = 1; key <= 3; ++key) EXPECT_EQ(DriftOf(index, {key, 0}), kInf);
  EXPECT_EQ(DriftOf(index, {4, 0}), 0.0f);
}

TEST(DriftIndex, RejectsInvalidInputAndStaysUnchanged) {
  DriftIndex index;
  ASSERT_TRUE(Build(&index, {0}, {9}, {0.25f}).ok());
  for (const int32_t table : {-1, 3, std::numeric_limits<int32_t>::max()}) {
    const Status status = Build(&index, {0, table}, {1, 2}, {0.0f, 0.0f});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("tables[1] is "), std::string::npos);
  }
  EXPECT_NE(Build(&index, {0, 0}, {1, 1}, {0.0f, kNan}).message().find("twice"), std::string::npos);
  EXPECT_NE(Build(&index, {0}, {1}, {-0.5f}).message().find("drifts[0] is -0.5"),
            std::string::npos);
  EXPECT_EQ(DriftOf(index, {9, 0}), 0.25f);
}

// Enough keys for multiple threads; every 100th drift is an anomaly.
struct ManyKeys {
  std::vector<int32_t> tables;
  std::vector<int64_t> keys;
  std::vector<float> drifts;

  explicit ManyKeys(int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      tables.push_back(static_cast<int32_t>(i % 3));
      keys.push_back(i / 3 * 7);
      drifts.push_back(i % 100 == 0 ? kNan : static_cast<float>(i));
    }
  }
  Status Build(DriftIndex* index, int threads) const {
    return index->Build(3, tables.data(), keys.data(), drifts.data(),
                        static_cast<int64_t>(keys.size()), Threads(threads));
  }
};

TEST(DriftIndex, ThreadsEqualSingleThread) {
  const ManyKeys many(200001);
  DriftIndex one;
  ASSERT_TRUE(many.Build(&one, 1).ok());
  for (const int threads : {2, 3, 7, 12}) {
    DriftIndex index;
    ASSERT_TRUE(many.Build(&index, threads).ok());
    EXPECT_EQ(index.size(), one.size());
    EXPECT_EQ(index.view().capacity, one.view().capacity);
    for (size_t i = 0; i < many.keys.size(); ++i) {
      const float expected = i % 100 == 0 ? kInf : static_cast<float>(i);
      ASSERT_EQ(DriftOf(index, {many.keys[i], many.tables[i]}), expected) << i;
      ASSERT_EQ(DriftOf(index, {many.keys[i] + 1, many.tables[i]}), kInf) << i;
    }
  }
}

TEST(DriftIndex, ThreadsReportTheFirstError) {
  std::mt19937_64 random(2);
  for (int trial = 0; trial < 20; ++trial) {
    ManyKeys many(60000);
    for (int error = 0; error < 3; ++error) {
      const size_t i = random() % many.keys.size();
      if (error == 0) many.tables[i] = 3;
      if (error == 1) many.drifts[i] = -1.0f;
      if (error != 2) continue;
      const size_t other = random() % many.keys.size();
      many.keys[i] = many.keys[other];
      many.tables[i] = many.tables[other];
    }
    DriftIndex one, index;
    const Status expected = many.Build(&one, 1);
    ASSERT_FALSE(expected.ok());
    const Status status = many.Build(&index, 3);
    EXPECT_EQ(status.message(), expected.message());
    EXPECT_EQ(index.size(), 0);
  }
}

// Keys run past the end of a part into the next one, where their repeats must be found, too.
TEST(DriftIndex, ThreadsDetectEveryDuplicateKey) {
  const ManyKeys many(50000);
  for (size_t i = 0; i < many.keys.size(); i += 970) {
    ManyKeys twice = many;
    twice.keys.push_back(many.keys[i]);
    twice.tables.push_back(many.tables[i]);
    twice.drifts.push_back(0.5f);
    DriftIndex index;
    const Status status = twice.Build(&index, 3);
    ASSERT_NE(status.message().find("occurs twice"), std::string::npos) << i;
  }
}

TEST(DriftIndex, RebuildReusesMemory) {
  const auto rebuild = [](DriftIndex* index, int64_t n, float drift) {
    std::vector<int32_t> tables(static_cast<size_t>(n), 1);
    std::vector<int64_t> keys(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) keys[static_cast<size_t>(i)] = 7 * i;
    const std::vector<float> drifts(static_cast<size_t>(n), drift);
    return index->Rebuild(3, tables.data(), keys.data(), drifts.data(), n, Threads(2));
  };
  DriftIndex index;
  ASSERT_TRUE(rebuild(&index, 1000, 0.5f).ok());
  const DriftEntry* const memory = index.view().entries;
  ASSERT_TRUE(rebuild(&index, 900, 0.25f).ok());
  EXPECT_EQ(index.view().entries, memory);
  EXPECT_EQ(index.size(), 900);
  EXPECT_EQ(DriftOf(index, {7 * 899, 1}), 0.25f);
  EXPECT_EQ(DriftOf(index, {7 * 900, 1}), DriftIndex::kUntracked);
  // An error empties the index but keeps its memory.
  EXPECT_NE(rebuild(&index, 900, -1.f).message().find("drifts[0] is -1"), std::string::npos);
  EXPECT_EQ(index.size(), 0);
  EXPECT_EQ(DriftOf(index, {0, 1}), DriftIndex::kUntracked);
  ASSERT_TRUE(rebuild(&index, 950, 2.f).ok());
  EXPECT_EQ(index.view().entries, memory);
  EXPECT_EQ(DriftOf(index, {7 * 949, 1}), 2.f);
  // The memory is too small, more than twice the needed size, or absent.
  ASSERT_TRUE(rebuild(&index, 2000, 3.f).ok());
  EXPECT_EQ(index.size(), 2000);
  ASSERT_TRUE(rebuild(&index, 10, 4.f).ok());
  EXPECT_EQ(index.size(), 10);
  EXPECT_LT(index.view().capacity, 100);
  ASSERT_TRUE(rebuild(&index, 0, 4.f).ok());
  EXPECT_EQ(DriftOf(index, {0, 1}), DriftIndex::kUntracked);
}

}  // namespace
}  // namespace slipstream
