#include "cc_ops/core/deferral/deferred_gradients.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <utility>
#include <vector>

#include "cc_ops/core/base/hash.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 3;

TEST(DeferredGradients, EqualsStandardMap) {
  DeferredGradients sums(kDim);
  std::map<int64_t, std::pair<int64_t, std::vector<float>>> model;
  std::mt19937_64 random(1);
  for (int64_t step = 0; step < 20000; ++step) {
    const int64_t key = static_cast<int64_t>(random() % 300) - 150;
    const uint32_t index = sums.Find(key);
    ASSERT_EQ(index != DeferredGradients::kNone, model.count(key) == 1);
    if (index == DeferredGradients::kNone) {
      std::vector<float> values(kDim);
      for (float& v : values) v = static_cast<float>(random() % 1000);
      std::copy(values.begin(), values.end(), sums.Sum(sums.Insert(key, step)));
      model[key] = {step, values};
    } else {
      ASSERT_EQ(sums.key(index), key);
      ASSERT_EQ(sums.since(index), model[key].first);
      ASSERT_EQ(std::vector<float>(sums.Sum(index), sums.Sum(index) + kDim), model[key].second);
      if (random() % 2 == 0) {
        sums.Remove(index);
        model.erase(key);
      }
    }
    ASSERT_EQ(sums.size(), static_cast<int64_t>(model.size()));
  }
}

TEST(DeferredGradients, ListsFromOldestToYoungest) {
  DeferredGradients sums(kDim);
  for (int64_t key = 0; key < 6; ++key) sums.Insert(key, 10 + key);
  for (int64_t key : {0, 3, 5}) sums.Remove(sums.Find(key));
  sums.Insert(9, 20);
  std::vector<int64_t> keys;
  for (uint32_t p = sums.oldest(); p != DeferredGradients::kNone; p = sums.next(p)) {
    keys.push_back(sums.key(p));
  }
  EXPECT_EQ(keys, (std::vector<int64_t>{1, 2, 4, 9}));
  sums.Clear();
  EXPECT_EQ(sums.oldest(), DeferredGradients::kNone);
  EXPECT_EQ(sums.bytes(), 0);
}

// The memory of removed gradients is reused, whichever is the oldest.
TEST(DeferredGradients, FreesMemoryOfErasedSums) {
  DeferredGradients sums(kDim);
  for (int64_t key = 0; key < 8; ++key) sums.Insert(key, 0);
  int64_t after_a_while = 0;
  for (int64_t step = 1; step <= 10000; ++step) {
    sums.Remove(sums.Find(1 + step % 7));
    sums.Insert(1 + step % 7, step);
    ASSERT_EQ(sums.key(sums.oldest()), 0);
    if (step == 100) after_a_while = sums.bytes();
  }
  EXPECT_EQ(sums.bytes(), after_a_while);
  int64_t since = -1, seen = 0;
  for (uint32_t p = sums.oldest(); p != DeferredGradients::kNone; p = sums.next(p), ++seen) {
    EXPECT_LT(since, sums.since(p));
    since = sums.since(p);
  }
  EXPECT_EQ(seen, 8);
}

}  // namespace
}  // namespace slipstream
