// Probes of a batch's keys: which of them are frozen, and in which state each is.
#ifndef SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_PROBE_H_
#define SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_PROBE_H_

#include <cstdint>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/containers/key_map.h"

namespace slipstream {

// The frozen-cache probe, first half: looks keys up among the frozen ones.
//   keys    [n], owned by the caller.
//   places  [n], owned by the caller: the key's place in `frozen`, or KeyMapEntry::kNowhere.
// Returns the number of keys that are frozen.
int64_t ProbeFrozen(const int64_t* keys, int64_t n, const KeyMapView& frozen,
                    const Parallel& parallel, int64_t* places);

// The second half: lists the positions of frozen keys and of the others, both ascending.
//   places  [n], as ProbeFrozen wrote them.
//   hits    as many as ProbeFrozen returned, owned by the caller; misses: n less that.
void SplitProbed(const int64_t* places, int64_t n, int64_t* hits, int64_t* misses);

// states: [n], owned by the caller; the state of each key, 0 for one that is not in `known`.
void LookUpStates(const int64_t* keys, int64_t n, const KeyMapView& known, const Parallel& parallel,
                  uint8_t* states);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_PROBE_H_
