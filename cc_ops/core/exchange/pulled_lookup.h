// Lookups in tables that are sharded over ranks.
//
//   RouteKeys      batch of this rank -> plan, and keys to request from each owner
//   PullRows       requested keys -> messages with rows (on the owners)
//   LookUpPulled   messages, plan -> pooled vectors
//
// In training, the rows are stored as replicas in tables of this rank. From the slots of a replica
// follows an upper bound of the distance by which a gradient would move the row of the owner. This
// rank can therefore decide to defer a gradient without asking the owner.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULLED_LOOKUP_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULLED_LOOKUP_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/exchange/send_buffer.h"
#include "cc_ops/core/lookup/batch_lookup.h"

namespace slipstream {

// Plans the lookup of a batch and collects the distinct keys for each of `ranks` owners in
// `requests`. replicas: the tables in which training batches are looked up. Stores the plan in
// `workspace` for LookUpPulled. Returns InvalidArgument for more than kMaxBatch examples
// (key_sort.h).
Status RouteKeys(const std::vector<EmbeddingTable*>& replicas,
                 const std::vector<FeatureView>& features, const std::vector<Combiner>& combiners,
                 int ranks, const Parallel& parallel, LookupWorkspace* workspace,
                 SendBuffer* requests);

// Messages of all ranks for a lookup that RouteKeys planned.
struct PulledMessages {
  SendBufferView keys;             // `requests` of RouteKeys.
  const uint8_t* bytes = nullptr;  // Messages of PullRows, by rank.
  int64_t num_bytes = 0;
};
// Pools the rows of every feature and example into `outputs`, like LookupForTraining, with the plan
// in `workspace`.
//
// training: whether accesses are counted and the rows are stored as replicas. Without a summary of
// the slots in the messages, slots are 0, for which movement is never underestimated. If false, no
// row is stored, and no update may follow. joins_step: as for LookupForTraining.
//
// Returns InvalidArgument if the messages do not contain the rows of the keys, if a value is not
// finite, or if the plan has other keys or another layout. Returns ResourceExhausted if the
// replicas do not fit. No replica has changed in these cases. Takes the mutexes of the tables.
Status LookUpPulled(const std::vector<FeatureView>& features,
                    const std::vector<Combiner>& combiners,
                    const std::vector<PooledOutput>& outputs, const PulledMessages& messages,
                    bool training, const Parallel& parallel, LookupWorkspace* workspace,
                    bool joins_step = false);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULLED_LOOKUP_H_
