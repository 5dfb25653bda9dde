// Sums over the losses of a window's trained examples, for the learning curve.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_LOSS_STATISTICS_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_LOSS_STATISTICS_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace slipstream {

struct LossStatistics {
  // Odd, so that a prediction of 0.5 is in the middle of a bin.
  static constexpr int kBins = 511;

  // The residual of an example is 1 - exp(-loss), which is |prediction - label| for binary
  // cross-entropy.
  int64_t skippable = 0;                     // Number of skippable examples.
  double skippable_squared_residuals = 0.0;  // Sum over these examples, without weights.
  // Sums over all examples, each weighted with the number of examples that it represents.
  double weight = 0.0, weighted_sum = 0.0, weighted_squared_residuals = 0.0;
  int64_t not_finite = 0;  // Number of losses that were not finite and are in no sum.
  // Sums of weights by label (0, 1) and by predicted probability in bins of equal width, for the
  // AUC.
  std::array<std::array<double, kBins>, 2> histogram = {};

  // Adds an example. loss: finite binary cross-entropy. stands_for: the weight, i.e. the number of
  // examples that this example represents, including itself.
  void Add(double loss, bool is_positive, bool is_skippable, double stands_for) {
    const double residual = -std::expm1(-loss);
    if (is_skippable) {
      ++skippable;
      skippable_squared_residuals += residual * residual;
    }
    weight += stands_for;
    weighted_sum += stands_for * loss;
    weighted_squared_residuals += stands_for * residual * residual;
    const double matched = std::exp(-loss);  // Predicted probability of the label.
    const double predicted = is_positive ? matched : 1.0 - matched;
    const int bin = std::clamp(static_cast<int>(predicted * kBins), 0, kBins - 1);
    histogram[is_positive ? 1 : 0][static_cast<size_t>(bin)] += stands_for;
  }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_LOSS_STATISTICS_H_
