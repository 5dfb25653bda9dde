// Tests deferred gradients in flat buffers. Fixed cases run on the CPU and on a GPU. Generated
// steps on a GPU must be bit-identical to the CPU. tests/ops/test_deferral.py compares the CPU with
// the definition.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/containers/key_set.h"
#include "cc_ops/core/deferral/deferred_buffers.h"
#include "cc_ops/core/testing/container_fuzz.h"
#include "cc_ops/core/testing/test_gpu.h"
#include "gtest/gtest.h"

#ifdef SLIPSTREAM_WITH_CUDA
#include "cc_ops/core/deferral/deferred_buffers.cu.h"
#endif

namespace slipstream {
namespace {

constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();

// Runs the whole second half on the CPU.
Status TakeDue(const DeferredBuffers& buffers, const DeferralRule& rule, const StepRows& rows,
               StepPlan* plan) {
  const Status status = FindDue(buffers, rule, rows, plan);
  if (status.ok()) KeepOthers(buffers, rule, rows, *plan);
  return status;
}

// Gradients of a step; keys ascend.
struct Gradients {
  std::vector<int64_t> keys;
  std::vector<float> values;  // [keys, dim]
};

struct Due {
  std::vector<int64_t> keys;
  std::vector<float> sums;
  StepCounts counts;
};

// Decides whether a sum may wait, as a caller does between the halves.
bool IsSmall(const float* sum, int64_t dim) {
  float largest = 0.0f;
  for (int64_t j = 0; j < dim; ++j) largest = std::max(largest, std::fabs(sum[j]));
  return largest < 60.0f;
}

// The buffers, and both halves of a step.
class Deferring {
 public:
  Deferring(int64_t capacity, int64_t dim) : capacity_(capacity), dim_(dim) {}
  virtual ~Deferring() = default;
  virtual Due Step(const DeferralRule& rule, const Gradients& gradients,
                   const KeySet& saturated) = 0;

 protected:
  // std::vector<bool> has no data().
  std::unique_ptr<bool[]> MayWait(const std::vector<float>& sums, int64_t n) const {
    std::unique_ptr<bool[]> may_wait(new bool[static_cast<size_t>(n) + 1]);
    for (int64_t i = 0; i < n; ++i) may_wait[i] = IsSmall(sums.data() + i * dim_, dim_);
    return may_wait;
  }

  int64_t capacity_, dim_;
};

class OnCpu : public Deferring {
 public:
  OnCpu(int64_t capacity, int64_t dim)
      : Deferring(capacity, dim),
        keys_(capacity, DeferredBuffers::kFree),
        since_(capacity),
        sums_(capacity * dim) {}

  Due Step(const DeferralRule& rule, const Gradients& gradients, const KeySet& saturated) override {
    const auto n = static_cast<int64_t>(gradients.keys.size());
    const DeferredBuffers buffers = {keys_.data(), since_.data(), sums_.data(), capacity_, dim_};
    std::vector<int64_t> indices(gradients.keys.size());
    std::vector<float> sums(gradients.values.size());
    EXPECT_TRUE(AddDeferred(buffers, gradients.keys.data(), gradients.values.data(), n,
                            indices.data(), sums.data())
                    .ok());
    const std::unique_ptr<bool[]> may_wait = MayWait(sums, n);
    StepPlan plan;
    EXPECT_TRUE(TakeDue(buffers, rule,
                        {gradients.keys.data(), n, indices.data(), sums.data(), may_wait.get(),
                         saturated.view()},
                        &plan)
                    .ok());
    return {plan.due_keys, plan.due_sums, plan.counts};
  }

 private:
  std::vector<int64_t> keys_, since_;
  std::vector<float> sums_;
};

#ifdef SLIPSTREAM_WITH_CUDA
class OnGpu : public Deferring {
 public:
  OnGpu(int64_t capacity, int64_t dim)
      : Deferring(capacity, dim),
        keys_(std::vector<int64_t>(capacity, DeferredBuffers::kFree)),
        since_(std::vector<int64_t>(capacity, 0)),
        sums_(std::vector<float>(capacity * dim, 0.0f)) {}

