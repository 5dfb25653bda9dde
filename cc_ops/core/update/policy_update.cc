#include "cc_ops/core/update/policy_update.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <shared_mutex>

#include "cc_ops/core/deferral/deferral.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/core/update/checked_update.h"

namespace slipstream {
namespace {

bool HasUse(const LookupPlan& plan, CellRange uses, RankShare share) {
  return std::any_of(plan.uses.begin() + uses.begin, plan.uses.begin() + uses.end,
                     [&](const Occurrence& use) { return share.Has(plan, use); });
}

// Returns the deferral rule of a policy at a step.
DeferralRule RuleOf(const UpdatePolicy& policy, int64_t step) {
  DeferralRule rule;
  rule.step = step;
  rule.max_age = policy.max_age;
  rule.defers = policy.mode == UpdatePolicy::Mode::kDefer;
  rule.by_movement = policy.trigger == UpdatePolicy::Trigger::kMovement;
  return rule;
}

// Updates one shard of one table.
class ShardUpdater {
 public:
  // step: number of the update. collected: null if gradients are applied.
  ShardUpdater(EmbeddingTable* table, int64_t shard, StepRates rates, int64_t step,
               PolicyScratch* scratch, CollectedRows* collected)
      : table_(table),
        updates_(table->updates().shard(shard)),
        flags_(table->flags().shard(shard)),
        shard_number_(shard),
        policy_(table->updates().policy()),
        update_rule_(table->options().rule),
        dim_(table->dim()),
        rates_(rates),
        rule_(RuleOf(policy_, step)),
        is_sampled_(policy_.Samples(shard)),
        scratch_(scratch),
        collected_(collected) {}

  // Updates the row of key u of the plan. Its uses begin at first_use. found.row is null if the row
  // was removed, which occurs only in a collection. deferred: index of the key's deferred gradient,
  // with one rank only.
  SLIPSTREAM_ALWAYS_INLINE void Update(const BucketUpdate& update, int64_t u, int64_t first_use,
                                       FoundRow found, uint32_t deferred) {
    const LookupPlan& plan = *update.plan;
    const CellRange uses = {first_use, plan.uses_end[u]};
    const int64_t key = plan.unique_key[u];
    const bool is_saturated = (flags_->Of(found.index) & kSaturated) != 0;
    if (rule_.defers && is_sampled_) {
      const bool any_due = Defer(update, key, uses, found.row, is_saturated, deferred);
      if (any_due && !policy_.is_shadow) Apply(scratch_->due.data(), key, found);
      if (!policy_.is_shadow) return;
    } else {
      const bool is_masked = policy_.mode == UpdatePolicy::Mode::kMask && is_saturated;
      const int64_t rows = RowsOffered(plan, uses);
      updates_->counts.offered += rows;
      (is_masked ? updates_->counts.masked : updates_->counts.sent) += rows;
      if (is_masked && !policy_.is_shadow) {
        if (policy_.decay_skipped && found.row != nullptr) DecaySlots(key, found);
        return;
      }
    }
    float* const sum = scratch_->row.sum.data();
    SumUses(plan, *update.gradients, uses.begin, uses.end, dim_, sum);
    Apply(sum, key, found);
  }

  // Applies gradients that expired without a gradient in this update. Prefetches the following ones
  // while one is applied.
  void ApplyExpired() {
    for (size_t rank = 0; rank < updates_->deferred.size(); ++rank) {
      const DeferredGradients& deferred = updates_->deferred[rank];
      const auto is_due = [&](uint32_t index) {
        return index != DeferredGradients::kNone && IsDueAt(deferred, index);
      };
      uint32_t ahead = deferred.oldest();
      for (int64_t waiting = 0; is_due(deferred.oldest()); --waiting) {
        for (; waiting < kUpdatePrefetch && is_due(ahead); ++waiting) {
          deferred.Prefetch(ahead);
          deferred.PrefetchFind(KeyedHash(deferred.key(ahead)));
          if (collected_ == nullptr) table_->rows().Prefetch(deferred.key(ahead));
          ahead = deferred.next(ahead);
        }
        ApplyDeferred(deferred.key(deferred.oldest()), rank);
      }
    }
  }

