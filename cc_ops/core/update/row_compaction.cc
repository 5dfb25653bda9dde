#include "cc_ops/core/update/row_compaction.h"

#include <algorithm>
#include <functional>

#include "cc_ops/core/base/radix_sort.h"

namespace slipstream {
namespace {

// A key and its position in the input.
struct Item {
  int64_t key;
  int64_t position;
};

// Minimum number of positions per task, below which a task costs more than it saves.
constexpr int64_t kPositionsPerTask = 4096;

// Sums the rows at order[i], i in [begin, end); see kRowsPerChunk. Not inlined, because few keys
// need it.
[[gnu::noinline]] void SumInChunks(const float* rows, int64_t dim, const int64_t* order,
                                   int64_t begin, int64_t end, float* sum) {
  std::vector<float> sum_of_chunk(static_cast<size_t>(dim));
  for (int64_t i = begin; i < end;) {
    float* const target = i == begin ? sum : sum_of_chunk.data();
    std::copy_n(rows + order[i] * dim, dim, target);
    const int64_t end_of_chunk = std::min(end, i + kRowsPerChunk);
    for (++i; i < end_of_chunk; ++i) {
      const float* row = rows + order[i] * dim;
      for (int64_t j = 0; j < dim; ++j) target[j] += row[j];
    }
    if (target == sum) continue;
    for (int64_t j = 0; j < dim; ++j) sum[j] += target[j];
  }
}

}  // namespace

template <class Key>
bool RowCompaction::KeepsAll(const Key* keys, int64_t n, const KeySetView& masked,
                             bool deduplicate) {
  if (!masked.is_empty()) return false;
  return !deduplicate || std::adjacent_find(keys, keys + n, std::greater_equal<Key>()) == keys + n;
}

template <class Key>
void RowCompaction::Plan(const Key* keys, int64_t n, const KeySetView& masked, bool deduplicate,
                         const Parallel& parallel) {
  const int tasks = TasksFor(n, kPositionsPerTask, parallel);
  std::vector<Item> items;
  if (deduplicate) {
    items.resize(static_cast<size_t>(n));
    parallel.run(tasks, [&](int task) {
      const TaskRange range = RangeOf(task, tasks, n);
      for (int64_t i = range.begin; i < range.end; ++i) items[i] = {keys[i], i};
    });
    RadixSort(&items, [](const Item& item) { return AscendingBits(item.key); }, parallel);
  }
  positions_ = n;
  order_.resize(items.size());

  // A run belongs to the task in whose range it begins.
  std::vector<std::vector<Run>> found(static_cast<size_t>(tasks));
  std::vector<int64_t> offered(static_cast<size_t>(tasks), 0);
  parallel.run(tasks, [&](int task) {
    const TaskRange range = RangeOf(task, tasks, n);
    if (!deduplicate) {
      for (int64_t i = range.begin; i < range.end; ++i) {
        if (!masked.Contains(keys[i])) found[task].push_back({i, i + 1});
      }
      offered[task] = range.end - range.begin;
      return;
    }
    for (int64_t i = range.begin; i < range.end; ++i) {
      order_[i] = items[i].position;
      if (i > 0 && items[i].key == items[i - 1].key) continue;
      ++offered[task];
      if (masked.Contains(items[i].key)) continue;
      int64_t end = i + 1;
      while (end < n && items[end].key == items[i].key) ++end;
      found[task].push_back({i, end});
    }
  });
  runs_.clear();
  offered_ = 0;
  for (int task = 0; task < tasks; ++task) {
    runs_.insert(runs_.end(), found[task].begin(), found[task].end());
    offered_ += offered[task];
  }
}

template <class Key>
void RowCompaction::Write(const Key* keys, const float* rows, int64_t dim, const Parallel& parallel,
                          Key* kept_keys, float* kept_rows) const {
  // Split positions evenly, not runs, because one key may have most of the batch.
  const int tasks = TasksFor(positions_, kPositionsPerTask, parallel);
  const auto first_run_at = [&](int64_t position) {
    const auto at =
        std::lower_bound(runs_.begin(), runs_.end(), position,
                         [](const Run& run, int64_t begin) { return run.begin < begin; });
    return static_cast<int64_t>(at - runs_.begin());
  };
  parallel.run(tasks, [&](int task) {
    const TaskRange range = RangeOf(task, tasks, positions_);
    const int64_t last = first_run_at(range.end);
    for (int64_t r = first_run_at(range.begin); r < last; ++r) {
      const Run& run = runs_[r];
      kept_keys[r] = keys[PositionOf(run.begin)];
      float* sum = kept_rows + r * dim;
      if (run.end - run.begin > kRowsPerChunk) {
        SumInChunks(rows, dim, order_.data(), run.begin, run.end, sum);
        continue;
      }
      std::copy_n(rows + PositionOf(run.begin) * dim, dim, sum);
      for (int64_t i = run.begin + 1; i < run.end; ++i) {
        const float* row = rows + PositionOf(i) * dim;
        for (int64_t j = 0; j < dim; ++j) sum[j] += row[j];
      }
    }
  });
}

template bool RowCompaction::KeepsAll(const int32_t*, int64_t, const KeySetView&, bool);
template bool RowCompaction::KeepsAll(const int64_t*, int64_t, const KeySetView&, bool);
template void RowCompaction::Plan(const int32_t*, int64_t, const KeySetView&, bool,
                                  const Parallel&);
template void RowCompaction::Plan(const int64_t*, int64_t, const KeySetView&, bool,
                                  const Parallel&);
template void RowCompaction::Write(const int32_t*, const float*, int64_t, const Parallel&, int32_t*,
                                   float*) const;
template void RowCompaction::Write(const int64_t*, const float*, int64_t, const Parallel&, int64_t*,
                                   float*) const;

}  // namespace slipstream
