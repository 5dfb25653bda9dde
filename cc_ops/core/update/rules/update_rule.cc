#include "cc_ops/core/update/rules/update_rule.h"

#include <algorithm>
#include <cmath>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/update/rules/all_rules.h"

namespace slipstream {
namespace {

SLIPSTREAM_SIMD_CLONES void ApplyToRow(const UpdateRule& rule, float rate, int64_t dim,
                                       const float* __restrict__ gradient,
                                       float* __restrict__ row) {
  AllRules::Visit(
      rule, [&](const auto& own) SLIPSTREAM_LAMBDA_INLINE { own.Apply(rate, dim, gradient, row); });
}

SLIPSTREAM_SIMD_CLONES void UpdateOneRow(const UpdateRule& rule, StepRates rates, int64_t dim,
                                         float* __restrict__ gradient, float* __restrict__ row) {
  rule.transforms.BeforeRule(rates, dim, gradient, row);
  AllRules::Visit(rule, [&](const auto& own) SLIPSTREAM_LAMBDA_INLINE {
    own.Apply(rates.rate, dim, gradient, row);
  });
  rule.transforms.AfterRule(rates, dim, row);
}

SLIPSTREAM_SIMD_CLONES float MovementOfRow(const UpdateRule& rule, float rate, int64_t dim,
                                           const float* __restrict__ gradient,
                                           const float* __restrict__ row) {
  float movement = 0.f;
  AllRules::Visit(rule, [&](const auto& own) SLIPSTREAM_LAMBDA_INLINE {
    movement = own.Movement(rate, dim, gradient, row);
  });
  return movement;
}

}  // namespace

Status UpdateRule::Make(const std::string& name, const std::vector<float>& numbers,
                        UpdateRule* rule) {
  const auto* const names = std::begin(AllRules::kNames);
  const auto* const found = std::find(names, std::end(AllRules::kNames), name);
  if (found == std::end(AllRules::kNames)) {
    std::string allowed;
    for (const char* known : AllRules::kNames) {
      allowed += std::string(allowed.empty() ? " '" : ", '") + known + "'";
    }
    return InvalidArgument("rule is '" + name + "'; expected one of" + allowed);
  }
  rule->index = static_cast<int>(found - names);
  const size_t count = AllRules::kParameters[rule->index];
  if (numbers.size() != count) {
    return InvalidArgument("rule '" + name + "' has " + std::to_string(numbers.size()) +
                           " parameters; expected " + std::to_string(count));
  }
  rule->parameters = {};
  std::copy(numbers.begin(), numbers.end(), rule->parameters.begin());
  return OkStatus();
}

const char* UpdateRule::name() const { return AllRules::kNames[index]; }

int64_t UpdateRule::SlotsPerRow(int64_t dim) const {
  int64_t slots = 0;
  AllRules::Visit(*this, [&](const auto& own) { slots = own.Slots(dim); });
  return slots;
}

void UpdateRule::InitSlots(int64_t dim, float* slots) const {
  std::fill_n(slots, SlotsPerRow(dim), 0.f);
  AllRules::Visit(*this, [&](const auto& own) { own.InitSlots(dim, slots); });
}

float UpdateRule::EffectiveRate(float learning_rate, int64_t step) const {
  float rate = 0.f;
  AllRules::Visit(*this, [&](const auto& own) { rate = own.EffectiveRate(learning_rate, step); });
  return rate;
}

StepRates UpdateRule::RatesOf(float learning_rate, int64_t step) const {
  StepRates rates;
  rates.rate = EffectiveRate(learning_rate, step);
  rates.rounding = Mix64(static_cast<uint64_t>(step));
  rates.kept = static_cast<float>(transforms.Kept(learning_rate));
  return rates;
}

bool UpdateRule::IsInRange(int64_t dim, float max_value, const float* row) const {
  bool is_in_range = false;
  AllRules::Visit(*this, [&](const auto& own) {
    is_in_range = AreAtMost(max_value, dim, row) && own.SlotsInRange(dim, row + dim);
  });
  return is_in_range;
}

// An update starts from values of at most max_value, multiplies them by `kept`, adds a step
// (StepBound) and divides by the scale of the table. Clipping and max_norm only shrink.
//
// Rows may grow beyond the range over many updates. Therefore all loops check whether updated rows
// are still in range, except the loop over float rows without transforms for rules that only add
// (kOnlyAdds), because rounding keeps these rows in range: the float after a power of two L is
// L + 2^-23 L. The sum of a number of at most L and a step of at most 2^-25 L is thus rounded to at
// most L.
bool UpdateRule::Fits(const StepRates& rates, int64_t dim, double gradient, ValueRange range,
                      bool is_unchecked) const {
  // Half of the largest float, because results may be rounded up to 16 bits.
  constexpr double kMaxResult = 0x1p126, kAbsorbed = 0x1p-26;
  // Twice the gradient of the penalty 2 * l2 * row.
  const double penalized = gradient + 4. * std::fabs(transforms.l2) * range.max_value;
  StepBound bound;
  bool only_adds = false;
  AllRules::Visit(*this, [&](const auto& own) {
    bound = own.Bound(rates.rate, penalized, dim, range.max_value);
    only_adds = own.kOnlyAdds;
  });
  const double start = range.max_value * std::max(1., static_cast<double>(rates.kept));
  const double value = (start + bound.step) / std::min(1.f, rates.next_scale);
  const bool fits =
      penalized <= kMaxResult && bound.rest <= kMaxResult && value <= range.max_result;
  if (!fits || !is_unchecked || !only_adds) return fits;
  return bound.step <= kAbsorbed * range.max_value &&
         gradient * gradient <= kAbsorbed * kMaxSquares;
}

void UpdateRule::Update(StepRates rates, int64_t dim, float* gradient, float* row) const {
  if (transforms.any()) return UpdateOneRow(*this, rates, dim, gradient, row);
  ApplyToRow(*this, rates.rate, dim, gradient, row);
}

void UpdateRule::Apply(float rate, int64_t dim, const float* gradient, float* row) const {
  ApplyToRow(*this, rate, dim, gradient, row);
}

float UpdateRule::Movement(float rate, int64_t dim, const float* gradient, const float* row) const {
  std::vector<float> changed;
  if (transforms.any_of_gradient()) {
    changed.assign(gradient, gradient + dim);
    transforms.ToGradient(1.f, dim, changed.data(), row);
    gradient = changed.data();
  }
  return MovementOfRow(*this, rate, dim, gradient, row);
}

float UpdateRule::SlotSummary(int64_t dim, const float* row) const {
  float summary = 0.f;
  AllRules::Visit(*this, [&](const auto& own) { summary = own.SlotSummary(dim, row); });
  return summary;
}

void UpdateRule::FillSlots(int64_t dim, float summary, float* row) const {
  std::fill_n(row + dim, SlotsPerRow(dim), 0.f);
  AllRules::Visit(*this, [&](const auto& own) { own.FillSlots(dim, summary, row + dim); });
}

void UpdateRule::DecaySlots(int64_t dim, float* row) const {
  AllRules::Visit(*this, [&](const auto& own) { own.DecaySlots(dim, row + dim); });
}

}  // namespace slipstream
