#include "cc_ops/core/update/row_sweep.h"

#include <algorithm>

#include "cc_ops/core/update/update_loop.h"

namespace slipstream {

SweepScratch::SweepScratch(const std::vector<EmbeddingTable*>& tables) {
  int64_t widest = 0, max_floats = 0, max_rows = 0;
  for (const EmbeddingTable* table : tables) {
    if (!IsSwept(*table)) continue;
    widest = std::max(widest, table->dim());
    max_floats = std::max(max_floats, table->rows().layout().floats());
    for (int64_t s = 0; s < kNumShards; ++s) {
      max_rows = std::max<int64_t>(max_rows, table->rows().shard(s)->arena.end());
    }
  }
  gradient.resize(static_cast<size_t>(widest));
  copy.resize(static_cast<size_t>(max_floats));
  is_done.reserve(static_cast<size_t>(max_rows));
}

ShardSweep::ShardSweep(EmbeddingTable* table, int64_t shard, SweepScratch* scratch)
    : table_(table), shard_(table->rows().shard(shard)), scratch_(scratch) {
  scratch_->is_done.assign(shard_->arena.end(), false);
}

void ShardSweep::Exclude(int64_t key) {
  const HashIndex::Entry* const entry = shard_->index.Find(key);
  if (entry != nullptr) scratch_->is_done[entry->index] = true;
}

void ShardSweep::UpdateOthers(StepRates rates) {
  const RowLayout& layout = table_->rows().layout();
  const int64_t dim = layout.dim;
  float* const gradient = scratch_->gradient.data();
  for (const HashIndex::Entry& entry : shard_->index.entries()) {
    if (entry.index == HashIndex::kEmpty || scratch_->is_done[entry.index]) continue;
    std::fill_n(gradient, dim, 0.f);
    StoredRow* const stored = shard_->arena.Row(entry.index);
    float* const row = layout.Open(stored, scratch_->copy.data());
    UpdateOpened(table_, rates, gradient, row, shard_);
    layout.Close(row, entry.key, rates.rounding, stored);
  }
}

}  // namespace slipstream
