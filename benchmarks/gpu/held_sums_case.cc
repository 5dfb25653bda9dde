// Both halves of a step with gradient sums that are held back.
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/gpu/bench.h"
#include "benchmarks/gpu/device.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/deferral/held_sums.cu.h"
#include "cc_ops/core/deferral/held_sums.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 64;

void CheckDone(const Status& status, const std::string& what) {
  if (!status.ok()) throw std::runtime_error(what + ": " + status.message());
}

// The buffers of held sums, on the host.
struct Buffers {
  std::vector<int64_t> keys, since;
  std::vector<float> sums;

  int64_t capacity() const { return static_cast<int64_t>(keys.size()); }
  HeldSums view() { return {keys.data(), since.data(), sums.data(), capacity(), kDim}; }
};

// The same on the device.
struct BuffersOnDevice {
  explicit BuffersOnDevice(const Buffers& from)
      : keys(from.keys), since(from.since), sums(from.sums), capacity(from.capacity()) {}
  HeldSums view() const { return {keys.data(), since.data(), sums.data(), capacity, kDim}; }

  OnDevice<int64_t> keys, since;
  OnDevice<float> sums;
  int64_t capacity;
};

// Any two are different.
int64_t KeyOf(int64_t i) { return static_cast<int64_t>(Mix64(static_cast<uint64_t>(i))); }

// Three places of four are taken, by every second key.
Buffers SomeHeld(int64_t capacity) {
  Buffers held;
  for (int64_t p = 0; p < capacity; ++p) {
    held.keys.push_back(p % 4 == 3 ? HeldSums::kFree : KeyOf(2 * p));
    held.since.push_back(40 + RandomBelow(7, p, 60));
  }
  held.sums.resize(static_cast<size_t>(capacity * kDim));
  for (int64_t i = 0; i < capacity * kDim; ++i) held.sums[i] = RandomFloat(8, i);
  return held;
}

// Places without a sum hold what was there; their keys say so.
void ExpectHeld(const BuffersOnDevice& found, const Buffers& expected) {
  ExpectEqual(found.keys.ToHost(), expected.keys, "held.keys");
  const std::vector<int64_t> since = found.since.ToHost();
  const std::vector<float> sums = found.sums.ToHost();
  for (int64_t p = 0; p < expected.capacity(); ++p) {
    if (expected.keys[p] == HeldSums::kFree) continue;
    const std::string place = " of place " + std::to_string(p) + ", ";
    ExpectEqual(&since[p], &expected.since[p], 1, "held.since" + place);
    ExpectEqual(&sums[p * kDim], &expected.sums[p * kDim], kDim, "held.sums" + place);
  }
}

void ExpectCounts(const HeldCounts& found, const HeldCounts& expected) {
  const std::vector<int64_t> found_counts = {found.held,    found.due_by_movement, found.due_by_age,
                                             found.flushed, found.refused,         found.left_alone,
                                             found.leaving};
  const std::vector<int64_t> expected_counts = {
      expected.held,    expected.due_by_movement, expected.due_by_age, expected.flushed,
      expected.refused, expected.left_alone,      expected.leaving};
  ExpectEqual(found_counts, expected_counts, "counts");
}

}  // namespace

