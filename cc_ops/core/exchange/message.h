// What one rank sends another at once: sizes, keys and values of several tables, in one piece.
//
// A message: int64 header (its length in bytes, whether its values are rounded, rows of each
// table), int64 keys by table, values by table (float, or the upper halves of floats), zeros up to
// its length.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_MESSAGE_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_MESSAGE_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/exchange/send_buffer.h"

namespace slipstream {

// Lengths of messages that change seldom: what carries them (Horovod) agrees on a tensor in more
// rounds whenever it is longer or shorter than the one of the same name before.
class SteadyLengths {
 public:
  // Returns the length, a multiple of 8, of the next message to a rank, which needs so many bytes:
  // that of the one before, unless it does not hold them, or twice as many for long.
  int64_t Of(size_t rank, int64_t bytes);

 private:
  struct Length {
    int64_t bytes = 0;
    int too_long = 0;  // messages in a row that needed less than half of it
  };
  std::vector<Length> lengths_;
};

// Bytes for each rank, with a header of their length, padded with zeros.
std::vector<int64_t> PaddedLengths(const std::vector<int64_t>& bytes, SteadyLengths* lengths);
// padded: from PaddedLengths; out: as long as all of them.
void Pad(const uint8_t* from, const std::vector<int64_t>& bytes, const std::vector<int64_t>& padded,
         uint8_t* out);
// What Pad of each rank was given for this one. InvalidArgument, which names the rank, if it is
// not.
Status Unpad(const uint8_t* padded, int64_t num_bytes, int ranks, std::vector<uint8_t>* bytes);

// Writes a message to each rank, one behind the other.
class MessageWriter {
 public:
  // row_floats: [tables], values of a row; 0: keys come without. rounds: values are rounded to
  // bfloat16.
  MessageWriter(std::vector<int64_t> row_floats, bool rounds);

  // InvalidArgument, which names the index, if sizes, keys and values do not fit together.
  Status Take(const SendBufferView& buffer, SteadyLengths* lengths);
  const std::vector<int64_t>& lengths() const { return lengths_; }  // [ranks], bytes
  // Of all messages, as long as all lengths.
  void Write(uint8_t* bytes) const;

 private:
  struct Counts {
    int64_t keys = 0, values = 0;
  };
  Counts CountsOf(int rank) const;

  const std::vector<int64_t> row_floats_;
  const bool rounds_;
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
    int64_t num_keys = 0, num_values = 0;
    bool rounds = false;
  };

  const std::vector<int64_t> row_floats_;
  std::vector<Message> messages_;
  int64_t num_keys_ = 0, num_values_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_MESSAGE_H_
