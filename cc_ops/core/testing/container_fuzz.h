// For tests: interprets bytes as a sequence of calls on a container and on an equivalent standard
// container, which must agree after each call. Any bytes are valid.
#ifndef SLIPSTREAM_CC_OPS_CORE_TESTING_CONTAINER_FUZZ_H_
#define SLIPSTREAM_CC_OPS_CORE_TESTING_CONTAINER_FUZZ_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <list>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/containers/hash_index.h"
#include "cc_ops/core/containers/key_set.h"
#include "cc_ops/core/deferral/deferred_gradients.h"
#include "cc_ops/core/hot_keys/hot_key_sketch.h"
#include "cc_ops/core/memory/index_memory.h"

namespace slipstream {
namespace fuzz {

// Inverts HashKey, so that tests can choose colliding keys.
inline int64_t KeyWithHash(uint64_t hash) {
  const auto undo = [](uint64_t x, int shift) {
    uint64_t found = x;
    for (int bits = shift; bits < 64; bits += shift) found = x ^ (found >> shift);
    return found;
  };
  uint64_t x = undo(hash, 31) * 0x319642b2d24d8ec3ULL;
  x = undo(x, 27) * 0x96de1b173f119089ULL;
  return static_cast<int64_t>(undo(x, 30) - 0x9e3779b97f4a7c15ULL);
}

// Reads bytes from the start; returns zeros after the end.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  bool empty() const { return left_ == 0; }

  uint8_t Byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  uint64_t Word() {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word = word << 8 | Byte();
    return word;
  }
  // Returns a number in [0, n), n at most 2^16.
  int64_t Below(int64_t n) { return (Byte() << 8 | Byte()) % n; }