  Due Step(const DeferralRule& rule, const Gradients& gradients, const KeySet& saturated) override {
    const auto n = static_cast<int64_t>(gradients.keys.size());
    const DeferredBuffers buffers = {keys_.data(), since_.data(), sums_.data(), capacity_, dim_};
    size_t bytes = 0;
    EXPECT_EQ(AddDeferredWorkspaceBytes(n, &bytes), cudaSuccess);
    OnDevice<char> workspace(bytes);
    OnDevice<int64_t> keys(gradients.keys), indices(gradients.keys.size());
    OnDevice<float> values(gradients.values), sums(gradients.values.size());
    const TestStream stream;
    const auto add = [&](size_t given) {
      return LaunchAddDeferred(stream.get(), buffers, keys.data(), values.data(), n,
                               {workspace.data(), given}, indices.data(), sums.data());
    };
    EXPECT_EQ(add(bytes - 1), cudaErrorInvalidValue);
    EXPECT_EQ(add(bytes), cudaSuccess);
    stream.Wait();
    if (!indices_instead.empty()) {
      EXPECT_EQ(cudaMemcpy(indices.data(), indices_instead.data(),
                           indices_instead.size() * sizeof(int64_t), cudaMemcpyHostToDevice),
                cudaSuccess);
    }

    const std::unique_ptr<bool[]> waits = MayWait(sums.ToHost(), n);
    OnDevice<bool> may_wait(gradients.keys.size());
    EXPECT_EQ(
        cudaMemcpy(may_wait.data(), waits.get(), gradients.keys.size(), cudaMemcpyHostToDevice),
        cudaSuccess);
    KeySetView view = saturated.view();
    OnDevice<KeySetEntry> entries(
        std::vector<KeySetEntry>(view.entries, view.entries + view.capacity));
    view.entries = entries.data();
    max_due = std::min(bound_.MaxDue(rule, n, capacity_), n + max_old);
    bound_.Launch(n);
    EXPECT_EQ(TakeDueWorkspaceBytes(n, max_due, &bytes), cudaSuccess);
    OnDevice<char> parts(bytes);
    OnDevice<int64_t> due_keys(static_cast<size_t>(max_due));
    OnDevice<float> due_sums(static_cast<size_t>(max_due * dim_));
    OnDevice<DeviceStepCounts> counts(1);
    const auto take = [&](size_t given) {
      return LaunchTakeDue(stream.get(), buffers, rule,
                           {keys.data(), n, indices.data(), sums.data(),
                            rule.by_movement ? may_wait.data() : nullptr, view},
                           max_due, {parts.data(), given}, due_keys.data(), due_sums.data(),
                           counts.data());
    };
    EXPECT_EQ(take(bytes - 1), cudaErrorInvalidValue);
    EXPECT_EQ(take(bytes), cudaSuccess);
    stream.Wait();
    const DeviceStepCounts found = counts.ToHost()[0];
    invalid_row = found.invalid_row;
    bound_.Finish(rule, n, invalid_row == 0 ? &found : nullptr);
    if (invalid_row != 0) return {};
    return {due_keys.ToHost(static_cast<size_t>(found.sent)),
            due_sums.ToHost(static_cast<size_t>(found.sent * dim_)), found};
  }

  int64_t max_old = std::numeric_limits<int64_t>::max() / 2;  // Limit of max_due - n.
  std::vector<int64_t> indices_instead;  // Replace the result of LaunchAddDeferred if not empty.
  // Results of the last step.
  int64_t max_due = 0, invalid_row = 0;

