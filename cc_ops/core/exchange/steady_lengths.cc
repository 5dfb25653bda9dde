#include "cc_ops/core/exchange/steady_lengths.h"

#include <algorithm>

namespace slipstream {
namespace {

constexpr int64_t kWord = sizeof(int64_t);
// A new length adds 1 / kSpareFraction to the payload, because the number of rows varies by one or
// two percent between batches.
constexpr int64_t kSpareFraction = 32, kMinBytes = 1024;
constexpr int kMaxTooLong = 64;

}  // namespace

int64_t SteadyLengths::Of(size_t rank, int64_t bytes) {
  if (rank >= lengths_.size()) lengths_.resize(rank + 1);
  Length& last = lengths_[rank];
  const bool is_too_long = last.bytes > kMinBytes && bytes < last.bytes - last.bytes / 4;
  last.too_long = is_too_long ? last.too_long + 1 : 0;
  last.maximum = is_too_long ? std::max(last.maximum, bytes) : 0;
  if (last.bytes == 0 || bytes > last.bytes || last.too_long > kMaxTooLong) {
    const int64_t maximum = std::max(bytes, last.maximum);
    const int64_t length = std::max(maximum + maximum / kSpareFraction, kMinBytes);
    last = {(length + kWord - 1) / kWord * kWord, 0, 0};
  }
  return last.bytes;
}

}  // namespace slipstream
