#include "cc_ops/core/lookup/merged_plan.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <new>
#include <tuple>

#include "cc_ops/core/lookup/key_sort.h"
#include "cc_ops/core/table/out_of_memory.h"

namespace slipstream {
namespace {

// A generation that no table has, so that an update finds the rows again.
constexpr int64_t kOutdated = -2;

// A distinct key of one of the plans.
struct KeyOfPlan {
  int64_t key;
  size_t plan;
  int64_t unique;  // Number of the key in its plan.
  bool operator<(const KeyOfPlan& other) const {
    return std::tie(key, plan) < std::tie(other.key, other.plan);
  }
};

// Number of the first use of a distinct key of a bucket.
int64_t FirstUse(const LookupPlan& plan, int64_t bucket, int64_t unique) {
  const int64_t begin = plan.unique_begin[bucket];
  return unique == begin ? begin : plan.uses_end[unique - 1];
}

class Merge {
 public:
  Merge(const std::vector<const LookupPlan*>& plans, LookupPlan* merged)
      : plans_(plans), merged_(merged) {
    is_scaled_ = std::any_of(plans.begin(), plans.end(),
                             [](const LookupPlan* plan) { return !plan->scale.empty(); });
  }

  // Allocates the merged plan and fills all parts that are not stored per key.
  void Begin() {
    const LookupPlan& last = *plans_.back();
    *merged_ = LookupPlan();
    merged_->tables = last.tables;
    merged_->generations = last.generations;
    merged_->update_steps = last.update_steps;
    merged_->unique_begin.assign(last.unique_begin.size(), 0);
    merged_->unique_count.assign(last.unique_count.size(), 0);
    merged_->max_scale = 1.f;
    for (const LookupPlan* plan : plans_) {
      float& largest = merged_->max_scale;
      // A NaN remains.
      if (!std::isnan(largest) && !(plan->max_scale <= largest)) largest = plan->max_scale;
      first_feature_.push_back(static_cast<int32_t>(merged_->feature_table.size()));
      merged_->feature_table.insert(merged_->feature_table.end(), plan->feature_table.begin(),
                                    plan->feature_table.end());
      merged_->examples.insert(merged_->examples.end(), plan->examples.begin(),
                               plan->examples.end());
      for (size_t b = 0; b < plan->unique_begin.size(); ++b) {
        merged_->unique_begin[b] += plan->unique_begin[b];
      }
      for (size_t t = 0; t < plan->tables.size(); ++t) {
        if (plan->generations[t] != last.generations[t]) merged_->generations[t] = kOutdated;
      }
    }
    const auto uses = static_cast<size_t>(merged_->unique_begin.back());
    merged_->unique_key.resize(uses);
    merged_->unique_row.resize(uses);
    merged_->unique_index.resize(uses);
    merged_->uses_end.resize(uses);
    merged_->uses.resize(uses);
    if (is_scaled_) {
      merged_->use_position.resize(uses);
      merged_->scale.resize(uses);
    }
  }

  // Merges the keys of a bucket.
  void MergeBucket(int64_t bucket, std::vector<KeyOfPlan>* keys) {
    keys->clear();
    for (size_t p = 0; p < plans_.size(); ++p) {
      const int64_t begin = plans_[p]->unique_begin[bucket];
      for (int64_t u = begin; u < begin + plans_[p]->unique_count[bucket]; ++u) {
        keys->push_back({plans_[p]->unique_key[u], p, u});
      }
    }
    std::sort(keys->begin(), keys->end());
    int64_t unique = merged_->unique_begin[bucket], use = unique;
    for (size_t i = 0; i < keys->size(); ++i) {
      const KeyOfPlan& of_plan = (*keys)[i];
      const LookupPlan& plan = *plans_[of_plan.plan];
      for (int64_t j = FirstUse(plan, bucket, of_plan.unique); j < plan.uses_end[of_plan.unique];
           ++j) {
        AddUse(of_plan.plan, j, use++);
      }
      // The last plan with a row has the current row: a key may have got its row in a later lookup.
      if (plan.unique_row[of_plan.unique] != nullptr) {
        merged_->unique_row[unique] = plan.unique_row[of_plan.unique];
        merged_->unique_index[unique] = plan.unique_index[of_plan.unique];
      }
      if (i + 1 < keys->size() && (*keys)[i + 1].key == of_plan.key) continue;
      merged_->unique_key[unique] = of_plan.key;
      merged_->uses_end[unique++] = use;
    }
    merged_->unique_count[bucket] = unique - merged_->unique_begin[bucket];
  }

 private:
  void AddUse(size_t p, int64_t from, int64_t to) {
    const LookupPlan& plan = *plans_[p];
    const Occurrence& use = plan.uses[from];
    merged_->uses[to] = {first_feature_[p] + use.feature, use.example};
    if (!is_scaled_) return;
    merged_->use_position[to] = to;
    merged_->scale[to] = plan.scale.empty() ? 1.f : plan.scale[plan.use_position[from]];
  }

  const std::vector<const LookupPlan*>& plans_;
  LookupPlan* const merged_;
  bool is_scaled_ = false;
  std::vector<int32_t> first_feature_;  // [plans]; number of the first feature of a plan.
};

}  // namespace

Status MergePlans(const std::vector<const LookupPlan*>& plans, const Parallel& parallel,
                  LookupPlan* merged) {
  for (const LookupPlan* plan : plans) {
    if (plan->tables == plans[0]->tables) continue;
    return InvalidArgument("the plans have different tables; expected lookups of the same tables");
  }
  try {
    Merge merge(plans, merged);
    merge.Begin();
    const std::vector<int64_t> bounds = BalancedBuckets(merged->unique_begin, parallel.threads);
    // Sized by the largest bucket, because a task must not allocate memory.
    size_t largest = 0;
    for (size_t b = 0; b + 1 < merged->unique_begin.size(); ++b) {
      largest = std::max(
          largest, static_cast<size_t>(merged->unique_begin[b + 1] - merged->unique_begin[b]));
    }
    std::vector<std::vector<KeyOfPlan>> keys(static_cast<size_t>(parallel.threads));
    for (std::vector<KeyOfPlan>& of_task : keys) of_task.reserve(largest);
    parallel.run(parallel.threads, [&](int task) {
      for (int64_t b = bounds[task]; b < bounds[task + 1]; ++b) merge.MergeBucket(b, &keys[task]);
    });
  } catch (const std::bad_alloc&) {
    return OutOfMemory("merging the lookups of a step", plans[0]->tables);
  }
  return OkStatus();
}

}  // namespace slipstream
