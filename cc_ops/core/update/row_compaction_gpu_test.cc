// Tests the row compaction on the CPU and on a GPU.
//
// Fixed cases have known results. Results for generated rows must not depend on the number of
// threads and must be bit-identical on a GPU. tests/ops/test_masking.py compares the CPU with the
// definition. Without a GPU, the tests for it are reported as skipped.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/containers/key_set.h"
#include "cc_ops/core/testing/test_gpu.h"
#include "cc_ops/core/testing/test_threads.h"
#include "cc_ops/core/update/row_compaction.h"
#include "gtest/gtest.h"

#ifdef SLIPSTREAM_WITH_CUDA
#include "cc_ops/core/update/row_compaction.cu.h"
#endif

namespace slipstream {
namespace {

template <class Key>
struct Rows {
  std::vector<Key> keys;
  std::vector<float> values;  // [keys, dim]
  int64_t offered = 0;
};

template <class Key>
Rows<Key> CompactOnCpu(const Rows<Key>& rows, int64_t dim, const KeySet& masked, bool deduplicate,
                       int threads) {
  const Parallel parallel = Threads(threads);
  RowCompaction compaction;
  compaction.Plan(rows.keys.data(), static_cast<int64_t>(rows.keys.size()), masked.view(),
                  deduplicate, parallel);
  Rows<Key> kept;
  kept.keys.resize(static_cast<size_t>(compaction.kept()));
  kept.values.resize(static_cast<size_t>(compaction.kept() * dim));
  kept.offered = compaction.offered();
  compaction.Write(rows.keys.data(), rows.values.data(), dim, parallel, kept.keys.data(),
                   kept.values.data());
  return kept;
}

#ifdef SLIPSTREAM_WITH_CUDA
template <class Key>
Rows<Key> CompactOnGpu(const Rows<Key>& rows, int64_t dim, const KeySet& masked, bool deduplicate) {
  const auto n = static_cast<int64_t>(rows.keys.size());
  KeySetView view = masked.view();
  OnDevice<KeySetEntry> entries(
      std::vector<KeySetEntry>(view.entries, view.entries + view.capacity));
  view.entries = entries.data();
  size_t bytes = 0;
  EXPECT_EQ(CompactRowsWorkspaceBytes<Key>(n, dim, deduplicate, &bytes), cudaSuccess);
  OnDevice<char> workspace(bytes);
  OnDevice<Key> keys(rows.keys), kept_keys(rows.keys.size());
  // Rows of an odd n are not aligned to 16 bytes.
  const auto shift = static_cast<size_t>(n % 2);
  std::vector<float> shifted(rows.values);
  shifted.insert(shifted.begin(), shift, 0.0f);
  OnDevice<float> values(shifted), kept_values(rows.values.size());
  OnDevice<CompactionCounts> counts(1);
  const TestStream stream;
  const auto launch = [&](size_t given) {
    const CompactionInput<Key> input = {keys.data(), values.data() + shift, n, dim, view,
                                        deduplicate};
    return LaunchCompactRows(stream.get(), input, {workspace.data(), given}, kept_keys.data(),
                             kept_values.data(), counts.data());
  };
  if (bytes > 0) {
    EXPECT_EQ(launch(bytes - 1), cudaErrorInvalidValue);
  }
  EXPECT_EQ(launch(bytes), cudaSuccess);
  stream.Wait();
  const CompactionCounts found = counts.ToHost(1)[0];
  return {kept_keys.ToHost(static_cast<size_t>(found.kept)),
          kept_values.ToHost(static_cast<size_t>(found.kept * dim)), found.offered};
}
#endif

// Parameter of a test: the number of threads, or the GPU.
constexpr int kGpu = 0;

class RowCompactionTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (GetParam() == kGpu && !WhyNoGpu().empty()) GTEST_SKIP() << WhyNoGpu();
  }

  template <class Key>
  Rows<Key> Compact(const Rows<Key>& rows, int64_t dim, const KeySet& masked, bool deduplicate) {
#ifdef SLIPSTREAM_WITH_CUDA
    if (GetParam() == kGpu) return CompactOnGpu(rows, dim, masked, deduplicate);
#endif
    return CompactOnCpu(rows, dim, masked, deduplicate, GetParam());
  }

