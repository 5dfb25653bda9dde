// The held sums on the CPU and, where there is one, on a GPU, both against a plain reference, over
// many steps.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/containers/key_set.h"
#include "cc_ops/core/deferral/held_sums.h"
#include "cc_ops/core/testing/test_gpu.h"
#include "gtest/gtest.h"

#ifdef SLIPSTREAM_WITH_CUDA
#include "cc_ops/core/deferral/held_sums.cu.h"
#endif

namespace slipstream {
namespace {

// A whole second half on the CPU.
Status TakeDue(const HeldSums& held, const HoldRule& rule, const int64_t* keys, int64_t n,
               const int64_t* places, const float* sums, const bool* may_wait,
               const KeySetView& marked, LeavingRows* leaving, HeldCounts* counts) {
  DuePlan plan;
  const Status status =
      FindDue(held, rule, keys, n, places, sums, may_wait, marked, &plan, leaving, counts);
  if (status.ok()) KeepOthers(held, rule, keys, n, sums, plan);
  return status;
}

using Row = std::vector<float>;

// A step's gradients: keys ascend.
struct Gradients {
  std::vector<int64_t> keys;
  std::vector<float> values;  // [keys, dim]
};

struct Left {
  std::vector<int64_t> keys;
  std::vector<float> sums;
  HeldCounts counts;
};

// What may wait, by a rule that looks at the sums as a caller does between the halves.
bool IsSmall(const float* sum, int64_t dim) {
  float largest = 0.0f;
  for (int64_t j = 0; j < dim; ++j) largest = std::max(largest, std::fabs(sum[j]));
  return largest < 60.0f;
}

// The buffers, and both halves of a step over them.
class Holder {
 public:
  Holder(int64_t capacity, int64_t dim) : capacity_(capacity), dim_(dim) {}
  virtual ~Holder() = default;
  virtual Left Step(const HoldRule& rule, const Gradients& gradients, const KeySet& marked) = 0;

 protected:
  // std::vector<bool> has no data.
  std::unique_ptr<bool[]> WhatMayWait(const std::vector<float>& sums, int64_t n) const {
    std::unique_ptr<bool[]> may_wait(new bool[static_cast<size_t>(n) + 1]);
    for (int64_t i = 0; i < n; ++i) may_wait[i] = IsSmall(sums.data() + i * dim_, dim_);
    return may_wait;
  }

  int64_t capacity_, dim_;
};

class HolderOnCpu : public Holder {
 public:
  HolderOnCpu(int64_t capacity, int64_t dim)
      : Holder(capacity, dim),
        keys_(capacity, HeldSums::kFree),
        since_(capacity),
        sums_(capacity * dim) {}

  Left Step(const HoldRule& rule, const Gradients& gradients, const KeySet& marked) override {
    const auto n = static_cast<int64_t>(gradients.keys.size());
    const HeldSums held = {keys_.data(), since_.data(), sums_.data(), capacity_, dim_};
    std::vector<int64_t> places(gradients.keys.size());
    std::vector<float> sums(gradients.values.size());
    EXPECT_TRUE(AddToHeld(held, gradients.keys.data(), gradients.values.data(), n, places.data(),
                          sums.data())
                    .ok());
    LeavingRows leaving;
    HeldCounts counts;
    EXPECT_TRUE(TakeDue(held, rule, gradients.keys.data(), n, places.data(), sums.data(),
                        WhatMayWait(sums, n).get(), marked.view(), &leaving, &counts)
                    .ok());
    return {leaving.keys, leaving.sums, counts};
  }

 private:
  std::vector<int64_t> keys_, since_;
  std::vector<float> sums_;
};

#ifdef SLIPSTREAM_WITH_CUDA
class HolderOnGpu : public Holder {
 public:
  HolderOnGpu(int64_t capacity, int64_t dim)
      : Holder(capacity, dim),
        keys_(std::vector<int64_t>(capacity, HeldSums::kFree)),
        since_(std::vector<int64_t>(capacity, 0)),
        sums_(std::vector<float>(capacity * dim, 0.0f)) {}

