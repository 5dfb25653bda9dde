#include "cc_ops/core/hot_keys/access_sketch.cu.h"

#include <cuda_runtime.h>

#include "cc_ops/core/gpu/launch.cu.h"
#include "cc_ops/core/gpu/scan_and_sort.cu.h"

namespace slipstream {
namespace {

struct Workspace {
  // Lays the parts out from `base`, which may be null to learn the total only.
  cudaError_t Layout(void* base, int64_t n) {
    const cudaError_t error = SortBytes<int64_t>(n, &scratch_bytes);
    if (error != cudaSuccess) return error;
    WorkspaceParts parts(base);
    ranks = parts.Take<int64_t>(n);
    sorted_ranks = parts.Take<int64_t>(n);
    positions = parts.Take<int32_t>(n);
    sorted_positions = parts.Take<int32_t>(n);
    scratch = parts.Take<char>(static_cast<int64_t>(scratch_bytes));
    bytes = parts.bytes();
    return cudaSuccess;
  }

  int64_t* ranks = nullptr;  // estimates, negative: ascending where those descend
  int64_t* sorted_ranks = nullptr;
  int32_t* positions = nullptr;
  int32_t* sorted_positions = nullptr;
  void* scratch = nullptr;
  size_t scratch_bytes = 0;
  size_t bytes = 0;
};

__global__ void AddKernel(AccessSketch sketch, const int64_t* __restrict__ keys,
                          const uint32_t* __restrict__ accesses, int64_t n) {
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    const unsigned long long added = accesses == nullptr ? 1 : accesses[i];
    for (int row = 0; row < AccessSketch::kRows; ++row) {
      atomicAdd(reinterpret_cast<unsigned long long*>(sketch.Counter(row, keys[i])), added);
    }
  }
}

__global__ void DecayKernel(AccessSketch sketch, uint64_t factor) {
  for (int64_t c = ThreadOfGrid(); c < sketch.NumCounters(); c += ThreadsOfGrid()) {
    sketch.counters[c] = Decayed(sketch.counters[c], factor);
  }
}

__global__ void EstimateKernel(AccessSketch sketch, const int64_t* __restrict__ keys, int64_t n,
                               int64_t* __restrict__ estimates) {
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    estimates[i] = sketch.Estimate(keys[i]);
  }
}

__global__ void RankKernel(AccessSketch sketch, const int64_t* __restrict__ candidates, int64_t n,
                           int64_t* __restrict__ ranks, int32_t* __restrict__ positions) {
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    ranks[i] = -sketch.Estimate(candidates[i]);
    positions[i] = static_cast<int32_t>(i);
  }
}

__global__ void TopKernel(const int64_t* __restrict__ candidates,
                          const int64_t* __restrict__ sorted_ranks,
                          const int32_t* __restrict__ sorted_positions, int64_t k,
                          int64_t* __restrict__ top_keys, int64_t* __restrict__ top_estimates) {
  for (int64_t i = ThreadOfGrid(); i < k; i += ThreadsOfGrid()) {
    top_keys[i] = candidates[sorted_positions[i]];
    top_estimates[i] = -sorted_ranks[i];
  }
}

}  // namespace

// clang-format off
cudaError_t LaunchAddAccesses(cudaStream_t stream, const AccessSketch& sketch, const int64_t* keys,
                              const uint32_t* accesses, int64_t n) {
  AddKernel<<<BlocksFor(n), kThreadsPerBlock, 0, stream>>>(sketch, keys, accesses, n);
  return cudaGetLastError();
}

cudaError_t LaunchDecayAccesses(cudaStream_t stream, const AccessSketch& sketch, uint64_t factor) {
  DecayKernel<<<BlocksFor(sketch.NumCounters()), kThreadsPerBlock, 0, stream>>>(sketch, factor);
  return cudaGetLastError();
}

cudaError_t LaunchEstimateAccesses(cudaStream_t stream, const AccessSketch& sketch,
                                   const int64_t* keys, int64_t n, int64_t* estimates) {
  EstimateKernel<<<BlocksFor(n), kThreadsPerBlock, 0, stream>>>(sketch, keys, n, estimates);
  return cudaGetLastError();
}
// clang-format on

cudaError_t TopAccessedWorkspaceBytes(int64_t n, size_t* bytes) {
  *bytes = 0;
  if (n > kMaxCandidates) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  Workspace workspace;
  const cudaError_t error = workspace.Layout(nullptr, n);
  *bytes = workspace.bytes;
  return error;
}

cudaError_t LaunchTopAccessed(cudaStream_t stream, const AccessSketch& sketch,
                              const int64_t* candidates, int64_t n, int64_t k, void* workspace,
                              size_t workspace_bytes, int64_t* top_keys, int64_t* top_estimates) {
  if (k > n || n > kMaxCandidates) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  Workspace parts;
  cudaError_t error = parts.Layout(workspace, n);
  if (error != cudaSuccess) return error;
  if (workspace == nullptr || parts.bytes > workspace_bytes) return cudaErrorInvalidValue;
  // clang-format off
  RankKernel<<<BlocksFor(n), kThreadsPerBlock, 0, stream>>>(
      sketch, candidates, n, parts.ranks, parts.positions);
  error = LaunchSort(stream, parts.scratch, parts.scratch_bytes, n, parts.ranks, parts.positions,
                     parts.sorted_ranks, parts.sorted_positions);
  if (error != cudaSuccess) return error;
  TopKernel<<<BlocksFor(k), kThreadsPerBlock, 0, stream>>>(
      candidates, parts.sorted_ranks, parts.sorted_positions, k, top_keys, top_estimates);
  // clang-format on
  return cudaGetLastError();
}

}  // namespace slipstream
