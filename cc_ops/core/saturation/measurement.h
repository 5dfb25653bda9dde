// Measures the drift of a table's rows from their snapshots.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_MEASUREMENT_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_MEASUREMENT_H_

#include <cstdint>

#include "cc_ops/core/base/drift.h"
#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// Reads the rows of keys and computes their drift. For a key without a row in memory, the initial
// values of the key count as its row. Therefore, load rows from disk first. The caller holds the
// mutex of the table, shared or exclusively.
//
//   keys      [n].
//   snapshot  [n, dim]; the rows at the start of the window.
//   rows      [n, dim]; receives the current rows.
//   found     [n]; receives whether a key has a row in memory.
//   drift     [n]; receives the distance of each row from its snapshot.
void MeasureRows(const EmbeddingTable& table, const int64_t* keys, const float* snapshot, int64_t n,
                 DriftMetric metric, const Parallel& parallel, float* rows, bool* found,
                 float* drift);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_MEASUREMENT_H_