  Left Step(const HoldRule& rule, const Gradients& gradients, const KeySet& marked) override {
    const auto n = static_cast<int64_t>(gradients.keys.size());
    const HeldSums held = {keys_.data(), since_.data(), sums_.data(), capacity_, dim_};
    size_t bytes = 0;
    EXPECT_EQ(HeldSumsWorkspaceBytes(n, capacity_, &bytes), cudaSuccess);
    OnDevice<char> workspace(bytes);
    OnDevice<int64_t> keys(gradients.keys), places(gradients.keys.size());
    OnDevice<float> values(gradients.values), sums(gradients.values.size());
    const TestStream stream;
    const auto add = [&](size_t given) {
      return LaunchAddToHeld(stream.get(), held, keys.data(), values.data(), n, workspace.data(),
                             given, places.data(), sums.data());
    };
    EXPECT_EQ(add(bytes - 1), cudaErrorInvalidValue);
    EXPECT_EQ(add(bytes), cudaSuccess);
    stream.Wait();

    const std::unique_ptr<bool[]> waits = WhatMayWait(sums.ToHost(), n);
    OnDevice<bool> may_wait(gradients.keys.size());
    EXPECT_EQ(
        cudaMemcpy(may_wait.data(), waits.get(), gradients.keys.size(), cudaMemcpyHostToDevice),
        cudaSuccess);
    KeySetView view = marked.view();
    OnDevice<KeySetEntry> entries(
        std::vector<KeySetEntry>(view.entries, view.entries + view.capacity));
    view.entries = entries.data();
    OnDevice<int64_t> leaving_keys(static_cast<size_t>(n + capacity_));
    OnDevice<float> leaving_sums(static_cast<size_t>((n + capacity_) * dim_));
    OnDevice<HeldCounts> counts(1);
    EXPECT_EQ(LaunchTakeDue(stream.get(), held, rule, keys.data(), n, places.data(), sums.data(),
                            rule.by_movement ? may_wait.data() : nullptr, view, workspace.data(),
                            bytes, leaving_keys.data(), leaving_sums.data(), counts.data()),
              cudaSuccess);
    stream.Wait();
    const HeldCounts found = counts.ToHost()[0];
    return {leaving_keys.ToHost(static_cast<size_t>(found.leaving)),
            leaving_sums.ToHost(static_cast<size_t>(found.leaving * dim_)), found};
  }

 private:
  OnDevice<int64_t> keys_, since_;
  OnDevice<float> sums_;
};
#endif

// The definition: a map from keys to sums.
class Reference {
 public:
  Reference(int64_t capacity, int64_t dim) : capacity_(capacity), dim_(dim) {}

  Left Step(const HoldRule& rule, const Gradients& gradients, const KeySet& marked) {
    Left left = {};
    std::map<int64_t, Row> leaving;
    const bool may_hold = rule.defers && !rule.lets_go;
    std::vector<size_t> wait_for_room;
    std::map<int64_t, Row> sums;
    for (size_t i = 0; i < gradients.keys.size(); ++i) {
      const int64_t key = gradients.keys[i];
      const auto found = held_.find(key);
      Row sum(gradients.values.begin() + i * dim_, gradients.values.begin() + (i + 1) * dim_);
      bool is_sound = true;
      for (int64_t j = 0; j < dim_; ++j) {
        sum[j] += found == held_.end() ? 0.0f : found->second.sum[j];
        is_sound = is_sound && std::isfinite(sum[j]);
      }
      const bool is_old = found != held_.end() && rule.step - found->second.since >= rule.max_age;
      bool waits = rule.by_movement ? IsSmall(sum.data(), dim_) : marked.Contains(key);
      waits = waits && is_sound && !is_old && may_hold;
      sums[key] = sum;
      if (waits && found != held_.end()) {
        found->second.sum = sum;
        ++left.counts.held;
      } else if (waits) {
        wait_for_room.push_back(i);
      } else {
        leaving[key] = sum;
        left.counts.due_by_age += is_old;
        left.counts.due_by_movement += !is_old && rule.by_movement && may_hold;
        if (found != held_.end()) held_.erase(found);
      }
    }
    for (auto next = held_.begin(); next != held_.end();) {
      const auto here = next++;
      if (!rule.lets_go && rule.step - here->second.since < rule.max_age) continue;
      leaving[here->first] = here->second.sum;
      held_.erase(here);
      ++left.counts.left_alone;
    }
    (rule.lets_go ? left.counts.flushed : left.counts.due_by_age) += left.counts.left_alone;
    for (size_t i : wait_for_room) {
      const int64_t key = gradients.keys[i];
      if (static_cast<int64_t>(held_.size()) < std::min(capacity_, rule.max_rows)) {
        held_[key] = {rule.step, sums[key]};
        ++left.counts.held;
      } else {
        leaving[key] = sums[key];
        ++left.counts.refused;
      }
    }
    for (const auto& [key, sum] : leaving) {
      left.keys.push_back(key);
      left.sums.insert(left.sums.end(), sum.begin(), sum.end());
    }
    left.counts.leaving = static_cast<int64_t>(left.keys.size());
    left.counts.pending = static_cast<int64_t>(held_.size());
    return left;
  }