 private:
  OnDevice<int64_t> keys_, since_;
  OnDevice<float> sums_;
  DueBound bound_;
};
#endif

std::array<int64_t, 10> Numbers(const StepCounts& counts) {
  return {counts.offered,      counts.deferred,    counts.due_by_movement,  counts.due_by_age,
          counts.flushed,      counts.over_budget, counts.without_gradient, counts.sent,
          counts.num_deferred, counts.next_due};
}

Gradients SomeGradients(int64_t n, int64_t dim, int64_t different, uint64_t seed) {
  std::set<int64_t> keys;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t random = Mix64(seed * 1000003 + static_cast<uint64_t>(i));
    keys.insert(static_cast<int64_t>(random % static_cast<uint64_t>(different)) - different / 3);
  }
  Gradients gradients;
  gradients.keys.assign(keys.begin(), keys.end());
  for (size_t i = 0; i < gradients.keys.size() * dim; ++i) {
    const uint64_t random = Mix64(seed ^ (i * 7919 + 13));
    gradients.values.push_back(static_cast<float>(random % 1009) / 12.0f - 40.0f);
  }
  return gradients;
}

KeySet EverySecondOf(int64_t different) {
  std::vector<int64_t> keys;
  for (int64_t key = -different; key < different; key += 2) keys.push_back(key);
  KeySet saturated;
  EXPECT_TRUE(saturated.Build(keys.data(), static_cast<int64_t>(keys.size())).ok());
  return saturated;
}

class DeferredBuffersTest : public OnProcessors {
 protected:
  std::unique_ptr<Deferring> MakeDevice(int64_t capacity, int64_t dim) {
#ifdef SLIPSTREAM_WITH_CUDA
    if (GetParam() == Processor::kGpu) return std::make_unique<OnGpu>(capacity, dim);
#endif
    return std::make_unique<OnCpu>(capacity, dim);
  }
};

// Runs the same steps on a GPU and on the CPU.
class DeferredBuffersOnGpuTest : public DeferredBuffersTest {
 protected:
  static void ExpectEqual(const Due& due, const Due& expected, const std::string& where) {
    EXPECT_EQ(due.keys, expected.keys) << where;
    EXPECT_EQ(Numbers(due.counts), Numbers(expected.counts)) << where;
    ASSERT_EQ(due.sums.size(), expected.sums.size()) << where;
    // Compare bits: a NaN equals itself, and -0 differs from 0.
    const size_t bytes = due.sums.size() * sizeof(float);
    EXPECT_TRUE(bytes == 0 || std::memcmp(due.sums.data(), expected.sums.data(), bytes) == 0)
        << where;
  }

