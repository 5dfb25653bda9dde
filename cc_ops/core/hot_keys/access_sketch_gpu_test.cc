// Compares the access sketch on the CPU and, if available, on a GPU with exact counts and with a
// simple reference.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/hot_keys/access_sketch.h"
#include "cc_ops/core/testing/test_gpu.h"
#include "gtest/gtest.h"

#ifdef SLIPSTREAM_WITH_CUDA
#include "cc_ops/core/hot_keys/access_sketch.cu.h"
#endif

namespace slipstream {
namespace {

// A sketch with counters on the host, to which a test adds accesses.
class Sketch {
 public:
  explicit Sketch(int log2_width)
      : counters_(static_cast<size_t>(AccessSketch::kRows) << log2_width),
        view_{counters_.data(), log2_width} {}
  virtual ~Sketch() = default;

  // If `accesses` is empty, adds one access of each key.
  void Add(const std::vector<int64_t>& keys, const std::vector<uint32_t>& accesses) {
    for (size_t i = 0; i < keys.size(); ++i) {
      for (int row = 0; row < AccessSketch::kRows; ++row) {
        *view_.Counter(row, keys[i]) += accesses.empty() ? 1 : accesses[i];
      }
    }
  }
  virtual void Decay(uint64_t factor) { DecayAccesses(view_, factor); }
  virtual std::vector<int64_t> Estimate(const std::vector<int64_t>& keys) {
    std::vector<int64_t> estimates(keys.size());
    EstimateAccesses(view_, keys.data(), static_cast<int64_t>(keys.size()), estimates.data());
    return estimates;
  }

 protected:
  std::vector<int64_t> counters_;
  AccessSketch view_;
};

#ifdef SLIPSTREAM_WITH_CUDA
class SketchOnGpu : public Sketch {
 public:
  using Sketch::Sketch;

  void Decay(uint64_t factor) override {
    OnDevice<int64_t> counters(counters_);
    EXPECT_EQ(LaunchDecayAccesses(stream_.get(), {counters.data(), view_.log2_width}, factor),
              cudaSuccess);
    stream_.Wait();
    const std::vector<int64_t> decayed = counters.ToHost();
    std::copy(decayed.begin(), decayed.end(), counters_.begin());
  }
  std::vector<int64_t> Estimate(const std::vector<int64_t>& keys) override {
    OnDevice<int64_t> counters(counters_), device_keys(keys), estimates(keys.size());
    EXPECT_EQ(LaunchEstimateAccesses(stream_.get(), {counters.data(), view_.log2_width},
                                     device_keys.data(), static_cast<int64_t>(keys.size()),
                                     estimates.data()),
              cudaSuccess);
    stream_.Wait();
    return estimates.ToHost();
  }

