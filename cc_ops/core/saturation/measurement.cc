#include "cc_ops/core/saturation/measurement.h"

namespace slipstream {

void MeasureRows(const EmbeddingTable& table, const int64_t* keys, const float* snapshot, int64_t n,
                 DriftMetric metric, const Parallel& parallel, float* rows, bool* found,
                 float* drift) {
  const int64_t dim = table.dim();
  parallel.run(parallel.threads, [&](int task) {
    const TaskRange range = RangeOf(task, parallel.threads, n);
    table.rows().VisitRows(
        keys, range.begin, range.end,
        [&](const RowStore::Visited& row) SLIPSTREAM_LAMBDA_INLINE { __builtin_prefetch(row.row); },
        [&](int64_t i, const RowStore::Visited& row) {
          found[i] = row.row != nullptr;
          table.rows().CopyRow(keys[i], row.row, rows + i * dim);
          RowDrift(rows, snapshot, i, i + 1, dim, metric, drift);
        });
  });
}

}  // namespace slipstream
