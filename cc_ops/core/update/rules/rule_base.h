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
#include <limits>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/update/rules/row_math.h"

namespace slipstream {

// Maximum number of parameters of a rule; unused ones are 0.
constexpr int kMaxRuleParameters = 8;
using RuleParameters = std::array<float, kMaxRuleParameters>;

// A row is in range if its values are at most ValueRange::max_value (UpdateRule::RangeOf) in
// magnitude and its slots are as in SlotsInRange of the rule. Practically all rows are in range.
// For them, UpdateRule::Fits proves that no result of an update overflows.
struct ValueRange {
  float max_value;    // Maximum in a row in range.
  double max_result;  // Maximum after one update; finite in the type of the values.
};
// Maxima of slots in range: sums and means of squares, and moments and other sums.
constexpr float kMaxSquares = 0x1p90f, kMaxMoment = 0x1p45f;
// A number of at most 2^k absorbs steps of at most 2^k times this, because the next float is
// 2^k + 2^(k-23): the sum is rounded to at most 2^k.
constexpr double kAbsorbed = 0x1p-26;
// Smallest epsilon for which rules have a bound.
constexpr float kMinEpsilon = 0x1p-100f;

// Upper bounds of the magnitudes that one update of a row in range can produce. They are doubles,
// which do not overflow where floats do.
struct StepBound {
  double step = 0.;  // Movement of a value.
  double rest = 0.;  // All slots and intermediate results.
};
constexpr StepBound kUnbounded = {std::numeric_limits<double>::infinity(), 0.};

// A rule without slots. In addition, a rule declares:
//
//   static constexpr const char* kName;      Name, equal to `rule` of the Python class.
//   static constexpr std::array kDefaults;   Defaults of its parameters, in the order of Python.
//   explicit Rule(const RuleParameters& p);
//   void Apply(float rate, int64_t dim, const float* gradient, float* row) const;
//       row: `dim` values, then their slots. rate: from EffectiveRate.
//   float Movement(float rate, int64_t dim, const float* gradient, const float* row) const;
//       See UpdateRule.
//   StepBound Bound(double rate, double gradient, int64_t dim, double max_value) const;
//       For any row in range and gradients of at most `gradient`. Bounds are too large by a factor
//       of 2 or more, because Apply rounds. rate: as in Apply. max_value: ValueRange::max_value.
struct RuleBase {
  // Whether rows in range stay in range: an update adds to each value a step that the value absorbs
  // (UpdateRule::Fits), and SlotsStayInRange is defined.
  static constexpr bool kStaysInRange = false;

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

  // Returns whether the slots ([Slots(dim)]) are in range, so that Bound holds; false if one is a
  // NaN.
  bool SlotsInRange(int64_t /*dim*/, const float* /*slots*/) const { return true; }
  // Returns whether slots in range stay in range. Arguments as in Bound, which is finite.
  bool SlotsStayInRange(double /*rate*/, double /*gradient*/) const { return true; }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_RULE_BASE_H_
