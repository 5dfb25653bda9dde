#include "cc_ops/core/deferral/deferred_buffers.cu.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/gpu/launch.cu.h"
#include "cc_ops/core/gpu/scan_and_sort.cu.h"

namespace slipstream {
namespace {

constexpr int32_t kNowhere = -1;
constexpr int64_t kLastKey = std::numeric_limits<int64_t>::max();

// Hash index of entries by key, with linear probing. The keys are read from the buffers.
struct KeyIndex {
  int32_t* buckets = nullptr;  // [num_buckets]; kNowhere if free.
  // A power of two, larger than the number of entries, so that probes end.
  int64_t num_buckets = 0;

  __device__ uint64_t mask() const { return static_cast<uint64_t>(num_buckets) - 1; }

  // The order of threads decides which bucket an entry gets, but not whether it is found.
  __device__ void Insert(int64_t key, int32_t index) const {
    uint64_t i = HashKey(key) & mask();
    while (atomicCAS(&buckets[i], kNowhere, index) != kNowhere) i = (i + 1) & mask();
  }

  __device__ int32_t Find(const int64_t* deferred_keys, int64_t key) const {
    for (uint64_t i = HashKey(key) & mask();; i = (i + 1) & mask()) {
      const int32_t index = buckets[i];
      if (index == kNowhere || deferred_keys[index] == key) return index;
    }
  }
};

// Workspace for n rows and `capacity` entries. Entry p has the number n + p here.
struct Workspace {
  // Assigns the parts from `base`, which may be null to compute only the total size.
  cudaError_t Layout(void* base, int64_t n, int64_t capacity) {
    const int64_t entries = n + capacity;
    if (entries > kMaxDeferredRows) return cudaErrorInvalidValue;
    size_t sort_bytes = 0;
    cudaError_t error = ScanBytes(entries + 1, &scratch_bytes);
    if (error != cudaSuccess) return error;
    error = SortBytes<int64_t>(entries, &sort_bytes);
    if (error != cudaSuccess) return error;
    scratch_bytes = std::max(scratch_bytes, sort_bytes);
    WorkspaceParts parts(base);
    index.num_buckets = 16;
    while (index.num_buckets < 2 * capacity) index.num_buckets *= 2;
    index.buckets = parts.Take<int32_t>(index.num_buckets);
    is_unsound = parts.Take<uint8_t>(n);
    decisions = parts.Take<Decision>(n);
    begins = parts.Take<int32_t>(n);
    targets = parts.Take<int32_t>(n);
    free = parts.Take<int32_t>(capacity + 1);
    free_indices = parts.Take<int32_t>(capacity);
    leaves = parts.Take<int32_t>(entries + 1);
    keys = parts.Take<int64_t>(entries);
    sorted_keys = parts.Take<int64_t>(entries);
    sources = parts.Take<int32_t>(entries);
    sorted_sources = parts.Take<int32_t>(entries);
    scratch = parts.Take<char>(static_cast<int64_t>(scratch_bytes));
    bytes = parts.bytes();
    return cudaSuccess;
  }

  // Assigns the parts in the caller's memory.
  cudaError_t LayoutIn(const DeviceWorkspace& memory, int64_t n, int64_t capacity) {
    const cudaError_t error = Layout(memory.data, n, capacity);
    if (error != cudaSuccess) return error;
    return memory.data == nullptr || bytes > memory.bytes ? cudaErrorInvalidValue : cudaSuccess;
  }

