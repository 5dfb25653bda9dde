// Lookups of multiple features in multiple tables for one batch.
//
// The forward pass sorts the keys of the batch by (table, shard) and assigns whole shards to
// threads. Rows are therefore found and created without locks or atomics, and results do not depend
// on the number of threads. A LookupPlan keeps the distinct keys, their rows and their uses for the
// update (gradient_update.h), so that no key is hashed twice.
#ifndef SLIPSTREAM_CC_OPS_CORE_LOOKUP_BATCH_LOOKUP_H_
#define SLIPSTREAM_CC_OPS_CORE_LOOKUP_BATCH_LOOKUP_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/lookup/feature_view.h"
#include "cc_ops/core/lookup/key_resolve.h"
#include "cc_ops/core/lookup/lookup_plan.h"
#include "cc_ops/core/lookup/pooling.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// Looks up a training batch and pools the rows of every feature and example into `outputs`. Creates
// missing rows, except for keys that are too rare for a row, and counts accesses. Takes the mutexes
// of the tables.
//
//   tables                        Distinct tables; FeatureView::table is an index into them.
//   features, combiners, outputs  One element per feature.
//   workspace                     Receives the plan for the update. It may come from an earlier
//                                 lookup.
//   joins_step                    Whether the lookup belongs to the same training step as the
//                                 lookups since the last update; see EmbeddingTable::BeginLookup.
//
// Returns InvalidArgument for more than kMaxBatch examples (key_sort.h), and ResourceExhausted if
// the rows do not fit in a bounded table or in memory. On an error no row was created. Note: rows
// may have been created if memory ran out or the disk failed. The tables are consistent in any
// case.
Status LookupForTraining(const std::vector<EmbeddingTable*>& tables,
                         const std::vector<FeatureView>& features,
                         const std::vector<Combiner>& combiners,
                         const std::vector<PooledOutput>& outputs, const Parallel& parallel,
                         LookupWorkspace* workspace, bool joins_step = false);

// Same without creating rows or counting accesses. Absent keys use the values of their initializer.
// Note: deferred gradients are not included; call FlushBeforeReading (policy_update.h) first.
Status LookupForEvaluation(const std::vector<EmbeddingTable*>& tables,
                           const std::vector<FeatureView>& features,
                           const std::vector<Combiner>& combiners,
                           const std::vector<PooledOutput>& outputs, const Parallel& parallel);

// The following functions are steps of LookupForTraining. exchange/pulled_lookup.h uses them for
// rows that come from other ranks.

// Returns numbers that describe the shapes of the features. They are equal for two lists of
// features if a plan for one also numbers the vectors and key positions of the other.
std::vector<int64_t> LayoutOf(const std::vector<FeatureView>& features,
                              const std::vector<Combiner>& combiners);
// Sorts the keys of a batch and fills the parts of the plan that do not depend on rows.
Status SortKeys(const std::vector<EmbeddingTable*>& tables,
                const std::vector<FeatureView>& features, const std::vector<Combiner>& combiners,
                const Parallel& parallel, LookupWorkspace* workspace);
// Fills the plan from the sorted keys, except for the rows.
void GroupKeys(const Parallel& parallel, LookupWorkspace* workspace);
// Evicts rows of bounded tables to make room for the sorted keys, and begins a lookup of each
// table. Returns ResourceExhausted if the keys exceed a capacity. Callers hold the mutexes
// exclusively.
Status BeginLookup(LookupWorkspace* workspace, bool joins_step);
// Pools the rows of the plan for features of its layout. Keys that are not in the plan contribute
// zeros. Callers hold the mutexes of the tables.
void DeliverRows(const std::vector<FeatureView>& features, const std::vector<Combiner>& combiners,
                 const std::vector<PooledOutput>& outputs, const Parallel& parallel,
                 LookupWorkspace* workspace);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_LOOKUP_BATCH_LOOKUP_H_