  // Runs twelve steps. No gradient begins to be deferred from step 10 on; steps 7 and 12 flush, and
  // steps 5 and 11 have no rows.
  void ExpectEqualsCpu(int64_t capacity, int64_t dim, int64_t n, int64_t different,
                       DeferralRule rule) {
    const std::unique_ptr<Deferring> on_gpu = MakeDevice(capacity, dim);
    OnCpu on_cpu(capacity, dim);
    const KeySet saturated = EverySecondOf(different);
    for (int64_t step = 1; step <= 12; ++step) {
      rule.step = step;
      rule.defers = step < 10;
      rule.flushes = step == 7 || step == 12;
      const Gradients gradients =
          SomeGradients(step % 6 == 5 ? 0 : n, dim, different, static_cast<uint64_t>(step));
      ExpectEqual(on_gpu->Step(rule, gradients, saturated), on_cpu.Step(rule, gradients, saturated),
                  "step " + std::to_string(step) + ", capacity " + std::to_string(capacity) +
                      ", dim " + std::to_string(dim) + ", rows " + std::to_string(n));
    }
  }
};

TEST_P(DeferredBuffersOnGpuTest, EqualsTheCpu) {
  struct Size {
    int64_t n, dim, capacity;
  };
  DeferralRule rule = {};
  rule.max_age = 4;
  rule.max_rows = 1000;
  for (const auto& [n, dim, capacity] : std::vector<Size>{{1, 1, 0},
                                                          {1, 5, 17},
                                                          {40, 33, 0},
                                                          {40, 1, 17},
                                                          {40, 5, 300},
                                                          {40, 16, 2000},
                                                          {700, 1, 300},
                                                          {700, 4, 2000},
                                                          {700, 5, 1},
                                                          {700, 33, 300},
                                                          {700, 130, 17},
                                                          {700, 128, 300}}) {
    rule.by_movement = !rule.by_movement;
    ExpectEqualsCpu(capacity, dim, n, 900, rule);
  }
}

// In the emulation, with three blocks, the threads of all kernels make two or more rounds.
TEST_P(DeferredBuffersOnGpuTest, SeveralRoundsEqualTheCpu) {
  DeferralRule rule = {};
  rule.max_age = 3;
  rule.max_rows = 2500;
  for (int64_t dim : {6, 8}) ExpectEqualsCpu(3000, dim, 2500, 6000, rule);
}

TEST_P(DeferredBuffersOnGpuTest, RowLimitsEqualTheCpu) {
  DeferralRule rule = {};
  rule.max_age = 1;
  for (int64_t max_rows : {0, 1, 16, 299}) {
    rule.max_rows = max_rows;
    ExpectEqualsCpu(300, 2, 200, 400, rule);
    rule.max_age = 1000;
  }
}

#ifdef SLIPSTREAM_WITH_CUDA
// The buffers have more entries than all tiles of one round.
TEST_P(DeferredBuffersOnGpuTest, LargeCapacityNeedsNoFurtherMemory) {
  constexpr int64_t kCapacity = 270000, kRows = 30, kDim = 4;
  OnGpu on_gpu(kCapacity, kDim);
  OnCpu on_cpu(kCapacity, kDim);
  const KeySet saturated = EverySecondOf(100000);
  DeferralRule rule = {1, 2, kCapacity, true, false, false};
  for (; rule.step <= 2; ++rule.step) {
    rule.flushes = rule.step == 2;
    const Gradients gradients =
        SomeGradients(kRows, kDim, 100000, static_cast<uint64_t>(rule.step));
    const auto n = static_cast<int64_t>(gradients.keys.size());
    ExpectEqual(on_gpu.Step(rule, gradients, saturated), on_cpu.Step(rule, gradients, saturated),
                "step " + std::to_string(rule.step));
    EXPECT_LE(on_gpu.max_due, n + 2 * kRows);
    size_t bytes = 0;
    EXPECT_EQ(TakeDueWorkspaceBytes(n, on_gpu.max_due, &bytes), cudaSuccess);
    EXPECT_LT(bytes, size_t{1} << 20);
  }
}

TEST_P(DeferredBuffersOnGpuTest, SumsOverLimitLeaveInNextStep) {
  OnGpu deferring(700, 3);
  const KeySet saturated = EverySecondOf(2000);
  Gradients gradients;
  for (int64_t key = 0; key < 1200; key += 2) gradients.keys.push_back(key);
  for (size_t i = 0; i < 3 * gradients.keys.size(); ++i) {
    gradients.values.push_back(static_cast<float>(i));
  }
  DeferralRule rule = {1, 3, 700, true, false, false};
  EXPECT_EQ(deferring.Step(rule, gradients, saturated).counts.num_deferred, 600);
  deferring.max_old = 250;
  std::vector<int64_t> keys;
  for (rule.step = 4; rule.step <= 7; ++rule.step) {
    const Due due = deferring.Step(rule, {}, saturated);
    keys.insert(keys.end(), due.keys.begin(), due.keys.end());
    EXPECT_EQ(due.counts.due_by_age, due.counts.sent);
    EXPECT_EQ(due.counts.next_due, due.counts.num_deferred);
    EXPECT_EQ(static_cast<int64_t>(keys.size()) + due.counts.num_deferred, 600);
    EXPECT_LE(deferring.max_due, 250);
    for (size_t r = 0; r < due.keys.size(); ++r) {
      EXPECT_EQ(due.sums[3 * r + 2], static_cast<float>(due.keys[r] / 2 * 3 + 2));
    }
  }
  std::sort(keys.begin(), keys.end());
  EXPECT_EQ(keys, gradients.keys);
}

TEST_P(DeferredBuffersOnGpuTest, RejectedRowsChangeNothing) {
  OnGpu deferring(4, 1);
  const KeySet saturated = EverySecondOf(20);
  DeferralRule rule = {1, 100, 4, true, false, false};
  EXPECT_EQ(deferring.Step(rule, {{4, 6}, {1, 2}}, saturated).counts.num_deferred, 2);
  rule.flushes = true;
  EXPECT_EQ(deferring.Step(rule, {{4, 8, 6, 8}, {1, 1, 1, 1}}, saturated).keys.size(), 0u);
  EXPECT_TRUE(deferring.invalid_row == 2 || deferring.invalid_row == 4) << deferring.invalid_row;
  EXPECT_EQ(deferring.Step(rule, {{kLowest, kLowest}, {1, 1}}, saturated).keys.size(), 0u);
  EXPECT_NE(deferring.invalid_row, 0);
  for (int64_t index : {-2, 1, 2, 4}) {
    deferring.indices_instead = {-1, index};
    EXPECT_EQ(deferring.Step(rule, {{8, 4}, {1, 1}}, saturated).keys.size(), 0u);
    EXPECT_EQ(deferring.invalid_row, 2) << index;
  }
  deferring.indices_instead.clear();
  const Due due = deferring.Step(rule, {{8, 4}, {1, 1}}, saturated);
  EXPECT_EQ(due.keys, (std::vector<int64_t>{4, 6, 8}));
  EXPECT_EQ(due.sums, (std::vector<float>{2, 2, 1}));
}

// Returns the largest number of consecutive buckets in use after the keys were inserted into the
// hash table of a step, which bounds the length of a search.
int64_t LongestRun(const std::vector<int64_t>& keys) {
  const auto n = static_cast<int64_t>(keys.size());
  size_t bytes = 0;
  EXPECT_EQ(AddDeferredWorkspaceBytes(n, &bytes), cudaSuccess);
  OnDevice<int32_t> buckets(bytes / sizeof(int32_t));
  OnDevice<int64_t> on_device(keys), indices(keys.size());
  OnDevice<float> gradients(std::vector<float>(keys.size(), 1.0f)), sums(keys.size());
  const TestStream stream;
  EXPECT_EQ(
      LaunchAddDeferred(stream.get(), {nullptr, nullptr, nullptr, 0, 1}, on_device.data(),
                        gradients.data(), n, {buckets.data(), bytes}, indices.data(), sums.data()),
      cudaSuccess);
  stream.Wait();
  EXPECT_EQ(sums.ToHost(), std::vector<float>(keys.size(), 1.0f));
  int64_t run = 0, longest = 0, in_use = 0;
  for (int32_t row : buckets.ToHost()) {
    run = row < 0 ? 0 : run + 1;  // A free bucket contains -1.
    longest = std::max(longest, run);
    in_use += row >= 0;
  }
  EXPECT_EQ(in_use, n);
  return longest;
}

// With HashKey, which is public, all chosen keys would be in one run of buckets. The longest run of
// random keys has about 50.
TEST_P(DeferredBuffersOnGpuTest, ChosenKeysDoNotCollide) {
  constexpr uint64_t kKeys = 4000;
  std::vector<int64_t> chosen;
  for (uint64_t i = 0; i < kKeys; ++i) chosen.push_back(fuzz::KeyWithHash(i << 32));
  EXPECT_LT(LongestRun(chosen), 500);
}
#endif

TEST_P(DeferredBuffersTest, DefersAtMostMaxRows) {
  for (int64_t max_rows : {0, 1, 16, 299}) {
    const std::unique_ptr<Deferring> deferring = MakeDevice(300, 2);
    DeferralRule rule = {1, 1000, max_rows, true, false, false};
    const KeySet saturated = EverySecondOf(400);
    for (; rule.step <= 20; ++rule.step) {
      const Gradients gradients = SomeGradients(200, 2, 400, static_cast<uint64_t>(rule.step));
      const StepCounts counts = deferring->Step(rule, gradients, saturated).counts;
      EXPECT_LE(counts.num_deferred, max_rows);
      EXPECT_EQ(counts.deferred + counts.sent, counts.offered);
    }
    // A step has about 190 saturated keys.
    if (max_rows < 190) {
      EXPECT_EQ(deferring->Step(rule, {}, saturated).counts.num_deferred, max_rows);
    }
  }
}

TEST_P(DeferredBuffersTest, KeepsRowsWhenLimitShrinks) {
  const std::unique_ptr<Deferring> deferring = MakeDevice(8, 1);
  DeferralRule rule = {1, 100, 8, true, false, false};
  const KeySet saturated = EverySecondOf(20);
  const auto deferred = [&](int64_t max_rows, const std::vector<int64_t>& keys) {
    ++rule.step;
    rule.max_rows = max_rows;
    return deferring->Step(rule, {keys, std::vector<float>(keys.size(), 1.0f)}, saturated)
        .counts.deferred;
  };
  EXPECT_EQ(deferred(8, {-2, 0, 2}), 3);
  EXPECT_EQ(deferred(2, {0, 4}), 1);
  EXPECT_EQ(deferred(4, {4, 6}), 1);
}

TEST_P(DeferredBuffersTest, AppliesNonFiniteSumsAtOnce) {
  const std::unique_ptr<Deferring> deferring = MakeDevice(4, 40);
  const KeySet saturated = EverySecondOf(20);
  DeferralRule rule = {1, 100, 4, true, false, false};
  std::vector<float> values(80, 1.0f);
  EXPECT_TRUE(deferring->Step(rule, {{2, 4}, values}, saturated).keys.empty());
  values[79] = std::numeric_limits<float>::infinity();
  values[3] = -0.0f;
  ++rule.step;
  const Due due = deferring->Step(rule, {{2, 4}, values}, saturated);
  EXPECT_EQ(due.keys, std::vector<int64_t>{4});
  EXPECT_EQ(due.sums[0], 2.0f);
  EXPECT_TRUE(std::isinf(due.sums[39]));
  values[79] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(deferring->Step(rule, {{2, 4}, values}, saturated).keys, std::vector<int64_t>{4});
}

TEST_P(DeferredBuffersTest, AppliesLowestKeyAtOnce) {
  KeySet saturated;
  ASSERT_TRUE(saturated.Build(&kLowest, 1).ok());
  for (bool by_movement : {false, true}) {
    const std::unique_ptr<Deferring> deferring = MakeDevice(4, 1);
    const DeferralRule rule = {1, 100, 4, true, false, by_movement};
    const Due due = deferring->Step(rule, {{kLowest}, {1}}, saturated);
    EXPECT_EQ(due.keys, std::vector<int64_t>{kLowest});
    EXPECT_EQ(due.sums, std::vector<float>{1});
    EXPECT_EQ(due.counts.num_deferred, 0);
  }
}

TEST_P(DeferredBuffersTest, DefersAllKeysExceptLowest) {
  const std::vector<int64_t> keys = {kLowest + 1, -1, 0, kHighest};
  KeySet saturated;
  ASSERT_TRUE(saturated.Build(keys.data(), 4).ok());
  const std::unique_ptr<Deferring> deferring = MakeDevice(6, 1);
  DeferralRule rule = {1, 100, 6, true, false, false};
  EXPECT_TRUE(deferring->Step(rule, {keys, {1, 2, 3, 4}}, saturated).keys.empty());
  rule.flushes = true;
  const Due due = deferring->Step(rule, {{0, 5}, {10, 20}}, saturated);
  EXPECT_EQ(due.keys, (std::vector<int64_t>{kLowest + 1, -1, 0, 5, kHighest}));
  EXPECT_EQ(due.sums, (std::vector<float>{1, 2, 13, 20, 4}));
}

TEST(DueBoundTest, BoundsRowsBeforeCountsArrive) {
  DueBound bound;
  DeferralRule rule = {0, 5, 100, true, false, true};
  const auto launch = [&](int64_t n) {
    ++rule.step;
    bound.Launch(n);
  };
  // Finishes a step after which two sums are due in the next step.
  const auto finish = [&](int64_t step, int64_t n, int64_t num_deferred) {
    StepCounts counts;
    counts.num_deferred = num_deferred;
    counts.next_due = 2;
    DeferralRule of_step = rule;
    of_step.step = step;
    bound.Finish(of_step, n, &counts);
  };
  const auto max_old = [&] { return bound.MaxDue(rule, 10, 40) - 10; };
  EXPECT_EQ(max_old(), 0);
  launch(7);
  EXPECT_EQ(max_old(), 7);
  launch(3);
  EXPECT_EQ(max_old(), 7 + 3);
  finish(1, 7, 4);
  EXPECT_EQ(max_old(), 4 + 3);
  launch(50);
  EXPECT_EQ(max_old(), 40);  // The capacity.
  finish(3, 50, 12);
  EXPECT_EQ(max_old(), 12 + 3);
  finish(2, 3, 8);  // Outdated.
  EXPECT_EQ(max_old(), 2);

  rule.flushes = true;
  EXPECT_EQ(max_old(), 12);
  rule.flushes = false;
  rule.max_age = 3;
  EXPECT_EQ(max_old(), 12);
  launch(1);
  finish(4, 1, 16);
  EXPECT_EQ(max_old(), 2);
  launch(1);
  bound.Finish(rule, 1, nullptr);
  EXPECT_EQ(max_old(), 2);

  launch(1);
  bound.Reset(30, rule.step);
  EXPECT_EQ(max_old(), 30 + 1);
  finish(rule.step, 1, 5);  // Counts of the replaced buffers.
  EXPECT_EQ(max_old(), 30);
  launch(1);
  finish(rule.step, 1, 31);
  EXPECT_EQ(max_old(), 2);
}

TEST(DeferredBuffersOnCpuTest, MovesSumsToOtherBuffers) {
  std::vector<int64_t> keys = {DeferredBuffers::kFree, 7, DeferredBuffers::kFree, -3},
                       since = {0, 6, 0, 5};
  std::vector<float> sums = {0, 0, 1, 2, 0, 0, 3, 4};
  const DeferredContents contents =
      ExportDeferred({keys.data(), since.data(), sums.data(), 4, 2}, 9);
  std::vector<int64_t> other_keys(3), other_since(3);
  std::vector<float> other_sums(6);
  const DeferredBuffers other = {other_keys.data(), other_since.data(), other_sums.data(), 3, 2};
  ASSERT_TRUE(ImportDeferred(contents, 9, other).ok());
  EXPECT_EQ(other_keys, (std::vector<int64_t>{-3, 7, DeferredBuffers::kFree}));
  EXPECT_EQ(other_since, (std::vector<int64_t>{5, 6, 0}));
  EXPECT_EQ(other_sums, (std::vector<float>{3, 4, 1, 2, 0, 0}));
}

// The memory after the buffers must not be written.
TEST(DeferredBuffersOnCpuTest, ImportBeyondCapacityChangesNothing) {
  const DeferredContents contents = {{4, 7, -3}, {1, 2, 3}, {}, {1, 2, 3}};
  std::vector<int64_t> keys(3, 99), since(3, 98);
  std::vector<float> sums(3, 97);
  const Status status = ImportDeferred(contents, 5, {keys.data(), since.data(), sums.data(), 2, 1});
  EXPECT_EQ(status.message(),
            "the import has 3 deferred gradients; expected at most 2, the capacity of the buffers");
  EXPECT_EQ(keys, std::vector<int64_t>(3, 99));
  EXPECT_EQ(since, std::vector<int64_t>(3, 98));
  EXPECT_EQ(sums, std::vector<float>(3, 97));
}

TEST(DeferredBuffersOnCpuTest, RejectsInvalidContents) {
  std::vector<int64_t> deferred_keys = {7, DeferredBuffers::kFree}, since = {1, 0};
  std::vector<float> deferred_sums = {1, 2};
  const DeferredBuffers buffers = {deferred_keys.data(), since.data(), deferred_sums.data(), 2, 1};
  const std::vector<int64_t> twice = {5, 7, 5};
  std::vector<int64_t> indices(3);
  std::vector<float> sums(3);
  const Status added =
      AddDeferred(buffers, twice.data(), sums.data(), 3, indices.data(), sums.data());
  EXPECT_EQ(added.message(),
            "keys[0] and keys[2] are both 5 in the merged gradients of a step; expected distinct "
            "keys. Sum the gradients of each key first");
  const bool may_wait = true;
  const DeferralRule rule = {2, 9, 9, true, false, true};
  for (int64_t index : {-2, 1, 2}) {
    StepPlan plan;
    const Status taken =
        TakeDue(buffers, rule, {&deferred_keys[0], 1, &index, sums.data(), &may_wait, {}}, &plan);
    EXPECT_NE(taken.message().find("indices[0] is " + std::to_string(index)), std::string::npos);
    EXPECT_EQ(deferred_keys[0], 7);
  }
}

TEST(DeferredBuffersOnCpuTest, ExportsContentsByAge) {
  std::vector<int64_t> keys(4), since(4);
  std::vector<float> sums(8);
  const DeferredBuffers buffers = {keys.data(), since.data(), sums.data(), 4, 2};
  const DeferredContents contents = {{9, 3, 7}, {0, 2, 2}, {}, {1, 2, 3, 4, 5, 6}};
  ASSERT_TRUE(ImportDeferred(contents, 5, buffers).ok());
  const DeferredContents found = ExportDeferred(buffers, 6);
  EXPECT_EQ(found.keys, (std::vector<int64_t>{3, 7, 9}));
  EXPECT_EQ(found.ages, (std::vector<int64_t>{3, 3, 1}));
  EXPECT_EQ(found.sums, (std::vector<float>{3, 4, 5, 6, 1, 2}));
  const auto status_of = [&](const DeferredContents& bad) {
    const Status status = ImportDeferred(bad, 5, buffers);
    EXPECT_EQ(ExportDeferred(buffers, 6).keys, found.keys);
    return status.message();
  };
  EXPECT_EQ(status_of({{5, 5}, {0, 0}, {}, {1, 2, 3, 4}}),
            "key 5 occurs twice in the deferred gradients to import; expected distinct keys");
  EXPECT_NE(status_of({{kLowest}, {0}, {}, {1, 2}}).find("cannot be deferred"), std::string::npos);
}

INSTANTIATE_TEST_SUITE_P(Devices, DeferredBuffersTest,
                         testing::Values(Processor::kCpu, Processor::kGpu),
                         [](const auto& processor) { return NameOfProcessor(processor); });

INSTANTIATE_TEST_SUITE_P(Devices, DeferredBuffersOnGpuTest, testing::Values(Processor::kGpu),
                         [](const auto& processor) { return NameOfProcessor(processor); });

}  // namespace
}  // namespace slipstream
