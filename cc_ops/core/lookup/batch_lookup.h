// Lookups of several features in several tables over one batch.
//
// The forward pass sorts the batch's keys by (table, shard) and gives each thread
// its own shards, so rows are found and made without locks or atomics, and the
// same way whatever the number of threads. What it learns (rows, duplicates) is
// kept in a plan for gradient_update.h, so that nothing is hashed twice.
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

// Pools the rows of every feature and example into `outputs` (one per feature).
// The plan for the update is left in
// `workspace`, which may come from an earlier lookup. Missing keys are made, accesses counted.
// InvalidArgument for more than kMaxBatch examples (key_sort.h).
// Takes the tables' mutexes. On an error no key is made, unless memory ran out or the disk failed
// (the tables stay intact then too).
Status LookupForTraining(const std::vector<EmbeddingTable*>& tables,
                         const std::vector<FeatureView>& features,
                         const std::vector<Combiner>& combiners,
                         const std::vector<PooledOutput>& outputs, const Parallel& parallel,
                         LookupWorkspace* workspace);

// The same without making keys or counting; absent keys give their initial rows.
// Deferred gradients are not in them: FlushBeforeReading (policy_update.h) comes first.
Status LookupForEvaluation(const std::vector<EmbeddingTable*>& tables,
                           const std::vector<FeatureView>& features,
                           const std::vector<Combiner>& combiners,
                           const std::vector<PooledOutput>& outputs, const Parallel& parallel);

// LookupForTraining in steps, where rows come from elsewhere.
//
// Equal for features whose vectors and key positions are numbered alike.
std::vector<int64_t> LayoutOf(const std::vector<FeatureView>& features,
                              const std::vector<Combiner>& combiners);
// Sorts a batch's keys; the plan gets what does not depend on its keys.
Status SortKeys(const std::vector<EmbeddingTable*>& tables,
                const std::vector<FeatureView>& features, const std::vector<Combiner>& combiners,
                const Parallel& parallel, LookupWorkspace* workspace);
// Fills the plan, but for the rows.
void GroupKeys(const Parallel& parallel, LookupWorkspace* workspace);
// Makes room for the keys in bounded tables, and begins a lookup. Callers hold the tables' mutexes.
Status BeginLookup(LookupWorkspace* workspace);
// Pools the rows of the plan, of features of its layout. Keys that it lacks have
// rows of zeros. Callers hold the tables' mutexes.
void DeliverRows(const std::vector<FeatureView>& features, const std::vector<Combiner>& combiners,
                 const std::vector<PooledOutput>& outputs, const Parallel& parallel,
                 LookupWorkspace* workspace);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_LOOKUP_BATCH_LOOKUP_H_
