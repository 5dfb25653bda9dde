// Encoding of rows of sharded tables in messages from their owners.
//
// A message contains RowsHead, then the rows of each table, then zeros up to its length. The rows
// of a table are encoded as one bit per row, followed by the rows with a set bit. A row without a
// set bit equals a new row, which the receiver computes from the key.
//
// An encoded row contains the upper 16 bits of the float UpdateRule::SlotSummary, if the summary is
// sent and the rule has slots, and then the values (EncodeRows). The summary is rounded down, so
// that movement is never underestimated.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULLED_ROWS_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULLED_ROWS_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/row_codec.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/exchange/send_buffer.h"
#include "cc_ops/core/exchange/steady_lengths.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

struct RowFormat {
  bool with_summary = false;  // Whether the summary of the slots is sent.
  RowDtype dtype = RowDtype::kFloat32;
};

struct RowsHead {
  int64_t length;  // Bytes of the message including the head.
  int64_t bytes;   // Bytes of the rows, without head and padding.
  int64_t dtype;   // RowFormat::dtype.
  int64_t with_summary;
};

// Appends a message: writes the head, lets the caller append rows, then pads.
class RowMessage {
 public:
  // Appends the head to `bytes`.
  RowMessage(RowFormat format, std::vector<uint8_t>* bytes);
  // Bytes of the rows so far.
  int64_t row_bytes() const;
  // Pads the message to its length for `rank` and returns the length.
  int64_t End(size_t rank, SteadyLengths* lengths);

 private:
  const RowFormat format_;
  const size_t begin_;
  std::vector<uint8_t>* bytes_;
};

// The rows in a message that the caller owns.
struct RowsView {
  RowFormat format;
  const uint8_t* bytes = nullptr;
  int64_t num_bytes = 0;
};

// Splits messages that are stored one after the other. Returns InvalidArgument, with the rank,
// unless there are `ranks` valid messages.
Status SplitRowMessages(const uint8_t* messages, int64_t num_bytes, int ranks,
                        std::vector<RowsView>* rows);

// Appends the rows of one rank and table.
class RowPacker {
 public:
  // Appends to `bytes`. rows: number of following calls of Add.
  RowPacker(const EmbeddingTable& table, RowFormat format, int64_t rows,
            std::vector<uint8_t>* bytes);

  // Adds the row of the next key. stored: null if the key has no row; the receiver then computes a
  // new row.
  void Add(int64_t key, const StoredRow* stored);

 private:
  const EmbeddingTable& table_;
  const RowFormat format_;
  const size_t given_;  // Position of the bits.
  int64_t next_ = 0;
  std::vector<float> new_row_, row_;
  std::vector<uint8_t>* bytes_;
};

// Reads the rows of one rank and table from a view that passed CheckPulledRows.
class RowUnpacker {
 public:
  // bytes: start of the encoded rows of this rank and table. rows: their number.
  RowUnpacker(const EmbeddingTable& table, RowFormat format, int64_t rows, const uint8_t* bytes);

  // Writes the row of the next key to `stored`. Its slots are computed from the summary
  // (UpdateRule::FillSlots), or are 0 without a summary.
  void Next(int64_t key, StoredRow* stored);
  // Returns the end of the bytes after the last row.
  const uint8_t* End() const { return bytes_; }

 private:
  const EmbeddingTable& table_;
  const RowFormat format_;
  const uint8_t* given_;
  const uint8_t* bytes_;
  const int64_t row_bytes_;
  int64_t next_ = 0;
  std::vector<float> copy_;  // Decoded row, if rows are not stored as floats.
};

// Returns InvalidArgument if the bytes of `rows` ([ranks]) do not match the sizes of each rank and
// table in `buffer`, or if a value is not finite.
Status CheckPulledRows(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                       const std::vector<RowsView>& rows);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULLED_ROWS_H_
