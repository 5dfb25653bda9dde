// Counts the accesses of a batch without looking up rows.
#ifndef SLIPSTREAM_CC_OPS_CORE_LOOKUP_ACCESS_COUNT_H_
#define SLIPSTREAM_CC_OPS_CORE_LOOKUP_ACCESS_COUNT_H_

#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/lookup/feature_view.h"
#include "cc_ops/core/lookup/lookup_plan.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// Adds the accesses of all keys of a batch to the counts of the tables, and creates missing rows,
// as LookupForTraining does. Most keys are counted in the hash index, in about a tenth of the time
// of a lookup. The rest are sorted as in a lookup: new keys, and a few keys in full parts of the
// index. Takes the mutexes of the tables.
//
//   tables     Distinct tables; FeatureView::table is an index into them. One thread counts the
//              keys of a table.
//   features   Each key position, except for padding, is an access. Weights are ignored.
//   workspace  Memory that later calls can reuse. Its plan must not be used afterwards.
//
// Note: a bounded table may evict a key of the batch that was counted before the new keys.
//
// Returns the errors of LookupForTraining. A part of the accesses was counted then.
Status CountAccesses(const std::vector<EmbeddingTable*>& tables,
                     const std::vector<FeatureView>& features, const Parallel& parallel,
                     LookupWorkspace* workspace);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_LOOKUP_ACCESS_COUNT_H_