  template <class Key>
  static void ExpectEqual(const Rows<Key>& kept, const Rows<Key>& expected,
                          const std::string& where) {
    EXPECT_EQ(kept.keys, expected.keys) << where;
    EXPECT_EQ(kept.offered, expected.offered) << where;
    ASSERT_EQ(kept.values.size(), expected.values.size()) << where;
    // Compare bits, because -0 differs from 0.
    const size_t bytes = kept.values.size() * sizeof(float);
    EXPECT_TRUE(bytes == 0 || std::memcmp(kept.values.data(), expected.values.data(), bytes) == 0)
        << where;
  }

  // Compares with the result of one CPU thread.
  template <class Key>
  void ExpectEqualsOneThread(const Rows<Key>& rows, int64_t dim, const KeySet& masked) {
    for (bool deduplicate : {false, true}) {
      ExpectEqual(Compact(rows, dim, masked, deduplicate),
                  CompactOnCpu(rows, dim, masked, deduplicate, 1),
                  std::to_string(rows.keys.size()) + " rows of " + std::to_string(dim));
    }
  }
};

// Keys repeat, and values have mixed magnitudes, so that the order of a sum matters.
template <class Key>
Rows<Key> SomeRows(int64_t n, int64_t dim, int64_t different_keys) {
  Rows<Key> rows;
  for (int64_t i = 0; i < n; ++i) {
    rows.keys.push_back(static_cast<Key>((i * i * 7919 + i) % different_keys - different_keys / 3));
    for (int64_t j = 0; j < dim; ++j) {
      const auto value = static_cast<float>((i * 104729 + j * 31) % 1009);
      rows.values.push_back(i % 3 == 0 ? value * 1e4f : value / 7.0f - 50.0f);
    }
  }
  return rows;
}

KeySet EveryThirdOf(int64_t different_keys) {
  std::vector<int64_t> keys;
  for (int64_t key = -different_keys; key < different_keys; key += 3) keys.push_back(key);
  KeySet masked;
  EXPECT_TRUE(masked.Build(keys.data(), static_cast<int64_t>(keys.size())).ok());
  return masked;
}

TEST_P(RowCompactionTest, EqualsSingleCpuThread) {
  for (int64_t n : {0, 1, 2, 255, 256, 257, 5000}) {
    for (int64_t dim : {0, 1, 4, 16, 33}) {
      for (int64_t different_keys : {1, 5, 4000}) {
        const KeySet masked = EveryThirdOf(different_keys);
        ExpectEqualsOneThread(SomeRows<int64_t>(n, dim, different_keys), dim, masked);
        if (different_keys != 5) continue;
        ExpectEqualsOneThread(SomeRows<int32_t>(n, dim, different_keys), dim, masked);
      }
    }
  }
  // Enough for two tasks per thread, and for two rounds of a warp.
  ExpectEqualsOneThread(SomeRows<int64_t>(30000, 4, 4000), 4, EveryThirdOf(4000));
}

TEST_P(RowCompactionTest, AddsRowsInOrderWithinChunks) {
  constexpr float kLarge = 1 << 24;  // Equal to kLarge + 1, rounded to float.
  Rows<int64_t> rows, expected;
  const auto add = [&](int64_t key, int64_t count, float sum) {
    for (int64_t i = 0; i < count; ++i) {
      rows.keys.push_back(key);
      rows.values.push_back(i == 0 ? kLarge : 1.0f);
    }
    expected.keys.push_back(key);
    expected.values.push_back(sum);
    ++expected.offered;
  };
  add(1, kRowsPerChunk, kLarge);
  // The last row is a chunk.
  add(2, kRowsPerChunk + 1, kLarge);
  add(3, kRowsPerChunk + 2, kLarge + 2);
  add(4, 1, kLarge);
  add(5, 3 * kRowsPerChunk, kLarge + 2 * kRowsPerChunk);
  add(6, 3 * kRowsPerChunk + 10, kLarge + 2 * kRowsPerChunk + 10);
  ExpectEqual(Compact(rows, 1, KeySet(), true), expected, "keys in chunks");
}

// Returns the sum of the values in chunks, as the header defines it.
float SumInChunks(const std::vector<float>& values) {
  std::vector<float> sums;
  for (size_t i = 0; i < values.size(); ++i) {
    i % kRowsPerChunk == 0 ? sums.push_back(values[i]) : void(sums.back() += values[i]);
  }
  float sum = sums[0];
  for (size_t chunk = 1; chunk < sums.size(); ++chunk) sum += sums[chunk];
  return sum;
}

