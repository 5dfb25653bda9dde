// Compares the sketch of hot keys on the CPU and, if available, on a GPU with a simple reference
// and with exact counts.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/hot_keys/access_sketch.h"
#include "cc_ops/core/hot_keys/hot_key_sketch.h"
#include "cc_ops/core/testing/test_gpu.h"
#include "gtest/gtest.h"

#ifdef SLIPSTREAM_WITH_CUDA
#include "cc_ops/core/hot_keys/hot_key_sketch.cu.h"
#endif

namespace slipstream {
namespace {

struct Content {
  std::vector<int64_t> counters, owners;
  std::vector<uint64_t> challenges;
};

Content EmptyContent(int log2_width) {
  const size_t size = static_cast<size_t>(AccessSketch::kRows) << log2_width;
  return {std::vector<int64_t>(size), std::vector<int64_t>(size, HotKeySketch::kNoOwner),
          std::vector<uint64_t>(size)};
}

HotKeySketch ViewOf(Content* content, int log2_width) {
  return {
      {content->counters.data(), log2_width}, content->owners.data(), content->challenges.data()};
}

// A batch. `counts` is empty or has one entry per key.
struct Batch {
  std::vector<int64_t> keys;
  std::vector<uint8_t> counts;
};

class Counter {
 public:
  explicit Counter(int log2_width) : log2_width_(log2_width) {}
  virtual ~Counter() = default;
  virtual void Count(const Batch& batch, int64_t unit) = 0;
  virtual Content content() = 0;

 protected:
  // std::vector<bool> has no data().
  static std::unique_ptr<bool[]> CountsOf(const Batch& batch) {
    if (batch.counts.empty()) return nullptr;
    std::unique_ptr<bool[]> counts(new bool[batch.counts.size()]);
    for (size_t i = 0; i < batch.counts.size(); ++i) counts[i] = batch.counts[i] != 0;
    return counts;
  }

  int log2_width_;
};

class CounterOnCpu : public Counter {
 public:
  explicit CounterOnCpu(int log2_width) : Counter(log2_width), content_(EmptyContent(log2_width)) {}

  void Count(const Batch& batch, int64_t unit) override {
    CountAccesses(ViewOf(&content_, log2_width_), batch.keys.data(), CountsOf(batch).get(),
                  static_cast<int64_t>(batch.keys.size()), unit);
  }
  Content content() override { return content_; }

 private:
  Content content_;
};

#ifdef SLIPSTREAM_WITH_CUDA
class CounterOnGpu : public Counter {
 public:
  explicit CounterOnGpu(int log2_width)
      : Counter(log2_width),
        counters_(EmptyContent(log2_width).counters),
        owners_(EmptyContent(log2_width).owners),
        challenges_(EmptyContent(log2_width).challenges) {}

  void Count(const Batch& batch, int64_t unit) override {
    OnDevice<int64_t> keys(batch.keys);
    OnDevice<bool> counts(batch.counts.size());
    const std::unique_ptr<bool[]> given = CountsOf(batch);
    if (given != nullptr) {
      EXPECT_EQ(cudaMemcpy(counts.data(), given.get(), batch.counts.size(), cudaMemcpyHostToDevice),
                cudaSuccess);
    }
    const TestStream stream;
    EXPECT_EQ(
        LaunchCountAccesses(stream.get(),
                            {{counters_.data(), log2_width_}, owners_.data(), challenges_.data()},
                            keys.data(), given == nullptr ? nullptr : counts.data(),
                            static_cast<int64_t>(batch.keys.size()), unit),
        cudaSuccess);
  }
  Content content() override {
    return {counters_.ToHost(), owners_.ToHost(), challenges_.ToHost()};
  }

