// For tests: makes a chosen allocation fail. A program that includes this header replaces operators
// new and delete.
#ifndef SLIPSTREAM_CC_OPS_CORE_TESTING_FAILING_MEMORY_H_
#define SLIPSTREAM_CC_OPS_CORE_TESTING_FAILING_MEMORY_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>

#include "cc_ops/core/base/status.h"

namespace {

// Number of allocations of this thread before one fails; negative if none fails.
thread_local int64_t allocations_left = -1;

void* Take(std::size_t size, std::size_t alignment) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  const std::size_t whole =
      (std::max<std::size_t>(size, 1) + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, whole);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// A separate function, because compilers warn about free in operator delete.
__attribute__((noinline)) void GiveBack(void* memory) { std::free(memory); }

}  // namespace

// All forms, because sanitizers replace each of them.
void* operator new(std::size_t size) { return Take(size, alignof(std::max_align_t)); }
void* operator new[](std::size_t size) { return Take(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return Take(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return Take(size, alignof(std::max_align_t));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { GiveBack(memory); }
void operator delete[](void* memory) noexcept { GiveBack(memory); }
void operator delete(void* memory, std::size_t) noexcept { GiveBack(memory); }
void operator delete[](void* memory, std::size_t) noexcept { GiveBack(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { GiveBack(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { GiveBack(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { GiveBack(memory); }

namespace slipstream {
namespace {

// Runs an operation in which allocation number n (from 0) fails, and returns whether the operation
// ran out of memory. Sets `has_ended` to whether the operation made at most n allocations. Expects
// that it then succeeds, and that an error names the table 'item'.
bool FailsAt(int64_t n, const std::function<Status()>& operation, bool* has_ended) {
  Status status;
  bool has_thrown = false;
  allocations_left = n;
  try {
    status = operation();
  } catch (const std::bad_alloc&) {
    has_thrown = true;
  }
  *has_ended = allocations_left >= 0;
  allocations_left = -1;
  if (*has_ended) {
    EXPECT_TRUE(!has_thrown && status.ok()) << status.message();
  }
  if (!status.ok()) {
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
    EXPECT_NE(status.message().find("table 'item' ("), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(" rows, "), std::string::npos) << status.message();
  }
  return has_thrown || !status.ok();
}

}  // namespace
}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TESTING_FAILING_MEMORY_H_