void MeasureHeldSums(Bench* bench) {
  const int64_t n = bench->Size(1 << 20, 1 << 10), capacity = n;
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < n; ++i) keys.push_back(KeyOf(i));
  std::vector<float> gradients(static_cast<size_t>(n * kDim));
  for (int64_t i = 0; i < n * kDim; ++i) gradients[i] = RandomFloat(9, i);
  std::vector<uint8_t> may_wait;
  for (int64_t i = 0; i < n; ++i) may_wait.push_back(RandomBelow(10, i, 10) < 7 ? 1 : 0);
  const HoldRule rule = {100, 50, capacity, true, false, true};

  Buffers held = SomeHeld(capacity);
  const BuffersOnDevice at_first(held);
  BuffersOnDevice on_device(held);
  std::vector<int64_t> expected_places(keys.size());
  std::vector<float> expected_sums(gradients.size());
  CheckDone(AddToHeld(held.view(), keys.data(), gradients.data(), n, expected_places.data(),
                      expected_sums.data()),
            "AddToHeld");
  int64_t found = 0;
  for (const int64_t place : expected_places) found += place >= 0 ? 1 : 0;

  const OnDevice<int64_t> keys_on_device(keys), places(n);
  const OnDevice<float> gradients_on_device(gradients), sums(n * kDim);
  const OnDevice<uint8_t> may_wait_on_device(may_wait);
  size_t workspace_bytes = 0;
  Check(HeldSumsWorkspaceBytes(n, capacity, &workspace_bytes), "HeldSumsWorkspaceBytes");
  const OnDevice<char> workspace(static_cast<int64_t>(workspace_bytes));
  const std::string shape =
      Shape(n, kDim) + ", " + std::to_string(100 * found / n) + "% of them held";
  constexpr int64_t kRow = 4 * kDim;
  bench->Measure({"held sums, add", shape, "keys, gradients, sums and keys of places; places, sums",
                  8 * n + kRow * n + kRow * found + 8 * capacity + 8 * n + kRow * n, false, nullptr,
                  [&](cudaStream_t stream) {
                    Check(LaunchAddToHeld(stream, on_device.view(), keys_on_device.data(),
                                          gradients_on_device.data(), n, workspace.data(),
                                          workspace_bytes, places.data(), sums.data()),
                          "LaunchAddToHeld");
                  },
                  [&] {
                    ExpectEqual(places.ToHost(), expected_places, "places");
                    ExpectEqual(sums.ToHost(), expected_sums, "sums");
                  }});

  // Of the CPU's result, so that this half is judged by itself.
  const std::unique_ptr<bool[]> waits(new bool[keys.size()]);
  for (int64_t i = 0; i < n; ++i) waits[i] = may_wait[i] != 0;
  LeavingRows leaving;
  HeldCounts expected = {};
  DuePlan due;
  CheckDone(FindDue(held.view(), rule, keys.data(), n, expected_places.data(), expected_sums.data(),
                    waits.get(), KeySetView(), &due, &leaving, &expected),
            "FindDue");
  KeepOthers(held.view(), rule, keys.data(), n, expected_sums.data(), due);
  const OnDevice<int64_t> leaving_keys(n + capacity);
  const OnDevice<float> leaving_sums((n + capacity) * kDim);
  const OnDevice<HeldCounts> counts(1);
  const int64_t read = (8 + 8 + 1 + kRow) * n + (8 + 8) * capacity + kRow * expected.left_alone;
  const int64_t written = (8 + kRow) * expected.leaving + kRow * expected.held;
  bench->Measure(
      {"held sums, take due", shape,
       "keys, places, sums, keys and ages of places, sums due; kept and leaving rows",
       read + written, false,
       [&](cudaStream_t stream) {
         CopyAsync(stream, at_first.keys, &on_device.keys);
         CopyAsync(stream, at_first.since, &on_device.since);
         CopyAsync(stream, at_first.sums, &on_device.sums);
       },
       [&](cudaStream_t stream) {
         Check(
             LaunchTakeDue(stream, on_device.view(), rule, keys_on_device.data(), n, places.data(),
                           sums.data(), reinterpret_cast<const bool*>(may_wait_on_device.data()),
                           KeySetView(), workspace.data(), workspace_bytes, leaving_keys.data(),
                           leaving_sums.data(), counts.data()),
             "LaunchTakeDue");
       },
       [&] {
         ExpectCounts(counts.ToHost()[0], expected);
         ExpectHeld(on_device, held);
         ExpectEqual(leaving_keys.ToHost(expected.leaving), leaving.keys, "leaving_keys");
         ExpectEqual(leaving_sums.ToHost(expected.leaving * kDim), leaving.sums, "leaving_sums");
       }});
}

}  // namespace slipstream
