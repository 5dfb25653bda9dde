// Main function of a test program: runs all tests and prints results in the format of GoogleTest.
#include <chrono>
#include <iostream>

#include "gtest/gtest.h"

int main() {
  using testing::internal::Outcome;
  int count[3] = {0, 0, 0};
  constexpr const char* kTags[3] = {"[       OK ] ", "[  SKIPPED ] ", "[  FAILED  ] "};
  for (const testing::internal::Case& each : testing::internal::Cases()) {
    std::cout << "[ RUN      ] " << each.name << std::endl;
    const auto start = std::chrono::steady_clock::now();
    const int outcome = static_cast<int>(testing::internal::RunOne(each));
    const auto spent = std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::steady_clock::now() - start);
    std::cout << kTags[outcome] << each.name << " (" << spent.count() << " ms)" << std::endl;
    ++count[outcome];
  }
  std::cout << "[  PASSED  ] " << count[static_cast<int>(Outcome::kOk)] << " tests.\n"
            << kTags[1] << count[static_cast<int>(Outcome::kSkipped)] << " tests.\n"
            << kTags[2] << count[static_cast<int>(Outcome::kFailed)] << " tests.\n";
  return count[static_cast<int>(Outcome::kFailed)] > 0 ? 1 : 0;
}