  void Flush() {
    rule_.flushes = true;
    ApplyExpired();
    for (DeferredGradients& deferred : updates_->deferred) deferred.Clear();
  }

 private:
  // Returns the number of ranks with a gradient of the key.
  int64_t RowsOffered(const LookupPlan& plan, CellRange uses) const {
    if (policy_.ranks == 1) return 1;
    int64_t rows = 0;
    for (int rank = 0; rank < policy_.ranks; ++rank) {
      rows += HasUse(plan, uses, {rank, policy_.ranks});
    }
    return rows;
  }

  // Adds the gradient of each rank to its deferred gradient. Returns whether a sum is due, which is
  // then in the scratch memory.
  SLIPSTREAM_ALWAYS_INLINE bool Defer(const BucketUpdate& update, int64_t key, CellRange uses,
                                      StoredRow* row, bool is_saturated, uint32_t known_index) {
    bool any_due = false;
    float* const sum = scratch_->row.sum.data();
    for (int rank = 0; rank < policy_.ranks; ++rank) {
      DeferredGradients& deferred = updates_->deferred[static_cast<size_t>(rank)];
      const RankShare share = {rank, policy_.ranks};
      const bool has_gradient = policy_.ranks == 1 || HasUse(*update.plan, uses, share);
      const uint32_t index = policy_.ranks == 1 ? known_index : deferred.Find(key);
      const bool is_deferred = index != DeferredGradients::kNone;
      // A gradient that expires on this rank is applied together with the due ones of other ranks.
      if (!has_gradient && !(is_deferred && IsDueAt(deferred, index))) continue;
      if (has_gradient) {
        SumUsesOf(share, *update.plan, *update.gradients, uses.begin, uses.end, dim_, sum);
        ++updates_->counts.offered;
        if (is_deferred) AddTo(sum, deferred.Sum(index), dim_);
      } else {
        std::copy_n(deferred.Sum(index), dim_, sum);
      }
      Decision decision = Decide(rule_, is_deferred, is_deferred ? deferred.since(index) : 0,
                                 MayWait(sum, row, is_saturated));
      if (decision == Decision::kBegin && !Begin(sum, key, rank)) {
        decision = Decision::kOverBudget;
      }
      Count(decision, has_gradient, &updates_->counts);
      if (decision == Decision::kStay) std::copy_n(sum, dim_, deferred.Sum(index));
      if (!IsDue(decision)) continue;
      if (is_deferred) deferred.Remove(index);
      AddDue(sum, &any_due);
    }
    return any_due;
  }

  bool IsDueAt(const DeferredGradients& deferred, uint32_t index) const {
    return IsDue(DecideWithoutGradient(rule_, deferred.since(index)));
  }

  // Returns whether a sum may be deferred longer. A sum with a NaN may not.
  bool MayWait(const float* sum, StoredRow* row, bool is_saturated) const {
    if (!rule_.by_movement) return is_saturated;
    if (row == nullptr) return false;
    const float* const opened = table_->rows().layout().Open(row, scratch_->row.copy.data());
    return update_rule_.Movement(rates_.rate, dim_, sum, opened) < policy_.movement;
  }

  void DecaySlots(int64_t key, FoundRow found) const {
    const RowLayout& layout = table_->rows().layout();
    float* const opened = layout.Open(found.row, scratch_->row.copy.data());
    update_rule_.DecaySlots(dim_, opened);
    layout.Close(opened, key, rates_.rounding, found.row);
    table_->rows().Change(static_cast<int>(shard_number_), found.index);
  }

