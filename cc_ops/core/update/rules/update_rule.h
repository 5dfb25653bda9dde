// Sparse optimizers: one call updates one row from the summed gradient of its key.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_UPDATE_RULE_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_UPDATE_RULE_H_

#include <cstdint>

namespace slipstream {

struct UpdateRule {
  enum class Kind { kSgd, kAdagrad, kRowWiseAdagrad, kAdam };
  Kind kind = Kind::kSgd;
  // Adagrad, row-wise Adagrad: initial accumulator, epsilon. Adam: beta 1,
  // beta 2, epsilon.
  float a = 0.f, b = 0.f, c = 0.f;

  // Floats kept beside a row of `dim` values.
  int64_t SlotsPerRow(int64_t dim) const;

  void InitSlots(int64_t dim, float* slots) const;

  // The factor on the gradient in update number `step` (1, 2, ...) of the table:
  // the learning rate, bias-corrected for Adam.
  float EffectiveRate(float learning_rate, int64_t step) const;

  // row: `dim` values followed by their slots. gradient: `dim` values; must not
  // overlap the row. rate: from EffectiveRate.
  void Apply(float rate, int64_t dim, const float* gradient, float* row) const;

  // How far applying `gradient` would move the value of the row that moves most.
  // Exact but for rounding; for Adam without its momentum: rate * |gradient| over
  // the root of the second moment as it would become, so that a sum of n like
  // gradients counts as n steps.
  float Movement(float rate, int64_t dim, const float* gradient, const float* row) const;

  // For a copy of a row without its slots: one number (0 for SGD, which has none)
  // from which FillSlots makes slots, beside which Movement is at least what it is
  // beside the row's own. Adam's copy has no momentum.
  float SlotSummary(int64_t dim, const float* row) const;
  void FillSlots(int64_t dim, float summary, float* row) const;

  // What a step with a gradient of 0 does to the slots, without moving the row:
  // Adam's moments shrink, the other rules' slots stay.
  void DecaySlots(int64_t dim, float* row) const;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_UPDATE_RULE_H_
