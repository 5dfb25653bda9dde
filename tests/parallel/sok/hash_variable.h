// A hash map of rows with the semantics of SOK's tables, for tests without a GPU.

#ifndef SLIPSTREAM_TESTS_SOK_HASH_VARIABLE_H_
#define SLIPSTREAM_TESTS_SOK_HASH_VARIABLE_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensorflow/core/framework/resource_base.h"

namespace sok_on_cpu {

// Returns the rank that owns `key`, which is the remainder of the unsigned key as in SOK.
inline int OwnerOf(int64_t key, int owners) {
  return static_cast<int>(static_cast<uint64_t>(key) % static_cast<uint64_t>(owners));
}

// Rows by key, with eviction of the row that was written longest ago. Not thread-safe. Callers must
// hold `mutex()`.
class HashVariable : public tensorflow::ResourceBase {
 public:
  // `dim` is the number of values per row, `initial` the value of all elements of a new row, and
  // `capacity` the maximum number of rows.
  HashVariable(int64_t dim, float initial, int64_t capacity)
      : dim_(dim), initial_(initial), capacity_(capacity) {}

  std::string DebugString() const override { return "a hash map with SOK's semantics"; }

  std::mutex& mutex() { return mutex_; }
  int64_t dim() const { return dim_; }
  int64_t size() const { return static_cast<int64_t>(rows_.size()); }
  bool Has(int64_t key) const { return rows_.count(key) != 0; }

  // Returns the row of `key`, valid until the next call. Allocates a missing row, and evicts the
  // row that was written longest ago if the table is full. Does not change the age of an existing
  // row.
  float* FindOrInsert(int64_t key) {
    const auto found = rows_.find(key);
    if (found != rows_.end()) return found->second.values.data();
    if (size() >= capacity_) {
      const auto oldest = by_age_.begin();
      rows_.erase(oldest->second);
      by_age_.erase(oldest);
    }
    Row& row = rows_[key];
    row.values.assign(dim_, initial_);
    row.written = NextTime();
    by_age_[row.written] = key;
    return row.values.data();
  }

  // Marks the row of `key` as written now. The row must exist.
  void Touch(int64_t key) {
    Row& row = rows_.at(key);
    by_age_.erase(row.written);
    row.written = NextTime();
    by_age_[row.written] = key;
  }

  // Returns the keys written after `time` (nanoseconds since 1970), in any order.
  std::vector<int64_t> KeysWrittenAfter(uint64_t time) const {
    std::vector<int64_t> keys;
    for (auto age = by_age_.upper_bound(time); age != by_age_.end(); ++age) {
      keys.push_back(age->second);
    }
    return keys;
  }

 private:
  struct Row {
    std::vector<float> values;
    uint64_t written = 0;
  };

  // Returns the present time, or a nanosecond after the last result, so that results are unique.
  uint64_t NextTime() {
    const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
    const uint64_t now = std::chrono::duration_cast<std::chrono::nanoseconds>(since_1970).count();
    last_time_ = std::max(now, last_time_ + 1);
    return last_time_;
  }

  const int64_t dim_;
  const float initial_;
  const int64_t capacity_;
  uint64_t last_time_ = 0;
  std::mutex mutex_;
  std::unordered_map<int64_t, Row> rows_;
  std::map<uint64_t, int64_t> by_age_;
};

}  // namespace sok_on_cpu

#endif  // SLIPSTREAM_TESTS_SOK_HASH_VARIABLE_H_
