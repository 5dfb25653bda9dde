// Keeps values that are not finite out of tables.
//
// An update must change all rows or none, therefore it must be known beforehand that its results
// are finite. Almost always a bound decides this in constant time: from the largest gradient and
// the largest factor of a key, which are found in passes that are necessary anyway, and from the
// largest number of uses of a key, no sum exceeds SumBound. If all rows are in range (ValueRange),
// UpdateRule::Fits then proves that no row, slot or intermediate result overflows.
//
// Otherwise, the sums are computed and checked before the update (SumBounds::CheckSums), and the
// state of the table is saved (TableBackup). After the update all changed rows are checked. If one
// is not finite, the table is restored bit for bit.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_CHECKED_UPDATE_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_CHECKED_UPDATE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/update/update_loop.h"

namespace slipstream {

// Sums with a larger bound are computed and checked. Half of the largest float.
constexpr double kMaxSumBound = 0x1p126;

// Returns an upper bound of the magnitudes of the sums of `uses` floats, each a factor of at most
// `scale` times a gradient of at most `largest`, in any order. Proof: for a power of two P that is
// at least the product, n P is a float or the sum no longer grows; rounding is monotonic, thus the
// sum of n products is at most n P, where P is at most twice the product.
inline double SumBound(int64_t uses, float largest, double scale) {
  return uses == 0 ? 0. : 2. * static_cast<double>(uses) * largest * scale;
}

// Bounds of the sums of an update of multiple tables.
class SumBounds {
 public:
  // largest: largest magnitude of the gradients. Throws std::bad_alloc.
  SumBounds(const LookupPlan& plan, float largest);
  // Returns the largest magnitude of a gradient that is applied to a row of a table, with deferred
  // gradients.
  double Applied(size_t table) const { return applied_[table]; }
  // Returns the value for UpdateState::set_deferred_bound after the update.
  double Deferred(size_t table) const { return deferred_[table]; }
  // Returns InvalidArgument, with table, key and cause, for the first sum that is not finite by
  // itself or together with the deferred gradients of its key. Computes sums only if a bound is too
  // large.
  Status CheckSums(const std::vector<PooledGradient>& gradients) const;

 private:
  const LookupPlan& plan_;
  std::vector<double> applied_, deferred_;
};

// Returns whether an update with gradients of at most `gradient` surely gives finite rows.
bool SurelyFits(const EmbeddingTable& table, const StepRates& rates, double gradient);

// Saves the state of a table before an update of some rows.
class TableBackup {
 public:
  // keys: keys that are updated; they may repeat or have no row. Keys with deferred gradients are
  // included anyway, and all keys if the update changes all rows. Rows on disk are not saved.
  // Throws std::bad_alloc.
  TableBackup(EmbeddingTable* table, std::vector<int64_t> keys);
  // Returns InvalidArgument, with the row and value, if a saved row or a deferred gradient is not
  // finite after the update.
  Status Check() const;
  // Undoes the update.
  void Restore();

 private:
  struct SavedRow {
    int64_t key;
    StoredRow* row;
  };
  EmbeddingTable* table_;
  std::vector<SavedRow> rows_;
  std::vector<uint8_t> bytes_;
  std::vector<ShardUpdates> updates_;
  int64_t step_;
  float learning_rate_;
  double scale_;
};

// Checks all backups. If a check fails, restores all tables and returns its error.
Status CheckOrRestore(std::vector<TableBackup>* backups);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_CHECKED_UPDATE_H_
