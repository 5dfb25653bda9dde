// Measures the two launchers of a step with deferred gradients: add, and take the due rows.
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/gpu/bench.h"
#include "benchmarks/gpu/device.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/deferral/deferred_buffers.cu.h"
#include "cc_ops/core/deferral/deferred_buffers.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 64;

void CheckDone(const Status& status, const std::string& what) {
  if (!status.ok()) throw std::runtime_error(what + ": " + status.message());
}

// Buffers of deferred gradients on the host.
struct Buffers {
  std::vector<int64_t> keys, since;
  std::vector<float> sums;

  int64_t capacity() const { return static_cast<int64_t>(keys.size()); }
  DeferredBuffers view() { return {keys.data(), since.data(), sums.data(), capacity(), kDim}; }
};

// Buffers of deferred gradients on the device.
struct BuffersOnDevice {
  explicit BuffersOnDevice(const Buffers& from)
      : keys(from.keys), since(from.since), sums(from.sums), capacity(from.capacity()) {}
  DeferredBuffers view() const { return {keys.data(), since.data(), sums.data(), capacity, kDim}; }

  OnDevice<int64_t> keys, since;
  OnDevice<float> sums;
  int64_t capacity;
};

// Returns a distinct key for each i.
int64_t KeyOf(int64_t i) { return static_cast<int64_t>(Mix64(static_cast<uint64_t>(i))); }

// Returns buffers with three of four indices in use, by keys with even numbers. Their sums began in
// the steps from `first_step` to 99.
Buffers SomeDeferred(int64_t capacity, int64_t first_step) {
  Buffers deferred;
  for (int64_t p = 0; p < capacity; ++p) {
    deferred.keys.push_back(p % 4 == 3 ? DeferredBuffers::kFree : KeyOf(2 * p));
    deferred.since.push_back(first_step + RandomBelow(7, p, 100 - first_step));
  }
  // The values repeat, because billions of them would take long.
  std::vector<float> random;
  for (int64_t i = 0; i < 1 << 20; ++i) random.push_back(RandomFloat(8, i));
  deferred.sums.resize(static_cast<size_t>(capacity * kDim));
  for (size_t i = 0; i < deferred.sums.size(); ++i) {
    deferred.sums[i] = random[i % random.size()];
  }
  return deferred;
}

// Throws unless the buffers are equal. The sums and ages of free indices are ignored.
void ExpectDeferred(const BuffersOnDevice& found, const Buffers& expected) {
  ExpectEqual(found.keys.ToHost(), expected.keys, "buffers.keys");
  const std::vector<int64_t> since = found.since.ToHost();
  const std::vector<float> sums = found.sums.ToHost();
  for (int64_t p = 0; p < expected.capacity(); ++p) {
    if (expected.keys[p] == DeferredBuffers::kFree) continue;
    const std::string place = " of index " + std::to_string(p) + ", ";
    ExpectEqual(&since[p], &expected.since[p], 1, "buffers.since" + place);
    ExpectEqual(&sums[p * kDim], &expected.sums[p * kDim], kDim, "buffers.sums" + place);
  }
}

void ExpectCounts(const StepCounts& found, const StepCounts& expected) {
  const auto numbers = [](const StepCounts& c) {
    return std::vector<int64_t>{c.deferred, c.due_by_movement, c.due_by_age,
                                c.flushed,  c.over_budget,     c.without_gradient,
                                c.sent,     c.num_deferred,    c.next_due};
  };
  ExpectEqual(numbers(found), numbers(expected), "counts");
}

