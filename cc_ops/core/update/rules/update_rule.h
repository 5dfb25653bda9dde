// Sparse optimizers: one call updates one row from the summed gradient of its key.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_UPDATE_RULE_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_UPDATE_RULE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/update/rules/row_transforms.h"
#include "cc_ops/core/update/rules/rule_base.h"

namespace slipstream {

// One of the rules of all_rules.h, as a value, with what is done beside it; SGD unless another is
// named.
struct UpdateRule {
  // name: of the rule; numbers: its parameters, all of them.
  static Status Make(const std::string& name, const std::vector<float>& numbers, UpdateRule* rule);

  const char* name() const;

  // Floats kept beside a row of `dim` values.
  int64_t SlotsPerRow(int64_t dim) const;

  void InitSlots(int64_t dim, float* slots) const;

  // Of update number `step` (1, 2, ...) of the table.
  float EffectiveRate(float learning_rate, int64_t step) const;
  // In a table of scale 1.
  StepRates RatesOf(float learning_rate, int64_t step) const;

  // The rule alone. row: `dim` values followed by their slots. gradient: `dim` values; must not
  // overlap the row. rate: from EffectiveRate.
  void Apply(float rate, int64_t dim, const float* gradient, float* row) const;

  // The rule and its transforms, which change the gradient.
  void Update(StepRates rates, int64_t dim, float* gradient, float* row) const;

  // How far applying `gradient` would move the value of the row that moves most.
  // Exact but for rounding; with momentum without it, so that a sum of n like
  // gradients counts as n steps; of a copy of an FTRL row at most so far. Of what transforms make
  // of the gradient, without what they do to the row.
  float Movement(float rate, int64_t dim, const float* gradient, const float* row) const;

  // For a copy of a row without its slots: one number (0 for rules that need none)
  // from which FillSlots makes slots, beside which Movement is at least what it is
  // beside the row's own. A copy has no momentum.
  float SlotSummary(int64_t dim, const float* row) const;
  void FillSlots(int64_t dim, float summary, float* row) const;

  // What a step with a gradient of 0 does to the slots, without moving the row:
  // moments shrink, sums stay.
  void DecaySlots(int64_t dim, float* row) const;

  int index = 0;  // in AllRules
  RuleParameters parameters = {};
  RowTransforms transforms;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_UPDATE_RULE_H_