 private:
  TestStream stream_;
};
#endif

class AccessSketchTest : public OnProcessors {
 protected:
  std::unique_ptr<Sketch> MakeSketch(int log2_width) {
#ifdef SLIPSTREAM_WITH_CUDA
    if (GetParam() == Processor::kGpu) return std::make_unique<SketchOnGpu>(log2_width);
#endif
    return std::make_unique<Sketch>(log2_width);
  }
};

// A small number of keys has most of the accesses.
std::vector<int64_t> SomeKeys(int64_t n, uint64_t seed) {
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t random = Mix64(seed + static_cast<uint64_t>(i));
    const uint64_t range = uint64_t{1} << (random % 14);
    keys.push_back(static_cast<int64_t>((random >> 20) % range) - 40);
  }
  return keys;
}

TEST_P(AccessSketchTest, ManyCountersCountExactly) {
  const std::unique_ptr<Sketch> sketch = MakeSketch(20);
  std::map<int64_t, int64_t> exact;
  for (uint64_t batch = 0; batch < 3; ++batch) {
    const std::vector<int64_t> keys = SomeKeys(5000, 100000 * batch);
    std::vector<uint32_t> accesses;
    if (batch > 0) {
      for (size_t i = 0; i < keys.size(); ++i) accesses.push_back(static_cast<uint32_t>(i % 7));
    }
    sketch->Add(keys, accesses);
    for (size_t i = 0; i < keys.size(); ++i) exact[keys[i]] += batch == 0 ? 1 : i % 7;
  }
  std::vector<int64_t> keys, counts;
  for (const auto& [key, count] : exact) {
    keys.push_back(key);
    counts.push_back(count);
  }
  EXPECT_EQ(sketch->Estimate(keys), counts);
  EXPECT_EQ(sketch->Estimate({123456789, -123456789}), (std::vector<int64_t>{0, 0}));
}

TEST_P(AccessSketchTest, FewCountersNeverUnderestimate) {
  constexpr int64_t kAccesses = 20000;
  const std::unique_ptr<Sketch> sketch = MakeSketch(8);
  const std::vector<int64_t> keys = SomeKeys(kAccesses, 5);
  sketch->Add(keys, {});
  std::map<int64_t, int64_t> exact;
  for (int64_t key : keys) ++exact[key];
  int64_t too_high = 0;
  for (const auto& [key, count] : exact) {
    const int64_t estimate = sketch->Estimate({key})[0];
    EXPECT_GE(estimate, count);
    // Bound of the sketch: an error above e / width of all accesses has a probability of e^-rows.
    too_high += estimate > count + kAccesses * 2718 / 1000 / 256;
  }
  EXPECT_LT(too_high, static_cast<int64_t>(exact.size()) / 50);
}

TEST_P(AccessSketchTest, SmallestSketchCounts) {
  const std::unique_ptr<Sketch> sketch = MakeSketch(1);
  sketch->Add({1, 2, 3, 4, 5}, {});
  for (int64_t estimate : sketch->Estimate({1, 2, 3, 4, 5})) {
    EXPECT_GE(estimate, 1);
    EXPECT_LE(estimate, 5);
  }
}

TEST_P(AccessSketchTest, DecayRoundsDownEquallyOnAllDevices) {
  const std::unique_ptr<Sketch> sketch = MakeSketch(16);
  const std::vector<int64_t> keys = {1, 2, 3, 4};
  sketch->Add(keys, {1000, 999, 1, 4294967295u});
  sketch->Decay(kNoDecay);
  EXPECT_EQ(sketch->Estimate(keys), (std::vector<int64_t>{1000, 999, 1, 4294967295}));
  sketch->Decay(kNoDecay / 2);
  EXPECT_EQ(sketch->Estimate(keys), (std::vector<int64_t>{500, 499, 0, 2147483647}));
  sketch->Decay(kNoDecay / 10 * 9);
  EXPECT_EQ(sketch->Estimate(keys), (std::vector<int64_t>{449, 449, 0, 1932735279}));
  sketch->Decay(0);
  EXPECT_EQ(sketch->Estimate(keys), (std::vector<int64_t>{0, 0, 0, 0}));
}

TEST_P(AccessSketchTest, CountsBeyond32BitsAreDecayed) {
  const std::unique_ptr<Sketch> sketch = MakeSketch(10);
  const std::vector<uint32_t> many(6, 4294967295u);
  sketch->Add(std::vector<int64_t>(6, -9), many);
  sketch->Decay(kNoDecay / 4 * 3);
  EXPECT_EQ(sketch->Estimate({-9})[0], int64_t{6} * 4294967295 * 3 / 4);
  EXPECT_EQ(Decayed(std::numeric_limits<int64_t>::max(), kNoDecay),
            std::numeric_limits<int64_t>::max());
}

TEST_P(AccessSketchTest, AcceptsEmptyInput) {
  const std::unique_ptr<Sketch> sketch = MakeSketch(4);
  sketch->Add({}, {});
  EXPECT_TRUE(sketch->Estimate({}).empty());
  EXPECT_EQ(sketch->Estimate({7})[0], 0);
}

TEST_P(AccessSketchTest, AcceptsEveryInt64Key) {
  const std::vector<int64_t> keys = {std::numeric_limits<int64_t>::min(), -1, 0,
                                     std::numeric_limits<int64_t>::max()};
  const std::unique_ptr<Sketch> sketch = MakeSketch(AccessSketch::kRows * 4);
  sketch->Add(keys, {1, 2, 3, 4});
  EXPECT_EQ(sketch->Estimate(keys), (std::vector<int64_t>{1, 2, 3, 4}));
}

INSTANTIATE_TEST_SUITE_P(Devices, AccessSketchTest,
                         testing::Values(Processor::kCpu, Processor::kGpu),
                         [](const auto& processor) { return NameOfProcessor(processor); });

}  // namespace
}  // namespace slipstream
