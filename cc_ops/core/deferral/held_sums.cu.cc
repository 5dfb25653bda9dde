#include "cc_ops/core/deferral/held_sums.cu.h"

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

// Places by key: linear probing, the keys themselves stay in the buffers.
struct Index {
  int32_t* slots = nullptr;  // [num_slots], kNowhere: free
  int64_t num_slots = 0;     // a power of two, more than the places: probes end

  __device__ uint64_t mask() const { return static_cast<uint64_t>(num_slots) - 1; }

  // The order in which threads come decides where a place lies, but not whether it is found.
  __device__ void Insert(int64_t key, int32_t place) const {
    uint64_t i = HashKey(key) & mask();
    while (atomicCAS(&slots[i], kNowhere, place) != kNowhere) i = (i + 1) & mask();
  }

  __device__ int32_t Find(const int64_t* held_keys, int64_t key) const {
    for (uint64_t i = HashKey(key) & mask();; i = (i + 1) & mask()) {
      const int32_t place = slots[i];
      if (place == kNowhere || held_keys[place] == key) return place;
    }
  }
};

// Of n rows and `capacity` places; entry n + p of the entries is place p.
struct Workspace {
  // Lays the parts out from `base`, which may be null to learn the total only.
  cudaError_t Layout(void* base, int64_t n, int64_t capacity) {
    const int64_t entries = n + capacity;
    size_t sort_bytes = 0;
    cudaError_t error = ScanBytes(entries + 1, &scratch_bytes);
    if (error != cudaSuccess) return error;
    error = SortBytes<int64_t>(entries, &sort_bytes);
    if (error != cudaSuccess) return error;
    scratch_bytes = std::max(scratch_bytes, sort_bytes);
    WorkspaceParts parts(base);
    index.num_slots = 16;
    while (index.num_slots < 2 * capacity) index.num_slots *= 2;
    index.slots = parts.Take<int32_t>(index.num_slots);
    is_unsound = parts.Take<uint8_t>(n);
    fates = parts.Take<RowFate>(n);
    wants = parts.Take<int32_t>(n);
    targets = parts.Take<int32_t>(n);
    free = parts.Take<int32_t>(capacity + 1);
    free_places = parts.Take<int32_t>(capacity);
    leaves = parts.Take<int32_t>(entries + 1);
    keys = parts.Take<int64_t>(entries);
    sorted_keys = parts.Take<int64_t>(entries);
    sources = parts.Take<int32_t>(entries);
    sorted_sources = parts.Take<int32_t>(entries);
    scratch = parts.Take<char>(static_cast<int64_t>(scratch_bytes));
    bytes = parts.bytes();
    return cudaSuccess;
  }

  Index index;
  uint8_t* is_unsound = nullptr;  // [n]
  RowFate* fates = nullptr;       // [n]
  // 1 or 0, then the number of 1s before; where there is an entry more, it is the number of all.
  int32_t* wants = nullptr;        // [n], whether a row wants room
  int32_t* free = nullptr;         // [capacity + 1], whether a place is free once sums have left
  int32_t* leaves = nullptr;       // [n + capacity + 1], whether an entry leaves
  int32_t* targets = nullptr;      // [n], the place that a row's sum is kept in, or kNowhere
  int32_t* free_places = nullptr;  // [capacity], ascending
  int64_t* keys = nullptr;         // [n + capacity], of the entries that leave
  int64_t* sorted_keys = nullptr;
  int32_t* sources = nullptr;  // [n + capacity], those entries
  int32_t* sorted_sources = nullptr;
  void* scratch = nullptr;
  size_t scratch_bytes = 0;
  size_t bytes = 0;
};

// Of flags that were scanned.
__device__ bool IsSet(const int32_t* ranks, int64_t i) { return ranks[i + 1] != ranks[i]; }

__device__ void Count(int64_t* counter, int64_t number = 1) {
  atomicAdd(reinterpret_cast<unsigned long long*>(counter),
            static_cast<unsigned long long>(number));
}

__global__ void IndexKernel(HeldSums held, Index index) {
  for (int64_t p = ThreadOfGrid(); p < held.capacity; p += ThreadsOfGrid()) {
    if (held.keys[p] != HeldSums::kFree) index.Insert(held.keys[p], static_cast<int32_t>(p));
  }
}

