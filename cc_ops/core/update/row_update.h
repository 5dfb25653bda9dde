// One row's update, and how far it moved the row if somebody watches.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_UPDATE_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_UPDATE_H_

#include <cstdint>

#include "cc_ops/core/table/embedding_table.h"
#include "cc_ops/core/update/rules/row_rules.h"

namespace slipstream {

// Applies the rule to a row; of a watched one, adds the squared length of the update. before:
// [dim], overwritten.
inline void UpdateRow(const UpdateRule& rule, float rate, int64_t dim, const float* gradient,
                      uint32_t slot, float* row, ShardFlags* flags, float* before) {
  if (!flags->IsWatched(slot)) {
    rule.Apply(rate, dim, gradient, row);
    return;
  }
  for (int64_t j = 0; j < dim; ++j) before[j] = row[j];
  rule.Apply(rate, dim, gradient, row);
  for (int64_t j = 0; j < dim; ++j) before[j] = row[j] - before[j];
  flags->AddSquaredUpdateLength(slot, SumOfSquares(dim, before));
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_UPDATE_H_
