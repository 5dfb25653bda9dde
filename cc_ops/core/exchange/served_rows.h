// Rows of sharded tables on their way to where they are looked up, as bytes.
//
// Of the rows of a rank and table: a bit for each, set if the row is given; if copies are kept, a
// bit for each, set if the rank is to keep its copy; then the given rows: the upper half of
// UpdateRule::SlotSummary, if slots travel and the rule has any, and the values, as float32 or
// rounded to bfloat16. A row that is not given is as a new one, which its key tells. Slots are
// rounded down: no movement is underestimated. Packed, all upper halves of slots stand before all
// values, which float_packing.h packs.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_SERVED_ROWS_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_SERVED_ROWS_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/exchange/row_exchange.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

struct RowFormat {
  bool with_summary = false;  // slots travel
  bool rounds = false;        // values are rounded to bfloat16
  bool packs = false;         // values are packed, without loss
  bool keeps = false;         // it is told which copies are kept
};

// Appends the rows of one rank and table.
class RowPacker {
 public:
  // gives_all: new rows, too. Writes to the end of `bytes`.
  RowPacker(const EmbeddingTable& table, RowFormat format, bool gives_all, int64_t rows,
            std::vector<uint8_t>* bytes);

  // The next row; null: the key has none, and so a new one. is_kept: whether the rank is to keep
  // its copy. gives: the row is given even if it is as a new one.
  void Add(int64_t key, const float* row, bool is_kept = false, bool gives = false);
  // The next row is not given: the rank's copy stands.
  void AddUnchanged();
  // Behind the last row: packs them, if the format says so.
  void End();

 private:
  const EmbeddingTable& table_;
  const RowFormat format_;
  const bool gives_all_;
  const size_t given_;      // place of the bits
  const size_t kept_;       // of those that tell what is kept
  const size_t first_row_;  // and of the first row behind them
  int64_t place_ = 0;
  std::vector<float> new_row_;
  std::vector<uint8_t>* bytes_;
};

// Reads the rows of one rank and table, not packed, of a view that CheckServedRows has passed.
class RowUnpacker {
 public:
  RowUnpacker(const EmbeddingTable& table, RowFormat format, int64_t rows, const uint8_t* bytes);

  bool IsNextGiven() const;
  bool IsNextKept() const;
  // Writes the next row, with slots that stand for its own; without a summary 0.
  void Next(int64_t key, float* row);
  // Passes over the next row, which is not given: the copy stands.
  void Pass() { ++place_; }
  // Passes over all rows that are left; returns the end of the bytes.
  const uint8_t* End();

 private:
  const EmbeddingTable& table_;
  const RowFormat format_;
  const uint8_t* given_;
  const uint8_t* bytes_;
  const int64_t rows_, row_bytes_;
  int64_t place_ = 0;
};

// Makes packed rows plain ones. InvalidArgument as CheckServedRows, which they then pass.
Status UnpackServedRows(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& parcels,
                        RowFormat format, const uint8_t* bytes, int64_t num_bytes,
                        std::vector<uint8_t>* plain);

// InvalidArgument if `bytes`, not packed, are not those of so many rows of each rank and table.
Status CheckServedRows(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& parcels,
                       RowFormat format, const uint8_t* bytes, int64_t num_bytes);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_SERVED_ROWS_H_
