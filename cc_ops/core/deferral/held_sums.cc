#include "cc_ops/core/deferral/held_sums.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "cc_ops/core/containers/flat_table.h"

namespace slipstream {
namespace {

constexpr int64_t kNowhere = -1;

// Keys that leave, each with its row, or n + its place.
using Leaves = std::vector<std::pair<int64_t, int64_t>>;

Status JudgeRows(const HeldSums& held, const HoldRule& rule, const int64_t* keys, int64_t n,
                 const int64_t* places, const float* sums, const bool* may_wait,
                 const KeySetView& marked, DuePlan* plan, Leaves* leaves, HeldCounts* counts) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t place = places[i];
    const bool is_held = place != kNowhere;
    if (is_held && (place < 0 || place >= held.capacity || held.keys[place] != keys[i])) {
      return InvalidArgument("places[" + std::to_string(i) + "] is " + std::to_string(place) +
                             ", where no sum of key " + std::to_string(keys[i]) +
                             " is held; allowed: what the first half of the step gave");
    }
    const float* sum = sums + i * held.dim;
    const bool is_sound =
        std::all_of(sum, sum + held.dim, [](float value) { return std::isfinite(value); });
    const bool waits = rule.by_movement ? may_wait[i] : marked.Contains(keys[i]);
    const int64_t since = is_held ? held.since[place] : 0;
    plan->fates[i] = FateOf(rule, is_held, since, is_sound, waits && keys[i] != HeldSums::kFree);
    if (plan->fates[i] == RowFate::kStays) {
      plan->targets[i] = place;
      ++counts->held;
    } else if (plan->fates[i] == RowFate::kPasses) {
      const bool is_old = is_held && rule.IsOld(since);
      counts->due_by_age += is_old;
      counts->due_by_movement += !is_old && rule.by_movement && rule.MayHold();
      if (is_held) plan->is_freed[place] = 1;
      leaves->emplace_back(keys[i], i);
    }
  }
  return OkStatus();
}

// Sums that leave without a gradient, and what there is room for after that.
void JudgePlaces(const HeldSums& held, const HoldRule& rule, const int64_t* keys, int64_t n,
                 DuePlan* plan, Leaves* leaves, HeldCounts* counts) {
  for (int64_t p = 0; p < held.capacity; ++p) {
    if (held.keys[p] == HeldSums::kFree || plan->is_freed[p]) continue;
    if (rule.lets_go || rule.IsOld(held.since[p])) {
      plan->is_freed[p] = 1;
      leaves->emplace_back(held.keys[p], n + p);
      ++counts->left_alone;
    } else {
      ++counts->pending;
    }
  }
  (rule.lets_go ? counts->flushed : counts->due_by_age) += counts->left_alone;

  int64_t place = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (plan->fates[i] != RowFate::kWantsRoom) continue;
    while (place < held.capacity && held.keys[place] != HeldSums::kFree && !plan->is_freed[place]) {
      ++place;
    }
    if (place == held.capacity || counts->pending >= rule.max_rows) {
      ++counts->refused;
      leaves->emplace_back(keys[i], i);
      continue;
    }
    plan->targets[i] = place++;
    ++counts->pending;
    ++counts->held;
  }
}

}  // namespace

Status AddToHeld(const HeldSums& held, const int64_t* keys, const float* gradients, int64_t n,
                 int64_t* places, float* sums) {
  // Of the step: it has fewer rows than there are sums, all of which are looked at in every step
  // anyhow.
  FlatTable<KeyNumber<int64_t>> rows;
  rows.Reset(rows.PowerOfTwo(2 * n));
  for (int64_t i = 0; i < n; ++i) {
    int64_t& row = rows.Probe({keys, keys[i]})->number;
    if (row != kNowhere) {
      return InvalidArgument("keys[" + std::to_string(row) + "] and keys[" + std::to_string(i) +
                             "] are both " + std::to_string(keys[i]) + "; allowed: each key once");
    }
    row = i;
  }
  std::fill_n(places, n, kNowhere);
  for (int64_t p = 0; p < held.capacity && n > 0; ++p) {
    if (held.keys[p] == HeldSums::kFree) continue;
    const int64_t row = rows.Probe({keys, held.keys[p]})->number;
    if (row != kNowhere) places[row] = p;
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < held.dim; ++j) {
      const float before = places[i] < 0 ? 0.0f : held.sums[places[i] * held.dim + j];
      sums[i * held.dim + j] = gradients[i * held.dim + j] + before;
    }
  }
  return OkStatus();
}

Status FindDue(const HeldSums& held, const HoldRule& rule, const int64_t* keys, int64_t n,
               const int64_t* places, const float* sums, const bool* may_wait,
               const KeySetView& marked, DuePlan* plan, LeavingRows* leaving, HeldCounts* counts) {
  *counts = HeldCounts();
  Leaves leaves;
  plan->fates.assign(static_cast<size_t>(n), RowFate::kPasses);
  plan->is_freed.assign(static_cast<size_t>(held.capacity), 0);
  plan->targets.assign(static_cast<size_t>(n), kNowhere);
  const Status status =
      JudgeRows(held, rule, keys, n, places, sums, may_wait, marked, plan, &leaves, counts);
  if (!status.ok()) return status;
  JudgePlaces(held, rule, keys, n, plan, &leaves, counts);

  std::sort(leaves.begin(), leaves.end());
  counts->leaving = static_cast<int64_t>(leaves.size());
  leaving->keys.resize(leaves.size());
  leaving->sums.resize(leaves.size() * static_cast<size_t>(held.dim));
  for (size_t r = 0; r < leaves.size(); ++r) {
    const auto [key, source] = leaves[r];
    leaving->keys[r] = key;
    const float* sum = source < n ? sums + source * held.dim : held.sums + (source - n) * held.dim;
    std::copy_n(sum, held.dim, leaving->sums.data() + r * static_cast<size_t>(held.dim));
  }
  return OkStatus();
}

void KeepOthers(const HeldSums& held, const HoldRule& rule, const int64_t* keys, int64_t n,
                const float* sums, const DuePlan& plan) {
  for (int64_t p = 0; p < held.capacity; ++p) {
    if (plan.is_freed[p]) held.keys[p] = HeldSums::kFree;
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t target = plan.targets[i];
    if (target == kNowhere) continue;
    if (plan.fates[i] == RowFate::kWantsRoom) {
      held.keys[target] = keys[i];
      held.since[target] = rule.step;
    }
    std::copy_n(sums + i * held.dim, held.dim, held.sums + target * held.dim);
  }
}

void CopyHeld(const HeldSums& held, const HeldSums& to) {
  int64_t next = 0;
  for (int64_t p = 0; p < held.capacity; ++p) {
    if (held.keys[p] == HeldSums::kFree) continue;
    to.keys[next] = held.keys[p];
    to.since[next] = held.since[p];
    std::copy_n(held.sums + p * held.dim, held.dim, to.sums + next * held.dim);
    ++next;
  }
  std::fill(to.keys + next, to.keys + to.capacity, HeldSums::kFree);
}

}  // namespace slipstream
