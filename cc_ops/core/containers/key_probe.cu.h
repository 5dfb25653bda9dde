// CUDA launchers of the key probes (see key_probe.h): raw device pointers and a stream.
#ifndef SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_PROBE_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_PROBE_CU_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cc_ops/core/containers/key_map.h"

namespace slipstream {

// Most keys of one launch.
constexpr int64_t kMaxProbedKeys = (int64_t{1} << 31) - 1;

// Bytes of device memory that LaunchProbe needs beside its results. Returns the error of
// cub's size query, which needs a device.
cudaError_t ProbeWorkspaceBytes(int64_t n, size_t* bytes);

// Enqueues a probe of a map on `stream`; returns at once and never waits for the device.
//
//   keys          [n].
//   map           its entries are in device memory too.
//   workspace     ProbeWorkspaceBytes(n) bytes, 256-byte aligned.
//   indices       [n]: the key's index in `map`, or KeyMapEntry::kNowhere.
//   hits, misses  [n] each: first the positions of the keys that are in it, or of the others,
//   ascending. num_hits      one value: how many of `hits` are written; of `misses` n less that.
//
// All pointers are to device memory that the caller owns and keeps until the stream has passed.
// Equals the CPU's result. cudaErrorInvalidValue if n > kMaxProbedKeys or the workspace is too
// small; otherwise the launches' error. Errors while running appear when the caller synchronizes.
cudaError_t LaunchProbe(cudaStream_t stream, const int64_t* keys, int64_t n, const KeyMapView& map,
                        void* workspace, size_t workspace_bytes, int64_t* indices, int64_t* hits,
                        int64_t* misses, int64_t* num_hits);

// Enqueues a lookup of states: states [n] of keys [n], 0 for one that is not in `known`. Pointers
// and errors as above.
cudaError_t LaunchStateLookup(cudaStream_t stream, const int64_t* keys, int64_t n,
                              const KeyMapView& known, uint8_t* states);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_CONTAINERS_KEY_PROBE_CU_H_
