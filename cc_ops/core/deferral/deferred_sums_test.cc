#include "cc_ops/core/deferral/deferred_sums.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <utility>
#include <vector>

#include "cc_ops/core/base/hash.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 3;

TEST(DeferredSums, KeepsWhatAMapKeeps) {
  DeferredSums sums(kDim);
  std::map<int64_t, std::pair<int64_t, std::vector<float>>> model;
  std::mt19937_64 random(1);
  for (int64_t step = 0; step < 20000; ++step) {
    const int64_t key = static_cast<int64_t>(random() % 300) - 150;
    const uint32_t place = sums.Find(key, HashKey(key));
    ASSERT_EQ(place != DeferredSums::kNone, model.count(key) == 1);
    if (place == DeferredSums::kNone) {
      std::vector<float> values(kDim);
      for (float& v : values) v = static_cast<float>(random() % 1000);
      std::copy(values.begin(), values.end(), sums.Sum(sums.Insert(key, HashKey(key), step)));
      model[key] = {step, values};
    } else {
      ASSERT_EQ(sums.key(place), key);
      ASSERT_EQ(sums.since(place), model[key].first);
      ASSERT_EQ(std::vector<float>(sums.Sum(place), sums.Sum(place) + kDim), model[key].second);
      if (random() % 2 == 0) {
        sums.Remove(place);
        model.erase(key);
      }
    }
    ASSERT_EQ(sums.size(), static_cast<int64_t>(model.size()));
  }
}

TEST(DeferredSums, ListsFromTheOldestToTheYoungest) {
  DeferredSums sums(kDim);
  for (int64_t key = 0; key < 6; ++key) sums.Insert(key, HashKey(key), 10 + key);
  for (int64_t key : {0, 3, 5}) sums.Remove(sums.Find(key, HashKey(key)));
  sums.Insert(9, HashKey(9), 20);
  std::vector<int64_t> keys;
  for (uint32_t p = sums.oldest(); p != DeferredSums::kNone; p = sums.next(p)) {
    keys.push_back(sums.key(p));
  }
  EXPECT_EQ(keys, (std::vector<int64_t>{1, 2, 4, 9}));
  sums.Clear();
  EXPECT_EQ(sums.oldest(), DeferredSums::kNone);
  EXPECT_EQ(sums.bytes(), 0);
}

}  // namespace
}  // namespace slipstream
