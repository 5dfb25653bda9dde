#include "cc_ops/core/containers/count_filter.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

namespace slipstream {
namespace {

TEST(CountFilter, NeverUnderestimatesCounts) {
  CountFilter filter;
  EXPECT_EQ(filter.Count(5), 0u);
  EXPECT_EQ(filter.bytes(), 0);
  std::mt19937_64 random(1);
  std::map<int64_t, uint32_t> known;
  int64_t too_high = 0;
  for (int i = 0; i < 100000; ++i) {
    const auto key = static_cast<int64_t>(random() % 50000);
    const auto accesses = static_cast<uint32_t>(1 + random() % 2);
    const uint32_t before = filter.Count(key);
    known[key] += accesses;
    const uint32_t count = filter.Add(key, accesses);
    EXPECT_EQ(count, before + accesses);
    ASSERT_GE(count, known[key]);
    too_high += count > known[key] ? 1 : 0;
  }
  EXPECT_LT(too_high, 100000 / 50);
  EXPECT_EQ(filter.bytes(), CountFilter::kCounters);
}

TEST(CountFilter, SaturatesAtMaximum) {
  CountFilter filter;
  EXPECT_EQ(filter.Add(-1, 1000), CountFilter::kMax);
  EXPECT_EQ(filter.Add(-1, 1), CountFilter::kMax);
}

TEST(CountFilter, AgesOldCounts) {
  CountFilter filter;
  filter.Add(7, 8);
  for (int64_t i = 8; i < CountFilter::kCounters; ++i) filter.Add(7000, 1);
  EXPECT_EQ(filter.Count(7), 4u);
  EXPECT_EQ(filter.added(), 0);
}

TEST(CountFilter, RestoresItsState) {
  CountFilter filter, other;
  for (int64_t key = 0; key < 1000; ++key) filter.Add(key, static_cast<uint32_t>(key % 7));
  other.Restore(filter.counters(), filter.added());
  for (int64_t key = 0; key < 1000; ++key) EXPECT_EQ(other.Count(key), filter.Count(key));
  EXPECT_EQ(other.added(), filter.added());
}

}  // namespace
}  // namespace slipstream
