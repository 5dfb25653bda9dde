#include "cc_ops/core/lookup/key_sort.h"

#include <algorithm>

#include "cc_ops/core/base/hash.h"

namespace slipstream {
namespace {

// Calls fn(example, position) for the keys of the examples [first, last), in order.
template <class Fn>
void ForEachKeyOf(const FeatureView& f, int64_t first, int64_t last, const Fn& fn) {
  if (f.row_splits == nullptr && f.width == 1) {
    // Fast path for one key per example, without the inner loop.
    int64_t p = first * f.stride;
    for (int64_t i = first; i < last; ++i, p += f.stride) {
      if (f.is_key(p)) fn(i, p);
    }
    return;
  }
  for (int64_t i = first; i < last; ++i) {
    for (int64_t p = f.begin(i); p < f.end(i); ++p) {
      if (f.is_key(p)) fn(i, p);
    }
  }
}

}  // namespace

void SortByBucket(const std::vector<FeatureView>& features, int num_tables,
                  const Positions& positions, bool with_positions, const Parallel& parallel,
                  SortedKeys* sorted) {
  const int tasks = parallel.threads;
  const int64_t buckets = static_cast<int64_t>(num_tables) * kNumShards;
  const Cells cells(features);
  std::vector<std::vector<int64_t>> next_of(static_cast<size_t>(tasks),
                                            std::vector<int64_t>(static_cast<size_t>(buckets), 0));
  parallel.run(tasks, [&](int task) {
    cells.ForEachFeature(task, tasks, [&](int f, int64_t first, int64_t last) {
      const int64_t* keys = features[f].keys;
      int64_t* counts = next_of[task].data() + features[f].table * kNumShards;
      ForEachKeyOf(features[f], first, last,
                   [&](int64_t, int64_t p) { ++counts[ShardOf(keys[p])]; });
    });
  });
  sorted->begin.resize(static_cast<size_t>(buckets) + 1);
  int64_t total = 0;
  for (int64_t b = 0; b < buckets; ++b) {
    sorted->begin[b] = total;
    for (int task = 0; task < tasks; ++task) {
      const int64_t count = next_of[task][b];
      next_of[task][b] = total;
      total += count;
    }
  }
  sorted->begin[buckets] = total;
  sorted->key.resize(static_cast<size_t>(total));
  sorted->use.resize(static_cast<size_t>(total));
  sorted->position.resize(with_positions ? static_cast<size_t>(total) : 0);
  parallel.run(tasks, [&](int task) {
    cells.ForEachFeature(task, tasks, [&](int f, int64_t first, int64_t last) {
      const int64_t* keys = features[f].keys;
      int64_t* next = next_of[task].data() + features[f].table * kNumShards;
      ForEachKeyOf(features[f], first, last, [&](int64_t i, int64_t p) {
        const int64_t at = next[ShardOf(keys[p])]++;
        sorted->key[at] = keys[p];
        sorted->use[at] = {f, static_cast<int32_t>(i)};
        if (with_positions) sorted->position[at] = positions.of(f, i, p);
      });
    });
  });
}

std::vector<int64_t> BalancedBuckets(const std::vector<int64_t>& begin, int tasks) {
  const int64_t buckets = static_cast<int64_t>(begin.size()) - 1;
  std::vector<int64_t> bounds = {0};
  for (int task = 1; task < tasks; ++task) {
    const int64_t target = begin[buckets] * task / tasks;
    const auto at = std::lower_bound(begin.begin(), begin.end(), target);
    bounds.push_back(std::max(bounds.back(), static_cast<int64_t>(at - begin.begin())));
  }
  bounds.push_back(buckets);
  for (int64_t& bound : bounds) bound = std::min(bound, buckets);
  return bounds;
}

}  // namespace slipstream
