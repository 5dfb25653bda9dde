#include "cc_ops/core/containers/key_probe.h"

#include <numeric>
#include <vector>

namespace slipstream {
namespace {

// Below this many keys a task costs more than it saves.
constexpr int64_t kKeysPerTask = 4096;

}  // namespace

int64_t ProbeKeys(const int64_t* keys, int64_t n, const KeyMapView& map, const Parallel& parallel,
                  int64_t* indices) {
  const int tasks = TasksFor(n, kKeysPerTask, parallel);
  std::vector<int64_t> hits(static_cast<size_t>(tasks), 0);
  parallel.run(tasks, [&](int task) {
    const TaskRange range = RangeOf(task, tasks, n);
    int64_t found = 0;
    for (int64_t i = range.begin; i < range.end; ++i) {
      indices[i] = map.Find(keys[i]).index;
      found += indices[i] != KeyMapEntry::kNowhere;
    }
    hits[task] = found;
  });
  return std::accumulate(hits.begin(), hits.end(), int64_t{0});
}

void SplitProbed(const int64_t* indices, int64_t n, int64_t* hits, int64_t* misses) {
  for (int64_t i = 0; i < n; ++i) {
    int64_t*& end = indices[i] != KeyMapEntry::kNowhere ? hits : misses;
    *end++ = i;
  }
}

void LookUpStates(const int64_t* keys, int64_t n, const KeyMapView& known, const Parallel& parallel,
                  uint8_t* states) {
  const int tasks = TasksFor(n, kKeysPerTask, parallel);
  parallel.run(tasks, [&](int task) {
    const TaskRange range = RangeOf(task, tasks, n);
    for (int64_t i = range.begin; i < range.end; ++i) {
      states[i] = static_cast<uint8_t>(known.Find(keys[i]).state);
    }
  });
}

}  // namespace slipstream
