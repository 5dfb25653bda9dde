#include "cc_ops/core/update/row_compaction.cu.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "cc_ops/core/gpu/block_counts.cu.h"
#include "cc_ops/core/gpu/launch.cu.h"
#include "cc_ops/core/gpu/row_lanes.cu.h"
#include "cc_ops/core/gpu/scan_and_sort.cu.h"
#include "cc_ops/core/update/row_compaction.h"

namespace slipstream {
namespace {

// The consecutive parts of the workspace.
template <class Key>
struct Workspace {
  // Assigns the parts from `base`, which may be null to compute only the total size.
  cudaError_t Layout(void* base, int64_t n, int64_t dim, bool deduplicate) {
    SLIPSTREAM_RETURN_IF_CUDA_ERROR(ScanBytes(n + 1, &scratch_bytes));
    if (deduplicate) {
      size_t sort_bytes = 0;
      SLIPSTREAM_RETURN_IF_CUDA_ERROR(SortBytes<Key>(n, &sort_bytes));
      scratch_bytes = std::max(scratch_bytes, sort_bytes);
    }
    WorkspaceParts parts(base);
    targets = parts.Take<int32_t>(n + 1);
    if (deduplicate) {
      sorted_keys = parts.Take<Key>(n);
      positions = parts.Take<int32_t>(n);
      sorted_positions = parts.Take<int32_t>(n);
      num_chunks = (n - 1) / kRowsPerChunk + 1;
      sums_of_chunks = parts.Take<float>(num_chunks * dim);
    }
    scratch = parts.Take<char>(static_cast<int64_t>(scratch_bytes));
    bytes = parts.bytes();
    return cudaSuccess;
  }

  // [n + 1]; 1 at the first row of each kept key, replaced by the number of 1s before.
  int32_t* targets = nullptr;
  Key* sorted_keys = nullptr;
  int32_t* positions = nullptr;
  int32_t* sorted_positions = nullptr;
  int64_t num_chunks = 0;
  float* sums_of_chunks = nullptr;  // [num_chunks, dim]; see Chunk.
  void* scratch = nullptr;
  size_t scratch_bytes = 0;
  size_t bytes = 0;
};

__global__ void CountUpKernel(int64_t n, int32_t* __restrict__ values) {
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    values[i] = static_cast<int32_t>(i);
  }
}

// Returns whether i is the first row of a key. Without sorting, each row is.
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
  unsigned heads = 0;
  for (int64_t i = ThreadOfGrid(); i <= n; i += ThreadsOfGrid()) {
    const bool is_head = i < n && IsHead(keys, i, input.deduplicate);
    flags[i] = is_head && !input.masked.Contains(keys[i]) ? 1 : 0;
    heads += is_head ? 1 : 0;
  }
  AddOfBlock(heads, &counts->offered);
}

// Returns whether i is the first row of a kept key. Its output row is then targets[i].
__device__ bool IsKept(const int32_t* targets, int64_t i) { return targets[i + 1] != targets[i]; }

// Returns the first position of the key at `at` in sorted keys.
template <class Key>
__device__ int64_t FirstOfKey(const Key* keys, int64_t at) {
  int64_t first = at;
  for (int64_t below = -1; first - below > 1;) {
    const int64_t middle = below + (first - below) / 2;
    (keys[middle] == keys[at] ? first : below) = middle;
  }
  return first;
}

// Returns the end of the rows of the key at `at` in sorted keys, or `limit` if it is lower. Few
// rows per key need few loads.
template <class Key>
__device__ int64_t EndOfKey(const Key* keys, int64_t at, int64_t limit) {
  const Key key = keys[at];
  int64_t last = at, step = 1;
  for (; last + step < limit && keys[last + step] == key; step *= 2) last += step;
  for (int64_t end = last + step < limit ? last + step : limit;;) {
    if (end - last <= 1) return end;
    const int64_t middle = last + (end - last) / 2;
    (keys[middle] == key ? last : end) = middle;
  }
}

// A chunk of the rows of a key after its first chunk; see kRowsPerChunk. The number of a chunk is
// begin / kRowsPerChunk. Numbers are unique, because these chunks begin at least kRowsPerChunk
// apart, also if their keys differ. The chunks of a key have consecutive numbers.
struct Chunk {
  int64_t head;  // First position of the key.
  int64_t begin;
};

