// The result of a lookup that the following update reuses.
//
// A lookup sorts the keys of a batch into buckets, one per table and shard, removes duplicates and
// finds the rows. The plan keeps the distinct keys, their rows and their uses (see Occurrence),
// bucket by bucket. The update therefore does not sort keys, and its threads work on different
// buckets without locks. It looks up keys again to find deferred gradients and for a sweep.
//
//   bucket b = table * kNumShards + shard
//     distinct keys u in [unique_begin[b], unique_begin[b] + unique_count[b])
//       unique_key[u], unique_row[u], unique_index[u]
//       uses[i] for i from uses_end[u - 1] (first key: unique_begin[b]) to below uses_end[u]
//
// Buckets have as many elements for distinct keys as for uses, therefore unique_begin[b] is also
// the first use of a bucket. Row pointers are valid while RowStore::addresses() equals
// `generations`. Otherwise the update finds the rows again.
#ifndef SLIPSTREAM_CC_OPS_CORE_LOOKUP_LOOKUP_PLAN_H_
#define SLIPSTREAM_CC_OPS_CORE_LOOKUP_LOOKUP_PLAN_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "cc_ops/core/containers/flat_table.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// A use of a key: the pooled vector (feature, example) to which its row contributes.
struct Occurrence {
  int32_t feature;
  int32_t example;
};

// See the top of the file.
struct LookupPlan {
  std::vector<EmbeddingTable*> tables;
  // RowStore::addresses() at the lookup; -1 if rows are in LookupWorkspace::rows or not yet found.
  std::vector<int64_t> generations;
  // UpdateState::step() of each table at the lookup.
  std::vector<int64_t> update_steps;
  // Number of the lookup in this process, ascending.
  int64_t number = 0;
  std::vector<int> feature_table;  // [features]; index of the feature's table.
  std::vector<int64_t> examples;   // [features]; number of output vectors.
  // Range of the distinct keys of each bucket; see the top of the file.
  std::vector<int64_t> unique_begin;  // [buckets + 1]; has room for every use.
  std::vector<int64_t> unique_count;  // [buckets]
  std::vector<int64_t> unique_key;
  std::vector<StoredRow*> unique_row;  // Null if the key has no row because it is too rare.
  std::vector<uint32_t> unique_index;  // Index of the row within its shard.
  // End of the uses of a key; they begin where the uses of the previous key of the bucket end.
  std::vector<int64_t> uses_end;
  std::vector<Occurrence> uses;  // By bucket, then key, then order in the batch.
  // Per use, the number of its key position over all features (Positions in key_sort.h). Empty if
  // every feature has one unweighted key per example, because the positions are then not needed.
  std::vector<int64_t> use_position;
  // Per key position, the factor of the row in its vector: the weight divided by the divisor of the
  // combiner. Empty if all factors are 1.
  std::vector<float> scale;
  // Largest magnitude in `scale`, at least 1; a NaN or infinity if there is one or if it is
  // unknown, which makes updates slower.
  float max_scale = std::numeric_limits<float>::infinity();
};

// Keys of a batch, sorted by bucket, in batch order within a bucket.
struct SortedKeys {
  std::vector<int64_t> begin;  // [buckets + 1]
  std::vector<int64_t> key;
  std::vector<Occurrence> use;
  std::vector<int64_t> position;  // As LookupPlan::use_position.
};

// Scratch memory of a thread that resolves buckets.
struct ResolveScratch {
  struct Buffers {
    // Per use, the number of its key among the distinct keys of the bucket.
    std::vector<int32_t> number_of;
    std::vector<uint64_t> hash;  // Hashes of the distinct keys.
  };
  FlatTable<KeyNumber<int32_t>> numbers;  // Distinct keys of the bucket.
  std::vector<int32_t> missed;            // Distinct keys that FindAtOnce did not find.
  Buffers buffers[2];  // By bucket % 2: a bucket starts before the previous one is finished.
};

// A distinct key of a plan that is requested from its owner, another rank or this rank.
struct PlannedKey {
  int64_t unique;  // Number of the key in the plan: u at the top of the file.
  int64_t uses;    // Number of its uses.
};

// Memory of a lookup. Reuse it between steps to avoid allocations.
struct LookupWorkspace {
  LookupPlan plan;
  bool is_collected = false;  // Whether the gradients of the lookup were collected.
  SortedKeys sorted;
  // For lookups over ranks; see exchange/pulled_lookup.h.
  std::vector<int64_t> layout;        // LayoutOf of the features.
  std::vector<int64_t> sizes;         // [ranks, tables]; number of requested keys.
  std::vector<PlannedKey> requested;  // In the order of the requests.
  std::vector<float> rows;            // Rows pulled for evaluation, in the layout of their table.
  std::vector<float> copies;          // Float copies of rows that are not stored as floats.
  std::vector<const float*> row_of_position;
  std::vector<ResolveScratch> scratches;  // One per task.
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_LOOKUP_LOOKUP_PLAN_H_
