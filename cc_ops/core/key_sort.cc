#include "cc_ops/core/key_sort.h"

#include <algorithm>

#include "cc_ops/core/hash.h"

namespace slipstream {
namespace {

// fn(feature, example, position) for every key in a range of cells, in order.
template <class Fn>
void ForEachKey(const std::vector<FeatureView>& features, int64_t batch, CellRange range,
                const Fn& fn) {
  for (int64_t cell = range.begin; cell < range.end;) {
    const int feature = static_cast<int>(cell / batch);
    const FeatureView& f = features[feature];
    const int64_t last = std::min(range.end, (feature + 1) * batch);
    for (; cell < last; ++cell) {
      const int64_t example = cell - feature * batch;
      for (int64_t p = f.begin(example); p < f.end(example); ++p) {
        if (f.is_key(p)) fn(feature, example, p);
      }
    }
  }
}

}  // namespace

void SortByBucket(const std::vector<FeatureView>& features, int64_t batch, int num_tables,
                  const Positions& positions, const Parallel& parallel, SortedKeys* sorted) {
  const int tasks = parallel.threads;
  const int64_t buckets = static_cast<int64_t>(num_tables) * kNumShards;
  const int64_t cells = static_cast<int64_t>(features.size()) * batch;
  std::vector<std::vector<int64_t>> place(static_cast<size_t>(tasks),
                                          std::vector<int64_t>(static_cast<size_t>(buckets), 0));
  const auto bucket_of = [&](int feature, int64_t key) {
    return features[feature].table * kNumShards + ShardOf(HashKey(key));
  };
  parallel.run(tasks, [&](int task) {
    std::vector<int64_t>& counts = place[task];
    ForEachKey(features, batch, CellsOf(task, tasks, cells),
               [&](int f, int64_t, int64_t p) { ++counts[bucket_of(f, features[f].keys[p])]; });
  });
  sorted->begin.resize(static_cast<size_t>(buckets) + 1);
  int64_t total = 0;
  for (int64_t b = 0; b < buckets; ++b) {
    sorted->begin[b] = total;
    for (int task = 0; task < tasks; ++task) {
      const int64_t count = place[task][b];
      place[task][b] = total;
      total += count;
    }
  }
  sorted->begin[buckets] = total;
  sorted->key.resize(static_cast<size_t>(total));
  sorted->use.resize(static_cast<size_t>(total));
  parallel.run(tasks, [&](int task) {
    std::vector<int64_t>& next = place[task];
    ForEachKey(features, batch, CellsOf(task, tasks, cells), [&](int f, int64_t i, int64_t p) {
      const int64_t key = features[f].keys[p];
      const int64_t at = next[bucket_of(f, key)]++;
      sorted->key[at] = key;
      sorted->use[at] = {positions.of(f, i, p), f, static_cast<int32_t>(i)};
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
