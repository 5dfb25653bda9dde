// A uniform random sample of a window's examples, with the keys that each example looks up.
#ifndef SLIPSTREAM_CC_OPS_CORE_SATURATION_INPUT_RESERVOIR_H_
#define SLIPSTREAM_CC_OPS_CORE_SATURATION_INPUT_RESERVOIR_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/saturation/drift_index.h"

namespace slipstream {

// Algorithm R (Vitter, 1985) with counter-based random numbers: the same seed and examples give the
// same sample. Needs 16 bytes per lookup of each sampled example. Not thread-safe.
class InputReservoir {
 public:
  // Limit of `Import`, so that no count overflows later.
  static constexpr int64_t kMaxOffered = int64_t{1} << 62;

  // capacity: maximum size of the sample, at least 1.
  InputReservoir(int64_t capacity, uint64_t seed) : capacity_(capacity), seed_(seed) {}

  // Offers the next example of the window to the sample. loss: its predicted loss; NaN if there is
  // none. list(): called only if the example is chosen; returns a pair of a pointer to its lookups,
  // which are copied, and their number. Throws std::bad_alloc; the example does not count as
  // offered then.
  template <class List>
  void OfferListed(float loss, List list) {
    const int64_t position = offered_in_window_;
    int64_t index = position;
    if (position >= capacity_) {
      const unsigned __int128 product =
          static_cast<unsigned __int128>(CounterRandom(seed_, offered_total_)) * (position + 1);
      index = static_cast<int64_t>(product >> 64);  // Uniform in [0, position].
    }
    if (index < capacity_) {
      const size_t wanted = static_cast<size_t>(index) + 1;
      if (inputs_.size() < wanted) inputs_.resize(wanted);
      if (losses_.size() < wanted) losses_.resize(wanted);
      const std::pair<const Lookup*, int64_t> listed = list();
      Store(index, listed.first, listed.second, loss);
    }
    ++offered_total_;
    ++offered_in_window_;
  }

  // Number of examples in the sample.
  int64_t size() const { return offered_in_window_ < capacity_ ? offered_in_window_ : capacity_; }
  // Return the lookups and the predicted loss of example i of the sample, i in [0, size()).
  const std::vector<Lookup>& input(int64_t i) const { return inputs_[i]; }
  float loss(int64_t i) const { return losses_[i]; }

  // The sample and the position of the random numbers as arrays.
  struct State {
    uint64_t offered_total = 0;     // Examples offered since the start.
    int64_t offered_in_window = 0;  // Examples offered since the last Clear.
    std::vector<int64_t> ends;      // [size]; end of the lookups of each example.
    std::vector<Lookup> lookups;    // [last end]
    std::vector<float> losses;      // [size]
  };

  State Export() const {
    State state;
    state.offered_total = offered_total_;
    state.offered_in_window = offered_in_window_;
    for (int64_t i = 0; i < size(); ++i) {
      state.lookups.insert(state.lookups.end(), inputs_[i].begin(), inputs_[i].end());
      state.ends.push_back(static_cast<int64_t>(state.lookups.size()));
      state.losses.push_back(losses_[i]);
    }
    return state;
  }

  // Returns whether `Import` accepts a state: its arrays match each other and the capacity.
  bool Fits(const State& state) const {
    const int64_t n = static_cast<int64_t>(state.ends.size());
    const int64_t offered = state.offered_in_window;
    if (offered < 0 || offered > kMaxOffered) return false;
    if (n != (offered < capacity_ ? offered : capacity_)) return false;
    if (static_cast<int64_t>(state.losses.size()) != n) return false;
    int64_t begin = 0;
    for (const int64_t end : state.ends) {
      if (end < begin) return false;
      begin = end;
    }
    return begin == static_cast<int64_t>(state.lookups.size());
  }

  // `state` must fit. Throws std::bad_alloc (strong exception guarantee).
  void Import(const State& state) {
    InputReservoir made(capacity_, seed_);
    made.offered_total_ = state.offered_total;
    made.offered_in_window_ = state.offered_in_window;
    made.inputs_.resize(state.ends.size());
    made.losses_.resize(state.ends.size());
    int64_t begin = 0;
    for (size_t i = 0; i < state.ends.size(); ++i) {
      const int64_t end = state.ends[i];
      made.Store(static_cast<int64_t>(i), state.lookups.data() + begin, end - begin,
                 state.losses[i]);
      begin = end;
    }
    *this = std::move(made);
  }

  // Starts the sample of the next window. Random numbers continue and never repeat.
  void Clear() { offered_in_window_ = 0; }

 private:
  void Store(int64_t index, const Lookup* lookups, int64_t m, float loss) {
    inputs_[index].assign(lookups, lookups + m);
    losses_[index] = loss;
  }

  int64_t capacity_;
  uint64_t seed_;
  uint64_t offered_total_ = 0;
  int64_t offered_in_window_ = 0;
  std::vector<std::vector<Lookup>> inputs_;  // Keep their memory between windows.
  std::vector<float> losses_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SATURATION_INPUT_RESERVOIR_H_
