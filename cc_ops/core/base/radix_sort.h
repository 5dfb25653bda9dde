// Sorts by an unsigned integer, faster than comparing for the many keys of a window's end.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_RADIX_SORT_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_RADIX_SORT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace slipstream {

// The order of int64 keys, and of float numbers from 0 with the largest first.
inline uint64_t AscendingBits(int64_t key) {
  return static_cast<uint64_t>(key) ^ (uint64_t{1} << 63);
}
inline uint64_t DescendingBits(float number) {
  uint32_t bits = 0;
  std::memcpy(&bits, &number, sizeof(bits));
  return ~bits;
}

// Sorts items by bits_of(item), an unsigned integer; equal ones keep their order. Digits that all
// items agree in cost nothing but a look. Throws std::bad_alloc, leaving items as they were.
template <class T, class BitsOf>
void RadixSort(std::vector<T>* items, const BitsOf& bits_of) {
  constexpr int kDigitBits = 11, kDigits = (64 + kDigitBits - 1) / kDigitBits;
  constexpr size_t kRadix = size_t{1} << kDigitBits;
  const auto digit_of = [&bits_of](const T& item, int digit) {
    return static_cast<size_t>(bits_of(item) >> (digit * kDigitBits)) & (kRadix - 1);
  };
  if (items->size() < 2) return;
  const uint64_t first = bits_of(items->front());
  uint64_t differing = 0;
  for (const T& item : *items) differing |= bits_of(item) ^ first;
  std::vector<T> sorted(items->size());
  for (int d = 0; d < kDigits; ++d) {
    if (((differing >> (d * kDigitBits)) & (kRadix - 1)) == 0) continue;
    std::array<size_t, kRadix> places{};
    for (const T& item : *items) ++places[digit_of(item, d)];
    size_t total = 0;
    for (size_t& place : places) total += std::exchange(place, total);
    for (const T& item : *items) sorted[places[digit_of(item, d)]++] = item;
    items->swap(sorted);
  }
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_RADIX_SORT_H_
