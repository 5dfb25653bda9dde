#include "cc_ops/core/drift_index.h"

#include <cmath>
#include <string>
#include <utility>

namespace slipstream {
namespace {

std::string At(int64_t position) { return " at position " + std::to_string(position); }

}  // namespace

Status DriftIndex::Build(int num_tables, const int32_t* tables, const int64_t* keys,
                         const float* drifts, int64_t n) {
  DriftIndex built;
  if (n > 0) {
    uint64_t capacity = 16;
    while (capacity < 2 * static_cast<uint64_t>(n)) capacity *= 2;
    built.slots_.resize(capacity);
  }
  const DriftIndexView view = built.view();
  for (int64_t i = 0; i < n; ++i) {
    if (tables[i] < 0 || tables[i] >= num_tables) {
      return InvalidArgument("tables is " + std::to_string(tables[i]) + At(i) + "; allowed: 0 to " +
                             std::to_string(num_tables - 1));
    }
    if (std::isfinite(drifts[i]) && drifts[i] < 0.0f) {
      return InvalidArgument("drift is " + std::to_string(drifts[i]) + At(i) +
                             "; allowed: at least 0, or not finite for an anomaly");
    }
    uint64_t home = view.Home({keys[i], tables[i]});
    while (built.slots_[home].table != DriftIndexView::kFree) {
      if (built.slots_[home].key == keys[i] && built.slots_[home].table == tables[i]) {
        return InvalidArgument("key " + std::to_string(keys[i]) + " of table " +
                               std::to_string(tables[i]) + " is given twice, the second time" +
                               At(i) + "; allowed: one drift per key");
      }
      home = (home + 1) & view.mask();
    }
    // An anomaly keeps a slot, so that a second mention is still found.
    const bool is_finite = std::isfinite(drifts[i]);
    // 0 is added so that there is one zero: scores are the same bytes wherever they are made.
    built.slots_[home] = {keys[i], tables[i], is_finite ? drifts[i] + 0.0f : kUntracked};
    built.size_ += is_finite ? 1 : 0;
  }
  *this = std::move(built);
  return OkStatus();
}

}  // namespace slipstream
