// One byte of flags per row, set at the end of a window.
//
// `kSaturated` is the only flag. An update that masks or defers reads it for every row of the
// batch, therefore the flags are stored by index within a shard and not by key. A row with a flag
// stays in memory if the table spills.
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
  kSaturated = 1,  // Gradients are dropped with Mode::kMask, deferred with Trigger::kInterval.
};

constexpr uint8_t kAllFlags = kSaturated;

// The flags of the rows of one shard.
class ShardFlags {
 public:
  // Returns the RowFlag bits of the row with this index within the shard.
  uint8_t Of(uint32_t index) const { return index < flags_.size() ? flags_[index] : 0; }
  // Returns false only if no row of the shard has a flag. Note: it may return true without any
  // flag.
  bool any() const { return !flags_.empty(); }
  SLIPSTREAM_PREFETCHES void Prefetch(uint32_t index) const {
    if (index < flags_.size()) __builtin_prefetch(&flags_[index], 1);
  }

 private:
  friend class RowFlags;
  // Makes room for the flags of `index`. rows: number of rows of the shard, for the size of the
  // allocation. Throws std::bad_alloc (strong exception guarantee).
  void Reserve(uint32_t index, int64_t rows);

  std::vector<uint8_t> flags_;  // By index. Rows beyond the end have no flags.
};

// The flags of a table. Callers hold the mutex of the table as for RowStore.
class RowFlags {
 public:
  RowFlags() : shards_(kNumShards) {}

  int64_t bytes() const;
  ShardFlags* shard(int64_t s) { return &shards_[s]; }
  const ShardFlags* shard(int64_t s) const { return &shards_[s]; }

  // Replaces all flags. keys: [n]. flags: [n], RowFlag bits. Keys without a row are ignored, unless
  // `create_missing` is set; then a key with a flag gets a row.
  //
  // Sets only the flags that differ from the previous call, which is faster, if the keys of the
  // previous call ascended, its keys with a flag had rows, no row has been removed since then, and
  // neither call sets `create_missing`. Otherwise sets all flags.
  //
  // Does not check its arguments; EmbeddingTable::SetFlags does. Throws std::bad_alloc; no flag is
  // changed then, but a part of the missing rows may have been created.
  void Set(const int64_t* keys, const uint8_t* flags, int64_t n, const Parallel& parallel,
           bool create_missing, RowStore* rows);
  // Clears the flags of a row that is removed. index: number of the row within its shard.
  void Clear(int64_t key, uint32_t index) noexcept;
  // Clears all flags because all rows are replaced.
  void Clear() noexcept;

  // Reads flags. flags: [n], RowFlag bits; 0 for a key without a row.
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

  // Returns the flags that differ from `last_`. The keys of `wanted` may be in any order. The last
  // nonzero flags of a repeated key count, the same as in a call that sets all flags.
  List ChangesTo(const View& wanted) const;
  // Returns the index of each key in its shard, with room for its flags, or HashIndex::kEmpty if
  // there is nothing to set: for keys without a row and, unless `takes_zeros`, without flags.
  std::vector<uint32_t> IndicesOf(const View& list, bool create_missing, bool takes_zeros,
                                  const Parallel& parallel, RowStore* rows);
  // Copies a list to `last_`, which becomes valid when `last_generation_` is set. Returns false if
  // the next Set cannot use it, because its keys do not ascend or it creates rows.
  bool Remember(const View& list, bool create_missing);

  std::vector<ShardFlags> shards_;
  List last_;  // List of the last Set, keys ascending.
  // RowStore::generation() at the last Set, or kNever if the next Set must not use `last_`.
  int64_t last_generation_ = kNever;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_FLAGS_H_
