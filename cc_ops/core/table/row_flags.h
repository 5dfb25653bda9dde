// Flags of a table's rows, which window ends set.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_FLAGS_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_FLAGS_H_

#include <cstdint>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/table/row_store.h"

namespace slipstream {

enum RowFlag : uint8_t {
  kSaturated = 1,  // its gradients are masked, or deferred by Trigger::kInterval
};

constexpr uint8_t kAllFlags = kSaturated;

// Of the rows of one shard.
class ShardFlags {
 public:
  uint8_t Of(uint32_t index) const { return index < flags_.size() ? flags_[index] : 0; }
  // False: no row has any.
  bool any() const { return !flags_.empty(); }
  SLIPSTREAM_PREFETCHES void Prefetch(uint32_t index) const {
    if (index < flags_.size()) __builtin_prefetch(&flags_[index], 1);
  }

 private:
  friend class RowFlags;
  // rows: of the shard. Throws std::bad_alloc, changing nothing.
  void Reserve(uint32_t index, int64_t rows);

  std::vector<uint8_t> flags_;  // by index; those beyond its end have no flags
};

// Callers hold the table's mutex, as for RowStore.
class RowFlags {
 public:
  RowFlags() : shards_(kNumShards) {}

  int64_t bytes() const;
  ShardFlags* shard(int64_t s) { return &shards_[s]; }
  const ShardFlags* shard(int64_t s) const { return &shards_[s]; }

  // keys, flags (RowFlag bits): [n]. Replaces all flags. create_missing: whether keys without a row
  // that get a flag get a row, too; else they are ignored. Takes little where most flags stay as
  // they were, keys are ascending, all that got a flag last had a row, and none has left since;
  // else all are set anew.
  // EmbeddingTable::SetFlags checks what comes from outside.
  // Throws std::bad_alloc: no flag has changed then, but some keys may have got their rows.
  void Set(const int64_t* keys, const uint8_t* flags, int64_t n, const Parallel& parallel,
           bool create_missing, RowStore* rows);
  // Of a row that leaves.
  void Clear(int64_t key, uint32_t index) noexcept;
  // Of all rows, which are being replaced.
  void Clear() noexcept;

  // flags: [n], RowFlag bits; 0 for a key without a row.
  void Get(const int64_t* keys, int64_t n, const RowStore& rows, uint8_t* flags) const;

 private:
  struct View {
    const int64_t* keys;   // [n]
    const uint8_t* flags;  // [n], RowFlag bits
    int64_t n;
  };
  struct List {
    std::vector<int64_t> keys;
    std::vector<uint8_t> flags;
    void Add(int64_t key, uint8_t flag) {
      keys.push_back(key);
      flags.push_back(flag);
    }
    View view() const { return {keys.data(), flags.data(), static_cast<int64_t>(keys.size())}; }
  };
  static constexpr int64_t kNever = -1;

  // Flags that differ from `last_`. Of a key that comes again, whatever the order of the keys,
  // the last flags that are not 0 hold, as where all are set anew.
  List ChangesTo(const View& wanted) const;
  // The index of each key of a list in its shard, with room for its flags, or HashIndex::kEmpty.
  std::vector<uint32_t> IndicesOf(const View& list, bool create_missing, bool takes_zeros,
                                  const Parallel& parallel, RowStore* rows);
  // Copies a list to `last_`, valid once `last_generation_` is set. False if the next Set cannot go
  // by it: its keys are not ascending, or it creates rows.
  bool Remember(const View& list, bool create_missing);

  std::vector<ShardFlags> shards_;
  List last_;                         // of the last Set, keys ascending
  int64_t last_generation_ = kNever;  // of the rows that have the flags of `last_`
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_FLAGS_H_