// Returns the chunk with the number; `begin` is `head` if there is no such chunk.
template <class Key>
__device__ Chunk ChunkOf(int64_t number, const Key* keys, int64_t n) {
  const int64_t at = number * kRowsPerChunk;
  if (at == 0 || keys[at] != keys[at - 1]) return {at, at};
  const int64_t head = FirstOfKey(keys, at);
  const int64_t begin = at + (kRowsPerChunk - (at - head) % kRowsPerChunk) % kRowsPerChunk;
  return {head, begin < n && keys[begin] == keys[at] ? begin : head};
}

// Returns sum + value_at(begin) + ... + value_at(end - 1), added in this order. Loads kAtOnce
// values before it adds them, because a load takes much longer than an addition.
template <int kAtOnce, class Vector, class ValueAt>
__device__ Vector SumOf(Vector sum, int64_t begin, int64_t end, const ValueAt& value_at) {
  Vector values[kAtOnce];
  for (; begin + kAtOnce <= end; begin += kAtOnce) {
    for (int i = 0; i < kAtOnce; ++i) values[i] = value_at(begin + i);
    for (int i = 0; i < kAtOnce; ++i) sum = Plus(sum, values[i]);
  }
  for (; begin < end; ++begin) sum = Plus(sum, value_at(begin));
  return sum;
}

// Sums the rows of each chunk of the kept keys. Lanes that share a row handle either the chunk with
// a number, or the first chunk of the key that begins at a position. The former are before the
// latter, because they have more rows.
template <class Key, class Lanes>
__global__ void SumKernel(CompactionInput<Key> input, Workspace<Key> parts, Lanes lanes,
                          Key* __restrict__ kept_keys,
                          typename Lanes::Value* __restrict__ kept_rows,
                          CompactionCounts* __restrict__ counts) {
  using Vector = typename Lanes::Value;
  const Key* __restrict__ keys = input.keys;
  const auto* __restrict__ rows = reinterpret_cast<const Vector*>(input.rows);
  const int32_t* __restrict__ order = parts.sorted_positions;
  const int32_t* __restrict__ targets = parts.targets;
  const int64_t n = input.n, width = lanes.width;
  if (ThreadOfGrid() == 0) counts->kept = targets[n];
  for (int64_t item = lanes.first_row(); item < parts.num_chunks + n;
       item += lanes.rows_of_grid()) {
    int64_t begin;
    Vector* sum;
    if (item < parts.num_chunks) {
      const Chunk chunk = ChunkOf(item, keys, n);
      if (chunk.begin == chunk.head || !IsKept(targets, chunk.head)) continue;
      begin = chunk.begin;
      sum = reinterpret_cast<Vector*>(parts.sums_of_chunks) + item * width;
    } else {
      begin = item - parts.num_chunks;
      if (!IsKept(targets, begin)) continue;
      if (lanes.lane() == 0) kept_keys[targets[begin]] = keys[begin];
      sum = kept_rows + targets[begin] * width;
    }
    if (!input.deduplicate) {
      for (int64_t j = lanes.lane(); j < width; j += lanes.num_lanes()) {
        sum[j] = rows[begin * width + j];
      }
      continue;
    }
    const int64_t limit = begin + kRowsPerChunk < n ? begin + kRowsPerChunk : n;
    const int64_t end = EndOfKey(keys, begin, limit);
    for (int64_t j = lanes.lane(); j < width; j += lanes.num_lanes()) {
      const auto value_at = [=](int64_t i) { return rows[order[i] * width + j]; };
      sum[j] = SumOf<4>(value_at(begin), begin + 1, end, value_at);
    }
  }
}