  KeyIndex index;
  uint8_t* is_unsound = nullptr;  // [n]
  Decision* decisions = nullptr;  // [n]
  // Flags 1 or 0, replaced by the number of 1s before each. A trailing element receives the total.
  int32_t* begins = nullptr;   // [n]; whether a row would begin to be deferred.
  int32_t* free = nullptr;     // [capacity + 1]; whether an entry is free after due sums have left.
  int32_t* leaves = nullptr;   // [n + capacity + 1]; whether a row or entry leaves.
  int32_t* targets = nullptr;  // [n]; the entry at which a row's sum stays, or kNowhere.
  int32_t* free_indices = nullptr;  // [capacity], ascending.
  int64_t* keys = nullptr;          // [n + capacity]; keys of the rows and entries that leave.
  int64_t* sorted_keys = nullptr;
  int32_t* sources = nullptr;  // [n + capacity]; numbers of these rows and entries.
  int32_t* sorted_sources = nullptr;
  void* scratch = nullptr;
  size_t scratch_bytes = 0;
  size_t bytes = 0;
};

// Returns a flag after the scan.
__device__ bool IsSet(const int32_t* ranks, int64_t i) { return ranks[i + 1] != ranks[i]; }

__device__ void AddTo(int64_t* counter, int64_t number = 1) {
  if (counter == nullptr) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(counter),
            static_cast<unsigned long long>(number));
}

__global__ void IndexKernel(DeferredBuffers buffers, KeyIndex index) {
  for (int64_t p = ThreadOfGrid(); p < buffers.capacity; p += ThreadsOfGrid()) {
    if (buffers.keys[p] != DeferredBuffers::kFree) {
      index.Insert(buffers.keys[p], static_cast<int32_t>(p));
    }
  }
}

// One warp per row, here and below.
__global__ void AddKernel(DeferredBuffers buffers, KeyIndex index, const int64_t* __restrict__ keys,
                          const float* __restrict__ gradients, int64_t n,
                          int64_t* __restrict__ indices, float* __restrict__ sums) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t step = ThreadsOfGrid() / kWarpSize;
  for (int64_t i = ThreadOfGrid() / kWarpSize; i < n; i += step) {
    // All lanes read the same addresses, which is one read.
    const int64_t p = index.Find(buffers.keys, keys[i]);
    if (lane == 0) indices[i] = p;
    for (int64_t j = lane; j < buffers.dim; j += kWarpSize) {
      const float before = p < 0 ? 0.0f : buffers.sums[p * buffers.dim + j];
      sums[i * buffers.dim + j] = gradients[i * buffers.dim + j] + before;
    }
  }
}

// `is_unsound` starts at 0. All threads that find a value write the same.
__global__ void SoundKernel(const float* __restrict__ sums, int64_t n, int64_t dim,
                            uint8_t* __restrict__ is_unsound) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t step = ThreadsOfGrid() / kWarpSize;
  for (int64_t i = ThreadOfGrid() / kWarpSize; i < n; i += step) {
    for (int64_t j = lane; j < dim; j += kWarpSize) {
      if (!isfinite(sums[i * dim + j])) is_unsound[i] = 1;
    }
  }
}

__global__ void DecideKernel(DeferredBuffers buffers, DeferralRule rule, StepRows rows,
                             Workspace parts, StepCounts* __restrict__ counts) {
  if (ThreadOfGrid() == 0) counts->offered = rows.n;
  for (int64_t i = ThreadOfGrid(); i < rows.n; i += ThreadsOfGrid()) {
    const int64_t key = rows.keys[i], p = rows.indices[i];
    // Errors cannot be reported from a kernel. An entry that is not the key's is ignored.
    const bool is_deferred = p >= 0 && p < buffers.capacity && buffers.keys[p] == key;
    const bool may_wait = rule.by_movement ? rows.may_wait[i] : rows.saturated.Contains(key);
    const Decision decision =
        Decide(rule, is_deferred, is_deferred ? buffers.since[p] : 0,
               may_wait && key != DeferredBuffers::kFree && parts.is_unsound[i] == 0);
    parts.decisions[i] = decision;
    parts.begins[i] = decision == Decision::kBegin ? 1 : 0;
    if (decision != Decision::kBegin) AddTo(CounterOf(decision, counts));
    if (is_deferred && IsDue(decision)) buffers.keys[p] = DeferredBuffers::kFree;
  }
}

// Flags entries that are due without a gradient, and entries that are free afterwards.
__global__ void DecideOthersKernel(DeferredBuffers buffers, DeferralRule rule,
                                   int32_t* __restrict__ free, int32_t* __restrict__ leaves,
                                   StepCounts* __restrict__ counts) {
  for (int64_t p = ThreadOfGrid(); p <= buffers.capacity; p += ThreadsOfGrid()) {
    const bool is_index = p < buffers.capacity;
    const bool is_deferred = is_index && buffers.keys[p] != DeferredBuffers::kFree;
    const Decision decision =
        is_deferred ? DecideWithoutGradient(rule, buffers.since[p]) : Decision::kStay;
    const bool is_due = IsDue(decision);
    free[p] = is_index && (!is_deferred || is_due) ? 1 : 0;
    leaves[p] = is_due ? 1 : 0;
    if (!is_due) continue;
    AddTo(&counts->without_gradient);
    AddTo(CounterOf(decision, counts));
  }
}

