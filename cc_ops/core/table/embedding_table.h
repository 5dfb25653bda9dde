// One embedding table of the native store: rows by key, their flags, the state of their updates.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_EMBEDDING_TABLE_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_EMBEDDING_TABLE_H_

#include <cstdint>
#include <new>
#include <shared_mutex>
#include <vector>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/table/row_flags.h"
#include "cc_ops/core/table/row_store.h"
#include "cc_ops/core/table/update_state.h"

namespace slipstream {

// Callers hold `mutex()`: shared for const members, exclusive for the others.
class EmbeddingTable {
 public:
  // `options` must be valid.
  explicit EmbeddingTable(const TableOptions& options)
      : options_(options), rows_(options_), updates_(options.dim) {}
  EmbeddingTable(const EmbeddingTable&) = delete;
  EmbeddingTable& operator=(const EmbeddingTable&) = delete;

  const TableOptions& options() const { return options_; }
  int64_t dim() const { return options_.dim; }
  // Makes what rows that spill to the disk need; to be called once, before anything else.
  // InvalidArgument if no file can be made there.
  Status Open();

  int64_t slots_per_row() const { return rows_.layout().slots; }
  std::shared_mutex& mutex() const { return mutex_; }
  int64_t bytes() const;

  RowStore& rows() { return rows_; }
  const RowStore& rows() const { return rows_; }
  RowFlags& flags() { return flags_; }
  const RowFlags& flags() const { return flags_; }
  UpdateState& updates() { return updates_; }
  const UpdateState& updates() const { return updates_; }

  // Whether updates of a shard's rows need more than gradients and rows.
  bool UpdatesByPolicy(int64_t shard) const {
    const UpdatePolicy& policy = updates_.policy();
    return policy.IsActive() && policy.Samples(shard);
  }

  // InvalidArgument if nothing would be left of the rows in an update of this rate.
  Status CheckRate(float learning_rate) const;
  // Begins the next update, whose rate was checked: all rows decay, where they do.
  StepRates BeginUpdate(float learning_rate);

  // Begins a lookup of a batch: rows that expired leave.
  void BeginLookup();

  // Sets the flags of rows; see RowFlags::Set. Rows that are created may evict others of a bounded
  // table. InvalidArgument for bits that are no flags, ResourceExhausted if the keys do not fit in
  // the capacity: nothing has changed then.
  Status SetFlags(const int64_t* keys, const uint8_t* flags, int64_t n, const Parallel& parallel,
                  bool create_missing = false);

  // Removes the least valuable rows for `incoming` new keys, never one of `pinned` (sorted); see
  // RowStore::KeysToEvict. Pinned and incoming keys together must fit in the capacity. Throws
  // std::bad_alloc, changing nothing.
  void Evict(int64_t incoming, const std::vector<int64_t>& pinned);

  // Replaces the values of rows; those of absent keys are made, as by a lookup that counts no
  // access, and may evict others of a bounded table. Slots, counts and flags of rows that are there
  // stay; their deferred gradients go.
  //   keys: [n]. rows: [n, dim].
  // InvalidArgument for a key that comes twice or a value that is not finite, ResourceExhausted if
  // the keys do not fit in the capacity: nothing has changed then. Throws std::bad_alloc: no value
  // has changed then, but some keys may have got their rows.
  Status Write(const int64_t* keys, const float* rows, int64_t n,
               const Parallel& parallel = Parallel());
  // Removes the rows of keys with their slots, counts and flags, and the keys' deferred gradients.
  // Returns how many rows there were. Throws std::bad_alloc, changing nothing.
  int64_t Remove(const int64_t* keys, int64_t n);

  // status: an error of reading from the disk; what is exported is not whole then.
  TableContents Export(Status* status = nullptr) const;
  // Replaces all rows; see RowStore::Import. Flags and deferred gradients go.
  Status Import(const TableContents& contents);

 private:
  // Removes rows that are there, but for deferred gradients that are to be exchanged.
  void Leave(const std::vector<int64_t>& keys);
  // Of rows that leave, ahead of them.
  void ForgetFlags(const std::vector<int64_t>& keys) noexcept;

  const TableOptions options_;
  RowStore rows_;
  RowFlags flags_;
  UpdateState updates_;
  mutable std::shared_mutex mutex_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_EMBEDDING_TABLE_H_