// One warp per row, here and below.
__global__ void AddKernel(HeldSums held, Index index, const int64_t* __restrict__ keys,
                          const float* __restrict__ gradients, int64_t n,
                          int64_t* __restrict__ places, float* __restrict__ sums) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t step = ThreadsOfGrid() / kWarpSize;
  for (int64_t i = ThreadOfGrid() / kWarpSize; i < n; i += step) {
    // All lanes ask for the same addresses: that is one read.
    const int64_t place = index.Find(held.keys, keys[i]);
    if (lane == 0) places[i] = place;
    for (int64_t j = lane; j < held.dim; j += kWarpSize) {
      const float before = place < 0 ? 0.0f : held.sums[place * held.dim + j];
      sums[i * held.dim + j] = gradients[i * held.dim + j] + before;
    }
  }
}

// `is_unsound` starts at 0; whoever finds a value writes the same.
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

__global__ void FateKernel(HeldSums held, HoldRule rule, const int64_t* __restrict__ keys,
                           int64_t n, const int64_t* __restrict__ places,
                           const bool* __restrict__ may_wait, KeySetView marked,
                           const uint8_t* __restrict__ is_unsound, RowFate* __restrict__ fates,
                           int32_t* __restrict__ wants, HeldCounts* __restrict__ counts) {
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    const int64_t place = places[i];
    // Nobody can be told of a place that is none of the key's: it must do no harm.
    const bool is_held = place >= 0 && place < held.capacity && held.keys[place] == keys[i];
    const int64_t since = is_held ? held.since[place] : 0;
    const bool waits = rule.by_movement ? may_wait[i] : marked.Contains(keys[i]);
    const RowFate fate =
        FateOf(rule, is_held, since, is_unsound[i] == 0, waits && keys[i] != HeldSums::kFree);
    fates[i] = fate;
    wants[i] = fate == RowFate::kWantsRoom ? 1 : 0;
    if (fate == RowFate::kStays) Count(&counts->held);
    if (fate != RowFate::kPasses) continue;
    if (is_held) held.keys[place] = HeldSums::kFree;
    if (is_held && rule.IsOld(since)) {
      Count(&counts->due_by_age);
    } else if (rule.by_movement && rule.MayHold()) {
      Count(&counts->due_by_movement);
    }
  }
}

// Flags of the places: those that are due without a gradient, and those that are free after that.
__global__ void PlaceKernel(HeldSums held, HoldRule rule, int32_t* __restrict__ free,
                            int32_t* __restrict__ leaves_of_places,
                            HeldCounts* __restrict__ counts) {
  for (int64_t p = ThreadOfGrid(); p <= held.capacity; p += ThreadsOfGrid()) {
    const bool is_occupied = p < held.capacity && held.keys[p] != HeldSums::kFree;
    const bool is_due = is_occupied && (rule.lets_go || rule.IsOld(held.since[p]));
    free[p] = p < held.capacity && (!is_occupied || is_due) ? 1 : 0;
    leaves_of_places[p] = is_due ? 1 : 0;
    if (!is_due) continue;
    Count(&counts->left_alone);
    Count(rule.lets_go ? &counts->flushed : &counts->due_by_age);
  }
}

__global__ void FreePlacesKernel(const int32_t* __restrict__ free, int64_t capacity,
                                 int32_t* __restrict__ free_places) {
  for (int64_t p = ThreadOfGrid(); p < capacity; p += ThreadsOfGrid()) {
    if (IsSet(free, p)) free_places[free[p]] = static_cast<int32_t>(p);
  }
}

__global__ void TargetKernel(int64_t capacity, int64_t max_rows, int64_t n,
                             const int64_t* __restrict__ places, const RowFate* __restrict__ fates,
                             const int32_t* __restrict__ wants, const int32_t* __restrict__ free,
                             const int32_t* __restrict__ free_places, int32_t* __restrict__ targets,
                             int32_t* __restrict__ leaves_of_rows,
                             HeldCounts* __restrict__ counts) {
  const int64_t num_free = free[capacity];
  const int64_t num_held = capacity - num_free;
  const int64_t room = min(num_free, max_rows - num_held);
  if (ThreadOfGrid() == 0) Count(&counts->pending, num_held);
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    int32_t target = kNowhere;
    if (fates[i] == RowFate::kStays) target = static_cast<int32_t>(places[i]);
    if (fates[i] == RowFate::kWantsRoom) {
      const bool has_room = wants[i] < room;
      if (has_room) target = free_places[wants[i]];
      Count(has_room ? &counts->held : &counts->refused);
      if (has_room) Count(&counts->pending);
    }
    targets[i] = target;
    leaves_of_rows[i] = target == kNowhere ? 1 : 0;
  }
}

