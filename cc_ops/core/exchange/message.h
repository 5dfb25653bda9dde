// Packs sizes, keys and values of multiple tables into one message per rank.
//
// A message contains, in this order: an int64 header (length in bytes, dtype of the values, number
// of rows of each table), int64 keys by table, rows by table (EncodeRows), and zeros up to its
// length.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_MESSAGE_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_MESSAGE_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/row_codec.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/exchange/send_buffer.h"
#include "cc_ops/core/exchange/steady_lengths.h"

namespace slipstream {

// Writes one message per rank, one after the other.
class MessageWriter {
 public:
  // row_floats: [tables], floats per row; 0 for keys without rows. int8 values are rounded
  // stochastically.
  MessageWriter(std::vector<int64_t> row_floats, RowDtype dtype);

  // Sets the contents of the messages, one per rank of `buffer`, and chooses their lengths with
  // `lengths`. Returns InvalidArgument, with the index, if sizes, keys and values do not match. The
  // buffer must stay valid until Write.
  Status Take(const SendBufferView& buffer, SteadyLengths* lengths);
  const std::vector<int64_t>& lengths() const { return lengths_; }  // [ranks], bytes.
  // Writes all messages. `bytes` must have the sum of all lengths.
  void Write(uint8_t* bytes) const;

 private:
  const std::vector<int64_t> row_floats_;
  const RowDtype dtype_;
  SendBufferView buffer_;
  std::vector<int64_t> lengths_;
};

// Reads messages that are stored one after the other.
class MessageReader {
 public:
  // row_floats: as for the MessageWriter.
  explicit MessageReader(std::vector<int64_t> row_floats);

  // Sets the messages to read, which must stay valid until Read. Returns InvalidArgument, with the
  // number of the message, unless there are `ranks` valid messages.
  Status Take(const uint8_t* bytes, int64_t num_bytes, int ranks);
  int64_t num_keys() const { return num_keys_; }
  int64_t num_values() const { return num_values_; }
  // Writes the contents of all messages. sizes: [ranks, tables]. keys: [num_keys()]. values:
  // [num_values()].
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