__global__ void FreeIndicesKernel(const int32_t* __restrict__ free, int64_t capacity,
                                  int32_t* __restrict__ free_indices) {
  for (int64_t p = ThreadOfGrid(); p < capacity; p += ThreadsOfGrid()) {
    if (IsSet(free, p)) free_indices[free[p]] = static_cast<int32_t>(p);
  }
}

__global__ void TargetKernel(int64_t capacity, DeferralRule rule, StepRows rows, Workspace parts,
                             StepCounts* __restrict__ counts) {
  const int64_t num_free = parts.free[capacity];
  const int64_t num_deferred = capacity - num_free;
  if (ThreadOfGrid() == 0) AddTo(&counts->num_deferred, num_deferred);
  for (int64_t i = ThreadOfGrid(); i < rows.n; i += ThreadsOfGrid()) {
    int32_t target = kNowhere;
    Decision decision = parts.decisions[i];
    if (decision == Decision::kStay) target = static_cast<int32_t>(rows.indices[i]);
    if (decision == Decision::kBegin) {
      const int64_t before = parts.begins[i];
      if (before < num_free && rule.HasBudget(num_deferred + before)) {
        target = parts.free_indices[before];
        AddTo(&counts->num_deferred);
      } else {
        decision = Decision::kOverBudget;
      }
      parts.decisions[i] = decision;
      AddTo(CounterOf(decision, counts));
    }
    parts.targets[i] = target;
    parts.leaves[i] = target == kNowhere ? 1 : 0;
  }
}

// Lists the rows and entries that leave and frees the entries. Fills the rest with the largest key.
// The sort is stable, therefore the filling also sorts after a row with that key.
__global__ void ListKernel(DeferredBuffers buffers, StepRows rows, Workspace parts,
                           StepCounts* __restrict__ counts) {
  const int64_t entries = rows.n + buffers.capacity;
  const int64_t leaving = parts.leaves[entries];
  if (ThreadOfGrid() == 0) counts->sent = leaving;
  for (int64_t i = ThreadOfGrid(); i < entries; i += ThreadsOfGrid()) {
    if (IsSet(parts.leaves, i)) {
      const int32_t at = parts.leaves[i];
      int64_t* const key = i < rows.n ? nullptr : &buffers.keys[i - rows.n];
      parts.keys[at] = key == nullptr ? rows.keys[i] : *key;
      if (key != nullptr) *key = DeferredBuffers::kFree;
      parts.sources[at] = static_cast<int32_t>(i);
    }
    if (i >= leaving) {
      parts.keys[i] = kLastKey;
      parts.sources[i] = kNowhere;
    }
  }
}

__global__ void WriteKernel(DeferredBuffers buffers, StepRows rows, Workspace parts,
                            const StepCounts* __restrict__ counts, int64_t* __restrict__ due_keys,
                            float* __restrict__ due_sums) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t step = ThreadsOfGrid() / kWarpSize, n = rows.n, dim = buffers.dim;
  for (int64_t r = ThreadOfGrid() / kWarpSize; r < counts->sent; r += step) {
    const int64_t source = parts.sorted_sources[r];
    const float* __restrict__ row =
        source < n ? rows.sums + source * dim : buffers.sums + (source - n) * dim;
    if (lane == 0) due_keys[r] = parts.sorted_keys[r];
    for (int64_t j = lane; j < dim; j += kWarpSize) due_sums[r * dim + j] = row[j];
  }
}

