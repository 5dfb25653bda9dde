// For tests: all drivers of container_fuzz.h and table_fuzz.h, for random bytes and libFuzzer.
#ifndef SLIPSTREAM_CC_OPS_CORE_TESTING_FUZZ_TARGETS_H_
#define SLIPSTREAM_CC_OPS_CORE_TESTING_FUZZ_TARGETS_H_

#include <cstdint>
#include <iterator>

#include "cc_ops/core/testing/container_fuzz.h"
#include "cc_ops/core/testing/table_fuzz.h"

namespace slipstream {
namespace fuzz {

struct Target {
  const char* name;
  Difference (*run)(Bytes);
};

inline constexpr Target kTargets[] = {
    {"HashIndex", FuzzHashIndex},
    {"KeySet", FuzzKeySet},
    {"DeferredGradients", FuzzDeferredGradients},
    {"HotKeySketch", FuzzHotKeySketch},
    {"EmbeddingTable", FuzzTable},
};

// Returns the driver for an input of libFuzzer by its first byte.
inline const Target& TargetOf(uint8_t first) { return kTargets[first % std::size(kTargets)]; }

}  // namespace fuzz
}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TESTING_FUZZ_TARGETS_H_
