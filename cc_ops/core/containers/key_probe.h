// Probes of a batch's keys: which of them are in a map, and in which state each is.
#ifndef SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_PROBE_H_
#define SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_PROBE_H_

#include <cstdint>

#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/containers/key_map.h"

namespace slipstream {

// First half: looks keys up in a map.
//   keys    [n], owned by the caller.
//   indices  [n], owned by the caller: the key's index in `map`, or KeyMapEntry::kNowhere.
// Returns the number of keys that are in the map.
int64_t ProbeKeys(const int64_t* keys, int64_t n, const KeyMapView& map, const Parallel& parallel,
                  int64_t* indices);

// The second half: lists the positions of keys in the map and of the others, both ascending.
//   indices  [n], as ProbeKeys wrote them.
//   hits    as many as ProbeKeys returned, owned by the caller; misses: n less that.
void SplitProbed(const int64_t* indices, int64_t n, int64_t* hits, int64_t* misses);

// states: [n], owned by the caller; the state of each key, 0 for one that is not in `known`.
void LookUpStates(const int64_t* keys, int64_t n, const KeyMapView& known, const Parallel& parallel,
                  uint8_t* states);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_PROBE_H_
