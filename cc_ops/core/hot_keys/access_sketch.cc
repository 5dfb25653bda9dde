#include "cc_ops/core/hot_keys/access_sketch.h"

namespace slipstream {

void DecayAccesses(const AccessSketch& sketch, uint64_t factor) {
  for (int64_t c = 0; c < sketch.NumCounters(); ++c) {
    sketch.counters[c] = Decayed(sketch.counters[c], factor);
  }
}

void EstimateAccesses(const AccessSketch& sketch, const int64_t* keys, int64_t n,
                      int64_t* estimates) {
  for (int64_t i = 0; i < n; ++i) estimates[i] = sketch.Estimate(keys[i]);
}

}  // namespace slipstream
