// Updates of the rows that a batch lacks, as by gradients of 0, where a table's rule asks for them.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_SWEEP_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_SWEEP_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

inline bool IsSwept(const EmbeddingTable& table) {
  return table.options().rule.transforms.SweepsAll();
}

// Memory of a thread that sweeps shards of these tables, as they are.
struct SweepScratch {
  explicit SweepScratch(const std::vector<EmbeddingTable*>& tables);
  std::vector<float> gradient;
  std::vector<float> copy;    // of a row and its slots
  std::vector<bool> is_done;  // by a row's index in its shard
};

// A shard of a table, whose rows of the batch have been updated. Needs no memory.
class ShardSweep {
 public:
  ShardSweep(EmbeddingTable* table, int64_t shard, SweepScratch* scratch);
  // The row of a key, if there is one, is of the batch.
  void LeaveOut(int64_t key);
  // Updates the others.
  void UpdateOthers(StepRates rates);

 private:
  EmbeddingTable* table_;
  RowShard* shard_;
  SweepScratch* scratch_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_SWEEP_H_
