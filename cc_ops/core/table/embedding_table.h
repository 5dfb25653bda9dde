// An embedding table: rows by key, their flags and the state of their updates.
//
// The table combines three parts that share one mutex. `RowStore` stores values, optimizer slots
// and access counts. `RowFlags` marks saturated rows. `UpdateState` has the update policy, the
// deferred gradients and the counters. This class keeps the parts consistent: a row that is removed
// loses its flags and deferred gradients, too.
//
// A lookup calls `BeginLookup`, then reads and creates rows through `rows()`. An update calls
// `BeginUpdate` and then changes rows in parallel, one thread per shard.
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

// Callers hold `mutex()`: shared for const members, exclusively for the others.
class EmbeddingTable {
 public:
  // `options` must be valid.
  explicit EmbeddingTable(const TableOptions& options)
      : options_(options), rows_(options_), updates_(options.dim) {}
  EmbeddingTable(const EmbeddingTable&) = delete;
  EmbeddingTable& operator=(const EmbeddingTable&) = delete;

  const TableOptions& options() const { return options_; }
  int64_t dim() const { return options_.dim; }
  // Opens the files of a table that spills to disk. Call it once, before all other functions.
  // Returns InvalidArgument if no file can be created in the folder.
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

  // Whether the update of a shard must consult the update policy.
  bool UpdatesByPolicy(int64_t shard) const {
    const UpdatePolicy& policy = updates_.policy();
    return policy.IsActive() && policy.Samples(shard);
  }

  // Returns InvalidArgument if the weight decay at this rate would leave nothing of the rows.
  Status CheckRate(float learning_rate) const;
  // Begins the next update with a rate that passed CheckRate, and decays all rows if configured.
  StepRates BeginUpdate(float learning_rate);

  // Begins the lookup of a batch and removes expired rows.
  void BeginLookup();

  // Sets the flags of rows; see RowFlags::Set. Rows that are created may evict others from a
  // bounded table. Returns InvalidArgument for unknown flag bits and ResourceExhausted if the keys
  // do not fit in the capacity; the table is unchanged then. A table that spills also returns the
  // errors of RowStore::BringIn; no flag is changed then.
  Status SetFlags(const int64_t* keys, const uint8_t* flags, int64_t n, const Parallel& parallel,
                  bool create_missing = false);

  // Removes the least valuable rows for `incoming` new keys, none of `pinned` (sorted); see
  // RowStore::KeysToEvict. Pinned and incoming keys together must fit in the capacity. Throws
  // std::bad_alloc (strong exception guarantee).
  void Evict(int64_t incoming, const std::vector<int64_t>& pinned);

  // Replaces the values of rows. keys: [n]. rows: [n, dim]. An absent key gets a row without
  // counting an access, which may evict others from a bounded table. Slots, counts and flags of
  // existing rows do not change. Deferred gradients of the keys are dropped.
  //
  // Returns InvalidArgument for a repeated key or a value that is not finite, and ResourceExhausted
  // if the keys do not fit in the capacity; the table is unchanged then. Throws std::bad_alloc; no
  // value has changed then, but a part of the missing rows may have been created. A table that
  // spills also returns the errors of RowStore::BringIn. It writes the rows in parts, therefore
  // earlier parts may be written when a later one fails.
  Status Write(const int64_t* keys, const float* rows, int64_t n,
               const Parallel& parallel = Parallel());
  // Removes rows with their slots, counts, flags and deferred gradients. Returns the number of
  // removed rows. Throws std::bad_alloc (strong exception guarantee).
  int64_t Remove(const int64_t* keys, int64_t n);

  // Exports all rows. An error of reading from disk is stored in `status`; the contents are
  // incomplete then.
  TableContents Export(Status* status = nullptr) const;
  // Replaces all rows; see RowStore::Import. Drops flags and deferred gradients.
  Status Import(const TableContents& contents);

 private:
  // Removes existing rows. Keeps deferred gradients that still have to be exchanged.
  void Leave(const std::vector<int64_t>& keys);
  // Clears the flags of rows that are about to be removed.
  void ForgetFlags(const std::vector<int64_t>& keys) noexcept;

  const TableOptions options_;
  RowStore rows_;
  RowFlags flags_;
  UpdateState updates_;
  mutable std::shared_mutex mutex_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_EMBEDDING_TABLE_H_
