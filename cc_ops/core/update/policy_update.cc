#include "cc_ops/core/update/policy_update.h"

#include <algorithm>
#include <mutex>
#include <new>
#include <shared_mutex>

#include "cc_ops/core/lookup/key_sort.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/core/update/row_update.h"
#include "cc_ops/core/update/use_sums.h"

namespace slipstream {
namespace {

void AddTo(float* total, const float* part, int64_t dim) {
  for (int64_t j = 0; j < dim; ++j) total[j] += part[j];
}

bool HasUse(const LookupPlan& plan, int64_t begin, int64_t end, CellRange examples) {
  return std::any_of(plan.uses.begin() + begin, plan.uses.begin() + end,
                     [&](const Occurrence& use) {
                       return use.example >= examples.begin && use.example < examples.end;
                     });
}

// Works on one shard of one table.
class ShardUpdater {
 public:
  // step: number of the update. collected: null if sums are to be applied.
  ShardUpdater(EmbeddingTable* table, int64_t shard, float rate, int64_t step,
               PolicyScratch* scratch, CollectedRows* collected)
      : table_(table),
        shard_(table->shard(shard)),
        shard_number_(shard),
        policy_(table->policy()),
        rule_(table->options().rule),
        dim_(table->dim()),
        rate_(rate),
        step_(step),
        is_sampled_(policy_.Samples(shard)),
        sum_(scratch->sum.data()),
        due_(scratch->due.data()),
        before_(scratch->before.data()),
        collected_(collected) {}

  // Updates the row of one key of the batch from its uses [begin, end). A row that left
  // the table, which only a collection meets, is null.
  void Update(const BucketUpdate& update, int64_t key, uint32_t slot, float* row, int64_t begin,
              int64_t end) {
    const uint8_t mark = shard_->MarkOf(slot);
    const bool holds = policy_.mode == UpdatePolicy::Mode::kDefer && is_sampled_;
    if (holds) Hold(update, key, row, begin, end, mark);
    if (holds && !policy_.is_shadow) {
      if (any_due_) Apply(due_, key, slot, row);
      return;
    }
    const bool is_masked = policy_.mode == UpdatePolicy::Mode::kMask && (mark & kSaturated) != 0;
    if (!holds) Count(*update.plan, begin, end, is_masked);
    if (is_masked && !policy_.is_shadow) {
      if (policy_.decay_skipped && row != nullptr) rule_.DecaySlots(dim_, row);
      return;
    }
    SumUses(*update.plan, *update.gradients, begin, end, dim_, sum_);
    Apply(sum_, key, slot, row);
  }

  // Applies the sums that have come of age and whose keys were not in the batch.
  void ApplyExpired() {
    if (!is_sampled_) return;
    for (size_t rank = 0; rank < shard_->deferred.size(); ++rank) {
      DeferredSums& sums = shard_->deferred[rank];
      while (sums.oldest() != DeferredSums::kNone && IsExpired(sums, sums.oldest())) {
        ApplyHeld(sums.key(sums.oldest()), rank, false);
      }
    }
  }

  void Flush() {
    for (size_t rank = 0; rank < shard_->deferred.size(); ++rank) {
      DeferredSums& sums = shard_->deferred[rank];
      while (sums.oldest() != DeferredSums::kNone) {
        ApplyHeld(sums.key(sums.oldest()), rank, true);
      }
      sums.Clear();
    }
  }

 private:
  // The examples of a batch that fall to one simulated rank: an even split.
  CellRange ExamplesOf(const LookupPlan& plan, int rank) const {
    return CellsOf(rank, policy_.ranks, plan.batch);
  }

  bool IsExpired(const DeferredSums& sums, uint32_t place) const {
    return step_ - sums.since(place) >= policy_.max_age;
  }

  void Count(const LookupPlan& plan, int64_t begin, int64_t end, bool is_masked) {
    int64_t rows = policy_.ranks == 1;
    for (int rank = 0; policy_.ranks > 1 && rank < policy_.ranks; ++rank) {
      rows += HasUse(plan, begin, end, ExamplesOf(plan, rank));
    }
    shard_->counts.offered += rows;
    (is_masked ? shard_->counts.masked : shard_->counts.sent) += rows;
  }

