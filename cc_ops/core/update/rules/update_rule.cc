#include "cc_ops/core/update/rules/update_rule.h"

#include <algorithm>
#include <cmath>

#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/update/rules/row_rules.h"

namespace slipstream {
namespace {

SLIPSTREAM_SIMD_CLONES void ApplyByKind(const UpdateRule& rule, float rate, int64_t dim,
                                        const float* __restrict__ gradient,
                                        float* __restrict__ row) {
  switch (rule.kind) {
    case UpdateRule::Kind::kSgd:
      return ApplyRule<UpdateRule::Kind::kSgd, false>(rule, rate, dim, gradient, row);
    case UpdateRule::Kind::kAdagrad:
      return ApplyRule<UpdateRule::Kind::kAdagrad, false>(rule, rate, dim, gradient, row);
    case UpdateRule::Kind::kRowWiseAdagrad:
      return ApplyRule<UpdateRule::Kind::kRowWiseAdagrad, false>(rule, rate, dim, gradient, row);
    case UpdateRule::Kind::kAdam:
      return ApplyRule<UpdateRule::Kind::kAdam, false>(rule, rate, dim, gradient, row);
  }
}

// The largest of |g| / sqrt(denominator) is found on squares: one root in the end.
// Written so that a NaN gives NaN: no comparison is to hide a damaged row.
float Larger(float a, float b) { return a > b || a != a ? a : b; }

float SgdMovement(int64_t dim, const float* g) {
  float most = 0.f;
  for (int64_t j = 0; j < dim; ++j) most = Larger(g[j] * g[j], most);
  return std::sqrt(most);
}

float AdagradMovement(float epsilon, int64_t dim, const float* g, const float* sum) {
  float most = 0.f;
  for (int64_t j = 0; j < dim; ++j) {
    const float square = g[j] * g[j];
    most = Larger(square / (sum[j] + square + epsilon), most);
  }
  return std::sqrt(most);
}

float RowWiseAdagradMovement(float epsilon, int64_t dim, const float* g, float sum) {
  float squares = 0.f, most = 0.f;
  for (int64_t j = 0; j < dim; ++j) {
    squares += g[j] * g[j];
    most = Larger(g[j] * g[j], most);
  }
  return std::sqrt(most / (sum + squares / static_cast<float>(dim) + epsilon));
}

float AdamMovement(const UpdateRule& rule, int64_t dim, const float* g, const float* v) {
  float most = 0.f;
  for (int64_t j = 0; j < dim; ++j) {
    const float second = v[j] + (1.f - rule.b) * (g[j] * g[j] - v[j]);
    most = Larger(std::fabs(g[j]) / (std::sqrt(second) + rule.c), most);
  }
  return most;
}

}  // namespace

int64_t UpdateRule::SlotsPerRow(int64_t dim) const {
  switch (kind) {
    case Kind::kSgd:
      return 0;
    case Kind::kAdagrad:
      return dim;
    case Kind::kRowWiseAdagrad:
      return 1;
    case Kind::kAdam:
      return 2 * dim;
  }
  return 0;
}

void UpdateRule::InitSlots(int64_t dim, float* slots) const {
  const bool accumulates = kind == Kind::kAdagrad || kind == Kind::kRowWiseAdagrad;
  std::fill(slots, slots + SlotsPerRow(dim), accumulates ? a : 0.f);
}

float UpdateRule::EffectiveRate(float learning_rate, int64_t step) const {
  if (kind != Kind::kAdam) return learning_rate;
  const double t = static_cast<double>(step);
  const double correction = std::sqrt(1.0 - std::pow(static_cast<double>(b), t)) /
                            (1.0 - std::pow(static_cast<double>(a), t));
  return static_cast<float>(learning_rate * correction);
}

void UpdateRule::Apply(float rate, int64_t dim, const float* gradient, float* row) const {
  ApplyByKind(*this, rate, dim, gradient, row);
}

float UpdateRule::Movement(float rate, int64_t dim, const float* gradient, const float* row) const {
  switch (kind) {
    case Kind::kSgd:
      return rate * SgdMovement(dim, gradient);
    case Kind::kAdagrad:
      return rate * AdagradMovement(b, dim, gradient, row + dim);
    case Kind::kRowWiseAdagrad:
      return rate * RowWiseAdagradMovement(b, dim, gradient, row[dim]);
    case Kind::kAdam:
      return rate * AdamMovement(*this, dim, gradient, row + 2 * dim);
  }
  return 0.f;
}

float UpdateRule::SlotSummary(int64_t dim, const float* row) const {
  switch (kind) {
    case Kind::kSgd:
      return 0.f;
    case Kind::kAdagrad:
      return *std::min_element(row + dim, row + 2 * dim);
    case Kind::kRowWiseAdagrad:
      return row[dim];
    case Kind::kAdam:
      return *std::min_element(row + 2 * dim, row + 3 * dim);
  }
  return 0.f;
}

void UpdateRule::FillSlots(int64_t dim, float summary, float* row) const {
  std::fill(row + dim, row + dim + SlotsPerRow(dim), summary);
  if (kind == Kind::kAdam) std::fill(row + dim, row + 2 * dim, 0.f);
}

void UpdateRule::DecaySlots(int64_t dim, float* row) const {
  if (kind != Kind::kAdam) return;
  for (int64_t j = 0; j < dim; ++j) {
    row[dim + j] *= a;
    row[2 * dim + j] *= b;
  }
}

}  // namespace slipstream
