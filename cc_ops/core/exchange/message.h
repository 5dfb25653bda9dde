// What one rank sends another at once: sizes, keys and values of several tables, in one piece.
//
// A message: int64 header (its length in bytes, the dtype of its values, rows of each table), int64
// keys by table, rows by table (EncodeRows), zeros up to its length.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_MESSAGE_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_MESSAGE_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/row_codec.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/exchange/send_buffer.h"
#include "cc_ops/core/exchange/steady_lengths.h"

namespace slipstream {

// Writes a message to each rank, one behind the other.
class MessageWriter {
 public:
  // row_floats: [tables], values of a row; 0: keys come without. int8 values are chosen by chance.
  MessageWriter(std::vector<int64_t> row_floats, RowDtype dtype);

  // InvalidArgument, which names the index, if sizes, keys and values do not fit together.
  Status Take(const SendBufferView& buffer, SteadyLengths* lengths);
  const std::vector<int64_t>& lengths() const { return lengths_; }  // [ranks], bytes
  // Of all messages, as long as all lengths.
  void Write(uint8_t* bytes) const;

 private:
  const std::vector<int64_t> row_floats_;
  const RowDtype dtype_;
  SendBufferView buffer_;
  std::vector<int64_t> lengths_;
};

// Reads messages that lie one behind the other.
class MessageReader {
 public:
  explicit MessageReader(std::vector<int64_t> row_floats);

  // InvalidArgument, which names the message, if these are not those of so many ranks.
  Status Take(const uint8_t* bytes, int64_t num_bytes, int ranks);
  int64_t num_keys() const { return num_keys_; }
  int64_t num_values() const { return num_values_; }
  void Read(int64_t* sizes, int64_t* keys, float* values) const;

 private:
  struct Message {
    const uint8_t* sizes = nullptr;
    int64_t num_keys = 0;
    RowDtype dtype = RowDtype::kFloat32;
  };

  const std::vector<int64_t> row_floats_;
  std::vector<Message> messages_;
  int64_t num_keys_ = 0, num_values_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_MESSAGE_H_
