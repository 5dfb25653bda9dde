// How far a table's rows have come from their snapshots.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_MEASUREMENT_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_MEASUREMENT_H_

#include <cstdint>

#include "cc_ops/core/base/drift.h"
#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// keys: [n]. rows: [n, dim] and found: [n], as RowStore::Gather; drift: [n], of each row from
// snapshot: [n, dim]. The caller holds the table's mutex.
void MeasureRows(const EmbeddingTable& table, const int64_t* keys, const float* snapshot, int64_t n,
                 DriftMetric metric, const Parallel& parallel, float* rows, bool* found,
                 float* drift);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_MEASUREMENT_H_