// Adds the sums of the other chunks of each kept key to the sum of its first chunk. The lanes of
// the second chunk do it.
template <class Key, class Lanes>
__global__ void AddChunksKernel(CompactionInput<Key> input, Workspace<Key> parts, Lanes lanes,
                                typename Lanes::Value* __restrict__ kept_rows) {
  using Vector = typename Lanes::Value;
  const Key* __restrict__ keys = input.keys;
  const auto* __restrict__ sums = reinterpret_cast<const Vector*>(parts.sums_of_chunks);
  const int64_t width = lanes.width;
  for (int64_t i = lanes.first_row(); i < parts.num_chunks; i += lanes.rows_of_grid()) {
    const Chunk chunk = ChunkOf(i, keys, input.n);
    const bool is_second = chunk.begin == chunk.head + kRowsPerChunk;
    if (!is_second || !IsKept(parts.targets, chunk.head)) continue;
    const int64_t rows = EndOfKey(keys, chunk.begin, input.n) - chunk.begin;
    const int64_t end = i + (rows + kRowsPerChunk - 1) / kRowsPerChunk;
    Vector* const sum = kept_rows + parts.targets[chunk.head] * width;
    for (int64_t j = lanes.lane(); j < width; j += lanes.num_lanes()) {
      sum[j] = SumOf<8>(sum[j], i, end, [=](int64_t other) { return sums[other * width + j]; });
    }
  }
}

}  // namespace

template <class Key>
cudaError_t CompactRowsWorkspaceBytes(int64_t n, int64_t dim, bool deduplicate, size_t* bytes) {
  *bytes = 0;
  if (n > kMaxCompactedRows) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  Workspace<Key> workspace;
  const cudaError_t error = workspace.Layout(nullptr, n, dim, deduplicate);
  *bytes = workspace.bytes;
  return error;
}

template <class Key>
cudaError_t LaunchCompactRows(cudaStream_t stream, const CompactionInput<Key>& input,
                              const DeviceWorkspace& workspace, Key* kept_keys, float* kept_rows,
                              CompactionCounts* counts) {
  const int64_t n = input.n;
  if (n > kMaxCompactedRows) return cudaErrorInvalidValue;
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(counts, 0, sizeof(*counts), stream));
  if (n == 0) return cudaSuccess;
  Workspace<Key> parts;
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(parts.Layout(workspace.data, n, input.dim, input.deduplicate));
  if (workspace.data == nullptr || parts.bytes > workspace.bytes) return cudaErrorInvalidValue;

  CompactionInput<Key> ordered = input;  // Replaces the keys, not the rows.
  if (input.deduplicate) {
    SLIPSTREAM_RETURN_IF_CUDA_ERROR(
        Launch(stream, BlocksFor(n), CountUpKernel, n, parts.positions));
    // A stable sort keeps positions of one key in input order.
    SLIPSTREAM_RETURN_IF_CUDA_ERROR(LaunchSort(stream, parts.scratch, parts.scratch_bytes, n,
                                               input.keys, parts.positions, parts.sorted_keys,
                                               parts.sorted_positions));
    ordered.keys = parts.sorted_keys;
  }
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(
      Launch(stream, BlocksFor(n + 1), FlagKernel<Key>, ordered, parts.targets, counts));
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(
      LaunchScan(stream, parts.scratch, parts.scratch_bytes, n + 1, parts.targets));
  return WithRowLanes(input.dim, {input.rows, kept_rows}, [&](const auto& lanes) {
    using Lanes = std::decay_t<decltype(lanes)>;
    auto* const sums = reinterpret_cast<typename Lanes::Value*>(kept_rows);
    SLIPSTREAM_RETURN_IF_CUDA_ERROR(Launch(stream, lanes.BlocksForRows(parts.num_chunks + n),
                                           SumKernel<Key, Lanes>, ordered, parts, lanes, kept_keys,
                                           sums, counts));
    if (parts.num_chunks <= 1) return cudaSuccess;
    return Launch(stream, lanes.BlocksForRows(parts.num_chunks), AddChunksKernel<Key, Lanes>,
                  ordered, parts, lanes, sums);
  });
}

template cudaError_t CompactRowsWorkspaceBytes<int32_t>(int64_t, int64_t, bool, size_t*);
template cudaError_t CompactRowsWorkspaceBytes<int64_t>(int64_t, int64_t, bool, size_t*);
template cudaError_t LaunchCompactRows(cudaStream_t, const CompactionInput<int32_t>&,
                                       const DeviceWorkspace&, int32_t*, float*, CompactionCounts*);
template cudaError_t LaunchCompactRows(cudaStream_t, const CompactionInput<int64_t>&,
                                       const DeviceWorkspace&, int64_t*, float*, CompactionCounts*);

}  // namespace slipstream
