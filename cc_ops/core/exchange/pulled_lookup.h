// Rows of tables that are sharded over ranks: requested from their owners, read there, and looked
// up as they came. Of a training batch they become replicas, whose slots tell how far a gradient
// would move its row.
//
//   RouteKeys      this rank's batch -> its plan, and which rows it needs
//   PullRows       the ranks' needs -> messages of rows
//   LookUpPulled   messages, plan -> pooled vectors
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULLED_LOOKUP_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULLED_LOOKUP_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/exchange/send_buffer.h"
#include "cc_ops/core/lookup/batch_lookup.h"

namespace slipstream {

// Plans the lookup of a batch, and finds the distinct keys of each owner among `ranks` ranks.
// replicas: the tables that training batches are looked up in. `requests` gets sizes and keys. The
// plan, in `workspace`, is for LookUpPulled. InvalidArgument for more than kMaxBatch examples
// (key_sort.h).
Status RouteKeys(const std::vector<EmbeddingTable*>& replicas,
                 const std::vector<FeatureView>& features, const std::vector<Combiner>& combiners,
                 int ranks, const Parallel& parallel, LookupWorkspace* workspace,
                 SendBuffer* requests);

// What ranks sent for a lookup that RouteKeys planned.
struct PulledMessages {
  SendBufferView keys;  // as they were requested
  const uint8_t* bytes = nullptr;
  int64_t num_bytes = 0;
};
// Pools the rows of every feature and example into `outputs`, as LookupForTraining does, with the
// plan that `workspace` has. training: accesses are counted, and the rows become replicas, without
// slots with slots of 0, beside which no movement is underestimated; else nothing is stored, and
// there is no update after it. InvalidArgument if the messages are not those of the keys' rows, a
// value is not finite, or the plan is of other keys or of another layout; ResourceExhausted if
// there is no room for so many replicas: none has changed then. Takes the mutexes.
Status LookUpPulled(const std::vector<FeatureView>& features,
                    const std::vector<Combiner>& combiners,
                    const std::vector<PooledOutput>& outputs, const PulledMessages& messages,
                    bool training, const Parallel& parallel, LookupWorkspace* workspace);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_PULLED_LOOKUP_H_
