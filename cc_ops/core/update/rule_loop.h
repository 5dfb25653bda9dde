// The update loops over the keys of a bucket, compiled for each update rule.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULE_LOOP_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULE_LOOP_H_

#include <cstdint>
#include <type_traits>
#include <vector>

#include "cc_ops/core/update/rules/all_rules.h"
#include "cc_ops/core/update/update_loop.h"

namespace slipstream {

// Sums the gradients of every key of a bucket and applies the update rule of the table to its row.
// next: number of the bucket that the thread updates afterwards; its rows are prefetched. The row
// pointers of the plan must be valid; keys without a row are skipped.
//
// For tables of float rows without transforms. No row of the bucket may be masked.
void UpdatePlainRows(const BucketUpdate& update, int64_t next, RowScratch* scratch);
// For tables of float rows; skips masked rows and applies transforms.
void UpdateRowsWithAll(const BucketUpdate& update, int64_t next, RowScratch* scratch);
// As UpdatePlainRows, for tables with rows that are not stored as floats.
void UpdateNarrowRows(const BucketUpdate& update, int64_t next, RowScratch* scratch);

// Returns the counters of the shard of a bucket.
inline UpdateCounts* CountsOf(const BucketUpdate& update) {
  return &update.table->updates().shard(update.bucket % kNumShards)->counts;
}

// Calls update(rule, dim) with the rule of the table. Common dimensions are passed as compile-time
// constants, which turns loops into a few instructions.
template <class Update>
void ForRuleAndDim(const EmbeddingTable& table, const Update& update) {
  AllRules::Visit(table.options().rule, [&](const auto& rule) {
    switch (table.dim()) {
      case 16:
        return update(rule, std::integral_constant<int64_t, 16>());
      case 32:
        return update(rule, std::integral_constant<int64_t, 32>());
      case 64:
        return update(rule, std::integral_constant<int64_t, 64>());
      default:
        return update(rule, table.dim());
    }
  });
}

// An array of kFactor * dim + kMore floats: on the stack if `dim` is a compile-time constant, else
// in `longer`.
template <class Dim, int64_t kFactor, int64_t kMore = 0>
struct LocalFloats {
  explicit LocalFloats(std::vector<float>* /*longer*/) {}
  float* data() { return values; }
  float values[kFactor * Dim::value + kMore];
};
template <int64_t kFactor, int64_t kMore>
struct LocalFloats<int64_t, kFactor, kMore> {
  explicit LocalFloats(std::vector<float>* longer) : longer(longer) {}
  float* data() { return longer->data(); }
  std::vector<float>* longer;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULE_LOOP_H_
