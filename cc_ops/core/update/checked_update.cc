#include "cc_ops/core/update/checked_update.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "cc_ops/core/update/policy_update.h"

namespace slipstream {
namespace {

std::string NameOf(const EmbeddingTable& table, int64_t key) {
  return "key " + std::to_string(key) + " of table '" + table.options().name + "'";
}

// Returns the number without the sign of a NaN.
std::string Text(float value) { return std::isnan(value) ? "nan" : std::to_string(value); }

// Calls fn(key, sum) for the deferred gradients of a shard.
template <class Fn>
void ForEachDeferred(ShardUpdates* updates, const Fn& fn) {
  for (DeferredGradients& deferred : updates->deferred) {
    for (uint32_t at = deferred.oldest(); at != DeferredGradients::kNone; at = deferred.next(at)) {
      fn(deferred.key(at), deferred.Sum(at));
    }
  }
}

// Sets `sum` ([dim]) to the gradient of a key. If the table defers gradients or simulates ranks,
// adds the magnitudes of all gradients, including deferred gradients, because such a table adds up
// parts of the gradients.
void SumWhole(const LookupPlan& plan, const std::vector<PooledGradient>& gradients, CellRange uses,
              int64_t key, EmbeddingTable* table, float* sum) {
  const int64_t dim = table->dim();
  const UpdatePolicy& policy = table->updates().policy();
  if (policy.mode != UpdatePolicy::Mode::kDefer && policy.ranks == 1) {
    return SumUses(plan, gradients, uses.begin, uses.end, dim, sum);
  }
  std::fill_n(sum, dim, 0.f);
  const auto add = [&](float scale, const float* values) {
    for (int64_t j = 0; j < dim; ++j) sum[j] += std::fabs(scale * values[j]);
  };
  for (int64_t i = uses.begin; i < uses.end; ++i) {
    const PooledGradient& gradient = gradients[plan.uses[i].feature];
    add(plan.scale.empty() ? 1.f : plan.scale[plan.use_position[i]],
        gradient.data + plan.uses[i].example * gradient.stride);
  }
  for (DeferredGradients& deferred : table->updates().shard(ShardOf(key))->deferred) {
    const uint32_t index = deferred.Find(key);
    if (index != DeferredGradients::kNone) add(1.f, deferred.Sum(index));
  }
}

// Returns why the sum of the uses of a key is not finite. is_deferred: whether the table defers
// gradients.
std::string CauseOf(const LookupPlan& plan, const std::vector<PooledGradient>& gradients,
                    CellRange uses, int64_t dim, bool is_deferred) {
  for (int64_t i = uses.begin; i < uses.end && !plan.scale.empty(); ++i) {
    const Occurrence& use = plan.uses[i];
    const float scale = plan.scale[plan.use_position[i]];
    const std::string place = " of the key in feature " + std::to_string(use.feature) +
                              ", example " + std::to_string(use.example) + ", ";
    if (!std::isfinite(scale)) {
      return "the weight" + place + "divided by the divisor of the combiner, is " + Text(scale);
    }
    const float* const g =
        gradients[use.feature].data + use.example * gradients[use.feature].stride;
    for (int64_t j = 0; j < dim; ++j) {
      if (std::isfinite(scale * g[j])) continue;
      return "the weight" + place + Text(scale) + ", times the gradient " + Text(g[j]) +
             " overflows float32";
    }
  }
  return "the sum of the gradients of its " + std::to_string(uses.end - uses.begin) + " uses" +
         (is_deferred ? ", with deferred gradients," : "") + " overflows float32";
}

}  // namespace

SumBounds::SumBounds(const LookupPlan& plan, float largest) : plan_(plan) {
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    // A bucket has at least as many uses as each of its keys.
    int64_t uses = 0;
    for (size_t b = t * kNumShards; b < (t + 1) * kNumShards; ++b) {
      uses = std::max(uses, plan.unique_begin[b + 1] - plan.unique_begin[b]);
    }
    plan.tables[t]->updates().TightenDeferredBound();
    const double sum = SumBound(uses, largest, plan.max_scale);
    applied_.push_back(plan.tables[t]->updates().AppliedBound(sum));
    deferred_.push_back(plan.tables[t]->updates().DeferredBound(sum));
  }
}

