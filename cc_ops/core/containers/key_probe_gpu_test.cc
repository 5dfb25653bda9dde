// The key probes on the CPU and, where there is one, on a GPU, both against a plain reference.
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/containers/key_map.h"
#include "cc_ops/core/containers/key_probe.h"
#include "cc_ops/core/testing/test_gpu.h"
#include "cc_ops/core/testing/test_threads.h"
#include "gtest/gtest.h"

#ifdef SLIPSTREAM_WITH_CUDA
#include "cc_ops/core/containers/key_probe.cu.h"
#endif

namespace slipstream {
namespace {

struct Probed {
  std::vector<int64_t> indices, hits, misses;
};

Probed ProbeOnCpu(const std::vector<int64_t>& keys, const KeyMap& map, int threads) {
  const auto n = static_cast<int64_t>(keys.size());
  Probed result;
  result.indices.resize(keys.size());
  const int64_t hits =
      ProbeKeys(keys.data(), n, map.view(), Threads(threads), result.indices.data());
  result.hits.resize(static_cast<size_t>(hits));
  result.misses.resize(static_cast<size_t>(n - hits));
  SplitProbed(result.indices.data(), n, result.hits.data(), result.misses.data());
  return result;
}

std::vector<uint8_t> StatesOnCpu(const std::vector<int64_t>& keys, const KeyMap& known,
                                 int threads) {
  std::vector<uint8_t> states(keys.size(), 77);
  LookUpStates(keys.data(), static_cast<int64_t>(keys.size()), known.view(), Threads(threads),
               states.data());
  return states;
}

#ifdef SLIPSTREAM_WITH_CUDA
std::vector<KeyMapEntry> EntriesOf(const KeyMap& map) {
  return {map.view().entries, map.view().entries + map.view().capacity};
}

Probed ProbeOnGpu(const std::vector<int64_t>& keys, const KeyMap& map) {
  const auto n = static_cast<int64_t>(keys.size());
  OnDevice<KeyMapEntry> entries(EntriesOf(map));
  KeyMapView view = map.view();
  view.entries = entries.data();
  size_t bytes = 0;
  EXPECT_EQ(ProbeWorkspaceBytes(n, &bytes), cudaSuccess);
  OnDevice<char> workspace(bytes);
  OnDevice<int64_t> device_keys(keys), indices(keys.size()), hits(keys.size()), misses(keys.size()),
      num_hits(1);
  const TestStream stream;
  const auto launch = [&](size_t given) {
    return LaunchProbe(stream.get(), device_keys.data(), n, view, workspace.data(), given,
                       indices.data(), hits.data(), misses.data(), num_hits.data());
  };
  if (bytes > 0) {
    EXPECT_EQ(launch(bytes - 1), cudaErrorInvalidValue);
  }
  EXPECT_EQ(launch(bytes), cudaSuccess);
  stream.Wait();
  const int64_t found = num_hits.ToHost()[0];
  return {indices.ToHost(), hits.ToHost(static_cast<size_t>(found)),
          misses.ToHost(static_cast<size_t>(n - found))};
}

std::vector<uint8_t> StatesOnGpu(const std::vector<int64_t>& keys, const KeyMap& known) {
  OnDevice<KeyMapEntry> entries(EntriesOf(known));
  KeyMapView view = known.view();
  view.entries = entries.data();
  OnDevice<int64_t> device_keys(keys);
  OnDevice<uint8_t> states(std::vector<uint8_t>(keys.size(), 77));
  const TestStream stream;
  EXPECT_EQ(LaunchStateLookup(stream.get(), device_keys.data(), static_cast<int64_t>(keys.size()),
                              view, states.data()),
            cudaSuccess);
  stream.Wait();
  return states.ToHost();
}
#endif

class KeyProbeTest : public OnProcessors {
 protected:
  void ExpectReference(const std::vector<int64_t>& keys, const std::vector<int64_t>& known) {
    std::unordered_map<int64_t, int64_t> index_of;
    std::vector<uint8_t> states;
    for (size_t i = 0; i < known.size(); ++i) {
      index_of.emplace(known[i], static_cast<int64_t>(i));
      states.push_back(static_cast<uint8_t>(i % 5));
    }
    KeyMap map;
    ASSERT_TRUE(map.Build(known.data(), states.data(), static_cast<int64_t>(known.size())).ok());
    Probed expected;
    std::vector<uint8_t> expected_states;
    for (size_t i = 0; i < keys.size(); ++i) {
      const auto found = index_of.find(keys[i]);
      const bool is_hit = found != index_of.end();
      expected.indices.push_back(is_hit ? found->second : -1);
      (is_hit ? expected.hits : expected.misses).push_back(static_cast<int64_t>(i));
      expected_states.push_back(is_hit ? states[found->second] : 0);
    }
    for (int threads :
         GetParam() == Processor::kCpu ? std::vector<int>{1, 3} : std::vector<int>{0}) {
      const Probed probed = Probe(keys, map, threads);
      EXPECT_EQ(probed.indices, expected.indices);
      EXPECT_EQ(probed.hits, expected.hits);
      EXPECT_EQ(probed.misses, expected.misses);
      EXPECT_EQ(States(keys, map, threads), expected_states);
    }
  }

 private:
  Probed Probe(const std::vector<int64_t>& keys, const KeyMap& map, int threads) {
#ifdef SLIPSTREAM_WITH_CUDA
    if (GetParam() == Processor::kGpu) return ProbeOnGpu(keys, map);
#endif
    return ProbeOnCpu(keys, map, threads);
  }
  std::vector<uint8_t> States(const std::vector<int64_t>& keys, const KeyMap& known, int threads) {
#ifdef SLIPSTREAM_WITH_CUDA
    if (GetParam() == Processor::kGpu) return StatesOnGpu(keys, known);
#endif
    return StatesOnCpu(keys, known, threads);
  }
};

std::vector<int64_t> SomeKeys(int64_t n, int64_t different, uint64_t seed) {
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t random = Mix64(seed + static_cast<uint64_t>(i));
    keys.push_back(static_cast<int64_t>(random % static_cast<uint64_t>(different)) - different / 3);
  }
  return keys;
}

TEST_P(KeyProbeTest, EqualsTheReference) {
  for (int64_t n : {0, 1, 255, 256, 257, 5000, 30000}) {
    for (int64_t known : {0, 1, 8, 9, 4000}) {
      for (int64_t different : {1, 50, 9000}) {
        ExpectReference(SomeKeys(n, different, 1), SomeKeys(known, different, 2));
      }
    }
  }
}

TEST_P(KeyProbeTest, NothingAndEverythingIsInTheMap) {
  const std::vector<int64_t> keys = SomeKeys(1000, 100, 1);
  ExpectReference(keys, {});
  ExpectReference(keys, keys);
  ExpectReference({}, keys);
}

TEST_P(KeyProbeTest, EveryInt64IsAKey) {
  constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
  constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();
  const std::vector<int64_t> keys = {kHighest, -1, kLowest, 0, kHighest, kLowest + 1, kLowest, 1};
  for (int64_t key : keys) ExpectReference(keys, {key});
  ExpectReference(keys, {0, kLowest, -1});
}

INSTANTIATE_TEST_SUITE_P(Devices, KeyProbeTest, testing::Values(Processor::kCpu, Processor::kGpu),
                         [](const auto& processor) { return NameOfProcessor(processor); });

}  // namespace
}  // namespace slipstream
