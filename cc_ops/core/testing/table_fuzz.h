// For tests: interprets bytes as lookups, updates, window ends, exports and imports of a table, and
// of a model that consists of standard containers.
#ifndef SLIPSTREAM_CC_OPS_CORE_TESTING_TABLE_FUZZ_H_
#define SLIPSTREAM_CC_OPS_CORE_TESTING_TABLE_FUZZ_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cc_ops/core/lookup/batch_lookup.h"
#include "cc_ops/core/table/embedding_table.h"
#include "cc_ops/core/testing/container_fuzz.h"
#include "cc_ops/core/testing/followed_rows.h"
#include "cc_ops/core/update/deferred_export.h"
#include "cc_ops/core/update/gradient_update.h"
#include "cc_ops/core/update/policy_update.h"

namespace slipstream {
namespace fuzz {

// Numbers are small multiples of 1/64, so that float sums are exact in any order.
class TableFuzzer {
 public:
  explicit TableFuzzer(Bytes bytes) : bytes_(bytes) {
    const uint8_t kind = bytes_.Byte();
    options_.name = "t";
    options_.dim = kDim;
    options_.capacity = kind % 3 == 0 ? 0 : 1 + bytes_.Below(400);
    options_.eviction = kind & 8 ? TableOptions::Eviction::kLru : TableOptions::Eviction::kLfu;
    options_.initializer.kind = RowInitializer::Kind::kConstant;
    options_.initializer.a = 1.f;
    table_ = std::make_unique<EmbeddingTable>(options_);
  }

  Difference Run() {
    while (!bytes_.empty()) {
      const uint8_t what = bytes_.Byte();
      Difference difference = what % 16 < 6 ? Lookup() : what % 16 < 11 ? Update() : Other(what);
      if (difference.empty()) difference = Compare();
      if (!difference.empty()) return difference;
    }
    return "";
  }

 private:
  static constexpr int64_t kDim = 2;
  static constexpr float kRate = 0.5f;

  struct Row {
    float total = 1.f;  // The first value of the row after its deferred gradients.
    float count = 0.f;
    int64_t last_used = 0;
    uint8_t flag = 0;
  };

  Difference Lookup() {
    keys_ = bytes_.Keys(80);
    FeatureView view;
    view.batch = view.num_keys = static_cast<int64_t>(keys_.size());
    view.keys = keys_.data();
    std::vector<float> pooled(keys_.size() * kDim), evaluated(pooled);
    const std::set<int64_t> wanted(keys_.begin(), keys_.end());
    const int64_t evicted = table_->rows().num_evicted();
    // Rows before the lookup; absent rows have initial values, and deferred gradients are applied.
    SLIPSTREAM_AGREE(FlushBeforeReading({table_.get()}, Parallel()).ok());
    SLIPSTREAM_AGREE(LookupForEvaluation({table_.get()}, {view}, {Combiner::kSum},
                                         {{evaluated.data(), kDim}}, Parallel())
                         .ok());
    const Status status = LookupForTraining({table_.get()}, {view}, {Combiner::kSum},
                                            {{pooled.data(), kDim}}, Parallel(), &workspace_);
    has_plan_ = status.ok();
    if (options_.capacity > 0 && wanted.size() > static_cast<size_t>(options_.capacity)) {
      SLIPSTREAM_AGREE(status.code() == StatusCode::kResourceExhausted);
      SLIPSTREAM_AGREE(table_->rows().num_evicted() == evicted);
      return "";
    }
    SLIPSTREAM_AGREE(status.ok());
    SLIPSTREAM_AGREE(pooled == evaluated);
    const Difference difference = Evicted(wanted, table_->rows().num_evicted() - evicted);
    if (!difference.empty()) return difference;
    ++lookups_;
    // Adds the accesses of a key as one number, because each addition to a decayed count rounds.
    std::unordered_map<int64_t, float> accesses;
    for (int64_t key : keys_) accesses[key] += 1.f;
    for (size_t i = 0; i < keys_.size(); ++i) {
      Row& row = model_[keys_[i]];
      row.count += std::exchange(accesses[keys_[i]], 0.f);
      row.last_used = lookups_;
      SLIPSTREAM_AGREE(pooled[i * kDim] == row.total);
    }
    return "";
  }

  // Removes evicted rows from the model and compares their values with the remaining rows.
  Difference Evicted(const std::set<int64_t>& wanted, int64_t evicted) {
    const auto value = [&](const Row& row) {
      return options_.eviction == TableOptions::Eviction::kLru ? static_cast<double>(row.last_used)
                                                               : row.count;
    };
    double max_removed = -1, min_present = std::numeric_limits<double>::infinity();
    for (auto known = model_.begin(); known != model_.end();) {
      if (table_->rows().Find(known->first) == nullptr) {
        SLIPSTREAM_AGREE(wanted.count(known->first) == 0);
        max_removed = std::max(max_removed, value(known->second));
        known = model_.erase(known);
        --evicted;
      } else {
        if (wanted.count(known->first) == 0) {
          min_present = std::min(min_present, value(known->second));
        }
        ++known;
      }
    }
    SLIPSTREAM_AGREE(evicted == 0);
    SLIPSTREAM_AGREE(max_removed <= min_present);
    return "";
  }