__global__ void KeepKernel(DeferredBuffers buffers, int64_t now, StepRows rows, Workspace parts) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t step = ThreadsOfGrid() / kWarpSize;
  for (int64_t i = ThreadOfGrid() / kWarpSize; i < rows.n; i += step) {
    const int64_t target = parts.targets[i];
    if (target == kNowhere) continue;
    if (lane == 0 && parts.decisions[i] == Decision::kBegin) {
      buffers.keys[target] = rows.keys[i];
      buffers.since[target] = now;
    }
    const float* __restrict__ sum = rows.sums + i * buffers.dim;
    float* __restrict__ kept = buffers.sums + target * buffers.dim;
    for (int64_t j = lane; j < buffers.dim; j += kWarpSize) kept[j] = sum[j];
  }
}

}  // namespace

cudaError_t DeferralWorkspaceBytes(int64_t n, int64_t capacity, size_t* bytes) {
  Workspace workspace;
  const cudaError_t error = workspace.Layout(nullptr, n, capacity);
  *bytes = workspace.bytes;
  return error;
}

cudaError_t LaunchAddDeferred(cudaStream_t stream, const DeferredBuffers& buffers,
                              const int64_t* keys, const float* gradients, int64_t n,
                              const DeviceWorkspace& workspace, int64_t* indices, float* sums) {
  Workspace parts;
  cudaError_t error = parts.LayoutIn(workspace, n, buffers.capacity);
  if (error != cudaSuccess) return error;
  const KeyIndex index = parts.index;
  // The byte 0xff makes kNowhere.
  error = cudaMemsetAsync(index.buckets, 0xff, index.num_buckets * sizeof(int32_t), stream);
  if (error != cudaSuccess) return error;
  Launch(stream, BlocksFor(buffers.capacity), IndexKernel, buffers, index);
  Launch(stream, BlocksFor(n * kWarpSize), AddKernel, buffers, index, keys, gradients, n, indices,
         sums);
  return cudaGetLastError();
}

cudaError_t LaunchTakeDue(cudaStream_t stream, const DeferredBuffers& buffers,
                          const DeferralRule& rule, const StepRows& rows,
                          const DeviceWorkspace& workspace, int64_t* due_keys, float* due_sums,
                          StepCounts* counts) {
  const int64_t n = rows.n, capacity = buffers.capacity, entries = n + capacity;
  Workspace parts;
  cudaError_t error = parts.LayoutIn(workspace, n, capacity);
  if (error != cudaSuccess) return error;
  error = cudaMemsetAsync(counts, 0, sizeof(*counts), stream);
  if (error != cudaSuccess) return error;
  error = cudaMemsetAsync(parts.is_unsound, 0, static_cast<size_t>(n), stream);
  if (error != cudaSuccess) return error;
  const auto scan = [&](int64_t count, int32_t* flags) {
    return LaunchScan(stream, parts.scratch, parts.scratch_bytes, count, flags);
  };
  const unsigned warps_of_rows = BlocksFor(n * kWarpSize);
  Launch(stream, warps_of_rows, SoundKernel, rows.sums, n, buffers.dim, parts.is_unsound);
  Launch(stream, BlocksFor(n), DecideKernel, buffers, rule, rows, parts, counts);
  Launch(stream, BlocksFor(capacity + 1), DecideOthersKernel, buffers, rule, parts.free,
         parts.leaves + n, counts);
  if (n > 0) error = scan(n, parts.begins);
  if (error != cudaSuccess) return error;
  error = scan(capacity + 1, parts.free);
  if (error != cudaSuccess) return error;
  Launch(stream, BlocksFor(capacity), FreeIndicesKernel, parts.free, capacity, parts.free_indices);
  Launch(stream, BlocksFor(n), TargetKernel, capacity, rule, rows, parts, counts);
  error = scan(entries + 1, parts.leaves);
  if (error != cudaSuccess) return error;
  Launch(stream, BlocksFor(entries), ListKernel, buffers, rows, parts, counts);
  if (entries > 0) {
    error = LaunchSort(stream, parts.scratch, parts.scratch_bytes, entries, parts.keys,
                       parts.sources, parts.sorted_keys, parts.sorted_sources);
    if (error != cudaSuccess) return error;
  }
  Launch(stream, BlocksFor(entries * kWarpSize), WriteKernel, buffers, rows, parts, counts,
         due_keys, due_sums);
  Launch(stream, warps_of_rows, KeepKernel, buffers, rule.step, rows, parts);
  return cudaGetLastError();
}

}  // namespace slipstream