// Lists the entries that leave. The rest is filled with a key behind which none comes: as equal
// keys keep their order, it also comes behind a row of that key.
__global__ void ListKernel(const int64_t* __restrict__ keys, int64_t n,
                           const int64_t* __restrict__ held_keys, int64_t capacity,
                           const int32_t* __restrict__ leaves, int64_t* __restrict__ listed_keys,
                           int32_t* __restrict__ sources, HeldCounts* __restrict__ counts) {
  const int64_t leaving = leaves[n + capacity];
  if (ThreadOfGrid() == 0) counts->leaving = leaving;
  for (int64_t i = ThreadOfGrid(); i < n + capacity; i += ThreadsOfGrid()) {
    if (IsSet(leaves, i)) {
      listed_keys[leaves[i]] = i < n ? keys[i] : held_keys[i - n];
      sources[leaves[i]] = static_cast<int32_t>(i);
    }
    if (i >= leaving) {
      listed_keys[i] = kLastKey;
      sources[i] = kNowhere;
    }
  }
}

__global__ void WriteKernel(const int64_t* __restrict__ sorted_keys,
                            const int32_t* __restrict__ sources, const float* __restrict__ sums,
                            int64_t n, const float* __restrict__ held_sums, int64_t dim,
                            const HeldCounts* __restrict__ counts,
                            int64_t* __restrict__ leaving_keys, float* __restrict__ leaving_sums) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t step = ThreadsOfGrid() / kWarpSize;
  for (int64_t r = ThreadOfGrid() / kWarpSize; r < counts->leaving; r += step) {
    const int64_t source = sources[r];
    const float* row = source < n ? sums + source * dim : held_sums + (source - n) * dim;
    if (lane == 0) leaving_keys[r] = sorted_keys[r];
    for (int64_t j = lane; j < dim; j += kWarpSize) leaving_sums[r * dim + j] = row[j];
  }
}

__global__ void FreeDueKernel(HeldSums held, const int32_t* __restrict__ leaves_of_places) {
  for (int64_t p = ThreadOfGrid(); p < held.capacity; p += ThreadsOfGrid()) {
    if (IsSet(leaves_of_places, p)) held.keys[p] = HeldSums::kFree;
  }
}

__global__ void KeepKernel(HeldSums held, int64_t now, const int64_t* __restrict__ keys, int64_t n,
                           const float* __restrict__ sums, const RowFate* __restrict__ fates,
                           const int32_t* __restrict__ targets) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t step = ThreadsOfGrid() / kWarpSize;
  for (int64_t i = ThreadOfGrid() / kWarpSize; i < n; i += step) {
    const int64_t target = targets[i];
    if (target == kNowhere) continue;
    if (lane == 0 && fates[i] == RowFate::kWantsRoom) {
      held.keys[target] = keys[i];
      held.since[target] = now;
    }
    for (int64_t j = lane; j < held.dim; j += kWarpSize) {
      held.sums[target * held.dim + j] = sums[i * held.dim + j];
    }
  }
}

