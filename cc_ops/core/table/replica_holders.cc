#include "cc_ops/core/table/replica_holders.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <string>
#include <utility>

namespace slipstream {

Status ReplicaHolders::SetReplicated(const int64_t* keys, int64_t n, int64_t stride, int ranks,
                                     float movement) {
  KeyMap map;
  const Status status = map.Build(keys, nullptr, n);
  if (!status.ok()) return status;
  const bool is_known = stride == stride_ && ranks == ranks_;
  const int64_t holder_bytes = HolderBytes(ranks);
  std::vector<int64_t> new_keys;
  std::vector<float> rows;
  std::vector<uint8_t> holders;
  try {
    new_keys.assign(keys, keys + n);
    rows.resize(static_cast<size_t>(n * stride));
    holders.resize(static_cast<size_t>(n * holder_bytes));
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("out of memory for the last sent values of " + std::to_string(n) +
                             " rows");
  }
  for (int64_t i = 0; is_known && i < n; ++i) {
    const int32_t index = Find(keys[i]);
    if (index == kNowhere) continue;
    std::copy_n(rows_.begin() + index * stride, stride, rows.begin() + i * stride);
    std::copy_n(holders_.begin() + index * holder_bytes, holder_bytes,
                holders.begin() + i * holder_bytes);
  }
  map_ = std::move(map);
  keys_ = std::move(new_keys);
  rows_ = std::move(rows);
  holders_ = std::move(holders);
  stride_ = stride;
  ranks_ = ranks;
  movement_ = movement;
  return OkStatus();
}

int64_t ReplicaHolders::bytes() const {
  return map_.view().bytes() +
         static_cast<int64_t>(keys_.capacity() * sizeof(int64_t) +
                              rows_.capacity() * sizeof(float) + holders_.capacity());
}

const float* ReplicaHolders::Current(int32_t index, const float* row, int64_t dim) {
  float* sent = rows_.data() + index * stride_;
  const int64_t holder_bytes = HolderBytes(ranks_);
  uint8_t* holders = holders_.data() + index * holder_bytes;
  const bool has_holders =
      std::any_of(holders, holders + holder_bytes, [](uint8_t bits) { return bits != 0; });
  bool is_close = has_holders;
  // A distance that is no number is not close.
  for (int64_t j = 0; j < dim && is_close; ++j) is_close = std::fabs(row[j] - sent[j]) <= movement_;
  if (!is_close) {
    std::copy_n(row, stride_, sent);
    std::fill_n(holders, holder_bytes, uint8_t{0});
  }
  return sent;
}

Status ReplicaHolders::Import(ReplicaContents contents, int64_t stride, int ranks) {
  const int64_t n = static_cast<int64_t>(contents.keys.size());
  if (static_cast<int64_t>(contents.rows.size()) != n * stride ||
      static_cast<int64_t>(contents.holders.size()) != n * HolderBytes(ranks)) {
    return InvalidArgument("the last sent values of " + std::to_string(n) + " rows are " +
                           std::to_string(contents.rows.size()) + " and their holders " +
                           std::to_string(contents.holders.size()) + " bytes; each row has " +
                           std::to_string(stride) + " and " + std::to_string(HolderBytes(ranks)));
  }
  for (size_t i = 0; i < contents.rows.size(); ++i) {
    if (std::isfinite(contents.rows[i])) continue;
    return InvalidArgument("what was sent last of the row of key " +
                           std::to_string(contents.keys[i / static_cast<size_t>(stride)]) +
                           " is not finite; allowed: finite values");
  }
  KeyMap map;
  const Status status = map.Build(contents.keys.data(), nullptr, n);
  if (!status.ok()) return status;
  map_ = std::move(map);
  keys_ = std::move(contents.keys);
  rows_ = std::move(contents.rows);
  holders_ = std::move(contents.holders);
  stride_ = stride;
  ranks_ = ranks;
  return OkStatus();
}

}  // namespace slipstream