TEST_P(RowCompactionTest, SumsManyFrequentKeysInChunks) {
  constexpr int64_t kDim = 8, kKeys = 40;
  // Key k has about 30 k rows in total, which are spread over the batch.
  Rows<int64_t> rows = SomeRows<int64_t>(kKeys * kKeys * 15, kDim, 1);
  for (size_t i = 0; i < rows.keys.size(); ++i) {
    const auto random = static_cast<int64_t>(Mix64(i) % (kKeys * kKeys));
    rows.keys[i] = static_cast<int64_t>(std::sqrt(static_cast<double>(random)));
  }
  const KeySet masked = EveryThirdOf(kKeys + 2);
  Rows<int64_t> expected;
  expected.offered = kKeys;
  for (int64_t key = 0; key < kKeys; ++key) {
    if (masked.Contains(key)) continue;
    expected.keys.push_back(key);
    for (int64_t j = 0; j < kDim; ++j) {
      std::vector<float> values;
      for (size_t i = 0; i < rows.keys.size(); ++i) {
        if (rows.keys[i] == key) values.push_back(rows.values[i * kDim + j]);
      }
      expected.values.push_back(SumInChunks(values));
    }
  }
  ExpectEqual(Compact(rows, kDim, masked, true), expected, "spread keys");
}

TEST_P(RowCompactionTest, HandlesNoAndAllRowsMasked) {
  const Rows<int64_t> rows = SomeRows<int64_t>(1000, 4, 100);
  ExpectEqualsOneThread(rows, 4, KeySet());
  ExpectEqual(Compact(rows, 4, KeySet(), false), {rows.keys, rows.values, 1000}, "nothing masked");
  KeySet all;
  ASSERT_TRUE(all.Build(rows.keys.data(), 1000).ok());
  ExpectEqual(Compact(rows, 4, all, false), {{}, {}, 1000}, "everything masked");
  const Rows<int64_t> kept = Compact(rows, 4, all, true);
  EXPECT_TRUE(kept.keys.empty() && kept.values.empty());
  EXPECT_EQ(kept.offered, CompactOnCpu(rows, 4, all, true, 1).offered);
}

TEST_P(RowCompactionTest, AcceptsEveryInt64Key) {
  constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
  constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();
  Rows<int64_t> rows;
  rows.keys = {kHighest, -1, kLowest, 0, kHighest, kLowest + 1, kLowest, -1};
  for (size_t i = 0; i < rows.keys.size(); ++i) rows.values.push_back(static_cast<float>(i) + 0.5f);
  const Rows<int64_t> sums = {{kLowest, kLowest + 1, -1, 0, kHighest}, {9, 5.5f, 9, 3.5f, 5}, 5};
  for (int64_t key : {kHighest, int64_t{-1}, kLowest, kLowest + 1, int64_t{7}}) {
    KeySet masked;
    ASSERT_TRUE(masked.Build(&key, 1).ok());
    for (bool deduplicate : {false, true}) {
      const Rows<int64_t>& all = deduplicate ? sums : rows;
      Rows<int64_t> expected;
      expected.offered = static_cast<int64_t>(all.keys.size());
      for (size_t i = 0; i < all.keys.size(); ++i) {
        if (all.keys[i] == key) continue;
        expected.keys.push_back(all.keys[i]);
        expected.values.push_back(all.values[i]);
      }
      ExpectEqual(Compact(rows, 1, masked, deduplicate), expected,
                  "without " + std::to_string(key));
    }
  }
}

TEST_P(RowCompactionTest, KeepsNonFiniteValues) {
  Rows<int64_t> rows;
  rows.keys = {4, 5, 6};
  rows.values = {std::numeric_limits<float>::infinity(), -0.0f,
                 -std::numeric_limits<float>::infinity()};
  // EveryThirdOf(5) contains key 4.
  const Rows<int64_t> expected = {{5, 6}, {rows.values[1], rows.values[2]}, 3};
  for (bool deduplicate : {false, true}) {
    ExpectEqual(Compact(rows, 1, EveryThirdOf(5), deduplicate), expected, "key 4 masked");
    ExpectEqual(Compact(rows, 1, KeySet(), deduplicate), {rows.keys, rows.values, 3}, "all kept");
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, RowCompactionTest, testing::Values(1, 2, 7, kGpu),
                         [](const testing::TestParamInfo<int>& where) {
                           return where.param == kGpu
                                      ? std::string("Gpu")
                                      : "Cpu" + std::to_string(where.param) + "Threads";
                         });

}  // namespace
}  // namespace slipstream
