#include "cc_ops/core/update/deferred_export.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cc_ops/core/base/hash.h"

namespace slipstream {

DeferredContents ExportDeferred(EmbeddingTable* table) {
  DeferredContents contents;
  const size_t n = static_cast<size_t>(table->updates().num_deferred());
  contents.keys.reserve(n);
  contents.ages.reserve(n);
  contents.ranks.reserve(n);
  contents.sums.reserve(n * static_cast<size_t>(table->dim()));
  for (int64_t s = 0; s < kNumShards; ++s) {
    std::vector<DeferredGradients>& ranks = table->updates().shard(s)->deferred;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      DeferredGradients& deferred = ranks[rank];
      for (uint32_t at = deferred.oldest(); at != DeferredGradients::kNone;
           at = deferred.next(at)) {
        contents.Add(deferred.key(at), table->updates().step() - deferred.since(at),
                     deferred.Sum(at), table->dim());
        contents.ranks.push_back(static_cast<int32_t>(rank));
      }
    }
  }
  return contents;
}

Status ImportDeferred(EmbeddingTable* table, const DeferredContents& contents) {
  const UpdatePolicy& policy = table->updates().policy();
  const std::string of = " of table '" + table->options().name + "'";
  const size_t n = contents.keys.size(), dim = static_cast<size_t>(table->dim());
  if (contents.ages.size() != n || contents.ranks.size() != n || contents.sums.size() != n * dim) {
    return InvalidArgument(
        "the arrays of deferred gradients" + of + " have " + std::to_string(n) + " keys, " +
        std::to_string(contents.ages.size()) + " ages, " + std::to_string(contents.ranks.size()) +
        " ranks and " + std::to_string(contents.sums.size()) +
        " values; expected 1 age, 1 rank and " + std::to_string(dim) + " values per key");
  }
  if (n > 0 && policy.mode != UpdatePolicy::Mode::kDefer) {
    return InvalidArgument("the policy" + of + " does not defer gradients, but the import has " +
                           std::to_string(n) +
                           ". Set a policy with mode 'defer' before the import");
  }
  const Status status = CheckDeferred(contents, table->dim(), of);
  if (!status.ok()) return status;
  std::vector<std::vector<DeferredGradients>> imported(kNumShards);
  std::vector<std::vector<int64_t>> last_age(kNumShards);
  for (int64_t s = 0; s < kNumShards; ++s) {
    const size_t ranks = table->updates().shard(s)->deferred.size();
    imported[s].assign(ranks, DeferredGradients(table->dim()));
    last_age[s].assign(ranks, contents.kMaxAge);
  }
  for (size_t i = 0; i < n; ++i) {
    const int64_t key = contents.keys[i], rank = contents.ranks[i], age = contents.ages[i];
    const int s = ShardOf(key);
    const auto invalid = [&](const std::string& what, int64_t value, const std::string& allowed) {
      return InvalidArgument(what + "[" + std::to_string(i) + "]" + of + " is " +
                             std::to_string(value) + "; expected " + allowed);
    };
    if (rank < 0 || rank >= static_cast<int64_t>(imported[s].size())) {
      return invalid("ranks", rank,
                     "an integer from 0 to " + std::to_string(imported[s].size() - 1));
    }
    // A shadow policy applies no deferred gradients, so entries of unsampled keys are not needed.
    if (!policy.Samples(s)) continue;
    DeferredGradients& deferred = imported[s][static_cast<size_t>(rank)];
    if (age > last_age[s][static_cast<size_t>(rank)]) {
      return invalid("ages", age, "the highest age of each rank first");
    }
    last_age[s][static_cast<size_t>(rank)] = age;
    if (deferred.Find(key) != DeferredGradients::kNone) {
      return invalid("keys", key, "each key at most once per rank");
    }
    if (!policy.is_exchanged && !table->rows().Has(key)) {
      return invalid("keys", key, "a key that has a row");
    }
    const uint32_t index = deferred.Insert(key, table->updates().step() - age);
    std::copy_n(contents.sums.data() + i * dim, dim, deferred.Sum(index));
  }
  for (int64_t s = 0; s < kNumShards; ++s)
    table->updates().shard(s)->deferred = std::move(imported[s]);
  const auto is_smaller = [](float a, float b) { return std::fabs(a) < std::fabs(b); };
  const auto largest = std::max_element(contents.sums.begin(), contents.sums.end(), is_smaller);
  table->updates().set_deferred_bound(largest == contents.sums.end() ? 0. : std::fabs(*largest));
  return OkStatus();
}

}  // namespace slipstream