  // Starts to defer a gradient. Returns false if the shard's part of the rank's budget is used up,
  // or if memory runs out.
  bool Begin(const float* sum, int64_t key, int rank) {
    DeferredGradients& deferred = updates_->deferred[static_cast<size_t>(rank)];
    const int64_t parts = static_cast<int64_t>(kNumShards) * policy_.ranks;
    const int64_t part = rank * kNumShards + shard_number_;
    DeferralRule rule = rule_;
    rule.max_rows = policy_.max_rows / parts + (part < policy_.max_rows % parts);
    if (!rule.HasBudget(deferred.size())) return false;
    try {
      std::copy_n(sum, dim_, deferred.Sum(deferred.Insert(key, rule_.step)));
    } catch (const std::bad_alloc&) {
      return false;
    }
    return true;
  }

  // Applies the due gradients of a key on the rank `first` and later ranks.
  void ApplyDeferred(int64_t key, size_t first) {
    bool any_due = false;
    for (size_t rank = first; rank < updates_->deferred.size(); ++rank) {
      DeferredGradients& deferred = updates_->deferred[rank];
      const uint32_t index = deferred.Find(key);
      if (index == DeferredGradients::kNone || !IsDueAt(deferred, index)) continue;
      Count(DecideWithoutGradient(rule_, deferred.since(index)), /*has_gradient=*/false,
            &updates_->counts);
      AddDue(deferred.Sum(index), &any_due);
      deferred.Remove(index);
    }
    if (policy_.is_shadow) return;
    FoundRow found = {nullptr, 0};
    // The row exists, because a removed row takes its deferred gradients along.
    if (collected_ == nullptr) found.row = table_->rows().Find(key, &found.index);
    Apply(scratch_->due.data(), key, found);
  }

  // Adds a gradient to the sum of a key's due gradients over simulated ranks.
  void AddDue(const float* gradient, bool* any_due) {
    if (*any_due) {
      AddTo(scratch_->due.data(), gradient, dim_);
    } else {
      std::copy_n(gradient, dim_, scratch_->due.data());
    }
    *any_due = true;
  }

  void Apply(float* gradient, int64_t key, FoundRow found) {
    if (collected_ == nullptr) {
      return UpdateRow(table_, rates_, key, gradient, found, &scratch_->row);
    }
    collected_->keys.push_back(key);
    collected_->rows.insert(collected_->rows.end(), gradient, gradient + dim_);
  }

