// Updates the rows that are not in a batch with a gradient of 0.
//
// An L2 penalty that applies to all rows of a table changes these rows at every step, too.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_SWEEP_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_SWEEP_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// Returns whether an update of the table must sweep its other rows.
inline bool IsSwept(const EmbeddingTable& table) {
  return table.options().rule.transforms.SweepsAll();
}

// Scratch memory of a thread that sweeps shards of these tables. No rows may be created between its
// construction and the sweep.
struct SweepScratch {
  explicit SweepScratch(const std::vector<EmbeddingTable*>& tables);
  std::vector<float> gradient;
  std::vector<float> copy;    // A row and its slots.
  std::vector<bool> is_done;  // By the index of a row in its shard.
};

// Sweeps one shard: construct the object, call Exclude for each key of the batch in the shard,
// then UpdateOthers. Allocates no memory.
class ShardSweep {
 public:
  ShardSweep(EmbeddingTable* table, int64_t shard, SweepScratch* scratch);
  // Excludes the row of a key, which was updated with the batch.
  void Exclude(int64_t key);
  // Updates all rows that were not excluded.
  void UpdateOthers(StepRates rates);

 private:
  EmbeddingTable* table_;
  RowShard* shard_;
  SweepScratch* scratch_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_SWEEP_H_