Status SumBounds::CheckSums(const std::vector<PooledGradient>& gradients) const {
  const auto is_small = [](double bound) { return bound <= kMaxSumBound; };
  if (std::all_of(applied_.begin(), applied_.end(), is_small)) return OkStatus();
  std::vector<float> sum;
  for (size_t b = 0; b < plan_.unique_count.size(); ++b) {
    EmbeddingTable* const table = plan_.tables[b / kNumShards];
    const CellRange keys = KeysOf(plan_, static_cast<int64_t>(b));
    int64_t first_use = keys.begin;
    sum.resize(static_cast<size_t>(table->dim()));
    for (int64_t u = keys.begin; u < keys.end; ++u) {
      const CellRange uses = {first_use, plan_.uses_end[u]};
      first_use = uses.end;
      SumWhole(plan_, gradients, uses, plan_.unique_key[u], table, sum.data());
      if (RowIsFinite(sum.data(), table->dim())) continue;
      return InvalidArgument("the gradient of " + NameOf(*table, plan_.unique_key[u]) +
                             " is not finite, because " +
                             CauseOf(plan_, gradients, uses, table->dim(),
                                     table->updates().policy().mode == UpdatePolicy::Mode::kDefer) +
                             "; expected finite values. No row was updated");
    }
  }
  return OkStatus();
}

bool SurelyFits(const EmbeddingTable& table, const StepRates& rates, double gradient) {
  const RowLayout& layout = table.rows().layout();
  const UpdateRule& rule = table.options().rule;
  const bool is_unchecked = layout.is_floats() && rule.transforms.OnlyShrink();
  return rule.Fits(rates, layout.dim, gradient, rule.RangeOf(layout.dtype), is_unchecked) &&
         table.rows().is_in_range();
}

TableBackup::TableBackup(EmbeddingTable* table, std::vector<int64_t> keys)
    : table_(table),
      step_(table->updates().step()),
      learning_rate_(table->updates().last_learning_rate()),
      scale_(table->rows().exact_scale()) {
  const RowTransforms& transforms = table->options().rule.transforms;
  if (transforms.SweepsAll() || table->rows().will_rescale()) keys = table->rows().Keys();
  for (int64_t s = 0; s < kNumShards; ++s) {
    ShardUpdates* const updates = table->updates().shard(s);
    ForEachDeferred(updates, [&](int64_t key, const float*) { keys.push_back(key); });
    updates_.push_back(*updates);
  }
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  const auto bytes = static_cast<size_t>(table->rows().layout().bytes());
  for (const int64_t key : keys) {
    StoredRow* const row = table->rows().Find(key);
    if (row != nullptr) rows_.push_back({key, row});
  }
  bytes_.resize(rows_.size() * bytes);
  for (size_t i = 0; i < rows_.size(); ++i) {
    std::memcpy(bytes_.data() + i * bytes, rows_[i].row, bytes);
  }
}

void TableBackup::Restore() {
  const auto bytes = static_cast<size_t>(table_->rows().layout().bytes());
  for (size_t i = 0; i < rows_.size(); ++i) {
    std::memcpy(static_cast<void*>(rows_[i].row), bytes_.data() + i * bytes, bytes);
  }
  for (int64_t s = 0; s < kNumShards; ++s) std::swap(*table_->updates().shard(s), updates_[s]);
  table_->updates().set_step(step_);
  table_->updates().set_last_learning_rate(learning_rate_);
  table_->rows().set_exact_scale(scale_);
}

Status TableBackup::Check() const {
  const RowLayout& layout = table_->rows().layout();
  const auto bad = [&](int64_t key, const std::string& what, const char* allowed) {
    return InvalidArgument("the update of " + NameOf(*table_, key) + " overflows: " + what +
                           "; expected " + allowed +
                           ". No row was updated. Decrease the learning rate, or clip gradients "
                           "with `clip_norm` or `clip_value`");
  };
  std::vector<float> row(static_cast<size_t>(layout.floats()));
  for (const SavedRow& saved : rows_) {
    layout.ReadValues(saved.row, row.data());
    layout.ReadSlots(saved.row, row.data() + layout.dim);
    const auto first =
        std::find_if(row.begin(), row.end(), [](float v) { return !std::isfinite(v); });
    if (first != row.end()) {
      const int64_t at = first - row.begin();
      const bool is_slot = at >= layout.dim;
      return bad(saved.key,
                 (is_slot ? "optimizer slot " : "value ") +
                     std::to_string(is_slot ? at - layout.dim : at) + " becomes " + Text(*first),
                 NumbersHeldBy(is_slot ? layout.slot_dtype : layout.dtype));
    }
    table_->rows().NoteRange(row.data(), table_->rows().shard(ShardOf(saved.key)));
  }
  Status status;
  for (int64_t s = 0; s < kNumShards; ++s) {
    ForEachDeferred(table_->updates().shard(s), [&](int64_t key, const float* sum) {
      if (!status.ok() || RowIsFinite(sum, layout.dim)) return;
      status = bad(key, "its deferred gradient is not finite", "finite values");
    });
  }
  return status;
}

Status CheckOrRestore(std::vector<TableBackup>* backups) {
  for (const TableBackup& backup : *backups) {
    const Status status = backup.Check();
    if (status.ok()) continue;
    for (TableBackup& restored : *backups) restored.Restore();
    return status;
  }
  return OkStatus();
}

}  // namespace slipstream