  EmbeddingTable* table_;
  ShardUpdates* updates_;
  const ShardFlags* flags_;
  const int64_t shard_number_;
  const UpdatePolicy& policy_;
  const UpdateRule update_rule_;
  const int64_t dim_;
  const StepRates rates_;
  DeferralRule rule_;
  const bool is_sampled_;
  PolicyScratch* scratch_;
  CollectedRows* collected_;
};

// Updates the rows of a bucket. drops_lost: whether the gradient of an evicted key is dropped.
SLIPSTREAM_SIMD_CLONES void UpdateKeys(const BucketUpdate& update, int64_t next,
                                       const DeferredOfKeys& deferred, bool drops_lost,
                                       ShardUpdater* updater) {
  const DeferredGradients *const own = deferred.In(update.bucket), *const later = deferred.In(next);
  const auto prefetch = [&](int64_t u, bool is_next) SLIPSTREAM_LAMBDA_INLINE {
    const DeferredGradients* const its = is_next ? later : own;
    if (its == nullptr) return;
    // Prefetch the index entry, too, because it is read again if a gradient begins or leaves.
    its->PrefetchFind(KeyedHash(update.plan->unique_key[u]));
    if (deferred.Of(u) != DeferredGradients::kNone) its->Prefetch(deferred.Of(u));
  };
  UpdateEachKey(update, next, prefetch,
                [&](int64_t u, int64_t first_use, FoundRow found) SLIPSTREAM_LAMBDA_INLINE {
                  if (found.row == nullptr && drops_lost) {
                    if (update.is_stale) ++*update.dropped;
                    return;
                  }
                  const uint32_t index = own == nullptr ? DeferredGradients::kNone : deferred.Of(u);
                  updater->Update(update, u, first_use, found, index);
                });
}

// Calls fn(key) for gradients that are due by age, or for all without a rule; oldest first.
template <class Fn>
void ForEachExpired(const DeferralRule* rule, const DeferredGradients& deferred, const Fn& fn) {
  for (uint32_t at = deferred.oldest(); at != DeferredGradients::kNone; at = deferred.next(at)) {
    if (rule != nullptr && !rule->IsExpired(deferred.since(at))) break;
    fn(deferred.key(at));
  }
}

}  // namespace

PolicyScratch::PolicyScratch(const std::vector<EmbeddingTable*>& tables)
    : row(tables), due(row.sum.size()) {}

DeferredOfKeys::DeferredOfKeys(const LookupPlan& plan) : plan_(plan) {
  const bool any = std::any_of(plan.tables.begin(), plan.tables.end(), [](EmbeddingTable* table) {
    return table->updates().shard(0)->deferred.size() == 1;
  });
  if (any) indices_.reset(new uint32_t[plan.unique_key.size()]);
}

const DeferredGradients* DeferredOfKeys::In(int64_t bucket) const {
  const int64_t shard = bucket % kNumShards;
  UpdateState& updates = plan_.tables[static_cast<size_t>(bucket / kNumShards)]->updates();
  const std::vector<DeferredGradients>& by_rank = updates.shard(shard)->deferred;
  return by_rank.size() == 1 && updates.policy().Samples(shard) ? by_rank.data() : nullptr;
}

void DeferredOfKeys::Find(CellRange buckets) {
  const std::vector<int64_t>& keys = plan_.unique_key;
  for (int64_t b = buckets.begin; indices_ != nullptr && b < buckets.end; ++b) {
    const int64_t next = std::min(b + 1, buckets.end - 1);
    const DeferredGradients *const deferred = In(b), *const next_deferred = In(next);
    if (b + 2 < buckets.end && In(b + 2) != nullptr) In(b + 2)->Prefetch();
    if (deferred == nullptr) continue;
    const auto prefetch = [&](int64_t u, bool is_next) SLIPSTREAM_LAMBDA_INLINE {
      const DeferredGradients* const its = is_next ? next_deferred : deferred;
      if (its != nullptr) its->PrefetchFind(KeyedHash(keys[u]));
    };
    // Each iteration is short, therefore prefetch twice as far ahead.
    UpdateEach<2 * kUpdatePrefetch>(KeysOf(plan_, b), KeysOf(plan_, next), prefetch,
                                    [&](int64_t u) { indices_[u] = deferred->Find(keys[u]); });
  }
}

void UpdateBucketByPolicy(const BucketUpdate& update, int64_t next, const DeferredOfKeys& deferred,
                          PolicyScratch* scratch, CollectedRows* collected) {
  // Collected rows belong to the next update.
  const int64_t step = update.table->updates().step() + (collected == nullptr ? 0 : 1);
  ShardUpdater updater(update.table, update.bucket % kNumShards, update.rates, step, scratch,
                       collected);
  UpdateKeys(update, next, deferred, /*drops_lost=*/collected == nullptr, &updater);
  updater.ApplyExpired();
}

int64_t MaxCollected(const LookupPlan& plan, int64_t bucket) {
  EmbeddingTable* table = plan.tables[static_cast<size_t>(bucket / kNumShards)];
  const DeferralRule rule = RuleOf(table->updates().policy(), table->updates().step() + 1);
  int64_t maximum = plan.unique_count[static_cast<size_t>(bucket)];
  for (const DeferredGradients& deferred : table->updates().shard(bucket % kNumShards)->deferred) {
    ForEachExpired(&rule, deferred, [&](int64_t) { ++maximum; });
  }
  return maximum;
}

void CollectDeferred(EmbeddingTable* table, PolicyScratch* scratch, CollectedRows* collected) {
  if (table->updates().num_deferred() == 0) return;
  for (int64_t s = 0; s < kNumShards; ++s) {
    ShardUpdater(table, s, StepRates(), table->updates().step(), scratch, collected).Flush();
  }
}

Status LoadForUpdate(const LookupPlan& plan, bool with_due, const Parallel& parallel) {
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    EmbeddingTable* const table = plan.tables[t];
    if (table->rows().spilled() == nullptr) continue;
    std::vector<int64_t> keys;
    const DeferralRule rule = RuleOf(table->updates().policy(), table->updates().step() + 1);
    for (int64_t s = 0; with_due && s < kNumShards; ++s) {
      for (const DeferredGradients& deferred : table->updates().shard(s)->deferred) {
        ForEachExpired(&rule, deferred, [&](int64_t key) { keys.push_back(key); });
      }
    }
    if (keys.empty() && table->rows().addresses() == plan.generations[t]) continue;
    for (int64_t s = 0; s < kNumShards; ++s) {
      const CellRange of_plan = KeysOf(plan, static_cast<int64_t>(t) * kNumShards + s);
      keys.insert(keys.end(), plan.unique_key.begin() + of_plan.begin,
                  plan.unique_key.begin() + of_plan.end);
    }
    const Status status = table->rows().LoadRow(keys.data(), static_cast<int64_t>(keys.size()),
                                                /*reads=*/false, "an update needs", parallel);
    if (!status.ok()) return status;
  }
  return OkStatus();
}

