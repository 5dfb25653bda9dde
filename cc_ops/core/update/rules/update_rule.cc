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

void RowTransforms::ShortenHuge(float maximum, int64_t dim, float* values) {
  constexpr float kScale = 0x1p-80f;
  float squares = 0.f;
  for (int64_t j = 0; j < dim; ++j) squares += kScale * values[j] * (kScale * values[j]);
  const float norm = std::sqrt(squares);
  if (norm <= kScale * maximum) return;
  Multiply(kScale, dim, values);
  Multiply(maximum / norm, dim, values);
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

ValueRange UpdateRule::RangeOf(RowDtype dtype) const {
  if (dtype == RowDtype::kFloat16) return {0x1p14f, 0x1p15};
  bool stays = false;
  AllRules::Visit(*this, [&](const auto& own) { stays = own.kStaysInRange; });
  // The larger range absorbs larger steps. The bounds of other updates contain products with rows.
  return stays && transforms.OnlyShrink() ? ValueRange{0x1p120f, 0x1p126}
                                          : ValueRange{0x1p40f, 0x1p126};
}

// An update starts from values of at most max_value, multiplies them by `kept`, adds a step
// (StepBound) and divides by the scale of the table. Clipping and max_norm only shrink.
//
// Rows may grow beyond the range over many updates. Therefore all loops check whether updated rows
// are still in range, except loops over float rows for rules that keep rows in range
// (kStaysInRange) with transforms that only shrink.
bool UpdateRule::Fits(const StepRates& rates, int64_t dim, double gradient, ValueRange range,
                      bool is_unchecked) const {
  // Half of the largest float, because results may be rounded up to 16 bits.
  constexpr double kMaxResult = 0x1p126;
  // Twice the gradient of the penalty 2 * l2 * row.
  const double penalized = gradient + 4. * std::fabs(transforms.l2) * range.max_value;
  StepBound bound;
  bool checks = true, stays = false;
  AllRules::Visit(*this, [&](const auto& own) {
    bound = own.Bound(rates.rate, penalized, dim, range.max_value);
    checks = !is_unchecked || !own.kStaysInRange;
    stays = rates.kept <= 1.f && own.SlotsStayInRange(rates.rate, gradient);
  });
  const double start = range.max_value * std::max(1., static_cast<double>(rates.kept));
  const double value = (start + bound.step) / std::min(1.f, rates.next_scale);
  const bool fits =
      penalized <= kMaxResult && bound.rest <= kMaxResult && value <= range.max_result;
  return fits && (checks || (stays && bound.step <= kAbsorbed * range.max_value));
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
