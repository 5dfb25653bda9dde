// An embedding table: rows by key, their flags and the state of their updates.
//
// The table combines three parts that share one mutex. `RowStore` stores values, optimizer slots
// and access counts. `RowFlags` marks saturated rows. `UpdateState` has the update policy, the
// deferred gradients and the counters. This class keeps the parts consistent: a row that is removed
// loses its flags and deferred gradients, too. Exception: deferred gradients that must be exchanged
// between ranks (UpdatePolicy::is_exchanged) stay if their row expires or is evicted.
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
  int64_t dim() const { return options_.dim; }  // Values per row.
  // Opens the files of a table that spills to disk. Call it once, before all other functions.
  // Returns InvalidArgument if no file can be created in the folder.
  Status Open();

  int64_t slots_per_row() const { return rows_.layout().slots; }
  std::shared_mutex& mutex() const { return mutex_; }
  // Allocated bytes of memory for rows, indexes, flags and deferred gradients.
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

  // Returns InvalidArgument if all rows decay and learning_rate * weight decay is 1 or more,
  // because the decay would set the rows to 0.
  Status CheckRate(float learning_rate) const;
  // Returns the factors of the next update. If all rows decay, next_scale is at most the scale that
  // BeginUpdate returns.
  StepRates NextRates(float learning_rate) const;
  // Begins the next update with a rate that passed CheckRate, and decays all rows if configured.
  // Returns the factors of the update.
  StepRates BeginUpdate(float learning_rate);

  // Counts the lookup of a batch, and removes expired rows; see RowStore::NextLookupStep. With
  // `joins_step`, it does neither if the table was not updated since the last counted lookup,
  // because all lookups of a training step count once.
  void BeginLookup(bool joins_step = false);
  // Appends to `keys` the keys with a row that NoteStepKeys has noted in this training step,
  // because their rows must stay until the update.
  void AppendStepKeys(std::vector<int64_t>* keys) const;
  // Notes keys of a lookup with `joins_step`, if the table is bounded. Call it after BeginLookup.
  void NoteStepKeys(const int64_t* keys, int64_t n);

  // Replaces the flags of all rows: rows of the keys [n] get `flags` [n] (RowFlag bits), other rows
  // get none. With `create_missing`, keys with a flag and without a row get a row, which may evict
  // other rows from a bounded table.
  //
  // Returns InvalidArgument for unknown flag bits and ResourceExhausted if the keys do not fit in
  // the capacity; the table is unchanged then. A table that spills also returns the errors of
  // RowStore::LoadRow; no flag is changed then.
  Status SetFlags(const int64_t* keys, const uint8_t* flags, int64_t n, const Parallel& parallel,
                  bool create_missing = false);

  // Removes the least valuable rows of a bounded table, so that `incoming` new keys fit. Rows of
  // `pinned` keys (ascending) stay. Pinned and incoming keys together must fit in the capacity. See
  // RowStore::KeysToEvict for the choice of rows. Throws std::bad_alloc (strong exception
  // guarantee).
  void Evict(int64_t incoming, const std::vector<int64_t>& pinned);

  // Replaces the values of rows. keys: [n]. rows: [n, dim]. An absent key gets a row without
  // counting an access, which may evict others from a bounded table. Slots, counts and flags of
  // existing rows do not change. Deferred gradients of the keys are dropped.
  //
  // Returns InvalidArgument for a repeated key or a value that is not finite in the data type of
  // the rows, and ResourceExhausted if the keys do not fit in the capacity; the table is unchanged
  // then. Throws std::bad_alloc; no value has changed then, but a part of the missing rows may have
  // been created. A table that spills also returns the errors of RowStore::LoadRow. It writes the
  // rows in parts, therefore earlier parts may be written when a later one fails.
  Status Write(const int64_t* keys, const float* rows, int64_t n,
               const Parallel& parallel = Parallel());
  // Removes rows with their slots, counts, flags and deferred gradients. Returns the number of
  // removed rows. Throws std::bad_alloc (strong exception guarantee).
  int64_t Remove(const int64_t* keys, int64_t n);
  // Removes all rows like Remove and clears the counters of keys without a row, and frees the
  // memory. The numbers of updates and lookups do not change. Throws std::bad_alloc (strong
  // exception guarantee unless the table spills).
  Status Clear();
  // Moves the rows to new memory, see RowStore::Shrink. If an allocation fails, std::bad_alloc is
  // thrown; the rows are unchanged then, but flags may be cleared.
  void Shrink();

  // Exports all rows. An error of reading from disk is stored in `status` if it is not null; the
  // contents are incomplete then.
  TableContents Export(Status* status = nullptr) const;
  // Replaces all rows and the numbers of steps, and drops flags and deferred gradients. Returns the
  // errors of RowStore::Import, which describes the rows then; flags, deferred gradients and the
  // number of updates are unchanged.
  Status Import(const TableContents& contents);

 private:
  // Removes existing rows that expired or are evicted, with their flags and deferred gradients.
  // Keeps deferred gradients that still have to be exchanged.
  void Leave(const std::vector<int64_t>& keys);
  // Clears the flags of rows that are about to be removed.
  void ForgetFlags(const std::vector<int64_t>& keys) noexcept;

  const TableOptions options_;
  RowStore rows_;
  RowFlags flags_;
  UpdateState updates_;
  int64_t counted_at_ = -1;  // updates_.step() at the last counted lookup.
  std::vector<int64_t> step_keys_;
  mutable std::shared_mutex mutex_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_EMBEDDING_TABLE_H_
