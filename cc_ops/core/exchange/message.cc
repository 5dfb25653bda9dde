#include "cc_ops/core/exchange/message.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "cc_ops/core/base/bfloat16.h"
#include "cc_ops/core/base/simd_clones.h"

namespace slipstream {
namespace {

constexpr int64_t kWord = sizeof(int64_t);
// What a new length has to spare: batches differ by some hundredths of their rows.
constexpr int64_t kSpareShare = 16, kLeastBytes = 1024;
constexpr int kMostTooLong = 64;
// What one rank can send another: its length, padded, is an int32.
constexpr int64_t kMostBytes = int64_t{1} << 30;

constexpr int64_t kPaddingHeader = 2 * kWord;
int64_t HeaderBytes(size_t tables) { return (2 + static_cast<int64_t>(tables)) * kWord; }

SLIPSTREAM_SIMD_CLONES void RoundAll(const float* values, int64_t n, uint16_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = RoundToBfloat16(values[i]);
}

SLIPSTREAM_SIMD_CLONES void UnroundAll(const uint16_t* rounded, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = FromBfloat16(rounded[i]);
}

// Copies to where `out` points, and moves it behind that.
void Append(const void* from, int64_t bytes, uint8_t** out) {
  if (bytes > 0) std::memcpy(*out, from, static_cast<size_t>(bytes));
  *out += bytes;
}

}  // namespace

int64_t SteadyLengths::Of(size_t rank, int64_t bytes) {
  if (rank >= lengths_.size()) lengths_.resize(rank + 1);
  Length& last = lengths_[rank];
  const bool is_too_long = last.bytes > kLeastBytes && bytes < last.bytes / 2;
  last.too_long = is_too_long ? last.too_long + 1 : 0;
  if (last.bytes == 0 || bytes > last.bytes || last.too_long > kMostTooLong) {
    const int64_t spare = std::max(bytes + bytes / kSpareShare, kLeastBytes);
    last = {(spare + kWord - 1) / kWord * kWord, 0};
  }
  return last.bytes;
}

std::vector<int64_t> PaddedLengths(const std::vector<int64_t>& bytes, SteadyLengths* lengths) {
  std::vector<int64_t> padded;
  for (size_t rank = 0; rank < bytes.size(); ++rank) {
    padded.push_back(lengths->Of(rank, bytes[rank] + kPaddingHeader));
  }
  return padded;
}

void Pad(const uint8_t* from, const std::vector<int64_t>& bytes, const std::vector<int64_t>& padded,
         uint8_t* out) {
  for (size_t rank = 0; rank < bytes.size(); ++rank) {
    uint8_t* const end = out + padded[rank];
    const int64_t head[] = {padded[rank], bytes[rank]};
    Append(head, sizeof(head), &out);
    Append(from, bytes[rank], &out);
    std::fill(out, end, uint8_t{0});
    from += bytes[rank];
    out = end;
  }
}

Status Unpad(const uint8_t* padded, int64_t num_bytes, int ranks, std::vector<uint8_t>* bytes) {
  bytes->clear();
  int64_t left = num_bytes;
  for (int rank = 0; rank < ranks; ++rank) {
    int64_t head[2] = {0, 0};
    if (left >= kPaddingHeader) std::memcpy(head, padded, sizeof(head));
    if (head[0] < kPaddingHeader || head[0] > left || head[1] < 0 ||
        head[1] > head[0] - kPaddingHeader) {
      return InvalidArgument("what rank " + std::to_string(rank) + " padded says that it has " +
                             std::to_string(head[1]) + " of " + std::to_string(head[0]) +
                             " bytes; " + std::to_string(left) + " are left of " +
                             std::to_string(num_bytes));
    }
    bytes->insert(bytes->end(), padded + kPaddingHeader, padded + kPaddingHeader + head[1]);
    padded += head[0];
    left -= head[0];
  }
  if (left != 0) {
    return InvalidArgument(std::to_string(left) + " of " + std::to_string(num_bytes) +
                           " bytes lie behind those of " + std::to_string(ranks) +
                           " ranks; allowed: none");
  }
  return OkStatus();
}

MessageWriter::MessageWriter(std::vector<int64_t> row_floats, bool rounds)
    : row_floats_(std::move(row_floats)), rounds_(rounds) {}

Status MessageWriter::Take(const SendBufferView& buffer, SteadyLengths* lengths) {
  const Status status =
      CheckSendBuffer(buffer, row_floats_, [](size_t t) { return std::to_string(t); });
  if (!status.ok()) return status;
  buffer_ = buffer;
  lengths_.clear();
  for (int rank = 0; rank < buffer.ranks; ++rank) {
    const Counts counts = CountsOf(rank);
    const int64_t bytes =
        HeaderBytes(row_floats_.size()) + counts.keys * kWord + counts.values * (rounds_ ? 2 : 4);
    if (bytes > kMostBytes) {
      return InvalidArgument("a message to rank " + std::to_string(rank) + " has " +
                             std::to_string(bytes) + " bytes; allowed: up to " +
                             std::to_string(kMostBytes) + ": make the batches smaller");
    }
    lengths_.push_back(lengths->Of(static_cast<size_t>(rank), bytes));
  }
  return OkStatus();
}

MessageWriter::Counts MessageWriter::CountsOf(int rank) const {
  const size_t tables = row_floats_.size();
  Counts counts;
  for (size_t t = 0; t < tables; ++t) {
    const int64_t rows = buffer_.sizes[static_cast<size_t>(rank) * tables + t];
    counts.keys += rows;
    counts.values += rows * row_floats_[t];
  }
  return counts;
}

void MessageWriter::Write(uint8_t* bytes) const {
  const size_t tables = row_floats_.size();
  const int64_t* keys = buffer_.keys;
  const float* values = buffer_.values;
  for (size_t rank = 0; rank < lengths_.size(); ++rank) {
    const Counts counts = CountsOf(static_cast<int>(rank));
    uint8_t* const end = bytes + lengths_[rank];
    const int64_t head[] = {lengths_[rank], rounds_ ? 1 : 0};
    Append(head, sizeof(head), &bytes);
    Append(buffer_.sizes + rank * tables, static_cast<int64_t>(tables) * kWord, &bytes);
    Append(keys, counts.keys * kWord, &bytes);
    if (rounds_) {
      RoundAll(values, counts.values, reinterpret_cast<uint16_t*>(bytes));
      bytes += counts.values * 2;
    } else {
      Append(values, counts.values * 4, &bytes);
    }
    std::fill(bytes, end, uint8_t{0});
    keys += counts.keys;
    values += counts.values;
    bytes = end;
  }
}

MessageReader::MessageReader(std::vector<int64_t> row_floats)
    : row_floats_(std::move(row_floats)) {}

Status MessageReader::Take(const uint8_t* bytes, int64_t num_bytes, int ranks) {
  messages_.assign(static_cast<size_t>(ranks), {});
  num_keys_ = num_values_ = 0;
  const int64_t header = HeaderBytes(row_floats_.size());
  int64_t left = num_bytes;
  for (size_t rank = 0; rank < messages_.size(); ++rank) {
    const auto wrong = [&](const std::string& what) {
      return InvalidArgument("the message of rank " + std::to_string(rank) + " has " + what + "; " +
                             std::to_string(left) + " bytes are left of " +
                             std::to_string(num_bytes));
    };
    int64_t head[2] = {0, 0};
    if (left < header) return wrong("no header of " + std::to_string(header) + " bytes");
    std::memcpy(head, bytes, sizeof(head));
    const int64_t length = head[0];
    if (length < header || length > left || length % kWord != 0) {
      return wrong("a length of " + std::to_string(length) + " bytes");
    }
    if (head[1] != 0 && head[1] != 1) return wrong("values of kind " + std::to_string(head[1]));
    Message& message = messages_[rank];
    message.rounds = head[1] == 1;
    message.sizes = bytes + sizeof(head);
    int64_t room = length - header;
    for (size_t t = 0; t < row_floats_.size(); ++t) {
      int64_t size = 0;
      std::memcpy(&size, message.sizes + t * kWord, kWord);
      const int64_t row_bytes = kWord + row_floats_[t] * (message.rounds ? 2 : 4);
      if (size < 0 || size > room / row_bytes) {
        return wrong(std::to_string(size) + " rows of its table " + std::to_string(t));
      }
      room -= size * row_bytes;
      message.num_keys += size;
      message.num_values += size * row_floats_[t];
    }
    num_keys_ += message.num_keys;
    num_values_ += message.num_values;
    bytes += length;
    left -= length;
  }
  if (left != 0) {
    return InvalidArgument(std::to_string(left) + " of " + std::to_string(num_bytes) +
                           " bytes lie behind the messages of " + std::to_string(ranks) +
                           " ranks; allowed: none");
  }
  return OkStatus();
}

void MessageReader::Read(int64_t* sizes, int64_t* keys, float* values) const {
  const auto tables = static_cast<int64_t>(row_floats_.size());
  for (const Message& message : messages_) {
    const uint8_t* at = message.sizes;
    const auto take = [&at](void* to, int64_t bytes) {
      if (bytes > 0) std::memcpy(to, at, static_cast<size_t>(bytes));
      at += bytes;
    };
    take(sizes, tables * kWord);
    take(keys, message.num_keys * kWord);
    if (message.rounds) {
      UnroundAll(reinterpret_cast<const uint16_t*>(at), message.num_values, values);
    } else {
      take(values, message.num_values * 4);
    }
    sizes += tables;
    keys += message.num_keys;
    values += message.num_values;
  }
}

}  // namespace slipstream
