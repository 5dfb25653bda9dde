// Sorts the keys of a batch by (table, shard), keeping the batch's order within one.
#ifndef SLIPSTREAM_CC_OPS_CORE_LOOKUP_KEY_SORT_H_
#define SLIPSTREAM_CC_OPS_CORE_LOOKUP_KEY_SORT_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/lookup/feature_view.h"
#include "cc_ops/core/lookup/lookup_plan.h"

namespace slipstream {

// Splits cells into one contiguous range per task.
struct CellRange {
  int64_t begin, end;
};
inline CellRange CellsOf(int task, int tasks, int64_t cells) {
  return {cells * task / tasks, cells * (task + 1) / tasks};
}

// The examples of all features in one numbering: those of feature f are begin[f] to begin[f + 1].
// Features that are not pooled have as many as key positions, others as many as the batch.
struct Cells {
  explicit Cells(const std::vector<FeatureView>& features) {
    begin.push_back(0);
    for (const FeatureView& f : features) begin.push_back(begin.back() + f.batch);
  }
  // fn(feature, first example, last example) for the features in a task's range.
  template <class Fn>
  void ForEachFeature(int task, int tasks, const Fn& fn) const {
    const CellRange range = CellsOf(task, tasks, begin.back());
    for (size_t f = 0; f + 1 < begin.size(); ++f) {
      const int64_t first = std::max(range.begin, begin[f]);
      const int64_t last = std::min(range.end, begin[f + 1]);
      if (first < last) fn(static_cast<int>(f), first - begin[f], last - begin[f]);
    }
  }
  std::vector<int64_t> begin;
};

// Positions of all features in one numbering: feature f's position p is
// base[f] + p. A column of a matrix is read with the stride of all columns, so
// its positions are divided by it.
struct Positions {
  explicit Positions(const std::vector<FeatureView>& features) {
    for (const FeatureView& f : features) {
      base.push_back(total);
      is_column.push_back(f.row_splits == nullptr && f.width == 1);
      total += is_column.back() ? f.batch : f.num_keys;
    }
  }
  int64_t of(int feature, int64_t example, int64_t position) const {
    return base[feature] + (is_column[feature] ? example : position);
  }
  std::vector<int64_t> base;
  std::vector<bool> is_column;
  int64_t total = 0;
};

// Most examples of a feature: an Occurrence numbers them.
constexpr int64_t kMaxBatch = std::numeric_limits<int32_t>::max();

// A counting sort; the result does not depend on the number of tasks. sorted->position is filled
// if `with_positions`, else left empty. Of more than kMaxBatch examples, the uses are not right.
void SortByBucket(const std::vector<FeatureView>& features, int num_tables,
                  const Positions& positions, bool with_positions, const Parallel& parallel,
                  SortedKeys* sorted);

// Task boundaries [tasks + 1] over buckets so that each task gets about as many keys.
std::vector<int64_t> BalancedBuckets(const std::vector<int64_t>& begin, int tasks);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_LOOKUP_KEY_SORT_H_
