#include "cc_ops/core/deferral/deferred_buffers.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "cc_ops/core/containers/flat_table.h"

namespace slipstream {
namespace {

constexpr int64_t kNowhere = -1;

}  // namespace

Status AddDeferred(const DeferredBuffers& buffers, const int64_t* keys, const float* gradients,
                   int64_t n, int64_t* indices, float* sums) {
  // Hash the rows of the step, not the buffers: a step has fewer rows than there are sums, and
  // every step reads all sums anyway.
  FlatTable<KeyNumber<int64_t>> rows;
  rows.Reset(rows.PowerOfTwo(2 * n));
  for (int64_t i = 0; i < n; ++i) {
    int64_t& row = rows.Probe({keys, keys[i]})->number;
    if (row != kNowhere) {
      return InvalidArgument("keys[" + std::to_string(row) + "] and keys[" + std::to_string(i) +
                             "] are both " + std::to_string(keys[i]) +
                             " in the merged gradients of a step; expected distinct keys. Sum the "
                             "gradients of each key first");
    }
    row = i;
  }
  std::fill_n(indices, n, kNowhere);
  for (int64_t p = 0; p < buffers.capacity && n > 0; ++p) {
    if (buffers.keys[p] == DeferredBuffers::kFree) continue;
    const int64_t row = rows.Probe({keys, buffers.keys[p]})->number;
    if (row != kNowhere) indices[row] = p;
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < buffers.dim; ++j) {
      const float before = indices[i] < 0 ? 0.0f : buffers.sums[indices[i] * buffers.dim + j];
      sums[i * buffers.dim + j] = gradients[i * buffers.dim + j] + before;
    }
  }
  return OkStatus();
}

Status FindDue(const DeferredBuffers& buffers, const DeferralRule& rule, const StepRows& rows,
               StepPlan* plan) {
  const int64_t n = rows.n, capacity = buffers.capacity, dim = buffers.dim;
  StepCounts& counts = plan->counts = StepCounts();
  counts.offered = n;
  plan->decisions.assign(static_cast<size_t>(n), Decision::kApply);
  plan->is_freed.assign(static_cast<size_t>(capacity), 0);
  plan->targets.assign(static_cast<size_t>(n), kNowhere);
  std::vector<std::pair<int64_t, int64_t>> due;  // Keys, each with its row i, or n + its entry.
  for (int64_t i = 0; i < n; ++i) {
    const int64_t key = rows.keys[i], p = rows.indices[i];
    const bool is_deferred = p != kNowhere;
    if (is_deferred && (p < 0 || p >= capacity || buffers.keys[p] != key)) {
      return InvalidArgument(
          "indices[" + std::to_string(i) + "] is " + std::to_string(p) +
          ", but that entry does not contain key " + std::to_string(key) +
          "; expected the indices that SlipstreamAddDeferred returned in this step");
    }
    // A sum that is not finite never waits, so that the optimizer sees it.
    const float* sum = rows.sums + i * dim;
    const bool may_wait =
        (rule.by_movement ? rows.may_wait[i] : rows.saturated.Contains(key)) &&
        key != DeferredBuffers::kFree &&
        std::all_of(sum, sum + dim, [](float value) { return std::isfinite(value); });
    const Decision decision =
        Decide(rule, is_deferred, is_deferred ? buffers.since[p] : 0, may_wait);
    plan->decisions[i] = decision;
    if (decision == Decision::kBegin) continue;  // The free entries are not known yet.
    Count(decision, /*has_gradient=*/true, &counts);
    if (decision == Decision::kStay) {
      plan->targets[i] = p;
    } else {
      if (is_deferred) plan->is_freed[p] = 1;
      due.emplace_back(key, i);
    }
  }
  for (int64_t p = 0; p < capacity; ++p) {
    if (buffers.keys[p] == DeferredBuffers::kFree || plan->is_freed[p]) continue;
    const Decision decision = DecideWithoutGradient(rule, buffers.since[p]);
    if (!IsDue(decision)) {
      ++counts.num_deferred;
      counts.next_due += rule.ExpiresNext(buffers.since[p]);
      continue;
    }
    Count(decision, /*has_gradient=*/false, &counts);
    plan->is_freed[p] = 1;
    due.emplace_back(buffers.keys[p], n + p);
  }
  int64_t free = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (plan->decisions[i] != Decision::kBegin) continue;
    if (counts.num_deferred < capacity && rule.HasBudget(counts.num_deferred)) {
      while (buffers.keys[free] != DeferredBuffers::kFree && !plan->is_freed[free]) ++free;
      plan->targets[i] = free++;
      ++counts.num_deferred;
      counts.next_due += rule.ExpiresNext(rule.step);
    } else {
      plan->decisions[i] = Decision::kOverBudget;
      due.emplace_back(rows.keys[i], i);
    }
    Count(plan->decisions[i], /*has_gradient=*/true, &counts);
  }
  std::sort(due.begin(), due.end());
  plan->due_keys.resize(due.size());
  plan->due_sums.resize(due.size() * static_cast<size_t>(dim));
  for (size_t r = 0; r < due.size(); ++r) {
    const auto [key, source] = due[r];
    plan->due_keys[r] = key;
    const float* sum = source < n ? rows.sums + source * dim : buffers.sums + (source - n) * dim;
    std::copy_n(sum, dim, plan->due_sums.data() + r * static_cast<size_t>(dim));
  }
  return OkStatus();
}

