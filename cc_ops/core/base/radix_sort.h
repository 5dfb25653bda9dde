// Radix sort by an unsigned integer, faster than std::sort for the keys of a whole table.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_RADIX_SORT_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_RADIX_SORT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "cc_ops/core/base/parallel.h"

namespace slipstream {

// Map int64 keys and non-negative floats to unsigned integers for RadixSort, which sorts the keys
// in ascending order and the floats in descending order.
inline uint64_t AscendingBits(int64_t key) {
  return static_cast<uint64_t>(key) ^ (uint64_t{1} << 63);
}
inline uint64_t DescendingBits(float number) {
  uint32_t bits = 0;
  std::memcpy(&bits, &number, sizeof(bits));
  return ~bits;
}

// Sorts items by bits_of(item), an unsigned integer, and keeps the order of equal items. Digits
// that are the same in all items are skipped. On one thread it throws only std::bad_alloc and then
// leaves the items unchanged. On more threads it rethrows the exceptions of `parallel`.
template <class T, class BitsOf>
void RadixSort(std::vector<T>* items, const BitsOf& bits_of, const Parallel& parallel = {}) {
  constexpr int kDigitBits = 11, kDigits = (64 + kDigitBits - 1) / kDigitBits;
  constexpr size_t kRadix = size_t{1} << kDigitBits;
  constexpr int64_t kItemsPerTask = 4096;
  const auto n = static_cast<int64_t>(items->size());
  if (n < 2) return;
  const int tasks = TasksFor(n, kItemsPerTask, parallel);
  struct Counts {
    uint64_t differing = 0;
    // Number of items per digit; later the position of the next item.
    std::array<size_t, kRadix> of_digit;
  };
  std::vector<Counts> counts(static_cast<size_t>(tasks));
  std::vector<T> sorted(items->size());
  const auto for_each = [&](const auto& fn) {
    parallel.run(tasks, [&](int task) {
      const TaskRange range = RangeOf(task, tasks, n);
      Counts* const own = &counts[static_cast<size_t>(task)];
      for (int64_t i = range.begin; i < range.end; ++i) fn((*items)[i], own);
    });
  };
  const uint64_t first = bits_of(items->front());
  for_each([&](const T& item, Counts* own) { own->differing |= bits_of(item) ^ first; });
  uint64_t differing = 0;
  for (const Counts& own : counts) differing |= own.differing;
  for (int shift = 0; shift < kDigits * kDigitBits; shift += kDigitBits) {
    const auto digit_of = [&](uint64_t bits) { return (bits >> shift) & (kRadix - 1); };
    if (digit_of(differing) == 0) continue;
    for (Counts& own : counts) own.of_digit.fill(0);
    for_each([&](const T& item, Counts* own) { ++own->of_digit[digit_of(bits_of(item))]; });
    size_t total = 0;
    for (size_t digit = 0; digit < kRadix; ++digit) {
      for (Counts& own : counts) total += std::exchange(own.of_digit[digit], total);
    }
    for_each([&](const T& item, Counts* own) {
      sorted[own->of_digit[digit_of(bits_of(item))]++] = item;
    });
    items->swap(sorted);
  }
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_RADIX_SORT_H_