 private:
  OnDevice<int64_t> counters_, owners_;
  OnDevice<uint64_t> challenges_;
};
#endif

// Reference implementation, counter by counter.
void CountByDefinition(const Batch& batch, int64_t unit, int log2_width, Content* content) {
  const HotKeySketch hot = ViewOf(content, log2_width);
  std::map<int64_t, std::vector<int64_t>> arrivals;  // Counter -> keys in order.
  for (size_t i = 0; i < batch.keys.size(); ++i) {
    if (!batch.counts.empty() && batch.counts[i] == 0) continue;
    for (int row = 0; row < AccessSketch::kRows; ++row) {
      int64_t* const counter = hot.sketch.Counter(row, batch.keys[i]);
      *counter += unit;
      arrivals[counter - hot.sketch.counters].push_back(batch.keys[i]);
    }
  }
  for (const auto& [counter, keys] : arrivals) {
    int64_t& owner = content->owners[static_cast<size_t>(counter)];
    int64_t highest = owner == HotKeySketch::kNoOwner ? 0 : hot.sketch.Estimate(owner);
    for (int64_t key : keys) {
      if (key == HotKeySketch::kNoOwner || hot.sketch.Estimate(key) <= highest) continue;
      owner = key;
      highest = hot.sketch.Estimate(key);
    }
  }
}

// Returns a small number of frequent keys and many rare ones, with repeats and keys that do not
// count.
Batch SomeBatch(int64_t n, int64_t different, uint64_t seed) {
  Batch batch;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t random = Mix64(seed * 1000003 + static_cast<uint64_t>(i));
    const uint64_t bound = 1 + random % static_cast<uint64_t>(different);
    batch.keys.push_back(static_cast<int64_t>(Mix64(random) % bound) - different / 3);
    batch.counts.push_back(random % 11 != 0);
  }
  return batch;
}

class HotKeySketchTest : public OnProcessors {
 protected:
  std::unique_ptr<Counter> MakeCounter(int log2_width) {
#ifdef SLIPSTREAM_WITH_CUDA
    if (GetParam() == Processor::kGpu) return std::make_unique<CounterOnGpu>(log2_width);
#endif
    return std::make_unique<CounterOnCpu>(log2_width);
  }
};

TEST_P(HotKeySketchTest, EqualsTheDefinition) {
  for (int log2_width : {1, 3, 8}) {
    const std::unique_ptr<Counter> counter = MakeCounter(log2_width);
    Content expected = EmptyContent(log2_width);
    for (uint64_t step = 0; step < 20; ++step) {
      Batch batch = SomeBatch(step % 5 == 4 ? 0 : 700, 300, step);
      if (step % 3 == 0) batch.counts.clear();
      counter->Count(batch, 1 + static_cast<int64_t>(step));
      CountByDefinition(batch, 1 + static_cast<int64_t>(step), log2_width, &expected);
      const Content found = counter->content();
      ASSERT_EQ(found.counters, expected.counters) << log2_width << ", step " << step;
      ASSERT_EQ(found.owners, expected.owners) << log2_width << ", step " << step;
      ASSERT_EQ(found.challenges, expected.challenges) << log2_width << ", step " << step;
    }
  }
}

// Zipf distribution: the 100th of 20,000 keys is accessed more often than a counter receives other
// keys.
TEST_P(HotKeySketchTest, RemembersHottestKeys) {
  const std::unique_ptr<Counter> counter = MakeCounter(12);
  std::map<int64_t, int64_t> exact;
  for (uint64_t step = 0; step < 40; ++step) {
    Batch batch;
    for (uint64_t i = 0; i < 5000; ++i) {
      const double unit = static_cast<double>(Mix64(step * 5000 + i) >> 11) * 0x1.0p-53;
      batch.keys.push_back(static_cast<int64_t>(std::pow(20000.0, unit)));
    }
    counter->Count(batch, 1);
    for (int64_t key : batch.keys) ++exact[key];
  }
  EXPECT_GT(exact.size(), 4096) << "more than a row has counters";
  std::vector<std::pair<int64_t, int64_t>> by_count;
  for (const auto& [key, count] : exact) by_count.emplace_back(-count, key);
  std::sort(by_count.begin(), by_count.end());
  const Content content = counter->content();
  const std::set<int64_t> remembered(content.owners.begin(), content.owners.end());
  for (size_t r = 0; r < 100; ++r) EXPECT_EQ(remembered.count(by_count[r].second), 1) << r;
}

TEST_P(HotKeySketchTest, CountsAnyKeyAndRemembersAllExceptLowest) {
  constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
  constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();
  const std::unique_ptr<Counter> counter = MakeCounter(6);
  counter->Count({{kLowest, kLowest, kLowest + 1, -1, kHighest}, {}}, 256);
  Content content = counter->content();
  const std::set<int64_t> remembered(content.owners.begin(), content.owners.end());
  EXPECT_EQ(remembered, (std::set<int64_t>{kLowest, kLowest + 1, -1, kHighest}))
      << "the lowest key stands for nobody";
  EXPECT_GE(ViewOf(&content, 6).sketch.Estimate(kLowest), 512);
}

INSTANTIATE_TEST_SUITE_P(Devices, HotKeySketchTest,
                         testing::Values(Processor::kCpu, Processor::kGpu),
                         [](const auto& processor) { return NameOfProcessor(processor); });

}  // namespace
}  // namespace slipstream