  // Updates the rows of the last lookup, possibly twice or after other operations.
  Difference Update() {
    if (!has_plan_) return "";
    std::vector<float> gradients;
    for (size_t i = 0; i < keys_.size(); ++i) {
      const float gradient = static_cast<float>(static_cast<int8_t>(bytes_.Byte())) / 32.f;
      gradients.insert(gradients.end(), kDim, gradient);
    }
    const int64_t dropped = table_->updates().num_dropped();
    const int64_t masked = table_->updates().counts().masked;
    const int64_t offered = table_->updates().counts().offered;
    const bool is_bad = !gradients.empty() && bytes_.Byte() == 0;
    if (is_bad) gradients.back() = std::numeric_limits<float>::quiet_NaN();
    const Status status =
        ApplyGradients(workspace_.plan, {{gradients.data(), kDim}}, kRate, Parallel());
    SLIPSTREAM_AGREE(status.ok() != is_bad);
    if (is_bad) return "";
    std::set<int64_t> gone, silenced;
    const std::set<int64_t> wanted(keys_.begin(), keys_.end());
    for (size_t i = 0; i < keys_.size(); ++i) {
      const auto known = model_.find(keys_[i]);
      if (known == model_.end()) {
        gone.insert(keys_[i]);
      } else if (table_->updates().policy().mode == UpdatePolicy::Mode::kMask &&
                 known->second.flag != 0) {
        silenced.insert(keys_[i]);
      } else {
        known->second.total -= kRate * gradients[i * kDim];
      }
    }
    const int64_t there = static_cast<int64_t>(wanted.size() - gone.size());
    SLIPSTREAM_AGREE(table_->updates().num_dropped() - dropped ==
                     static_cast<int64_t>(gone.size()));
    const UpdateCounts counts = table_->updates().counts();
    SLIPSTREAM_AGREE(counts.masked - masked == static_cast<int64_t>(silenced.size()));
    SLIPSTREAM_AGREE(counts.offered - offered == there);
    return "";
  }

  Difference Other(uint8_t what) {
    switch (what % 16) {
      case 11:
        SLIPSTREAM_AGREE(FlushDeferred(table_.get(), Parallel()).ok());
        SLIPSTREAM_AGREE(table_->updates().num_deferred() == 0);
        return "";
      case 12:
        return SetFlags();
      case 13:
        return SetPolicy();
      case 14:
        return what & 16 ? Reimport() : BadImport();
      default:
        table_->rows().DecayCounts(0.5f);
        for (auto& known : model_) known.second.count *= 0.5f;
        return HotKeys();
    }
  }

  Difference SetFlags() {
    std::vector<int64_t> keys = bytes_.Keys(40);
    if (keys.size() % 2 == 0) {  // Only ascending keys are compared with the last list.
      std::sort(keys.begin(), keys.end());
      keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    }
    const std::vector<uint8_t> flags(keys.size(), kSaturated);
    SLIPSTREAM_AGREE(
        table_->SetFlags(keys.data(), flags.data(), static_cast<int64_t>(keys.size()), Parallel())
            .ok());
    for (auto& known : model_) known.second.flag = 0;
    for (int64_t key : keys) {
      if (model_.count(key) > 0) model_[key].flag = kSaturated;
    }
    return "";
  }

  Difference SetPolicy() {
    UpdatePolicy policy;
    policy.mode = static_cast<UpdatePolicy::Mode>(bytes_.Byte() % 3);
    policy.trigger = static_cast<UpdatePolicy::Trigger>(bytes_.Byte() % 2);
    policy.movement = static_cast<float>(bytes_.Byte()) / 16.f;
    policy.max_age = 1 + bytes_.Byte() % 20;
    policy.max_rows = bytes_.Byte() * 16;
    SLIPSTREAM_AGREE(ValidateUpdatePolicy(policy).ok());
    SLIPSTREAM_AGREE(FlushDeferred(table_.get(), Parallel()).ok());
    table_->updates().SetPolicy(policy);
    return "";
  }

