#include "cc_ops/core/update_rule.h"

#include <algorithm>
#include <cmath>

#include "cc_ops/core/simd_clones.h"

namespace slipstream {
namespace {

SLIPSTREAM_SIMD_CLONES void ApplySgd(float rate, int64_t dim, const float* __restrict__ g,
                                     float* __restrict__ row) {
  for (int64_t j = 0; j < dim; ++j) row[j] -= rate * g[j];
}

SLIPSTREAM_SIMD_CLONES void ApplyAdagrad(float rate, float epsilon, int64_t dim,
                                         const float* __restrict__ g, float* __restrict__ row,
                                         float* __restrict__ sum) {
  for (int64_t j = 0; j < dim; ++j) {
    sum[j] += g[j] * g[j];
    row[j] -= rate * g[j] / std::sqrt(sum[j] + epsilon);
  }
}

SLIPSTREAM_SIMD_CLONES void ApplyRowWiseAdagrad(float rate, float epsilon, int64_t dim,
                                                const float* __restrict__ g,
                                                float* __restrict__ row, float* __restrict__ sum) {
  float squares = 0.f;
  for (int64_t j = 0; j < dim; ++j) squares += g[j] * g[j];
  *sum += squares / static_cast<float>(dim);
  const float factor = rate / std::sqrt(*sum + epsilon);
  for (int64_t j = 0; j < dim; ++j) row[j] -= factor * g[j];
}

SLIPSTREAM_SIMD_CLONES void ApplyAdam(float rate, const UpdateRule& rule, int64_t dim,
                                      const float* __restrict__ g, float* __restrict__ row,
                                      float* __restrict__ m, float* __restrict__ v) {
  const float beta_1 = rule.a, beta_2 = rule.b, epsilon = rule.c;
  for (int64_t j = 0; j < dim; ++j) {
    m[j] += (1.f - beta_1) * (g[j] - m[j]);
    v[j] += (1.f - beta_2) * (g[j] * g[j] - v[j]);
    row[j] -= rate * m[j] / (std::sqrt(v[j]) + epsilon);
  }
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
  switch (kind) {
    case Kind::kSgd:
      return ApplySgd(rate, dim, gradient, row);
    case Kind::kAdagrad:
      return ApplyAdagrad(rate, b, dim, gradient, row, row + dim);
    case Kind::kRowWiseAdagrad:
      return ApplyRowWiseAdagrad(rate, b, dim, gradient, row, row + dim);
    case Kind::kAdam:
      return ApplyAdam(rate, *this, dim, gradient, row, row + dim, row + 2 * dim);
  }
}

}  // namespace slipstream
