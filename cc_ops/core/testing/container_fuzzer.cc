// The drivers under libFuzzer (`make fuzz`, requires clang). The first byte selects a driver.
#include <cstdint>
#include <cstdio>

#include "cc_ops/core/testing/fuzz_targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const slipstream::fuzz::Target& target = slipstream::fuzz::TargetOf(data[0]);
  const slipstream::fuzz::Difference difference =
      target.run(slipstream::fuzz::Bytes(data + 1, size - 1));
  if (!difference.empty()) {
    std::fprintf(stderr, "%s: %s\n", target.name, difference.c_str());
    __builtin_trap();
  }
  return 0;
}
