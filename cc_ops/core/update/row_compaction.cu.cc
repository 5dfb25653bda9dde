#include "cc_ops/core/update/row_compaction.cu.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "cc_ops/core/gpu/launch.cu.h"
#include "cc_ops/core/gpu/scan_and_sort.cu.h"

namespace slipstream {
namespace {

// The consecutive parts of the workspace.
template <class Key>
struct Workspace {
  // Assigns the parts from `base`, which may be null to compute only the total size.
  cudaError_t Layout(void* base, int64_t n, bool deduplicate) {
    cudaError_t error = ScanBytes(n, &scratch_bytes);
    if (error != cudaSuccess) return error;
    if (deduplicate) {
      size_t sort_bytes = 0;
      error = SortBytes<Key>(n, &sort_bytes);
      if (error != cudaSuccess) return error;
      scratch_bytes = std::max(scratch_bytes, sort_bytes);
    }
    WorkspaceParts parts(base);
    targets = parts.Take<int32_t>(n);
    if (deduplicate) {
      sorted_keys = parts.Take<Key>(n);
      positions = parts.Take<int32_t>(n);
      sorted_positions = parts.Take<int32_t>(n);
    }
    scratch = parts.Take<char>(static_cast<int64_t>(scratch_bytes));
    bytes = parts.bytes();
    return cudaSuccess;
  }

  int32_t* targets = nullptr;  // 1 where an output row begins; later its index in the output.
  Key* sorted_keys = nullptr;
  int32_t* positions = nullptr;
  int32_t* sorted_positions = nullptr;
  void* scratch = nullptr;
  size_t scratch_bytes = 0;
  size_t bytes = 0;
};

__global__ void CountUpKernel(int64_t n, int32_t* __restrict__ values) {
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    values[i] = static_cast<int32_t>(i);
  }
}

// Returns whether an output row begins at i: everywhere, or where the sorted keys change.
template <class Key>
__device__ bool IsHead(const Key* keys, int64_t i, bool is_sorted) {
  return !is_sorted || i == 0 || keys[i] != keys[i - 1];
}

// `counts` starts at zero. Integer sums do not depend on the order of the blocks.
template <class Key>
__global__ void FlagKernel(CompactionInput<Key> input, int32_t* __restrict__ flags,
                           CompactionCounts* __restrict__ counts) {
  const Key* __restrict__ keys = input.keys;
  const int64_t n = input.n;
  const int64_t step = ThreadsOfGrid();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x;
  // All threads of a block make the same number of rounds, because they count together.
  for (int64_t begin = first; begin < n; begin += step) {
    const int64_t i = begin + threadIdx.x;
    const bool is_head = i < n && IsHead(keys, i, input.deduplicate);
    const bool is_kept = is_head && !input.masked.Contains(keys[i]);
    if (i < n) flags[i] = is_kept ? 1 : 0;
    const int heads = __syncthreads_count(is_head);
    const int kept = __syncthreads_count(is_kept);
    if (threadIdx.x == 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&counts->offered),
                static_cast<unsigned long long>(heads));
      atomicAdd(reinterpret_cast<unsigned long long*>(&counts->kept),
                static_cast<unsigned long long>(kept));
    }
  }
}

// One warp per position; a warp exits where no output row begins. One warp sums all rows of a key
// in order, so that the sum equals the CPU's.
template <class Key>
__global__ void WriteKernel(CompactionInput<Key> input, const int32_t* __restrict__ order,
                            const int32_t* __restrict__ targets, Key* __restrict__ kept_keys,
                            float* __restrict__ kept_rows) {
  const Key* __restrict__ keys = input.keys;
  const float* __restrict__ rows = input.rows;
  const int64_t n = input.n, dim = input.dim;
  const bool is_sorted = input.deduplicate;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t step = ThreadsOfGrid() / kWarpSize;
  for (int64_t i = ThreadOfGrid() / kWarpSize; i < n; i += step) {
    const Key key = keys[i];
    if (!IsHead(keys, i, is_sorted) || input.masked.Contains(key)) continue;
    const int64_t target = targets[i];
    if (lane == 0) kept_keys[target] = key;
    for (int64_t j = lane; j < dim; j += kWarpSize) {
      float sum = rows[(is_sorted ? order[i] : i) * dim + j];
      if (is_sorted) {
        for (int64_t other = i + 1; other < n && keys[other] == key; ++other) {
          sum += rows[order[other] * dim + j];
        }
      }
      kept_rows[target * dim + j] = sum;
    }
  }
}

}  // namespace

template <class Key>
cudaError_t CompactRowsWorkspaceBytes(int64_t n, bool deduplicate, size_t* bytes) {
  *bytes = 0;
  if (n > kMaxCompactedRows) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  Workspace<Key> workspace;
  const cudaError_t error = workspace.Layout(nullptr, n, deduplicate);
  *bytes = workspace.bytes;
  return error;
}

template <class Key>
cudaError_t LaunchCompactRows(cudaStream_t stream, const CompactionInput<Key>& input,
                              const DeviceWorkspace& workspace, Key* kept_keys, float* kept_rows,
                              CompactionCounts* counts) {
  const int64_t n = input.n;
  if (n > kMaxCompactedRows) return cudaErrorInvalidValue;
  cudaError_t error = cudaMemsetAsync(counts, 0, sizeof(*counts), stream);
  if (error != cudaSuccess || n == 0) return error;
  Workspace<Key> parts;
  error = parts.Layout(workspace.data, n, input.deduplicate);
  if (error != cudaSuccess) return error;
  if (workspace.data == nullptr || parts.bytes > workspace.bytes) return cudaErrorInvalidValue;

  CompactionInput<Key> ordered = input;  // Replaces the keys, not the rows.
  if (input.deduplicate) {
    Launch(stream, BlocksFor(n), CountUpKernel, n, parts.positions);
    // A stable sort keeps positions of one key in input order.
    error = LaunchSort(stream, parts.scratch, parts.scratch_bytes, n, input.keys, parts.positions,
                       parts.sorted_keys, parts.sorted_positions);
    if (error != cudaSuccess) return error;
    ordered.keys = parts.sorted_keys;
  }
  Launch(stream, BlocksFor(n), FlagKernel<Key>, ordered, parts.targets, counts);
  error = LaunchScan(stream, parts.scratch, parts.scratch_bytes, n, parts.targets);
  if (error != cudaSuccess) return error;
  Launch(stream, BlocksFor(n * kWarpSize), WriteKernel<Key>, ordered, parts.sorted_positions,
         parts.targets, kept_keys, kept_rows);
  return cudaGetLastError();
}

template cudaError_t CompactRowsWorkspaceBytes<int32_t>(int64_t, bool, size_t*);
template cudaError_t CompactRowsWorkspaceBytes<int64_t>(int64_t, bool, size_t*);
template cudaError_t LaunchCompactRows(cudaStream_t, const CompactionInput<int32_t>&,
                                       const DeviceWorkspace&, int32_t*, float*, CompactionCounts*);
template cudaError_t LaunchCompactRows(cudaStream_t, const CompactionInput<int64_t>&,
                                       const DeviceWorkspace&, int64_t*, float*, CompactionCounts*);

}  // namespace slipstream
