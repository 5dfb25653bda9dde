// The key probes as memory traffic; probe_turns.cc has them beside another library.
#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/gpu/bench.h"
#include "benchmarks/gpu/device.h"
#include "benchmarks/gpu/probed_keys.h"

namespace slipstream {

void MeasureKeyProbe(Bench* bench) {
  const int64_t n = bench->Size(1 << 24, 1 << 10);
  // A map that stays in the cache, and one that does not.
  for (const int64_t size : {bench->Size(1 << 18, 1 << 8), bench->Size(1 << 24, 1 << 10)}) {
    const ProbedMap map(size);
    const std::vector<int64_t> keys = map.Batch(n, 50, 12);
    const OnDevice<int64_t> keys_on_device(keys);
    const StateLookup lookup(n);
    const MapProbe probe(n);
    const std::string shape =
        WithCommas(n) + " keys, map of " + std::to_string(map.bytes_on_device() >> 20) + " MiB";
    bench->Measure({"state lookup", shape, "keys; states (not the map)", (8 + 1) * n, false,
                    nullptr,
                    [&](cudaStream_t stream) {
                      lookup.Launch(stream, keys_on_device.data(), map.on_device());
                    },
                    [&] { lookup.ExpectResults(keys, map); }});
    bench->Measure(
        {"map probe", shape, "keys; places, positions (not the map)", (8 + 8 + 8) * n, false,
         nullptr,
         [&](cudaStream_t stream) { probe.Launch(stream, keys_on_device.data(), map.on_device()); },
         [&] { probe.ExpectResults(keys, map); }});
  }
}

}  // namespace slipstream