cudaError_t LayOut(int64_t n, int64_t capacity, void* base, size_t bytes, Workspace* parts) {
  if (n + capacity > kMaxHeldRows) return cudaErrorInvalidValue;
  const cudaError_t error = parts->Layout(base, n, capacity);
  if (error != cudaSuccess) return error;
  return base == nullptr || parts->bytes > bytes ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace

cudaError_t HeldSumsWorkspaceBytes(int64_t n, int64_t capacity, size_t* bytes) {
  *bytes = 0;
  if (n + capacity > kMaxHeldRows) return cudaErrorInvalidValue;
  Workspace workspace;
  const cudaError_t error = workspace.Layout(nullptr, n, capacity);
  *bytes = workspace.bytes;
  return error;
}

cudaError_t LaunchAddToHeld(cudaStream_t stream, const HeldSums& held, const int64_t* keys,
                            const float* gradients, int64_t n, void* workspace,
                            size_t workspace_bytes, int64_t* places, float* sums) {
  Workspace parts;
  cudaError_t error = LayOut(n, held.capacity, workspace, workspace_bytes, &parts);
  if (error != cudaSuccess) return error;
  const Index index = parts.index;
  // Bytes of 0xff: kNowhere.
  error = cudaMemsetAsync(index.slots, 0xff, index.num_slots * sizeof(int32_t), stream);
  if (error != cudaSuccess) return error;
  // clang-format off
  IndexKernel<<<BlocksFor(held.capacity), kThreadsPerBlock, 0, stream>>>(held, index);
  AddKernel<<<BlocksFor(n * kWarpSize), kThreadsPerBlock, 0, stream>>>(
      held, index, keys, gradients, n, places, sums);
  // clang-format on
  return cudaGetLastError();
}

cudaError_t LaunchTakeDue(cudaStream_t stream, const HeldSums& held, const HoldRule& rule,
                          const int64_t* keys, int64_t n, const int64_t* places, const float* sums,
                          const bool* may_wait, const KeySetView& marked, void* workspace,
                          size_t workspace_bytes, int64_t* leaving_keys, float* leaving_sums,
                          HeldCounts* counts) {
  const int64_t capacity = held.capacity, entries = n + capacity;
  Workspace parts;
  cudaError_t error = LayOut(n, capacity, workspace, workspace_bytes, &parts);
  if (error != cudaSuccess) return error;
  error = cudaMemsetAsync(counts, 0, sizeof(*counts), stream);
  if (error != cudaSuccess) return error;
  error = cudaMemsetAsync(parts.is_unsound, 0, static_cast<size_t>(n), stream);
  if (error != cudaSuccess) return error;
  const auto scan = [&](int64_t count, int32_t* flags) {
    return LaunchScan(stream, parts.scratch, parts.scratch_bytes, count, flags);
  };
  int32_t* const leaves_of_places = parts.leaves + n;
  const unsigned warps_of_rows = BlocksFor(n * kWarpSize);
  // clang-format off
  SoundKernel<<<warps_of_rows, kThreadsPerBlock, 0, stream>>>(
      sums, n, held.dim, parts.is_unsound);
  FateKernel<<<BlocksFor(n), kThreadsPerBlock, 0, stream>>>(
      held, rule, keys, n, places, may_wait, marked, parts.is_unsound, parts.fates, parts.wants,
      counts);
  PlaceKernel<<<BlocksFor(capacity + 1), kThreadsPerBlock, 0, stream>>>(
      held, rule, parts.free, leaves_of_places, counts);
  if (n > 0) error = scan(n, parts.wants);
  if (error != cudaSuccess) return error;
  error = scan(capacity + 1, parts.free);
  if (error != cudaSuccess) return error;
  FreePlacesKernel<<<BlocksFor(capacity), kThreadsPerBlock, 0, stream>>>(
      parts.free, capacity, parts.free_places);
  TargetKernel<<<BlocksFor(n), kThreadsPerBlock, 0, stream>>>(
      capacity, rule.max_rows, n, places, parts.fates, parts.wants, parts.free, parts.free_places,
      parts.targets, parts.leaves, counts);
  error = scan(entries + 1, parts.leaves);
  if (error != cudaSuccess) return error;
  ListKernel<<<BlocksFor(entries), kThreadsPerBlock, 0, stream>>>(
      keys, n, held.keys, capacity, parts.leaves, parts.keys, parts.sources, counts);
  if (entries > 0) {
    error = LaunchSort(stream, parts.scratch, parts.scratch_bytes, entries, parts.keys,
                       parts.sources, parts.sorted_keys, parts.sorted_sources);
    if (error != cudaSuccess) return error;
  }
  WriteKernel<<<BlocksFor(entries * kWarpSize), kThreadsPerBlock, 0, stream>>>(
      parts.sorted_keys, parts.sorted_sources, sums, n, held.sums, held.dim, counts, leaving_keys,
      leaving_sums);
  FreeDueKernel<<<BlocksFor(capacity), kThreadsPerBlock, 0, stream>>>(held, leaves_of_places);
  KeepKernel<<<warps_of_rows, kThreadsPerBlock, 0, stream>>>(
      held, rule.step, keys, n, sums, parts.fates, parts.targets);
  // clang-format on
  return cudaGetLastError();
}

}  // namespace slipstream
