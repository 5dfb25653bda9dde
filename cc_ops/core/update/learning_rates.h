// The learning rates of one update of multiple tables.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_LEARNING_RATES_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_LEARNING_RATES_H_

#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "cc_ops/core/base/status.h"

namespace slipstream {

// One rate for all tables, or one rate per table.
class LearningRates {
 public:
  LearningRates() = default;
  LearningRates(float of_all) : rates_(1, of_all) {}  // NOLINT: a number is the rate of all
  explicit LearningRates(std::vector<float> of_tables) : rates_(std::move(of_tables)) {}

  // Returns the rate of a table, given by its number in the update.
  float Of(size_t table) const { return rates_.size() == 1 ? rates_[0] : rates_[table]; }

  // Returns InvalidArgument unless all rates are finite and there is one, or one per table.
  Status Check(size_t num_tables) const {
    if (rates_.size() != 1 && rates_.size() != num_tables) {
      return InvalidArgument("learning_rate has " + std::to_string(rates_.size()) +
                             " values; expected a scalar or " + std::to_string(num_tables) +
                             " values, a rate per table");
    }
    for (const float rate : rates_) {
      if (std::isfinite(rate)) continue;
      return InvalidArgument("learning_rate is " + std::to_string(rate) +
                             "; expected a finite number");
    }
    return OkStatus();
  }

 private:
  std::vector<float> rates_ = {0.f};
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_LEARNING_RATES_H_
