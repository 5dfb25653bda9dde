// Measures decay and estimation of the count-min sketch of accesses.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/gpu/bench.h"
#include "benchmarks/gpu/device.h"
#include "cc_ops/core/hot_keys/access_sketch.cu.h"
#include "cc_ops/core/hot_keys/access_sketch.h"

namespace slipstream {

void MeasureAccessSketch(Bench* bench) {
  const int log2_width = static_cast<int>(bench->Size(24, 12));
  const int64_t n = bench->Size(1 << 23, 1 << 10);
  constexpr uint64_t kDecay = kNoDecay / 10 * 9;
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < n; ++i) keys.push_back(RandomBelow(11, i, n));

  std::vector<int64_t> counters(static_cast<size_t>(AccessSketch::kRows) << log2_width, 0);
  const AccessSketch expected = {counters.data(), log2_width};
  const int64_t num_counters = expected.NumCounters();
  for (int64_t key : keys) {
    for (int row = 0; row < AccessSketch::kRows; ++row) ++*expected.Counter(row, key);
  }
  const std::vector<int64_t> added = counters;

  const OnDevice<int64_t> after_adding(added), keys_on_device(keys);
  OnDevice<int64_t> on_device(num_counters);
  const AccessSketch sketch = {on_device.data(), log2_width};
  const std::string width =
      ", sketch of " + std::to_string(static_cast<int64_t>(on_device.bytes()) >> 20) + " MiB";
  constexpr int64_t kCounters = 8 * AccessSketch::kRows;  // Bytes of the counters of a key.
  const auto restore = [&](cudaStream_t stream) { CopyAsync(stream, after_adding, &on_device); };

  bench->Measure({"access sketch, decay", WithCommas(num_counters) + " counters",
                  "counters read and written", 16 * num_counters, true, restore,
                  [&](cudaStream_t stream) {
                    Check(LaunchDecayAccesses(stream, sketch, kDecay), "LaunchDecayAccesses");
                  },
                  [&] {
                    DecayAccesses(expected, kDecay);
                    ExpectEqual(on_device.ToHost(), counters, "counters");
                    std::copy(added.begin(), added.end(), counters.begin());
                  }});

  const OnDevice<int64_t> estimates(n);
  bench->Measure(
      {"access sketch, estimate", WithCommas(n) + " keys" + width,
       "keys, 4 counters of a key; estimates", (8 + kCounters + 8) * n, false, restore,
       [&](cudaStream_t stream) {
         Check(LaunchEstimateAccesses(stream, sketch, keys_on_device.data(), n, estimates.data()),
               "LaunchEstimateAccesses");
       },
       [&] {
         std::vector<int64_t> expected_estimates(keys.size());
         EstimateAccesses(expected, keys.data(), n, expected_estimates.data());
         ExpectEqual(estimates.ToHost(), expected_estimates, "estimates");
       }});
}

}  // namespace slipstream
