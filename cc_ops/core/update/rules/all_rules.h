// The list of update rules, and the dispatch to code that is compiled for each rule.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ALL_RULES_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ALL_RULES_H_

#include "cc_ops/core/update/rules/adagrad.h"
#include "cc_ops/core/update/rules/adam.h"
#include "cc_ops/core/update/rules/adam_per_row.h"
#include "cc_ops/core/update/rules/ftrl.h"
#include "cc_ops/core/update/rules/momentum.h"
#include "cc_ops/core/update/rules/rowwise_adagrad.h"
#include "cc_ops/core/update/rules/rowwise_adam.h"
#include "cc_ops/core/update/rules/sgd.h"
#include "cc_ops/core/update/rules/update_rule.h"

namespace slipstream {

template <class... Rules>
struct RuleList {
  static constexpr int kCount = sizeof...(Rules);

  // Calls f(r), where r is an object of the selected rule's own type, for example Adagrad. `f` must
  // be inlined.
  template <class F>
  static SLIPSTREAM_ALWAYS_INLINE void Visit(const UpdateRule& rule, const F& f) {
    int index = 0;
    ((rule.index == index++ ? f(Rules(rule.parameters)) : void()), ...);
  }

  static constexpr const char* kNames[] = {Rules::kName...};
  static constexpr size_t kParameters[] = {Rules::kDefaults.size()...};
};

using AllRules =
    RuleList<Sgd, Momentum, Adagrad, RowWiseAdagrad, Adam, AdamPerRow, RowWiseAdam, Ftrl>;

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_RULES_ALL_RULES_H_