 private:
  struct Held {
    int64_t since = 0;
    Row sum;
  };
  int64_t capacity_, dim_;
  std::map<int64_t, Held> held_;
};

std::array<int64_t, 8> Numbers(const HeldCounts& counts) {
  return {counts.held,    counts.due_by_movement, counts.due_by_age, counts.flushed,
          counts.refused, counts.left_alone,      counts.leaving,    counts.pending};
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
  KeySet marked;
  EXPECT_TRUE(marked.Build(keys.data(), static_cast<int64_t>(keys.size())).ok());
  return marked;
}

class HeldSumsTest : public OnPlaces {
 protected:
  std::unique_ptr<Holder> MakeHolder(int64_t capacity, int64_t dim) {
#ifdef SLIPSTREAM_WITH_CUDA
    if (GetParam() == Place::kGpu) return std::make_unique<HolderOnGpu>(capacity, dim);
#endif
    return std::make_unique<HolderOnCpu>(capacity, dim);
  }

  static void ExpectEqual(const Left& left, const Left& expected, const std::string& place) {
    EXPECT_EQ(left.keys, expected.keys) << place;
    EXPECT_EQ(Numbers(left.counts), Numbers(expected.counts)) << place;
    ASSERT_EQ(left.sums.size(), expected.sums.size()) << place;
    // Bit for bit: a NaN equals itself, and -0 is not 0.
    const size_t bytes = left.sums.size() * sizeof(float);
    EXPECT_TRUE(bytes == 0 || std::memcmp(left.sums.data(), expected.sums.data(), bytes) == 0)
        << place;
  }

