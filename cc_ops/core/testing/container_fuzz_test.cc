#include "cc_ops/core/testing/container_fuzz.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "cc_ops/core/testing/fuzz_targets.h"

namespace slipstream {
namespace fuzz {
namespace {

// Runs random bytes for SLIPSTREAM_FUZZ_SECONDS, or a fixed number of cases. A failure prints its
// seed.
class Containers : public testing::TestWithParam<Target> {};

TEST_P(Containers, EqualStandardContainers) {
  constexpr uint64_t kCases = 1000;
  const char* const seconds = std::getenv("SLIPSTREAM_FUZZ_SECONDS");
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::seconds(seconds == nullptr ? 0 : std::atoll(seconds));
  uint64_t seed = 0;
  for (; seconds == nullptr ? seed < kCases : std::chrono::steady_clock::now() < end; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<uint8_t> bytes(random() % (seed % 16 == 0 ? 20000 : 1000));
    // Half of the cases use few distinct bytes, so that keys and calls repeat.
    const uint64_t range = random() % 2 == 0 ? 256 : 1 + random() % 64;
    const uint64_t first = random();
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(first + random() % range);
    ASSERT_EQ(GetParam().run(Bytes(bytes.data(), bytes.size())), "") << "seed " << seed;
  }
  RecordProperty("cases", static_cast<int>(seed));
}

INSTANTIATE_TEST_SUITE_P(All, Containers, testing::ValuesIn(kTargets),
                         [](const testing::TestParamInfo<Target>& info) {
                           return std::string(info.param.name);
                         });

// Inputs from libFuzzer that together reach all code that it reached, and an input for which counts
// were once rounded differently.
TEST(Corpus, EqualsStandardContainers) {
  int files = 0;
  for (const auto& file :
       std::filesystem::directory_iterator("cc_ops/core/testing/container_corpus")) {
    std::ifstream stream(file.path(), std::ios::binary);
    const std::vector<char> read{std::istreambuf_iterator<char>(stream), {}};
    const std::vector<uint8_t> bytes(read.begin(), read.end());
    ASSERT_FALSE(bytes.empty()) << file.path();
    const Target& target = TargetOf(bytes[0]);
    ASSERT_EQ(target.run(Bytes(bytes.data() + 1, bytes.size() - 1)), "")
        << target.name << ", " << file.path();
    ++files;
  }
  EXPECT_GT(files, 0);
}

TEST(KeyWithHash, InvertsHash) {
  for (uint64_t hash : {uint64_t{0}, uint64_t{1}, ~uint64_t{0}, uint64_t{0x123456789abcdef}}) {
    EXPECT_EQ(HashKey(KeyWithHash(hash)), hash);
  }
}

}  // namespace
}  // namespace fuzz
}  // namespace slipstream
