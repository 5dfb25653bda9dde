// Update rules with default parameters, for tests of properties that hold for all rules.
#ifndef SLIPSTREAM_CC_OPS_CORE_TESTING_TEST_RULES_H_
#define SLIPSTREAM_CC_OPS_CORE_TESTING_TEST_RULES_H_

#include <algorithm>
#include <string>
#include <vector>

#include "cc_ops/core/update/rules/all_rules.h"

namespace slipstream {

inline std::vector<std::string> AllRuleNames() {
  return {std::begin(AllRules::kNames), std::end(AllRules::kNames)};
}

// Returns the rule with this name. numbers: values for its first parameters; the others have their
// defaults.
inline UpdateRule RuleNamed(const std::string& name, const std::vector<float>& numbers = {}) {
  UpdateRule rule;
  const std::vector<std::string> names = AllRuleNames();
  rule.index = static_cast<int>(std::find(names.begin(), names.end(), name) - names.begin());
  AllRules::Visit(rule, [&](const auto& own) {
    std::copy(own.kDefaults.begin(), own.kDefaults.end(), rule.parameters.begin());
  });
  std::copy(numbers.begin(), numbers.end(), rule.parameters.begin());
  return rule;
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TESTING_TEST_RULES_H_
