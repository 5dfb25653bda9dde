#include "cc_ops/core/table/embedding_table.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "cc_ops/core/table/eviction.h"

namespace slipstream {

Status EmbeddingTable::Open() {
  const Status status = rows_.OpenSpill();
  if (rows_.spilled() != nullptr) {
    rows_.spilled()->KeepIf(
        [this](int shard, uint32_t index) { return flags_.shard(shard)->Of(index) != 0; });
  }
  return status;
}

int64_t EmbeddingTable::bytes() const {
  return rows_.bytes() + flags_.bytes() + updates_.deferred_bytes();
}

Status EmbeddingTable::CheckRate(float learning_rate) const {
  const RowTransforms& transforms = options_.rule.transforms;
  if (!transforms.DecaysAll() || transforms.Kept(learning_rate) > 0.) return OkStatus();
  return InvalidArgument(
      "learning_rate * weight_decay (SGD adds 2 * l2 to weight_decay) of table '" + options_.name +
      "' is " + std::to_string(learning_rate * transforms.decay) +
      "; expected a product below 1 if all rows decay. Decrease learning_rate or weight_decay");
}

StepRates EmbeddingTable::NextRates(float learning_rate) const {
  StepRates rates = options_.rule.RatesOf(learning_rate, updates_.step() + 1);
  if (options_.rule.transforms.DecaysAll()) rates.next_scale = rates.kept * rows_.scale();
  return rates;
}

StepRates EmbeddingTable::BeginUpdate(float learning_rate) {
  StepRates rates = options_.rule.RatesOf(learning_rate, updates_.NextStep());
  updates_.set_last_learning_rate(learning_rate);
  updates_.set_lost_cause("");
  if (options_.rule.transforms.DecaysAll()) {
    rates.scale = rows_.DecayValues(options_.rule.transforms.Kept(learning_rate));
    rates.next_scale = rows_.scale();
  }
  return rates;
}

Status EmbeddingTable::SetFlags(const int64_t* keys, const uint8_t* flags, int64_t n,
                                const Parallel& parallel, bool create_missing) {
  std::vector<int64_t> wanted;
  for (int64_t i = 0; i < n; ++i) {
    if ((flags[i] & ~kAllFlags) != 0) {
      return InvalidArgument("flags[" + std::to_string(i) + "] is " + std::to_string(flags[i]) +
                             " for key " + std::to_string(keys[i]) + " of table '" + options_.name +
                             "'; expected an integer from 0 to " + std::to_string(kAllFlags) +
                             ". No flag was set");
    }
    if (create_missing && options_.capacity > 0 && flags[i] != 0) wanted.push_back(keys[i]);
  }
  if (MayOverflow(*this, static_cast<int64_t>(wanted.size()))) {
    const Status status = EvictFor({{this, std::move(wanted)}}, "keys with flags need");
    if (!status.ok()) return status;
  }
  if (rows_.spilled() != nullptr) {
    // Rows with flags must stay in memory.
    std::vector<int64_t> kept;
    for (int64_t i = 0; i < n; ++i) {
      if (flags[i] != 0) kept.push_back(keys[i]);
    }
    const Status status = rows_.LoadRow(kept.data(), static_cast<int64_t>(kept.size()),
                                        /*reads=*/false, "keys with flags need", parallel);
    if (!status.ok()) return status;
  }
  flags_.Set(keys, flags, n, parallel, create_missing, &rows_);
  return OkStatus();
}

void EmbeddingTable::Evict(int64_t incoming, const std::vector<int64_t>& pinned) {
  const std::vector<int64_t> evicted = rows_.KeysToEvict(incoming, pinned);
  Leave(evicted);
  rows_.CountEvicted(static_cast<int64_t>(evicted.size()));
}

void EmbeddingTable::BeginLookup(bool joins_step) {
  if (joins_step && counted_at_ == updates_.step()) return rows_.JoinLookupStep();
  counted_at_ = updates_.step();
  step_keys_.clear();
  const std::vector<int64_t> expired = rows_.NextLookupStep();
  Leave(expired);
  rows_.CountExpired(static_cast<int64_t>(expired.size()));
}

void EmbeddingTable::AppendStepKeys(std::vector<int64_t>* keys) const {
  if (counted_at_ != updates_.step()) return;
  std::copy_if(step_keys_.begin(), step_keys_.end(), std::back_inserter(*keys),
               [&](int64_t key) { return rows_.Has(key); });
}

void EmbeddingTable::NoteStepKeys(const int64_t* keys, int64_t n) {
  if (options_.capacity > 0) step_keys_.insert(step_keys_.end(), keys, keys + n);
}

void EmbeddingTable::Leave(const std::vector<int64_t>& keys) {
  for (const int64_t key : keys) updates_.EvictDeferred(key);
  ForgetFlags(keys);
  rows_.Remove(keys);
}

void EmbeddingTable::ForgetFlags(const std::vector<int64_t>& keys) noexcept {
  for (const int64_t key : keys) {
    uint32_t index = 0;
    // Rows with flags are in memory, therefore Find does not miss any.
    if (rows_.Find(key, &index) != nullptr) flags_.Clear(key, index);
  }
}

Status EmbeddingTable::Write(const int64_t* keys, const float* rows, int64_t n,
                             const Parallel& parallel) {
  const auto bad = [&](int64_t key, const std::string& what) {
    return InvalidArgument("the row to write for key " + std::to_string(key) + " of table '" +
                           options_.name + "' " + what + ". No row was written");
  };
  const int64_t dim = options_.dim;
  const float factor = rows_.stored_factor();
  for (int64_t i = 0; i < n * dim; ++i) {
    if (IsHeldBy(options_.dtype, rows[i]) && IsHeldBy(options_.dtype, factor * rows[i])) continue;
    return bad(keys[i / dim], "contains " + std::to_string(rows[i]) + "; expected " +
                                  NumbersHeldBy(options_.dtype));
  }
  std::vector<int64_t> wanted(keys, keys + n);
  std::sort(wanted.begin(), wanted.end());
  const auto twice = std::adjacent_find(wanted.begin(), wanted.end());
  if (twice != wanted.end()) return bad(*twice, "occurs twice; expected distinct keys");
  if (MayOverflow(*this, n)) {
    const Status status = EvictFor({{this, std::move(wanted)}}, "a write needs");
    if (!status.ok()) return status;
  }
  const auto write = [&](int64_t begin, int64_t end) {
    std::vector<StoredRow*> targets(static_cast<size_t>(end - begin));
    for (int64_t i = begin; i < end; ++i) {
      uint32_t index = 0;
      targets[i - begin] = rows_.FindOrInsert(keys[i], 0.f, &index);
      rows_.Change(ShardOf(keys[i]), index);
    }
    for (int64_t i = begin; i < end; ++i) {
      updates_.DropDeferred(keys[i]);
      rows_.WriteRow(keys[i], rows + i * dim, targets[i - begin]);
    }
  };
  return rows_.ForPartsInMemory(keys, n, /*reads=*/false, "a write needs", parallel, write);
}

int64_t EmbeddingTable::Remove(const int64_t* keys, int64_t n) {
  std::vector<int64_t> leaving(keys, keys + n);
  std::sort(leaving.begin(), leaving.end());
  leaving.erase(std::unique(leaving.begin(), leaving.end()), leaving.end());
  for (const int64_t key : leaving) updates_.DropDeferred(key);
  const auto is_absent = [&](int64_t key) { return !rows_.Has(key); };
  leaving.erase(std::remove_if(leaving.begin(), leaving.end(), is_absent), leaving.end());
  ForgetFlags(leaving);
  rows_.Remove(leaving);
  return static_cast<int64_t>(leaving.size());
}

Status EmbeddingTable::Clear() {
  TableContents nothing;
  nothing.update_step = updates_.step();
  nothing.lookup_step = rows_.lookup_step();
  const Status status = Import(nothing);
  if (!status.ok()) return status;
  for (CountFilter& filter : rows_.filters()) filter.Restore({}, 0);
  return OkStatus();
}

void EmbeddingTable::Shrink() {
  // Flags are stored by index, and rows get new indices.
  std::vector<int64_t> keys;
  for (int s = 0; s < kNumShards; ++s) {
    if (!flags_.shard(s)->any()) continue;
    for (const HashIndex::Entry& entry : rows_.shard(s)->index.entries()) {
      if (entry.index == HashIndex::kEmpty || IsOnDisk(entry.index)) continue;
      if (flags_.shard(s)->Of(entry.index) != 0) keys.push_back(entry.key);
    }
  }
  std::vector<uint8_t> flags(keys.size());
  flags_.Get(keys.data(), static_cast<int64_t>(keys.size()), rows_, flags.data());
  rows_.Shrink();
  flags_.Clear();
  flags_.Set(keys.data(), flags.data(), static_cast<int64_t>(keys.size()), Parallel(),
             /*create_missing=*/false, &rows_);
}

TableContents EmbeddingTable::Export(Status* status) const {
  TableContents contents = rows_.Export(status);
  contents.update_step = updates_.step();
  return contents;
}

Status EmbeddingTable::Import(const TableContents& contents) {
  const Status status = rows_.Import(contents);
  if (!status.ok()) return status;
  flags_.Clear();
  updates_.DropAllDeferred();
  updates_.set_step(contents.update_step);
  return OkStatus();
}

}  // namespace slipstream
