// Rows of tables that are sharded over processes: asked for, served by their owners
// and copied to where they are looked up.
//
// A row travels as its values and, if copies are to judge how far gradients move it and
// the rule has slots, UpdateRule::SlotSummary.
#ifndef SLIPSTREAM_CC_OPS_CORE_ROW_SERVING_H_
#define SLIPSTREAM_CC_OPS_CORE_ROW_SERVING_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/feature_view.h"
#include "cc_ops/core/parallel.h"
#include "cc_ops/core/row_exchange.h"
#include "cc_ops/core/status.h"

namespace slipstream {

// Floats of a row of a table on its way.
inline int64_t ServedFloats(const EmbeddingTable& table, bool with_summary) {
  return table.dim() + (with_summary && table.slots_per_row() > 0 ? 1 : 0);
}

// The distinct keys of a batch that must be asked for, by owner: all whose copy is not
// frozen. copies: the tables that the batch will be looked up in. reads_frozen: false
// asks for frozen ones, too. `requests` gets sizes and keys. Takes the mutexes.
Status RouteKeys(const std::vector<EmbeddingTable*>& copies,
                 const std::vector<FeatureView>& features, int ranks, bool reads_frozen,
                 const Parallel& parallel, RowParcels* requests);

// Reads the rows of keys, in their order. makes_rows: keys without a row get one, and
// each key counts as accessed once; else they give the rows they would start with.
// with_summary: whether slots travel. ResourceExhausted: a bounded table cannot hold
// them. Takes the mutexes.
Status ServeRows(const std::vector<EmbeddingTable*>& tables, const RowParcelsView& requests,
                 bool makes_rows, bool with_summary, std::vector<float>* values);

// Copies rows that were served, without counting accesses.
struct CopyOptions {
  // As they were served. Without, a copy's slots are 0, beside which no movement is
  // underestimated.
  bool with_summary = false;
  bool frozen = false;      // mark them kFrozen
  int passed_over = -1;     // a rank whose rows are not copied
  bool makes_room = false;  // bounded tables let others go for them; else a lookup must
                            // follow that does so
};
// Takes the mutexes.
Status StoreCopies(const std::vector<EmbeddingTable*>& copies, const RowParcelsView& rows,
                   const CopyOptions& options);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_ROW_SERVING_H_
