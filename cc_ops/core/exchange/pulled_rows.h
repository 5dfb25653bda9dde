// Rows of sharded tables on their way to where they are looked up, as bytes.
//
// A message to a rank: RowsHead, then of each table its rows, then zeros up to its length. Of the
// rows of a table: a bit for each, set if the row is given; then the given rows: the upper half of
// UpdateRule::SlotSummary, if slots travel and the rule has any, and the values (EncodeRows). A row
// that is not given is as a new one, which its key tells. Slots are rounded down: no movement is
// underestimated.
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
  bool with_summary = false;  // slots travel
  RowDtype dtype = RowDtype::kFloat32;
};

struct RowsHead {
  int64_t length;  // of the message, with this
  int64_t bytes;   // of the rows
  int64_t dtype;
  int64_t with_summary;
};

// Appends a message: rows are put behind its head, then it ends.
class RowMessage {
 public:
  // Writes to the end of `bytes`.
  RowMessage(RowFormat format, std::vector<uint8_t>* bytes);
  // What its rows take by now.
  int64_t row_bytes() const;
  // Pads it to its length for such a rank; returns that.
  int64_t End(size_t rank, SteadyLengths* lengths);

 private:
  const RowFormat format_;
  const size_t begin_;
  std::vector<uint8_t>* bytes_;
};

// The rows in a message, somewhere else's memory.
struct RowsView {
  RowFormat format;
  const uint8_t* bytes = nullptr;
  int64_t num_bytes = 0;
};

// Splits messages that lie one behind the other. InvalidArgument, which names the rank, if these
// are not those of so many ranks.
Status SplitRowMessages(const uint8_t* messages, int64_t num_bytes, int ranks,
                        std::vector<RowsView>* rows);

// Appends the rows of one rank and table.
class RowPacker {
 public:
  // Writes to the end of `bytes`.
  RowPacker(const EmbeddingTable& table, RowFormat format, int64_t rows,
            std::vector<uint8_t>* bytes);

  // The next row; null: the key has none, and so a new one.
  void Add(int64_t key, const StoredRow* stored);

 private:
  const EmbeddingTable& table_;
  const RowFormat format_;
  const size_t given_;  // index of the bits
  int64_t next_ = 0;
  std::vector<float> new_row_, row_;
  std::vector<uint8_t>* bytes_;
};

// Reads the rows of one rank and table, of a view that CheckPulledRows has passed.
class RowUnpacker {
 public:
  RowUnpacker(const EmbeddingTable& table, RowFormat format, int64_t rows, const uint8_t* bytes);

  // Writes the next row, with slots that stand for its own; without a summary 0.
  void Next(int64_t key, StoredRow* stored);
  // The end of the bytes, after the last row.
  const uint8_t* End() const { return bytes_; }

 private:
  const EmbeddingTable& table_;
  const RowFormat format_;
  const uint8_t* given_;
  const uint8_t* bytes_;
  const int64_t row_bytes_;
  int64_t next_ = 0;
  std::vector<float> copy_;  // of a row that does not lie in memory as floats
};

// InvalidArgument if `rows`, [ranks], are not those of so many rows of each rank and table, or a
// value is not finite.
Status CheckPulledRows(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                       const std::vector<RowsView>& rows);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULLED_ROWS_H_