  // Adds each rank's gradients to its sum; leaves in `due_` what is to be applied.
  void Hold(const BucketUpdate& update, int64_t key, const float* row, int64_t begin, int64_t end,
            uint8_t mark) {
    any_due_ = false;
    const uint64_t hash = HashKey(key);
    for (int rank = 0; rank < policy_.ranks; ++rank) {
      DeferredSums& sums = shard_->deferred[static_cast<size_t>(rank)];
      const CellRange examples = ExamplesOf(*update.plan, rank);
      const bool has_new = policy_.ranks == 1 || HasUse(*update.plan, begin, end, examples);
      const uint32_t place = sums.Find(key, hash);
      const bool is_held = place != DeferredSums::kNone;
      const bool is_expired = is_held && IsExpired(sums, place);
      if (!has_new && !is_expired) continue;
      if (has_new) {
        SumUsesOf(examples, *update.plan, *update.gradients, begin, end, dim_, sum_);
        ++shard_->counts.offered;
        if (is_held) AddTo(sum_, sums.Sum(place), dim_);
      } else {
        std::copy_n(sums.Sum(place), dim_, sum_);
      }
      if (is_expired) {
        ++shard_->counts.due_by_age;
      } else if (!MayWait(row, mark)) {
        shard_->counts.due_by_movement += policy_.trigger == UpdatePolicy::Trigger::kMovement;
      } else if (is_held) {
        std::copy_n(sum_, dim_, sums.Sum(place));
        ++shard_->counts.held;
        continue;
      } else if (sums.size() < Allowed(rank) && Keep(&sums, key, hash)) {
        ++shard_->counts.held;
        continue;
      } else {
        ++shard_->counts.refused;
      }
      if (is_held) sums.Remove(place);
      AddDue();
    }
  }

  // Whether the sum in `sum_` may be held longer. A NaN anywhere may not.
  bool MayWait(const float* row, uint8_t mark) const {
    if (policy_.trigger == UpdatePolicy::Trigger::kInterval) return (mark & kSaturated) != 0;
    return row != nullptr && rule_.Movement(rate_, dim_, sum_, row) < policy_.movement;
  }

  // The sums that a rank may hold in this shard: its part of what the table may.
  int64_t Allowed(int rank) const {
    const int64_t parts = static_cast<int64_t>(kNumShards) * policy_.ranks;
    const int64_t part = rank * kNumShards + shard_number_;
    return policy_.max_rows / parts + (part < policy_.max_rows % parts);
  }

