// Sparse optimizers: a call updates one row from the summed gradient of its key.
//
// An UpdateRule is a value that selects one of the rules in all_rules.h and adds transforms
// (penalty, clipping, decay). Its functions dispatch by the rule's number. The update loops instead
// call AllRules::Visit once per bucket and use the rule's type directly.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_UPDATE_RULE_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_UPDATE_RULE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc_ops/core/base/row_codec.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/update/rules/row_transforms.h"
#include "cc_ops/core/update/rules/rule_base.h"

namespace slipstream {

// A rule with its parameters and transforms; SGD by default.
struct UpdateRule {
  // Creates the rule `name`. numbers: all parameters of the rule, in the order of its constructor.
  // Returns InvalidArgument for an unknown name or another number of parameters.
  static Status Make(const std::string& name, const std::vector<float>& numbers, UpdateRule* rule);

  const char* name() const;

  // Number of slots (floats) of a row with `dim` values.
  int64_t SlotsPerRow(int64_t dim) const;

  // Writes the slots ([SlotsPerRow(dim)]) of a new row.
  void InitSlots(int64_t dim, float* slots) const;

  // Returns the factor of the gradient, with bias correction if the rule has one per table, in
  // update number `step` (1, 2, ...) of the table.
  float EffectiveRate(float learning_rate, int64_t step) const;
  // Returns all factors of this update, for a table with RowStore::scale 1.
  StepRates RatesOf(float learning_rate, int64_t step) const;

  // Returns the range of values of the type in which an update needs no check. Half of float16's
  // range remains for the step.
  ValueRange RangeOf(RowDtype dtype) const;
  // Returns whether a row is in range (ValueRange). row: `dim` values, then their slots.
  bool IsInRange(int64_t dim, float max_value, const float* row) const;
  // Returns whether one update of any row in range gives finite values of at most
  // ValueRange::max_result, and finite slots. gradient: maximum magnitude of the summed gradients.
  // is_unchecked: whether the caller runs the loop that does not check whether rows are still in
  // range; the result is then also whether they are (see update_rule.cc).
  bool Fits(const StepRates& rates, int64_t dim, double gradient, ValueRange range,
            bool is_unchecked) const;

  // Applies only the rule. row: `dim` values, then their slots. gradient: `dim` values, which must
  // not overlap the row. rate: from EffectiveRate.
  void Apply(float rate, int64_t dim, const float* gradient, float* row) const;

  // Applies the transforms and the rule. Changes the gradient.
  void Update(StepRates rates, int64_t dim, float* gradient, float* row) const;

  // Returns the largest distance by which applying `gradient` would move a value of the row.
  // Arguments as in Apply. The result is exact except for rounding, with these exceptions: momentum
  // is ignored, so that a sum of n similar gradients counts as n steps; for a row with slots from
  // FillSlots, FTRL returns an upper bound. Transforms of the gradient are included, changes of the
  // row by transforms are not.
  float Movement(float rate, int64_t dim, const float* gradient, const float* row) const;

  // SlotSummary compresses the slots of a row to one number (0 for rules that need none). FillSlots
  // sets the slots of a replica of the row on another rank from this number. With these slots,
  // Movement is at least as large as with the original slots. The replica has no momentum. row:
  // `dim` values, then their slots.
  float SlotSummary(int64_t dim, const float* row) const;
  void FillSlots(int64_t dim, float summary, float* row) const;

  // Changes the slots like a step with a gradient of 0, without moving the row: moments shrink,
  // sums of squares do not change.
  void DecaySlots(int64_t dim, float* row) const;

  int index = 0;  // Index in AllRules.
  RuleParameters parameters = {};
  RowTransforms transforms;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_UPDATE_RULE_H_