void MeasureStep(Bench* bench, int64_t n, int64_t capacity, int64_t first_step) {
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < n; ++i) keys.push_back(KeyOf(i));
  std::vector<float> gradients(static_cast<size_t>(n * kDim));
  for (int64_t i = 0; i < n * kDim; ++i) gradients[i] = RandomFloat(9, i);
  std::vector<uint8_t> may_wait;
  for (int64_t i = 0; i < n; ++i) may_wait.push_back(RandomBelow(10, i, 10) < 7 ? 1 : 0);
  const DeferralRule rule = {100, 50, capacity, true, false, true};

  Buffers deferred = SomeDeferred(capacity, first_step);
  const BuffersOnDevice at_first(deferred);
  BuffersOnDevice on_device(deferred);
  std::vector<int64_t> expected_indices(keys.size());
  std::vector<float> expected_sums(gradients.size());
  CheckDone(AddDeferred(deferred.view(), keys.data(), gradients.data(), n, expected_indices.data(),
                        expected_sums.data()),
            "AddDeferred");
  int64_t found = 0;
  for (const int64_t index : expected_indices) found += index >= 0 ? 1 : 0;

  const OnDevice<int64_t> keys_on_device(keys), indices(n);
  const OnDevice<float> gradients_on_device(gradients), sums(n * kDim);
  const OnDevice<uint8_t> may_wait_on_device(may_wait);
  size_t add_bytes = 0;
  Check(AddDeferredWorkspaceBytes(n, &add_bytes), "AddDeferredWorkspaceBytes");
  const OnDevice<char> add_workspace(static_cast<int64_t>(add_bytes));
  const std::string shape = Shape(n, kDim) + ", " + std::to_string(100 * found / n) +
                            "% of them deferred, capacity " + WithCommas(capacity);
  constexpr int64_t kRow = 4 * kDim;
  bench->Measure(
      {"deferred gradients, add", shape, "keys, gradients, sums and deferred keys; indices, sums",
       8 * n + kRow * n + kRow * found + 8 * capacity + 8 * n + kRow * n, false, nullptr,
       [&](cudaStream_t stream) {
         Check(LaunchAddDeferred(stream, on_device.view(), keys_on_device.data(),
                                 gradients_on_device.data(), n, {add_workspace.data(), add_bytes},
                                 indices.data(), sums.data()),
               "LaunchAddDeferred");
       },
       [&] {
         ExpectEqual(indices.ToHost(), expected_indices, "indices");
         ExpectEqual(sums.ToHost(), expected_sums, "sums");
       }});

  // Start from the result of the CPU, so that an error in AddDeferred does not affect this case.
  const std::unique_ptr<bool[]> waits(new bool[keys.size()]);
  for (int64_t i = 0; i < n; ++i) waits[i] = may_wait[i] != 0;
  const StepRows rows = {keys.data(),          n,           expected_indices.data(),
                         expected_sums.data(), waits.get(), KeySetView()};
  StepPlan plan;
  CheckDone(FindDue(deferred.view(), rule, rows, &plan), "FindDue");
  const StepCounts& expected = plan.counts;
  KeepOthers(deferred.view(), rule, rows, plan);
  const OnDevice<int64_t> expected_indices_on_device(expected_indices);
  const OnDevice<float> expected_sums_on_device(expected_sums);
  const int64_t max_due = n + expected.without_gradient;
  size_t take_bytes = 0;
  Check(TakeDueWorkspaceBytes(n, max_due, &take_bytes), "TakeDueWorkspaceBytes");
  const OnDevice<char> take_workspace(static_cast<int64_t>(take_bytes));
  const OnDevice<int64_t> due_keys(max_due);
  const OnDevice<float> due_sums(max_due * kDim);
  const OnDevice<DeviceStepCounts> counts(1);
  const int64_t read =
      (8 + 8 + 1 + kRow) * n + (8 + 8) * capacity + kRow * expected.without_gradient;
  const int64_t written = (8 + kRow) * expected.sent + kRow * expected.deferred;
  bench->Measure(
      {"deferred gradients, take due", shape,
       "keys, indices, sums, deferred keys and ages, sums due; kept and due rows", read + written,
       false,
       [&](cudaStream_t stream) {
         CopyAsync(stream, at_first.keys, &on_device.keys);
         CopyAsync(stream, at_first.since, &on_device.since);
         CopyAsync(stream, at_first.sums, &on_device.sums);
       },
       [&](cudaStream_t stream) {
         Check(
             LaunchTakeDue(stream, on_device.view(), rule,
                           {keys_on_device.data(), n, expected_indices_on_device.data(),
                            expected_sums_on_device.data(),
                            reinterpret_cast<const bool*>(may_wait_on_device.data()), KeySetView()},
                           max_due, {take_workspace.data(), take_bytes}, due_keys.data(),
                           due_sums.data(), counts.data()),
             "LaunchTakeDue");
       },
       [&] {
         const DeviceStepCounts counted = counts.ToHost()[0];
         if (counted.invalid_row != 0) throw std::runtime_error("a row was rejected");
         ExpectCounts(counted, expected);
         ExpectDeferred(on_device, deferred);
         ExpectEqual(due_keys.ToHost(expected.sent), plan.due_keys, "due_keys");
         ExpectEqual(due_sums.ToHost(expected.sent * kDim), plan.due_sums, "due_sums");
       }});
}

}  // namespace

void MeasureDeferredGradients(Bench* bench) {
  const int64_t n = bench->Size(1 << 20, 1 << 10);
  MeasureStep(bench, n, n, 40);
  // Memory and time must not depend on the capacity, except for reading all keys and ages.
  MeasureStep(bench, bench->Size(1 << 16, 1 << 7), bench->Size(10'000'000, 1 << 13), 50);
}

}  // namespace slipstream
