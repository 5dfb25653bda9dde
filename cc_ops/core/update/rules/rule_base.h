// What every rule has, and what it does unless it says otherwise. A rule is a struct in a file of
// its own, derived from RuleBase and named in all_rules.h.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_RULE_BASE_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_RULE_BASE_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/update/rules/row_math.h"

namespace slipstream {

// Room for the numbers that a rule is given; what it does not use is 0.
constexpr int kMaxRuleParameters = 8;
using RuleParameters = std::array<float, kMaxRuleParameters>;

// A rule without slots. Beside what stands here, a rule has
//   static constexpr const char* kName;      of Python's class, its `rule`
//   static constexpr std::array kDefaults;   of the numbers that it is given, in Python's order
//   explicit Rule(const RuleParameters& p);
//   void Apply(float rate, int64_t dim, const float* gradient, float* row) const;
//       row: `dim` values, then their slots; rate: from EffectiveRate
//   float Movement(float rate, int64_t dim, const float* gradient, const float* row) const;
//       see UpdateRule
struct RuleBase {
  // Floats kept beside a row of `dim` values.
  int64_t Slots(int64_t /*dim*/) const { return 0; }

  // slots: of a new row; they are 0 when this is called.
  void InitSlots(int64_t /*dim*/, float* /*slots*/) const {}

  // The factor on the gradient in update number `step` (1, 2, ...) of the table.
  float EffectiveRate(float learning_rate, int64_t /*step*/) const { return learning_rate; }

  // See UpdateRule. FillSlots: the slots are 0 when it is called.
  float SlotSummary(int64_t /*dim*/, const float* /*row*/) const { return 0.f; }
  void FillSlots(int64_t /*dim*/, float /*summary*/, float* /*slots*/) const {}
  void DecaySlots(int64_t /*dim*/, float* /*slots*/) const {}
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_RULE_BASE_H_
