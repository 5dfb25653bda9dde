#include "cc_ops/core/update/row_compaction.h"

#include <algorithm>
#include <utility>

namespace slipstream {
namespace {

// A key and where it came from. Keys are biased so that unsigned order is theirs.
struct Item {
  uint64_t key;
  int64_t position;
};

uint64_t Biased(int64_t key) { return static_cast<uint64_t>(key) ^ (uint64_t{1} << 63); }
int64_t Unbiased(uint64_t key) { return static_cast<int64_t>(key ^ (uint64_t{1} << 63)); }

// Below this many positions a task costs more than it saves.
constexpr int64_t kPositionsPerTask = 4096;

// A stable radix sort by key; digits that all keys share cost nothing, and keys of a dense
// variable share all but the lowest two or three.
void SortByKey(std::vector<Item>* items, const Parallel& parallel) {
  constexpr int kDigitBits = 11;
  constexpr int kDigits = 1 << kDigitBits;
  const auto n = static_cast<int64_t>(items->size());
  const int tasks = TasksFor(n, kPositionsPerTask, parallel);
  std::vector<uint64_t> differing(static_cast<size_t>(tasks), 0);
  parallel.run(tasks, [&](int task) {
    const TaskRange range = RangeOf(task, tasks, n);
    uint64_t bits = 0;
    for (int64_t i = range.begin; i < range.end; ++i) bits |= (*items)[i].key ^ (*items)[0].key;
    differing[task] = bits;
  });
  uint64_t all_differing = 0;
  for (uint64_t bits : differing) all_differing |= bits;

  std::vector<Item> sorted(items->size());
  std::vector<std::vector<int64_t>> place(static_cast<size_t>(tasks));
  for (int shift = 0; shift < 64; shift += kDigitBits) {
    if (((all_differing >> shift) & (kDigits - 1)) == 0) continue;
    const auto digit_of = [shift](const Item& item) {
      return static_cast<int>((item.key >> shift) & (kDigits - 1));
    };
    parallel.run(tasks, [&](int task) {
      place[task].assign(kDigits, 0);
      const TaskRange range = RangeOf(task, tasks, n);
      for (int64_t i = range.begin; i < range.end; ++i) ++place[task][digit_of((*items)[i])];
    });
    int64_t total = 0;
    for (int digit = 0; digit < kDigits; ++digit) {
      for (int task = 0; task < tasks; ++task) {
        total += std::exchange(place[task][digit], total);
      }
    }
    parallel.run(tasks, [&](int task) {
      const TaskRange range = RangeOf(task, tasks, n);
      for (int64_t i = range.begin; i < range.end; ++i) {
        sorted[place[task][digit_of((*items)[i])]++] = (*items)[i];
      }
    });
    items->swap(sorted);
  }
}

}  // namespace

template <class Key>
void RowCompaction::Plan(const Key* keys, int64_t n, const KeySetView& masked, bool deduplicate,
                         const Parallel& parallel) {
  const int tasks = TasksFor(n, kPositionsPerTask, parallel);
  std::vector<Item> items;
  if (deduplicate) {
    items.resize(static_cast<size_t>(n));
    parallel.run(tasks, [&](int task) {
      const TaskRange range = RangeOf(task, tasks, n);
      for (int64_t i = range.begin; i < range.end; ++i) items[i] = {Biased(keys[i]), i};
    });
    SortByKey(&items, parallel);
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
      if (masked.Contains(Unbiased(items[i].key))) continue;
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
  // Tasks get about as many positions, not runs: one key may own most of the batch.
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
      std::copy_n(rows + PositionOf(run.begin) * dim, dim, sum);
      for (int64_t i = run.begin + 1; i < run.end; ++i) {
        const float* row = rows + PositionOf(i) * dim;
        for (int64_t j = 0; j < dim; ++j) sum[j] += row[j];
      }
    }
  });
}

template void RowCompaction::Plan(const int32_t*, int64_t, const KeySetView&, bool,
                                  const Parallel&);
template void RowCompaction::Plan(const int64_t*, int64_t, const KeySetView&, bool,
                                  const Parallel&);
template void RowCompaction::Write(const int32_t*, const float*, int64_t, const Parallel&, int32_t*,
                                   float*) const;
template void RowCompaction::Write(const int64_t*, const float*, int64_t, const Parallel&, int64_t*,
                                   float*) const;

}  // namespace slipstream
