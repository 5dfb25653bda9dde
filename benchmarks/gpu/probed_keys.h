// A map of keys on both sides, and batches of keys to look up in it.
#ifndef SLIPSTREAM_BENCHMARKS_GPU_PROBED_KEYS_H_
#define SLIPSTREAM_BENCHMARKS_GPU_PROBED_KEYS_H_

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "benchmarks/gpu/bench.h"
#include "benchmarks/gpu/device.h"
#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/containers/key_map.h"

namespace slipstream {

// Key i of those that are in the map (i below its size) or not (the others); never negative, since
// HierarchicalKV keeps a few negative keys for itself.
inline int64_t ProbedKey(int64_t i) {
  return static_cast<int64_t>(Mix64(static_cast<uint64_t>(i)) >> 1);
}

// Keys with their numbers as places.
class ProbedMap {
 public:
  explicit ProbedMap(int64_t size)
      : keys_(KeysOf(size)), map_(MapOf(keys_)), slots_(SlotsOf(map_)) {}

  const std::vector<int64_t>& keys() const { return keys_; }
  int64_t size() const { return static_cast<int64_t>(keys_.size()); }
  int64_t PlaceOf(int64_t key) const { return map_.view().Find(key).index; }
  uint8_t StateOf(int64_t key) const { return static_cast<uint8_t>(map_.view().Find(key).state); }
  KeyMapView on_device() const {
    KeyMapView view = map_.view();
    view.entries = slots_.data();
    return view;
  }
  int64_t bytes_on_device() const { return static_cast<int64_t>(slots_.bytes()); }

  // n keys, drawn evenly: of those in the map with probability hits_percent / 100, else of as many
  // that are not.
  std::vector<int64_t> Batch(int64_t n, int hits_percent, uint64_t seed) const {
    std::vector<int64_t> batch;
    for (int64_t i = 0; i < n; ++i) {
      const bool is_hit = RandomBelow(seed, 2 * i, 100) < hits_percent;
      const int64_t number = RandomBelow(seed, 2 * i + 1, size());
      batch.push_back(ProbedKey(is_hit ? number : size() + number));
    }
    return batch;
  }

 private:
  static std::vector<int64_t> KeysOf(int64_t size) {
    std::vector<int64_t> keys;
    for (int64_t i = 0; i < size; ++i) keys.push_back(ProbedKey(i));
    return keys;
  }
  static KeyMap MapOf(const std::vector<int64_t>& keys) {
    const auto n = static_cast<int64_t>(keys.size());
    std::vector<uint8_t> states;
    for (int64_t i = 0; i < n; ++i) states.push_back(static_cast<uint8_t>(1 + i % 4));
    KeyMap map;
    const Status status = map.Build(keys.data(), states.data(), n);
    if (!status.ok()) throw std::runtime_error(status.message());
    if (map.size() != n) throw std::logic_error("ProbedKey gives a key twice");
    return map;
  }
  static std::vector<KeyMapEntry> SlotsOf(const KeyMap& map) {
    return {map.view().entries, map.view().entries + map.view().capacity};
  }

  std::vector<int64_t> keys_;
  KeyMap map_;
  OnDevice<KeyMapEntry> slots_;
};

// What LaunchProbe needs and writes, for batches of n keys.
class MapProbe {
 public:
  explicit MapProbe(int64_t n);

  // keys: [n], in device memory.
  void Launch(cudaStream_t stream, const int64_t* keys, const KeyMapView& map) const;

  // Throws unless the last launch's results are the CPU's. keys: [n], on the host.
  void ExpectResults(const std::vector<int64_t>& keys, const ProbedMap& map) const;

 private:
  int64_t n_;
  size_t workspace_bytes_;
  OnDevice<char> workspace_;
  OnDevice<int64_t> places_, hits_, misses_, num_hits_;
};

// The same for LaunchStateLookup.
class StateLookup {
 public:
  explicit StateLookup(int64_t n) : n_(n), states_(n) {}
  void Launch(cudaStream_t stream, const int64_t* keys, const KeyMapView& known) const;
  void ExpectResults(const std::vector<int64_t>& keys, const ProbedMap& map) const;

 private:
  int64_t n_;
  OnDevice<uint8_t> states_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_BENCHMARKS_GPU_PROBED_KEYS_H_