  // Twenty steps, with a change of mind: nothing more is held from the 15th on, and step 18 lets
  // go.
  void ExpectReference(int64_t capacity, int64_t dim, int64_t n, int64_t different, HoldRule rule) {
    const std::unique_ptr<Holder> holder = MakeHolder(capacity, dim);
    Reference reference(capacity, dim);
    const KeySet marked = EverySecondOf(different);
    for (int64_t step = 1; step <= 20; ++step) {
      rule.step = step;
      rule.defers = step < 15;
      rule.lets_go = step == 9 || step == 18;
      const Gradients gradients =
          SomeGradients(step % 6 == 5 ? 0 : n, dim, different, static_cast<uint64_t>(step));
      ExpectEqual(holder->Step(rule, gradients, marked), reference.Step(rule, gradients, marked),
                  "step " + std::to_string(step) + ", capacity " + std::to_string(capacity) +
                      ", dim " + std::to_string(dim) + ", rows " + std::to_string(n));
    }
  }
};

TEST_P(HeldSumsTest, EqualsTheReference) {
  for (bool by_movement : {false, true}) {
    for (int64_t n : {1, 40, 700}) {
      for (int64_t dim : {1, 5, 33}) {
        for (int64_t capacity : {0, 1, 17, 300, 2000}) {
          HoldRule rule = {};
          rule.max_age = 4;
          rule.max_rows = 1000;
          rule.by_movement = by_movement;
          ExpectReference(capacity, dim, n, 900, rule);
        }
      }
    }
  }
}

TEST_P(HeldSumsTest, NoMoreAreHeldThanAllowed) {
  for (int64_t max_rows : {0, 1, 16, 299}) {
    for (int64_t max_age : {1, 1000}) {
      HoldRule rule = {};
      rule.max_age = max_age;
      rule.max_rows = max_rows;
      ExpectReference(300, 2, 200, 400, rule);
    }
  }
}

TEST_P(HeldSumsTest, MoreMayBeHeldThanAllowedNow) {
  const std::unique_ptr<Holder> holder = MakeHolder(8, 1);
  HoldRule rule = {1, 100, 8, true, false, false};
  const KeySet marked = EverySecondOf(20);
  const auto held = [&](int64_t max_rows, const std::vector<int64_t>& keys) {
    ++rule.step;
    rule.max_rows = max_rows;
    return holder->Step(rule, {keys, std::vector<float>(keys.size(), 1.0f)}, marked).counts.held;
  };
  EXPECT_EQ(held(8, {-2, 0, 2}), 3);
  EXPECT_EQ(held(2, {0, 4}), 1);
  EXPECT_EQ(held(4, {4, 6}), 1);
}

TEST_P(HeldSumsTest, SumsThatAreNotFiniteLeaveAtOnce) {
  const std::unique_ptr<Holder> holder = MakeHolder(4, 40);
  const KeySet marked = EverySecondOf(20);
  HoldRule rule = {1, 100, 4, true, false, false};
  std::vector<float> values(80, 1.0f);
  EXPECT_TRUE(holder->Step(rule, {{2, 4}, values}, marked).keys.empty());
  values[79] = std::numeric_limits<float>::infinity();
  values[3] = -0.0f;
  ++rule.step;
  const Left left = holder->Step(rule, {{2, 4}, values}, marked);
  EXPECT_EQ(left.keys, std::vector<int64_t>{4});
  EXPECT_EQ(left.sums[0], 2.0f);
  EXPECT_TRUE(std::isinf(left.sums[39]));
  values[79] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(holder->Step(rule, {{2, 4}, values}, marked).keys, std::vector<int64_t>{4});
}

constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();

TEST_P(HeldSumsTest, TheLowestKeyLeavesAtOnce) {
  KeySet marked;
  ASSERT_TRUE(marked.Build(&kLowest, 1).ok());
  for (bool by_movement : {false, true}) {
    const std::unique_ptr<Holder> holder = MakeHolder(4, 1);
    const HoldRule rule = {1, 100, 4, true, false, by_movement};
    const Left left = holder->Step(rule, {{kLowest}, {1}}, marked);
    EXPECT_EQ(left.keys, std::vector<int64_t>{kLowest});
    EXPECT_EQ(left.sums, std::vector<float>{1});
    EXPECT_EQ(left.counts.pending, 0);
  }
}

TEST_P(HeldSumsTest, AllKeysButTheLowestCanBeHeld) {
  const std::vector<int64_t> keys = {kLowest + 1, -1, 0, kHighest};
  KeySet marked;
  ASSERT_TRUE(marked.Build(keys.data(), 4).ok());
  const std::unique_ptr<Holder> holder = MakeHolder(6, 1);
  HoldRule rule = {1, 100, 6, true, false, false};
  EXPECT_TRUE(holder->Step(rule, {keys, {1, 2, 3, 4}}, marked).keys.empty());
  rule.lets_go = true;
  const Left left = holder->Step(rule, {{0, 5}, {10, 20}}, marked);
  EXPECT_EQ(left.keys, (std::vector<int64_t>{kLowest + 1, -1, 0, 5, kHighest}));
  EXPECT_EQ(left.sums, (std::vector<float>{1, 2, 13, 20, 4}));
}

TEST(HeldSumsOnCpuTest, WhatIsHeldMovesToOtherBuffers) {
  std::vector<int64_t> keys = {HeldSums::kFree, 7, HeldSums::kFree, -3}, since = {0, 5, 0, 6};
  std::vector<float> sums = {0, 0, 1, 2, 0, 0, 3, 4};
  std::vector<int64_t> other_keys(3), other_since(3);
  std::vector<float> other_sums(6);
  CopyHeld({keys.data(), since.data(), sums.data(), 4, 2},
           {other_keys.data(), other_since.data(), other_sums.data(), 3, 2});
  EXPECT_EQ(other_keys, (std::vector<int64_t>{7, -3, HeldSums::kFree}));
  EXPECT_EQ(other_since, (std::vector<int64_t>{5, 6, 0}));
  EXPECT_EQ(other_sums, (std::vector<float>{1, 2, 3, 4, 0, 0}));
}

TEST(HeldSumsOnCpuTest, WhatCannotBeIsRefused) {
  std::vector<int64_t> held_keys = {7, HeldSums::kFree}, since = {1, 0};
  std::vector<float> held_sums = {1, 2};
  const HeldSums held = {held_keys.data(), since.data(), held_sums.data(), 2, 1};
  const std::vector<int64_t> twice = {5, 7, 5};
  std::vector<int64_t> places(3);
  std::vector<float> sums(3);
  const Status added = AddToHeld(held, twice.data(), sums.data(), 3, places.data(), sums.data());
  EXPECT_EQ(added.message(), "keys[0] and keys[2] are both 5; allowed: each key once");
  const bool may_wait = true;
  const HoldRule rule = {2, 9, 9, true, false, true};
  for (int64_t place : {-2, 1, 2}) {
    LeavingRows leaving;
    HeldCounts counts;
    const Status taken = TakeDue(held, rule, &held_keys[0], 1, &place, sums.data(), &may_wait,
                                 KeySetView(), &leaving, &counts);
    EXPECT_NE(taken.message().find("places[0] is " + std::to_string(place)), std::string::npos);
    EXPECT_EQ(held_keys[0], 7);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, HeldSumsTest, testing::Values(Place::kCpu, Place::kGpu),
                         [](const auto& place) { return NameOfPlace(place); });

}  // namespace
}  // namespace slipstream