Status FlushDeferred(EmbeddingTable* table, const Parallel& parallel) {
  if (table->updates().num_deferred() == 0 || table->updates().policy().is_exchanged) {
    return OkStatus();
  }
  const int64_t step = table->updates().step();
  const float last_rate = table->updates().last_learning_rate();
  // Gradients imported before the first update wait until an update provides a rate.
  if (step == 0 && last_rate == 0.f && !table->updates().policy().is_shadow) return OkStatus();
  // The flush counts as part of the last update. At step 0 the bias correction is not a number.
  const StepRates rates = table->options().rule.RatesOf(last_rate, std::max<int64_t>(step, 1));
  const bool fits = SurelyFits(*table, rates, table->updates().AppliedBound(0.));
  // Allocate everything here. After this point all gradients are applied or none.
  std::vector<PolicyScratch> scratches(parallel.threads, PolicyScratch({table}));
  // All shards at once, unless rows must be loaded; then as many shards as fit in memory.
  for (int64_t first = 0; first < kNumShards;) {
    int64_t last = kNumShards;
    if (table->rows().spilled() != nullptr) {
      std::vector<int64_t> keys;
      for (last = first; last < kNumShards; ++last) {
        if (static_cast<int64_t>(keys.size()) > table->rows().KeysAtOnce()) break;
        for (const DeferredGradients& deferred : table->updates().shard(last)->deferred) {
          ForEachExpired(nullptr, deferred, [&](int64_t key) { keys.push_back(key); });
        }
      }
      const Status status =
          table->rows().LoadRow(keys.data(), static_cast<int64_t>(keys.size()),
                                /*reads=*/false, "the deferred gradients need", parallel);
      if (!status.ok()) return status;
    }
    std::vector<TableBackup> backups;
    if (!fits) backups.emplace_back(table, std::vector<int64_t>());
    parallel.run(parallel.threads, [&](int task) {
      const CellRange range = CellsOf(task, parallel.threads, last - first);
      for (int64_t s = first + range.begin; s < first + range.end; ++s) {
        ShardUpdater(table, s, rates, step, &scratches[task], nullptr).Flush();
      }
    });
    const Status status = CheckOrRestore(&backups);
    if (!status.ok()) return status;
    first = last;
  }
  return OkStatus();
}

Status FlushBeforeReading(const std::vector<EmbeddingTable*>& tables, const Parallel& parallel) {
  for (EmbeddingTable* table : tables) {
    {
      const std::shared_lock<std::shared_mutex> lock(table->mutex());
      if (table->updates().num_deferred() == 0) continue;
    }
    const std::unique_lock<std::shared_mutex> lock(table->mutex());
    try {
      const Status status = FlushDeferred(table, parallel);
      if (!status.ok()) return status;
    } catch (const std::bad_alloc&) {
      return OutOfMemory("applying deferred gradients", {table});
    }
  }
  return OkStatus();
}

}  // namespace slipstream
