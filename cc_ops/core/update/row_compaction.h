// Leaves the gradient rows of masked keys out: compacted away, not set to zero, so that neither an
// exchange nor an optimizer ever sees them. On request the rows of a key are summed first.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_COMPACTION_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_COMPACTION_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/containers/key_set.h"

namespace slipstream {

// Two steps, so that the caller can allocate outputs of the right size in between. Results depend
// on neither the number of threads nor the addresses of anything.
class RowCompaction {
 public:
  // Whether all rows stay as they are, so that there is nothing to plan: none is masked and, if
  // they are to be deduplicated, keys ascend, each once.
  template <class Key>
  static bool KeepsAll(const Key* keys, int64_t n, const KeySetView& masked, bool deduplicate);

  // Decides which rows stay.
  //   keys         [n], int32_t or int64_t, owned by the caller.
  //   masked       the keys to leave out.
  //   deduplicate  false: every row is its own and the order of the input is kept.
  //                true: rows of one key become one row; keys ascend.
  template <class Key>
  void Plan(const Key* keys, int64_t n, const KeySetView& masked, bool deduplicate,
            const Parallel& parallel);

  // Rows before masking: n, or the number of different keys if they are deduplicated.
  int64_t offered() const { return offered_; }
  // Rows that stay.
  int64_t kept() const { return static_cast<int64_t>(runs_.size()); }

  // Writes what stays.
  //   keys, rows            [n] and [n, dim], row-major: those of the last Plan.
  //   kept_keys, kept_rows  [kept()] and [kept(), dim], owned by the caller.
  // Rows of one key are added up in the order of the input.
  template <class Key>
  void Write(const Key* keys, const float* rows, int64_t dim, const Parallel& parallel,
             Key* kept_keys, float* kept_rows) const;

 private:
  // A range of positions in `order_`, all of one key.
  struct Run {
    int64_t begin, end;
  };

  int64_t PositionOf(int64_t i) const { return order_.empty() ? i : order_[i]; }

  std::vector<int64_t> order_;  // input positions, keys ascending; empty: as they came
  std::vector<Run> runs_;       // one per row that stays, ascending
  int64_t offered_ = 0;
  int64_t positions_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_COMPACTION_H_
