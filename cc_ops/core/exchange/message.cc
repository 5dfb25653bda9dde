#include "cc_ops/core/exchange/message.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

namespace slipstream {
namespace {

constexpr int64_t kWord = sizeof(int64_t);

int64_t HeaderBytes(size_t tables) { return (2 + static_cast<int64_t>(tables)) * kWord; }

// Copies bytes to `*out` and advances it.
void Append(const void* from, int64_t bytes, uint8_t** out) {
  if (bytes > 0) std::memcpy(*out, from, static_cast<size_t>(bytes));
  *out += bytes;
}

}  // namespace

MessageWriter::MessageWriter(std::vector<int64_t> row_floats, RowDtype dtype)
    : row_floats_(std::move(row_floats)), dtype_(dtype) {}

Status MessageWriter::Take(const SendBufferView& buffer, SteadyLengths* lengths) {
  const Status status =
      CheckSendBuffer(buffer, row_floats_, [](size_t t) { return std::to_string(t); });
  if (!status.ok()) return status;
  buffer_ = buffer;
  lengths_.clear();
  const size_t tables = row_floats_.size();
  for (int rank = 0; rank < buffer.ranks; ++rank) {
    int64_t bytes = HeaderBytes(tables);
    for (size_t t = 0; t < tables; ++t) {
      bytes += buffer.sizes[static_cast<size_t>(rank) * tables + t] *
               (kWord + EncodedBytes(dtype_, row_floats_[t]));
    }
    if (bytes > kMaxMessageBytes) {
      return InvalidArgument("the message to rank " + std::to_string(rank) + " has " +
                             std::to_string(bytes) + " bytes; expected at most " +
                             std::to_string(kMaxMessageBytes) + ". Reduce the batch size");
    }
    lengths_.push_back(lengths->Of(static_cast<size_t>(rank), bytes));
  }
  return OkStatus();
}

void MessageWriter::Write(uint8_t* bytes) const {
  const size_t tables = row_floats_.size();
  const int64_t *keys = buffer_.keys, *sizes = buffer_.sizes;
  const float* values = buffer_.values;
  for (const int64_t length : lengths_) {
    uint8_t* const end = bytes + length;
    const int64_t head[] = {length, static_cast<int64_t>(dtype_)};
    Append(head, sizeof(head), &bytes);
    Append(sizes, static_cast<int64_t>(tables) * kWord, &bytes);
    const int64_t num_keys = std::accumulate(sizes, sizes + tables, int64_t{0});
    Append(keys, num_keys * kWord, &bytes);
    for (size_t t = 0; t < tables; ++t) {
      const int64_t rows = *sizes++, dim = row_floats_[t];
      EncodeRows(values, keys, rows, dim, dtype_, RowRounding::kByChance, bytes);
      keys += rows;
      values += rows * dim;
      bytes += rows * EncodedBytes(dtype_, dim);
    }
    std::fill(bytes, end, uint8_t{0});
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
      return InvalidArgument("the message from rank " + std::to_string(rank) + " has " + what +
                             "; expected a valid message in the remaining " + std::to_string(left) +
                             " of " + std::to_string(num_bytes) + " bytes");
    };
    int64_t head[2] = {0, 0};
    if (left < header) return wrong("no complete header of " + std::to_string(header) + " bytes");
    std::memcpy(head, bytes, sizeof(head));
    const int64_t length = head[0];
    if (length < header || length > left || length % kWord != 0) {
      return wrong("the length " + std::to_string(length) + " in its header");
    }
    if (head[1] < 0 || head[1] >= kRowDtypes) {
      return wrong("the dtype number " + std::to_string(head[1]));
    }
    Message& message = messages_[rank];
    message.dtype = static_cast<RowDtype>(head[1]);
    message.sizes = bytes + sizeof(head);
    int64_t room = length - header;
    for (size_t t = 0; t < row_floats_.size(); ++t) {
      int64_t size = 0;
      std::memcpy(&size, message.sizes + t * kWord, kWord);
      const int64_t row_bytes = kWord + EncodedBytes(message.dtype, row_floats_[t]);
      if (size < 0 || size > room / row_bytes) {
        return wrong(std::to_string(size) + " rows of table " + std::to_string(t));
      }
      room -= size * row_bytes;
      message.num_keys += size;
      num_values_ += size * row_floats_[t];
    }
    num_keys_ += message.num_keys;
    bytes += length;
    left -= length;
  }
  if (left != 0) {
    return InvalidArgument(std::to_string(left) + " of " + std::to_string(num_bytes) +
                           " bytes remain after the messages of " + std::to_string(ranks) +
                           " ranks; expected 0");
  }
  return OkStatus();
}

void MessageReader::Read(int64_t* sizes, int64_t* keys, float* values) const {
  const auto tables = static_cast<int64_t>(row_floats_.size());
  for (const Message& message : messages_) {
    const uint8_t* at = message.sizes;
    const auto take = [&at](int64_t* to, int64_t n) {
      if (n > 0) std::memcpy(to, at, static_cast<size_t>(n * kWord));
      at += n * kWord;
    };
    take(sizes, tables);
    take(keys, message.num_keys);
    for (const int64_t dim : row_floats_) {
      const int64_t rows = *sizes++;
      DecodeRows(at, rows, dim, message.dtype, values);
      at += rows * EncodedBytes(message.dtype, dim);
      values += rows * dim;
    }
    keys += message.num_keys;
  }
}

}  // namespace slipstream
