// Sorts the keys of a batch into buckets, one per table and shard. Keys of a bucket stay in the
// order of the batch.
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

// The numbers from `begin` to below `end`.
struct CellRange {
  int64_t begin, end;
};
// Splits the numbers below `cells` into one range per task and returns the range of `task`.
inline CellRange CellsOf(int task, int tasks, int64_t cells) {
  return {cells * task / tasks, cells * (task + 1) / tasks};
}

// Numbers the output vectors (cells) of all features: feature f has the numbers from begin[f] to
// below begin[f + 1]. A feature has one vector per example. If it is not pooled, each of its key
// positions is an example (FeatureView::SplitPositions).
struct Cells {
  explicit Cells(const std::vector<FeatureView>& features) {
    begin.push_back(0);
    for (const FeatureView& f : features) begin.push_back(begin.back() + f.batch);
  }
  // Divides the cells evenly among the tasks. For each feature with cells of this task, calls
  // fn(feature, first, last), where [first, last) are examples of the feature.
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

// Numbers the key positions of all features: position p of feature f is base[f] + p. For a dense
// feature with one key per example, the number is base[f] + example instead, because the feature
// can be a column of a matrix, whose positions are FeatureView::stride apart.
struct Positions {
  explicit Positions(const std::vector<FeatureView>& features) {
    for (const FeatureView& f : features) {
      base.push_back(total);
      is_column.push_back(f.row_splits == nullptr && f.width == 1);
      total += is_column.back() ? f.batch : f.num_keys;
    }
  }
  // Returns the number of the key at `position` of FeatureView::keys, which belongs to `example`.
  int64_t of(int feature, int64_t example, int64_t position) const {
    return base[feature] + (is_column[feature] ? example : position);
  }
  std::vector<int64_t> base;
  std::vector<bool> is_column;
  int64_t total = 0;
};

// Maximum number of examples of a feature, because an Occurrence has 32-bit numbers.
constexpr int64_t kMaxBatch = std::numeric_limits<int32_t>::max();

// Sorts the keys of all features (counting sort). The result does not depend on the number of
// tasks. Fills sorted->position if `with_positions`, else leaves it empty. Note: a feature must not
// have more than kMaxBatch examples, because their numbers would overflow.
void SortByBucket(const std::vector<FeatureView>& features, int num_tables,
                  const Positions& positions, bool with_positions, const Parallel& parallel,
                  SortedKeys* sorted);

// Divides buckets into ranges with about the same number of keys. begin: [buckets + 1], the first
// key of each bucket. Task i gets the buckets from result[i] to below result[i + 1]; result: [tasks
// + 1].
std::vector<int64_t> BalancedBuckets(const std::vector<int64_t>& begin, int tasks);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_LOOKUP_KEY_SORT_H_
