#include "cc_ops/core/held_sums.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>

namespace slipstream {

void AddToHeld(const HeldSums& held, const int64_t* keys, const float* gradients, int64_t n,
               int64_t* places, float* sums) {
  std::unordered_map<int64_t, int64_t> place_of;
  for (int64_t p = 0; p < held.capacity; ++p) {
    if (held.keys[p] != HeldSums::kFree) place_of.emplace(held.keys[p], p);
  }
  for (int64_t i = 0; i < n; ++i) {
    const auto found = place_of.find(keys[i]);
    places[i] = found == place_of.end() ? -1 : found->second;
    for (int64_t j = 0; j < held.dim; ++j) {
      const float before = places[i] < 0 ? 0.0f : held.sums[places[i] * held.dim + j];
      sums[i * held.dim + j] = gradients[i * held.dim + j] + before;
    }
  }
}

HeldCounts TakeDue(const HeldSums& held, const HoldRule& rule, const int64_t* keys, int64_t n,
                   const int64_t* places, const float* sums, const bool* may_wait,
                   const KeySetView& marked, LeavingRows* leaving) {
  HeldCounts counts = {};
  std::vector<RowFate> fates(static_cast<size_t>(n));
  LeavingRows found;
  const auto leave = [&](int64_t key, const float* sum) {
    found.keys.push_back(key);
    found.sums.insert(found.sums.end(), sum, sum + held.dim);
  };
  for (int64_t i = 0; i < n; ++i) {
    const bool is_held = places[i] >= 0;
    const int64_t since = is_held ? held.since[places[i]] : 0;
    const float* sum = sums + i * held.dim;
    const bool is_sound =
        std::all_of(sum, sum + held.dim, [](float value) { return std::isfinite(value); });
    const bool waits = rule.by_movement ? may_wait[i] : marked.Contains(keys[i]);
    fates[i] = FateOf(rule, is_held, since, is_sound, waits);
    if (fates[i] == RowFate::kPasses) {
      const bool is_old = is_held && rule.IsOld(since);
      counts.due_by_age += is_old;
      counts.due_by_movement += !is_old && rule.by_movement && rule.MayHold();
      if (is_held) held.keys[places[i]] = HeldSums::kFree;
      leave(keys[i], sum);
    } else if (fates[i] == RowFate::kStays) {
      std::copy_n(sum, held.dim, held.sums + places[i] * held.dim);
      ++counts.held;
    }
  }
  int64_t occupied = 0;
  for (int64_t p = 0; p < held.capacity; ++p) {
    if (held.keys[p] == HeldSums::kFree) continue;
    if (rule.lets_go || rule.IsOld(held.since[p])) {
      leave(held.keys[p], held.sums + p * held.dim);
      held.keys[p] = HeldSums::kFree;
      ++counts.left_alone;
    } else {
      ++occupied;
    }
  }
  (rule.lets_go ? counts.flushed : counts.due_by_age) += counts.left_alone;

  int64_t place = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (fates[i] != RowFate::kWantsRoom) continue;
    while (place < held.capacity && held.keys[place] != HeldSums::kFree) ++place;
    if (place == held.capacity || occupied >= rule.max_rows) {
      ++counts.refused;
      leave(keys[i], sums + i * held.dim);
      continue;
    }
    held.keys[place] = keys[i];
    held.since[place] = rule.step;
    std::copy_n(sums + i * held.dim, held.dim, held.sums + place * held.dim);
    ++occupied;
    ++counts.held;
  }

  counts.leaving = static_cast<int64_t>(found.keys.size());
  std::vector<int64_t> order(found.keys.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return found.keys[a] < found.keys[b]; });
  leaving->keys.clear();
  leaving->sums.clear();
  for (int64_t i : order) {
    leaving->keys.push_back(found.keys[i]);
    leaving->sums.insert(leaving->sums.end(), found.sums.begin() + i * held.dim,
                         found.sums.begin() + (i + 1) * held.dim);
  }
  return counts;
}

}  // namespace slipstream