  // Starts a sum; false if memory ran out.
  bool Keep(DeferredSums* sums, int64_t key, uint64_t hash) {
    try {
      std::copy_n(sum_, dim_, sums->Sum(sums->Insert(key, hash, step_)));
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  void AddDue() {
    ++shard_->counts.sent;
    if (any_due_) {
      AddTo(due_, sum_, dim_);
    } else {
      std::copy_n(sum_, dim_, due_);
    }
    any_due_ = true;
  }

  // Applies a key's held sums of `first` and later ranks: those that have come of
  // age, or all of them in a flush.
  void ApplyHeld(int64_t key, size_t first, bool is_flush) {
    const uint64_t hash = HashKey(key);
    any_due_ = false;
    for (size_t rank = first; rank < shard_->deferred.size(); ++rank) {
      DeferredSums& sums = shard_->deferred[rank];
      const uint32_t place = sums.Find(key, hash);
      if (place == DeferredSums::kNone || !(is_flush || IsExpired(sums, place))) continue;
      std::copy_n(sums.Sum(place), dim_, sum_);
      sums.Remove(place);
      ++(is_flush ? shard_->counts.flushed : shard_->counts.due_by_age);
      AddDue();
    }
    if (policy_.is_shadow) return;
    if (collected_ != nullptr) return Collect(due_, key);
    uint32_t slot = 0;
    // A row that leaves the table takes its sums with it: the row is there.
    float* row = table_->Find(key, hash, &slot);
    Apply(due_, key, slot, row);
  }

  void Apply(const float* gradient, int64_t key, uint32_t slot, float* row) {
    if (collected_ != nullptr) return Collect(gradient, key);
    UpdateRow(rule_, rate_, dim_, gradient, slot, row, shard_, before_);
  }

  void Collect(const float* gradient, int64_t key) {
    collected_->keys.push_back(key);
    collected_->rows.insert(collected_->rows.end(), gradient, gradient + dim_);
  }

  EmbeddingTable* table_;
  TableShard* shard_;
  const int64_t shard_number_;
  const UpdatePolicy& policy_;
  const UpdateRule rule_;
  const int64_t dim_;
  const float rate_;
  const int64_t step_;
  const bool is_sampled_;
  float *sum_, *due_, *before_;
  CollectedRows* collected_;
  bool any_due_ = false;
};

void UpdateOrCollect(const BucketUpdate& update, int64_t step, PolicyScratch* scratch,
                     CollectedRows* collected) {
  const LookupPlan& plan = *update.plan;
  EmbeddingTable* table = update.table;
  ShardUpdater updater(table, update.bucket % kNumShards, update.rate, step, scratch, collected);
  const int64_t begin = plan.unique_begin[update.bucket];
  const int64_t end = begin + plan.unique_count[update.bucket];
  const int64_t row_floats = table->dim() + table->slots_per_row();
  int64_t use = begin;
  for (int64_t u = begin; u < end; ++u) {
    if (u + kUpdatePrefetch < end) PrefetchRow(plan.unique_row[u + kUpdatePrefetch], row_floats);
    const int64_t first_use = use;
    use = plan.uses_end[u];
    float* row = plan.unique_row[u];
    uint32_t slot = plan.unique_slot[u];
    if (update.is_stale) {
      row = table->Find(plan.unique_key[u], HashKey(plan.unique_key[u]), &slot);
      if (row == nullptr && collected == nullptr) {
        ++*update.dropped;
        continue;
      }
      if (row == nullptr) slot = HashIndex::kEmpty;
    }
    updater.Update(update, plan.unique_key[u], slot, row, first_use, use);
  }
  updater.ApplyExpired();
}

int64_t WidestRow(const std::vector<EmbeddingTable*>& tables) {
  int64_t widest = 0;
  for (const EmbeddingTable* table : tables) widest = std::max(widest, table->dim());
  return widest;
}

}  // namespace

PolicyScratch::PolicyScratch(const std::vector<EmbeddingTable*>& tables)
    : PolicyScratch(WidestRow(tables)) {}

void UpdateBucketByPolicy(const BucketUpdate& update, PolicyScratch* scratch) {
  UpdateOrCollect(update, update.table->update_step(), scratch, nullptr);
}

void CollectBucketByPolicy(const BucketUpdate& update, PolicyScratch* scratch,
                           CollectedRows* collected) {
  // The update that these rows will be part of.
  UpdateOrCollect(update, update.table->update_step() + 1, scratch, collected);
}

int64_t MostCollected(const LookupPlan& plan, int64_t bucket) {
  EmbeddingTable* table = plan.tables[static_cast<size_t>(bucket / kNumShards)];
  const int64_t step = table->update_step() + 1, max_age = table->policy().max_age;
  int64_t most = plan.unique_count[static_cast<size_t>(bucket)];
  for (const DeferredSums& sums : table->shard(bucket % kNumShards)->deferred) {
    for (uint32_t at = sums.oldest(); at != DeferredSums::kNone; at = sums.next(at)) {
      if (step - sums.since(at) < max_age) break;
      ++most;
    }
  }
  return most;
}

void CollectDeferred(EmbeddingTable* table, PolicyScratch* scratch, CollectedRows* collected) {
  if (table->num_deferred() == 0) return;
  for (int64_t s = 0; s < kNumShards; ++s) {
    ShardUpdater(table, s, 0.f, table->update_step(), scratch, collected).Flush();
  }
}

void FlushDeferred(EmbeddingTable* table, const Parallel& parallel) {
  if (table->num_deferred() == 0 || table->policy().is_exchanged) return;
  const int64_t step = table->update_step();
  // Sums can be imported before the first update. Without a rate they stay until it tells one.
  if (step == 0 && table->last_learning_rate() == 0.f && !table->policy().is_shadow) return;
  // They count as a part of that update: a bias correction of 0 updates is no number.
  const float rate =
      table->options().rule.EffectiveRate(table->last_learning_rate(), std::max<int64_t>(step, 1));
  // All that needs memory; from here on sums are applied all or none.
  std::vector<PolicyScratch> scratches(parallel.threads, PolicyScratch(table->dim()));
  parallel.run(parallel.threads, [&](int task) {
    PolicyScratch& scratch = scratches[task];
    const CellRange range = CellsOf(task, parallel.threads, kNumShards);
    for (int64_t s = range.begin; s < range.end; ++s) {
      ShardUpdater(table, s, rate, step, &scratch, nullptr).Flush();
    }
  });
}

Status FlushBeforeReading(const std::vector<EmbeddingTable*>& tables, const Parallel& parallel) {
  for (EmbeddingTable* table : tables) {
    {
      const std::shared_lock<std::shared_mutex> lock(table->mutex());
      if (table->num_deferred() == 0) continue;
    }
    const std::unique_lock<std::shared_mutex> lock(table->mutex());
    try {
      FlushDeferred(table, parallel);
    } catch (const std::bad_alloc&) {
      return OutOfMemory("applying what is held back", {table});
    }
  }
  return OkStatus();
}

}  // namespace slipstream