  // Like a checkpoint: exports everything to another table, which replaces this one.
  Difference Reimport() {
    const TableContents contents = table_->Export();
    const DeferredContents deferred = ExportDeferred(table_.get());
    auto other = std::make_unique<EmbeddingTable>(options_);
    other->updates().SetPolicy(table_->updates().policy());
    SLIPSTREAM_AGREE(other->Import(contents).ok());
    SLIPSTREAM_AGREE(ImportDeferred(other.get(), deferred).ok());
    const TableContents again = other->Export();
    SLIPSTREAM_AGREE(again.keys == contents.keys && again.rows == contents.rows);
    SLIPSTREAM_AGREE(again.counts == contents.counts && again.last_used == contents.last_used);
    SLIPSTREAM_AGREE(ExportDeferred(other.get()).sums == deferred.sums);
    SLIPSTREAM_AGREE(table_->Import(contents).ok());
    SLIPSTREAM_AGREE(ImportDeferred(table_.get(), deferred).ok());
    for (auto& known : model_) known.second.flag = 0;
    return "";
  }

  Difference BadImport() {
    TableContents contents = table_->Export();
    DeferredContents deferred = ExportDeferred(table_.get());
    std::vector<int64_t>* const lists[] = {&contents.keys, &contents.last_used, &deferred.keys,
                                           &deferred.ages};
    std::vector<int64_t>* const list = lists[bytes_.Byte() % 4];
    if (list == &contents.last_used && list->empty()) return "";
    list->push_back(bytes_.Key());
    SLIPSTREAM_AGREE(!table_->Import(contents).ok() ||
                     !ImportDeferred(table_.get(), deferred).ok());
    // Importing the contents of the table dropped its deferred gradients before the second import
    // failed.
    if (list != &deferred.keys && list != &deferred.ages) return "";
    list->pop_back();
    SLIPSTREAM_AGREE(ImportDeferred(table_.get(), deferred).ok());
    for (auto& known : model_) known.second.flag = 0;
    return "";
  }

  Difference HotKeys() {
    const int64_t k = bytes_.Below(50);
    std::vector<int64_t> keys;
    std::vector<float> counts, expected;
    table_->rows().HotKeys(k, RowStore::HotKeyOrder::kByCount, Parallel(), &keys, &counts);
    for (const auto& known : model_) {
      if (known.second.count > 0.f) expected.push_back(known.second.count);
    }
    std::sort(expected.rbegin(), expected.rend());
    expected.resize(std::min(expected.size(), static_cast<size_t>(k)));
    SLIPSTREAM_AGREE(counts == expected);
    for (size_t i = 0; i < keys.size(); ++i) SLIPSTREAM_AGREE(model_[keys[i]].count == counts[i]);
    return "";
  }

  Difference Compare() {
    followed_.Follow(table_.get());
    SLIPSTREAM_AGREE(followed_.rows == RowsOf(*table_, table_->rows().Entries()));
    const TableContents contents = table_->Export();
    SLIPSTREAM_AGREE(table_->rows().size() == static_cast<int64_t>(model_.size()));
    SLIPSTREAM_AGREE(options_.capacity == 0 || table_->rows().size() <= options_.capacity);
    SLIPSTREAM_AGREE(contents.keys.size() == model_.size());
    std::unordered_map<int64_t, float> sums;
    const DeferredContents deferred = ExportDeferred(table_.get());
    for (size_t i = 0; i < deferred.keys.size(); ++i) {
      sums[deferred.keys[i]] = deferred.sums[i * kDim];
      SLIPSTREAM_AGREE(model_.count(deferred.keys[i]) > 0);
    }
    SLIPSTREAM_AGREE(sums.size() == deferred.keys.size());
    SLIPSTREAM_AGREE(table_->updates().num_deferred() == static_cast<int64_t>(sums.size()));
    for (size_t i = 0; i < contents.keys.size(); ++i) {
      const auto known = model_.find(contents.keys[i]);
      SLIPSTREAM_AGREE(known != model_.end());
      SLIPSTREAM_AGREE(contents.counts[i] == known->second.count);
      const float row = contents.rows[i * kDim];
      SLIPSTREAM_AGREE(row == contents.rows[i * kDim + 1]);
      const auto sum = sums.find(contents.keys[i]);
      SLIPSTREAM_AGREE(row - (sum == sums.end() ? 0.f : kRate * sum->second) ==
                       known->second.total);
      if (!contents.last_used.empty()) {
        SLIPSTREAM_AGREE(contents.last_used[i] == known->second.last_used);
      }
      uint8_t flag = 0;
      table_->flags().Get(&contents.keys[i], 1, table_->rows(), &flag);
      SLIPSTREAM_AGREE(flag == known->second.flag);
    }
    return "";
  }

  Bytes bytes_;
  TableOptions options_;
  std::unique_ptr<EmbeddingTable> table_;
  FollowedRows followed_;
  std::unordered_map<int64_t, Row> model_;
  int64_t lookups_ = 0;
  std::vector<int64_t> keys_;  // Keys of the last lookup.
  LookupWorkspace workspace_;
  bool has_plan_ = false;
};

inline Difference FuzzTable(Bytes bytes) { return TableFuzzer(bytes).Run(); }

}  // namespace fuzz
}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TESTING_TABLE_FUZZ_H_
