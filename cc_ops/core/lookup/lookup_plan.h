// What a lookup of a batch finds out and the update after it needs.
#ifndef SLIPSTREAM_CC_OPS_CORE_LOOKUP_LOOKUP_PLAN_H_
#define SLIPSTREAM_CC_OPS_CORE_LOOKUP_LOOKUP_PLAN_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/containers/flat_table.h"
#include "cc_ops/core/table/embedding_table.h"

namespace slipstream {

// A use of a key: whose vector its row went into.
struct Occurrence {
  int32_t feature;
  int32_t example;
};

// What the forward pass found out for the backward pass.
struct LookupPlan {
  std::vector<EmbeddingTable*> tables;
  std::vector<int64_t> generations;  // of the tables at the lookup; -1: rows lie in no table
  std::vector<int> feature_table;    // [features]
  std::vector<int64_t> examples;     // [features], of each
  // Bucket b = table * kNumShards + shard holds the distinct keys
  // unique_begin[b] .. unique_begin[b] + unique_count[b].
  std::vector<int64_t> unique_begin;  // [buckets + 1]; room for every use
  std::vector<int64_t> unique_count;  // [buckets]
  std::vector<int64_t> unique_key;
  std::vector<StoredRow*> unique_row;  // null: the key has none yet, as it is too rare
  std::vector<uint32_t> unique_index;  // of the row, within its shard
  std::vector<int64_t> uses_end;       // end of the key's uses; they begin where the
                                       // previous key of the bucket ends
  std::vector<Occurrence> uses;        // by bucket, then key, then batch order
  // Number of each use's key position over all features. Empty where every feature has one
  // unweighted key per example: then nobody asks.
  std::vector<int64_t> use_position;
  // Per position: weight over the combiner's divisor. Empty: all are 1.
  std::vector<float> scale;
};

// The batch's keys sorted by bucket, and in batch order within one.
struct SortedKeys {
  std::vector<int64_t> begin;  // [buckets + 1]
  std::vector<int64_t> key;
  std::vector<Occurrence> use;
  std::vector<int64_t> position;  // as LookupPlan::use_position
};

// What a thread needs while it looks for the rows of a bucket's keys.
struct ResolveScratch {
  struct Buffers {
    std::vector<int32_t> number_of;  // of each use's key among the bucket's distinct ones
    std::vector<uint64_t> hash;      // of the distinct keys
  };
  FlatTable<KeyNumber<int32_t>> numbers;  // of the distinct keys
  std::vector<int32_t> missed;            // distinct keys that were not found at once
  Buffers buffers[2];                     // of buckets with even and with odd numbers
};

// A distinct key of a plan, whose row comes from elsewhere.
struct PlannedKey {
  int64_t unique;  // index in the plan
  int64_t uses;
};

// The memory of a lookup. Reused from step to step it costs no allocation.
struct LookupWorkspace {
  LookupPlan plan;
  SortedKeys sorted;
  // Of a lookup over ranks, see exchange/pulled_lookup.h.
  std::vector<int64_t> layout;  // of its features
  std::vector<int64_t> sizes;   // [ranks, tables], keys requested
  std::vector<PlannedKey> requested;
  std::vector<float> rows;    // that lie in no table, as their layout says
  std::vector<float> copies;  // of rows that do not lie in memory as floats
  std::vector<const float*> row_of_position;
  std::vector<ResolveScratch> scratches;  // one per task
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_LOOKUP_LOOKUP_PLAN_H_
