// Drops the gradient rows of masked keys.
//
// Rows are removed, not zeroed, so that neither an exchange nor an optimizer processes them. On
// request, rows of the same key are summed first.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_COMPACTION_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_COMPACTION_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/containers/key_set.h"

namespace slipstream {

// Rows of one key are summed in chunks of this size, so that threads of a GPU share the rows of a
// frequent key: first the rows of each chunk in input order, then the sums of the chunks in order.
// Sums of at most this number of rows are therefore sums in input order.
constexpr int64_t kRowsPerChunk = 256;

// Plans, then writes, so that the caller can allocate outputs of the right size in between. Results
// do not depend on the number of threads.
class RowCompaction {
 public:
  // Returns true only if the output equals the input, so that no plan is needed: `masked` is empty
  // and, if rows are deduplicated, keys strictly ascend.
  template <class Key>
  static bool KeepsAll(const Key* keys, int64_t n, const KeySetView& masked, bool deduplicate);

  // Selects the rows to keep. Call it before the functions below, which use the last plan.
  //
  //   keys         [n], int32_t or int64_t, owned by the caller; the key of each row.
  //   masked       Keys to drop.
  //   deduplicate  If true, rows of one key become one row, and keys ascend. If false, rows
  //                are not summed, and the input order is kept.
  template <class Key>
  void Plan(const Key* keys, int64_t n, const KeySetView& masked, bool deduplicate,
            const Parallel& parallel);

  // Rows before masking: n, or the number of distinct keys if rows are deduplicated.
  int64_t offered() const { return offered_; }
  // Number of rows that are kept.
  int64_t kept() const { return static_cast<int64_t>(runs_.size()); }

  // Writes the kept rows. Rows of one key are summed; see kRowsPerChunk for the order.
  //
  //   keys, rows            [n] and [n, dim], row-major, of the last Plan.
  //   kept_keys, kept_rows  [kept()] and [kept(), dim], owned by the caller.
  template <class Key>
  void Write(const Key* keys, const float* rows, int64_t dim, const Parallel& parallel,
             Key* kept_keys, float* kept_rows) const;

 private:
  // A range of positions in `order_` with one key.
  struct Run {
    int64_t begin, end;
  };

  int64_t PositionOf(int64_t i) const { return order_.empty() ? i : order_[i]; }

  std::vector<int64_t> order_;  // Input positions by ascending key; empty for the input order.
  std::vector<Run> runs_;       // One per kept row, ascending.
  int64_t offered_ = 0;
  int64_t positions_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_COMPACTION_H_