  // Returns a key from a small or large set, at the ends of the range, or from keys that collide by
  // KeyedHash, including on the last line of the table.
  int64_t Key() {
    const uint8_t kind = Byte();
    switch (kind % 6) {
      case 0:
        return kind / 6 - 20;
      case 1:
        return Byte();
      case 2:
        return Below(1 << 16) * 1000003;
      case 3:
        return (kind & 64 ? std::numeric_limits<int64_t>::min() + Byte() % 3
                          : std::numeric_limits<int64_t>::max() - Byte() % 3);
      case 4:
        return KeyWithHash((kind & 64 ? ~uint64_t{0xff} : 0) | Byte()) ^
               static_cast<int64_t>(kHashSeed);
      default:
        return static_cast<int64_t>(Word());
    }
  }
  // Returns up to `maximum` keys.
  std::vector<int64_t> Keys(int64_t maximum) {
    std::vector<int64_t> keys(static_cast<size_t>(Below(maximum + 1)));
    for (int64_t& key : keys) key = Key();
    return keys;
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

// Result of a driver: empty if all agreed, else a description.
using Difference = std::string;

#define SLIPSTREAM_AGREE(condition)                                                    \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      return std::string(__FILE__) + ":" + std::to_string(__LINE__) + ": " #condition; \
    }                                                                                  \
  } while (false)

inline Difference FuzzHashIndex(Bytes bytes) {
  struct Known {
    uint32_t index;
    float count;
  };
  IndexMemory memory(1);
  HashIndex index(bytes.Byte() % 2 == 0 ? nullptr : &memory);
  std::unordered_map<int64_t, Known> model;
  uint32_t last = 0;
  while (!bytes.empty()) {
    const uint8_t what = bytes.Byte() % 8;
    const int64_t key = bytes.Key();
    const auto known = model.find(key);
    HashIndex::Entry* entry = index.Find(key);
    SLIPSTREAM_AGREE((entry != nullptr) == (known != model.end()));
    if (entry != nullptr) {
      SLIPSTREAM_AGREE(entry->key == key && entry->index == known->second.index);
      SLIPSTREAM_AGREE(entry->count == known->second.count);
    }
    if (what < 2) {
      SLIPSTREAM_AGREE(index.Erase(key) == (model.erase(key) > 0));
    } else if (entry == nullptr) {
      entry = index.Insert(key, ++last);
      entry->count = static_cast<float>(what);
      model[key] = {last, entry->count};
    } else {
      entry->count += 1.f;
      known->second.count += 1.f;
    }
    SLIPSTREAM_AGREE(index.size() == static_cast<int64_t>(model.size()));
  }
  for (const auto& known : model) {
    const HashIndex::Entry* entry = index.Find(known.first);
    SLIPSTREAM_AGREE(entry != nullptr && entry->index == known.second.index);
    SLIPSTREAM_AGREE(entry->count == known.second.count);
  }
  int64_t used = 0;
  for (const HashIndex::Entry& entry : index.entries()) used += entry.index != HashIndex::kEmpty;
  SLIPSTREAM_AGREE(used == index.size());
  return "";
}

inline Difference FuzzKeySet(Bytes bytes) {
  KeySet set;
  while (!bytes.empty()) {
    const std::vector<int64_t> keys = bytes.Keys(300);
    SLIPSTREAM_AGREE(set.Build(keys.data(), static_cast<int64_t>(keys.size())).ok());
    const std::unordered_set<int64_t> model(keys.begin(), keys.end());
    SLIPSTREAM_AGREE(set.size() == static_cast<int64_t>(model.size()));
    for (int64_t key : keys) SLIPSTREAM_AGREE(set.Contains(key));
    for (int64_t key : bytes.Keys(30))
      SLIPSTREAM_AGREE(set.Contains(key) == (model.count(key) > 0));
  }
  return "";
}

inline Difference FuzzDeferredGradients(Bytes bytes) {
  struct Sum {
    int64_t key, since;
    std::vector<float> sum;
  };
  const int64_t dim = 1 + bytes.Byte() % 5;
  DeferredGradients sums(dim);
  std::list<Sum> model;  // Oldest first.
  std::unordered_map<int64_t, std::list<Sum>::iterator> index_of;
  for (int64_t step = 0; !bytes.empty(); ++step) {
    const uint8_t what = bytes.Byte();
    const int64_t key = bytes.Key();
    const auto known = index_of.find(key);
    const uint32_t index = sums.Find(key);
    SLIPSTREAM_AGREE((index != DeferredGradients::kNone) == (known != index_of.end()));
    if (what == 255) {
      sums.Clear();
      model.clear();
      index_of.clear();
    } else if (index == DeferredGradients::kNone) {
      model.push_back({key, step, std::vector<float>(dim, static_cast<float>(what))});
      index_of[key] = std::prev(model.end());
      std::fill_n(sums.Sum(sums.Insert(key, step)), dim, static_cast<float>(what));
    } else if (what % 2 == 0) {
      sums.Remove(index);
      model.erase(known->second);
      index_of.erase(known);
    } else {
      sums.Sum(index)[what % dim] += 1.f;
      known->second->sum[what % dim] += 1.f;
    }
    SLIPSTREAM_AGREE(sums.size() == static_cast<int64_t>(model.size()));
  }
  uint32_t at = sums.oldest();
  for (const Sum& sum_of : model) {
    SLIPSTREAM_AGREE(at != DeferredGradients::kNone);
    SLIPSTREAM_AGREE(sums.key(at) == sum_of.key && sums.since(at) == sum_of.since);
    SLIPSTREAM_AGREE(sums.Find(sum_of.key) == at);
    SLIPSTREAM_AGREE(std::equal(sum_of.sum.begin(), sum_of.sum.end(), sums.Sum(at)));
    at = sums.next(at);
  }
  SLIPSTREAM_AGREE(at == DeferredGradients::kNone);
  return "";
}

inline Difference FuzzHotKeySketch(Bytes bytes) {
  AccessSketch sketch;
  sketch.log2_width = 1 + bytes.Byte() % 6;
  const size_t n = static_cast<size_t>(sketch.NumCounters());
  std::vector<int64_t> counters(n), owners(n, HotKeySketch::kNoOwner), expected(owners);
  std::vector<uint64_t> challenges(n);
  sketch.counters = counters.data();
  const HotKeySketch hot = {sketch, owners.data(), challenges.data()};
  std::unordered_map<int64_t, int64_t> accesses;
  const int64_t unit = int64_t{1} << bytes.Byte() % 34;
  while (!bytes.empty()) {
    const std::vector<int64_t> keys = bytes.Keys(60);
    const bool some = bytes.Byte() % 2 == 0;
    const std::vector<uint8_t> counted(keys.size(), bytes.Byte() % 4 != 0);
    CountAccesses(hot, keys.data(), some ? reinterpret_cast<const bool*>(counted.data()) : nullptr,
                  static_cast<int64_t>(keys.size()), unit);
    if (!keys.empty() && (!some || counted[0] != 0)) {
      // Per counter, the first key of the batch with the highest estimate.
      std::unordered_map<int64_t, int64_t> winners;
      for (int64_t key : keys) {
        accesses[key] += unit;
        if (key == HotKeySketch::kNoOwner) continue;
        for (int row = 0; row < AccessSketch::kRows; ++row) {
          const int64_t counter = sketch.Counter(row, key) - sketch.counters;
          const auto [winner, is_new] = winners.emplace(counter, key);
          const auto bounded = [&](int64_t k) {
            return std::min<int64_t>(sketch.Estimate(k), 0xffffffff);
          };
          if (!is_new && bounded(key) > bounded(winner->second)) winner->second = key;
        }
      }
      for (const auto& [counter, winner] : winners) {
        int64_t& owner = expected[static_cast<size_t>(counter)];
        if (hot.TakesOver(owner, sketch.Estimate(winner))) owner = winner;
      }
    }
    SLIPSTREAM_AGREE(owners == expected);
    SLIPSTREAM_AGREE(std::count(challenges.begin(), challenges.end(), 0u) ==
                     static_cast<int64_t>(n));
    for (const auto& [key, count] : accesses) SLIPSTREAM_AGREE(sketch.Estimate(key) >= count);
  }
  return "";
}

}  // namespace fuzz
}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TESTING_CONTAINER_FUZZ_H_
