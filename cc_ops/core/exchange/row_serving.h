// Rows of tables that are sharded over processes: asked for, served by their owners
// and copied to where they are looked up.
// Slots travel where copies are to judge how far gradients move a row.
//
// Where copies are kept (kRefreshedReplica, published_rows.h), parcels have twice as many sizes,
// [ranks, 2 * tables]: first the keys whose rows are asked for, then those whose copy the rank
// keeps, of which it is sent what has moved too far.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_ROW_SERVING_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_ROW_SERVING_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/exchange/row_exchange.h"
#include "cc_ops/core/exchange/served_rows.h"
#include "cc_ops/core/lookup/feature_view.h"

namespace slipstream {

// The distinct keys of a batch that must be asked for, by owner: all whose copy is not
// frozen. copies: the tables that the batch will be looked up in. `requests` gets sizes and keys.
// Takes the mutexes.
struct RouteOptions {
  int ranks = 1;
  bool reads_frozen = true;  // false asks for frozen ones, too
  bool keeps = false;        // kept copies are told apart; else they are asked for, too
};
Status RouteKeys(const std::vector<EmbeddingTable*>& copies,
                 const std::vector<FeatureView>& features, const RouteOptions& options,
                 const Parallel& parallel, RowParcels* requests);

// Reads the rows of keys, in their order.
struct ServeOptions {
  // Keys without a row get one, and each key counts as accessed once; else they give the
  // rows they would start with.
  bool makes_rows = false;
  // Where the format keeps copies: this rank, which has its rows and needs none.
  int own_rank = -1;
  int64_t most_rank_bytes = (int64_t{1} << 31) - 1;  // what an alltoall can send to a rank
  RowFormat format;
};
// bytes: see served_rows.h; rank_bytes: [ranks], of these, each rank's.
// ResourceExhausted: a bounded table cannot hold the rows, or they are too many bytes; then no rank
// counts as having a replica that it had not before. Takes the mutexes.
Status ServeRows(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& requests,
                 const ServeOptions& options, std::vector<uint8_t>* bytes,
                 std::vector<int64_t>* rank_bytes);

// Copies rows that were served, without counting accesses.
struct CopyOptions {
  // As they were served. Without slots, a copy's are 0, beside which no movement is
  // underestimated.
  RowFormat format;
  bool frozen = false;      // mark them kReadOnlyReplica
  int passed_over = -1;     // a rank whose rows are not copied
  bool makes_room = false;  // bounded tables let others go for them; else a lookup must
                            // follow that does so
};
// InvalidArgument if the bytes are not those of the keys' rows, a value is not finite, or they
// leave a copy as it is that is not kept here: nothing is copied then. Copies that are not told to
// be kept, are not from then on. Takes the mutexes.
Status StoreCopies(const std::vector<EmbeddingTable*>& copies, const RowParcelsView& keys,
                   const uint8_t* bytes, int64_t num_bytes, const CopyOptions& options);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_ROW_SERVING_H_
