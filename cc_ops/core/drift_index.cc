#include "cc_ops/core/drift_index.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace slipstream {
namespace {

std::string At(int64_t position) { return " at position " + std::to_string(position); }

}  // namespace

void DriftIndex::Find(const Lookup* lookups, int64_t n, float* drifts) const {
  constexpr int64_t kAhead = 16;
  const DriftIndexView index = view();
  if (index.num_slots == 0) {
    std::fill_n(drifts, n, kUntracked);
    return;
  }
  int64_t homes[kAhead];
  for (int64_t i = 0; i < n + kAhead; ++i) {
    int64_t* const home = &homes[i % kAhead];
    if (i >= kAhead) drifts[i - kAhead] = index.FindFrom(*home, lookups[i - kAhead]);
    if (i < n) {
      *home = index.Home(lookups[i]);
      __builtin_prefetch(&slots_[static_cast<size_t>(*home)]);
    }
  }
}

Status DriftIndex::Check(int num_tables, const int32_t* tables, const float* drifts, int64_t i) {
  if (tables[i] < 0 || tables[i] >= num_tables) {
    return InvalidArgument("tables is " + std::to_string(tables[i]) + At(i) + "; allowed: 0 to " +
                           std::to_string(num_tables - 1));
  }
  if (std::isfinite(drifts[i]) && drifts[i] < 0.0f) {
    return InvalidArgument("drift is " + std::to_string(drifts[i]) + At(i) +
                           "; allowed: at least 0, or not finite for an anomaly");
  }
  return OkStatus();
}

void DriftIndex::Swap(DriftIndex* other) {
  std::swap(memory_, other->memory_);
  std::swap(slots_, other->slots_);
  std::swap(size_, other->size_);
}

Status DriftIndex::Build(int num_tables, const int32_t* tables, const int64_t* keys,
                         const float* drifts, int64_t n) {
  constexpr int64_t kAhead = 16, kLine = DriftIndexView::kLine;
  DriftIndex built;
  if (n > 0) built.slots_.resize(static_cast<size_t>(kLine * (n / (kLine - 1) + 1)));
  const DriftIndexView view = built.view();
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) {
      const int64_t ahead = view.Home({keys[i + kAhead], tables[i + kAhead]});
      __builtin_prefetch(&built.slots_[static_cast<size_t>(ahead)], 1);
    }
    const Status status = Check(num_tables, tables, drifts, i);
    if (!status.ok()) return status;
    int64_t place = view.Home({keys[i], tables[i]});
    while (view.slots[place].table != DriftIndexView::kFree) {
      if (view.slots[place].key == keys[i] && view.slots[place].table == tables[i]) {
        return InvalidArgument("key " + std::to_string(keys[i]) + " of table " +
                               std::to_string(tables[i]) +
                               " is given twice; allowed: one drift per key");
      }
      place = place + 1 == view.num_slots ? 0 : place + 1;
    }
    // An anomaly keeps a slot, so that a second mention is still found.
    const bool is_finite = std::isfinite(drifts[i]);
    // 0 is added so that there is one zero: scores are the same bytes wherever they are made.
    built.slots_[static_cast<size_t>(place)] = {keys[i], tables[i],
                                                is_finite ? drifts[i] + 0.0f : kUntracked};
    built.size_ += is_finite ? 1 : 0;
  }
  Swap(&built);
  return OkStatus();
}

}  // namespace slipstream
