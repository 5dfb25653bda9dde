#include "benchmarks/gpu/probed_keys.h"

#include "cc_ops/core/containers/key_probe.cu.h"

namespace slipstream {
namespace {

size_t WorkspaceBytes(int64_t n) {
  size_t bytes = 0;
  Check(ProbeWorkspaceBytes(n, &bytes), "ProbeWorkspaceBytes");
  return bytes;
}

}  // namespace

MapProbe::MapProbe(int64_t n)
    : n_(n),
      workspace_bytes_(WorkspaceBytes(n)),
      workspace_(static_cast<int64_t>(workspace_bytes_)),
      places_(n),
      hits_(n),
      misses_(n),
      num_hits_(1) {}

void MapProbe::Launch(cudaStream_t stream, const int64_t* keys, const KeyMapView& map) const {
  Check(LaunchProbe(stream, keys, n_, map, workspace_.data(), workspace_bytes_, places_.data(),
                    hits_.data(), misses_.data(), num_hits_.data()),
        "LaunchProbe");
}

void MapProbe::ExpectResults(const std::vector<int64_t>& keys, const ProbedMap& map) const {
  std::vector<int64_t> places, hits, misses;
  for (int64_t i = 0; i < n_; ++i) {
    places.push_back(map.PlaceOf(keys[i]));
    (places.back() != KeyMapEntry::kNowhere ? hits : misses).push_back(i);
  }
  const auto num_hits = static_cast<int64_t>(hits.size());
  ExpectEqual(num_hits_.ToHost(), {num_hits}, "num_hits");
  ExpectEqual(places_.ToHost(), places, "places");
  ExpectEqual(hits_.ToHost(num_hits), hits, "hits");
  ExpectEqual(misses_.ToHost(n_ - num_hits), misses, "misses");
}

void StateLookup::Launch(cudaStream_t stream, const int64_t* keys, const KeyMapView& known) const {
  Check(LaunchStateLookup(stream, keys, n_, known, states_.data()), "LaunchStateLookup");
}

void StateLookup::ExpectResults(const std::vector<int64_t>& keys, const ProbedMap& map) const {
  std::vector<uint8_t> states;
  for (const int64_t key : keys) states.push_back(map.StateOf(key));
  ExpectEqual(states_.ToHost(), states, "states");
}

}  // namespace slipstream