void KeepOthers(const DeferredBuffers& buffers, const DeferralRule& rule, const StepRows& rows,
                const StepPlan& plan) {
  for (int64_t p = 0; p < buffers.capacity; ++p) {
    if (plan.is_freed[p]) buffers.keys[p] = DeferredBuffers::kFree;
  }
  for (int64_t i = 0; i < rows.n; ++i) {
    const int64_t target = plan.targets[i];
    if (target == kNowhere) continue;
    if (plan.decisions[i] == Decision::kBegin) {
      buffers.keys[target] = rows.keys[i];
      buffers.since[target] = rule.step;
    }
    std::copy_n(rows.sums + i * buffers.dim, buffers.dim, buffers.sums + target * buffers.dim);
  }
}

void DueBound::Reset(int64_t num_deferred, int64_t step) {
  min_step_ = step + 1;
  num_deferred_ = num_deferred;
  max_age_ = 0;
}

int64_t DueBound::MaxDue(const DeferralRule& rule, int64_t n, int64_t capacity) const {
  const bool is_known = steps_in_flight_ == 0 && rule.max_age == max_age_ && !rule.flushes;
  return n + (is_known ? next_due_ : std::min(num_deferred_ + rows_in_flight_, capacity));
}

void DueBound::Launch(int64_t n) {
  ++steps_in_flight_;
  rows_in_flight_ += n;
}

void DueBound::Finish(const DeferralRule& rule, int64_t n, const StepCounts* counts) {
  --steps_in_flight_;
  rows_in_flight_ -= n;
  if (counts == nullptr || rule.step < min_step_) return;
  min_step_ = rule.step;
  max_age_ = rule.max_age;
  num_deferred_ = counts->num_deferred;
  next_due_ = counts->next_due;
}

DeferredContents ExportDeferred(const DeferredBuffers& buffers, int64_t step) {
  std::vector<int64_t> order;
  for (int64_t p = 0; p < buffers.capacity; ++p) {
    if (buffers.keys[p] != DeferredBuffers::kFree) order.push_back(p);
  }
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::pair(buffers.since[a], buffers.keys[a]) <
           std::pair(buffers.since[b], buffers.keys[b]);
  });
  DeferredContents contents;
  for (int64_t p : order) {
    contents.Add(buffers.keys[p], step - buffers.since[p], buffers.sums + p * buffers.dim,
                 buffers.dim);
  }
  return contents;
}

Status ImportDeferred(const DeferredContents& contents, int64_t step,
                      const DeferredBuffers& buffers) {
  const Status status = CheckDeferred(contents, buffers.dim, "");
  if (!status.ok()) return status;
  const int64_t n = contents.size();
  if (n > buffers.capacity) {
    const std::string capacity = std::to_string(buffers.capacity);
    return InvalidArgument("the import has " + std::to_string(n) +
                           " deferred gradients; expected at most " + capacity +
                           ", the capacity of the buffers");
  }
  std::vector<int64_t> sorted = contents.keys;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    return InvalidArgument(
        "key " + std::to_string(*twice) +
        " occurs twice in the deferred gradients to import; expected distinct keys");
  }
  if (n > 0 && sorted.front() == DeferredBuffers::kFree) {
    return InvalidArgument(
        "key " + std::to_string(sorted.front()) +
        " cannot be deferred, because it marks free entries; expected any other key");
  }
  std::copy_n(contents.keys.data(), n, buffers.keys);
  std::fill(buffers.keys + n, buffers.keys + buffers.capacity, DeferredBuffers::kFree);
  for (int64_t i = 0; i < n; ++i) buffers.since[i] = step - contents.ages[i];
  std::copy_n(contents.sums.data(), n * buffers.dim, buffers.sums);
  return status;
}

}  // namespace slipstream
