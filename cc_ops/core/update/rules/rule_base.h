// The interface of update rules, with default implementations.
//
// A rule is a struct in its own file that derives from RuleBase and is listed in all_rules.h. Calls
// are resolved at compile time, so that the update loops are compiled for each rule.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_RULE_BASE_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_RULE_BASE_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/update/rules/row_math.h"

namespace slipstream {

// Maximum number of parameters of a rule; unused ones are 0.
constexpr int kMaxRuleParameters = 8;
using RuleParameters = std::array<float, kMaxRuleParameters>;

// A rule without slots. In addition, a rule declares:
//
//   static constexpr const char* kName;      Name, equal to `rule` of the Python class.
//   static constexpr std::array kDefaults;   Defaults of its parameters, in the order of Python.
//   explicit Rule(const RuleParameters& p);
//   void Apply(float rate, int64_t dim, const float* gradient, float* row) const;
//       row: `dim` values, then their slots. rate: from EffectiveRate.
//   float Movement(float rate, int64_t dim, const float* gradient, const float* row) const;
//       See UpdateRule.
struct RuleBase {
  // Number of slots (floats) of a row with `dim` values.
  int64_t Slots(int64_t /*dim*/) const { return 0; }

  // Initializes the slots of a new row, which are 0 before the call.
  void InitSlots(int64_t /*dim*/, float* /*slots*/) const {}

  // Returns the factor of the gradient in update number `step` (1, 2, ...) of the table.
  float EffectiveRate(float learning_rate, int64_t /*step*/) const { return learning_rate; }

  // See UpdateRule. The slots are 0 before FillSlots is called.
  float SlotSummary(int64_t /*dim*/, const float* /*row*/) const { return 0.f; }
  void FillSlots(int64_t /*dim*/, float /*summary*/, float* /*slots*/) const {}
  void DecaySlots(int64_t /*dim*/, float* /*slots*/) const {}
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_RULE_BASE_H_
