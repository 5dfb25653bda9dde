#include "cc_ops/core/containers/key_probe.cu.h"

#include <cuda_runtime.h>

#include "cc_ops/core/gpu/launch.cu.h"
#include "cc_ops/core/gpu/scan_and_sort.cu.h"

namespace slipstream {
namespace {

struct Workspace {
  // Lays the parts out from `base`, which may be null to learn the total only.
  cudaError_t Layout(void* base, int64_t n) {
    const cudaError_t error = ScanBytes(n, &scratch_bytes);
    if (error != cudaSuccess) return error;
    WorkspaceParts parts(base);
    ranks = parts.Take<int32_t>(n);
    scratch = parts.Take<char>(static_cast<int64_t>(scratch_bytes));
    bytes = parts.bytes();
    return cudaSuccess;
  }

  int32_t* ranks = nullptr;  // 1 for a key of the map, then the number of those before it
  void* scratch = nullptr;
  size_t scratch_bytes = 0;
  size_t bytes = 0;
};

__global__ void ProbeKernel(const int64_t* __restrict__ keys, int64_t n, KeyMapView map,
                            int64_t* __restrict__ indices, int32_t* __restrict__ flags) {
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    const int32_t index = map.Find(keys[i]).index;
    indices[i] = index;
    flags[i] = index != KeyMapEntry::kNowhere ? 1 : 0;
  }
}

__global__ void SplitKernel(const int64_t* __restrict__ indices, const int32_t* __restrict__ ranks,
                            int64_t n, int64_t* __restrict__ hits, int64_t* __restrict__ misses,
                            int64_t* __restrict__ num_hits) {
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    const bool is_hit = indices[i] != KeyMapEntry::kNowhere;
    const int64_t hits_before = ranks[i];
    if (is_hit) {
      hits[hits_before] = i;
    } else {
      misses[i - hits_before] = i;
    }
    if (i == n - 1) *num_hits = hits_before + (is_hit ? 1 : 0);
  }
}

__global__ void StateLookupKernel(const int64_t* __restrict__ keys, int64_t n, KeyMapView known,
                                  uint8_t* __restrict__ states) {
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    states[i] = static_cast<uint8_t>(known.Find(keys[i]).state);
  }
}

}  // namespace

cudaError_t ProbeWorkspaceBytes(int64_t n, size_t* bytes) {
  *bytes = 0;
  if (n > kMaxProbedKeys) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  Workspace workspace;
  const cudaError_t error = workspace.Layout(nullptr, n);
  *bytes = workspace.bytes;
  return error;
}

cudaError_t LaunchProbe(cudaStream_t stream, const int64_t* keys, int64_t n, const KeyMapView& map,
                        void* workspace, size_t workspace_bytes, int64_t* indices, int64_t* hits,
                        int64_t* misses, int64_t* num_hits) {
  if (n > kMaxProbedKeys) return cudaErrorInvalidValue;
  if (n == 0) return cudaMemsetAsync(num_hits, 0, sizeof(*num_hits), stream);
  Workspace parts;
  cudaError_t error = parts.Layout(workspace, n);
  if (error != cudaSuccess) return error;
  if (workspace == nullptr || parts.bytes > workspace_bytes) return cudaErrorInvalidValue;
  // clang-format off
  ProbeKernel<<<BlocksFor(n), kThreadsPerBlock, 0, stream>>>(
      keys, n, map, indices, parts.ranks);
  error = LaunchScan(stream, parts.scratch, parts.scratch_bytes, n, parts.ranks);
  if (error != cudaSuccess) return error;
  SplitKernel<<<BlocksFor(n), kThreadsPerBlock, 0, stream>>>(
      indices, parts.ranks, n, hits, misses, num_hits);
  // clang-format on
  return cudaGetLastError();
}

cudaError_t LaunchStateLookup(cudaStream_t stream, const int64_t* keys, int64_t n,
                              const KeyMapView& known, uint8_t* states) {
  if (n > kMaxProbedKeys) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  // clang-format off
  StateLookupKernel<<<BlocksFor(n), kThreadsPerBlock, 0, stream>>>(keys, n, known, states);
  // clang-format on
  return cudaGetLastError();
}

}  // namespace slipstream
