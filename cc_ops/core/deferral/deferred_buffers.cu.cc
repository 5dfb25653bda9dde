#include "cc_ops/core/deferral/deferred_buffers.cu.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/gpu/block_counts.cu.h"
#include "cc_ops/core/gpu/launch.cu.h"
#include "cc_ops/core/gpu/row_lanes.cu.h"
#include "cc_ops/core/gpu/scan_and_sort.cu.h"

namespace slipstream {
namespace {

constexpr int32_t kNowhere = -1;
// Indices of rows without an entry.
constexpr int64_t kNotDeferred = -1, kRepeated = -2;
constexpr int64_t kLastKey = std::numeric_limits<int64_t>::max();

// The buffers are divided into tiles of consecutive entries. A block reads a whole tile at a time,
// and the number of tiles is limited, so that their counts need no memory for the capacity.
constexpr int64_t kMaxTiles = 1024;

struct Tiles {
  explicit Tiles(int64_t capacity) : capacity(capacity) {
    const int64_t size = (capacity + kMaxTiles - 1) / kMaxTiles;
    rounds = (size + kThreadsPerBlock - 1) / kThreadsPerBlock;
    number =
        rounds == 0 ? 0 : (capacity + rounds * kThreadsPerBlock - 1) / (rounds * kThreadsPerBlock);
  }

  // Returns the entry of this thread in a round of a tile; not less than `capacity` if there is
  // none.
  __device__ int64_t Entry(int64_t tile, int64_t round) const {
    return (tile * rounds + round) * kThreadsPerBlock + threadIdx.x;
  }

  // Returns the number of entries of a tile.
  __device__ int64_t Size(int64_t tile) const {
    return min(rounds * kThreadsPerBlock, capacity - tile * rounds * kThreadsPerBlock);
  }

  int64_t capacity;
  int64_t rounds;  // Per tile, with one entry per thread.
  int64_t number;
};

// Hash index of the rows of a step by key, with linear probing.
struct RowIndex {
  const int64_t* keys = nullptr;  // [n]
  int32_t* buckets = nullptr;     // [mask + 1]; kNowhere if free.
  uint64_t mask = 0;              // A power of two minus 1; at least half of the buckets stay free.
  uint64_t seed = 0;              // See KeyedHash.

  // Returns false if another row has the key. One row of each key is inserted.
  __device__ bool Insert(int32_t row) const {
    for (uint64_t i = KeyedHash(keys[row], seed) & mask;; i = (i + 1) & mask) {
      const int32_t other = atomicCAS(&buckets[i], kNowhere, row);
      if (other == kNowhere) return true;
      if (keys[other] == keys[row]) return false;
    }
  }

  // Returns the row of a key, or kNowhere.
  __device__ int32_t Find(int64_t key) const {
    for (uint64_t i = KeyedHash(key, seed) & mask;; i = (i + 1) & mask) {
      const int32_t row = buckets[i];
      if (row == kNowhere || keys[row] == key) return row;
    }
  }
};

// Numbers of rows and entries that a step has found so far. They start at 0.
struct Found {
  int64_t num_kept;  // Gradients that stay deferred.
  int64_t num_old;   // Entries that are due without a gradient, including those over the limit.
  int64_t num_rows;  // Rows that leave.
};

// Workspace of LaunchTakeDue. A source is a row, or n + an entry.
struct Workspace {
  // Assigns the parts from `base`, which may be null to compute only the total size.
  cudaError_t Layout(void* base, int64_t n, int64_t max_due) {
    if (n < 0 || max_due < n || max_due > kMaxDeferredRows) return cudaErrorInvalidValue;
    size_t sort_bytes = 0;
    SLIPSTREAM_RETURN_IF_CUDA_ERROR(ScanBytes(n + 1, &scratch_bytes));
    SLIPSTREAM_RETURN_IF_CUDA_ERROR(SortBytes<int64_t>(max_due, &sort_bytes));
    scratch_bytes = std::max(scratch_bytes, sort_bytes);
    this->max_due = max_due;
    WorkspaceParts parts(base);
    found = parts.Take<Found>(1);
    decisions = parts.Take<Decision>(n);
    begins = parts.Take<int32_t>(n + 1);
    free_of_tile = parts.Take<int32_t>(kMaxTiles);
    free_entries = parts.Take<int32_t>(n);
    keys = parts.Take<int64_t>(max_due);
    sorted_keys = parts.Take<int64_t>(max_due);
    sources = parts.Take<int32_t>(max_due);
    sorted_sources = parts.Take<int32_t>(max_due);
    scratch = parts.Take<char>(static_cast<int64_t>(scratch_bytes));
    bytes = parts.bytes();
    return cudaSuccess;
  }

  // Returns the number of entries that leave without a gradient in a step of n rows.
  __device__ int64_t NumOld(int64_t n) const { return min(found->num_old, max_due - n); }

  // Returns the number of rows that begin to be deferred in a step of n rows: the first ones that
  // find room.
  __device__ int64_t NumBegun(const DeferralRule& rule, int64_t capacity, int64_t n) const {
    const int64_t room = min(capacity, rule.max_rows) - found->num_kept;
    return max(min(static_cast<int64_t>(begins[n]), room), int64_t{0});
  }

  int64_t max_due = 0;
  Found* found = nullptr;         // [1]
  Decision* decisions = nullptr;  // [n]
  // Whether a row would begin to be deferred, as 1 or 0; later the number of these rows before it.
  // The last element becomes their total.
  int32_t* begins = nullptr;        // [n + 1]
  int32_t* free_of_tile = nullptr;  // [kMaxTiles]; number of free entries after due sums have left.
  int32_t* free_entries = nullptr;  // [n]; the first free entries, ascending.
  // Keys and sources of the rows and entries that leave, followed by kLastKey and kNowhere. The
  // sort is stable, therefore these also sort after a row with that key.
  int64_t* keys = nullptr;  // [max_due]
  int64_t* sorted_keys = nullptr;
  int32_t* sources = nullptr;
  int32_t* sorted_sources = nullptr;
  void* scratch = nullptr;
  size_t scratch_bytes = 0;
  size_t bytes = 0;
};

__global__ void IndexRowsKernel(RowIndex index, int64_t n, int64_t* __restrict__ indices) {
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    indices[i] = index.Insert(static_cast<int32_t>(i)) ? kNotDeferred : kRepeated;
  }
}

__global__ void FindEntriesKernel(DeferredBuffers buffers, RowIndex index,
                                  int64_t* __restrict__ indices) {
  for (int64_t p = ThreadOfGrid(); p < buffers.capacity; p += ThreadsOfGrid()) {
    const int64_t key = buffers.keys[p];
    if (key == DeferredBuffers::kFree) continue;
    const int32_t row = index.Find(key);
    if (row != kNowhere) indices[row] = p;
  }
}

template <class Lanes>
__global__ void AddKernel(Lanes lanes, DeferredBuffers buffers, const int64_t* __restrict__ indices,
                          const float* __restrict__ gradients, int64_t n,
                          float* __restrict__ sums) {
  for (int64_t i = lanes.first_row(); i < n; i += lanes.rows_of_grid()) {
    const int64_t p = indices[i];
    const auto* const gradient = lanes.Row(gradients, i);
    const auto* const before = lanes.Row(buffers.sums, p < 0 ? 0 : p);
    auto* const sum = lanes.Row(sums, i);
    for (int64_t j = lanes.lane(); j < lanes.width; j += lanes.num_lanes()) {
      sum[j] = Plus(gradient[j], p < 0 ? typename Lanes::Value{} : before[j]);
    }
  }
}

__global__ void CheckKernel(DeferredBuffers buffers, StepRows rows,
                            DeviceStepCounts* __restrict__ counts) {
  for (int64_t i = ThreadOfGrid(); i < rows.n; i += ThreadsOfGrid()) {
    const int64_t p = rows.indices[i];
    if (p == kNotDeferred) continue;
    if (p >= 0 && p < buffers.capacity && buffers.keys[p] == rows.keys[i]) continue;
    Max64(&counts->invalid_row, i + 1);
  }
}

// Decides about the rows, and frees the entries of due rows.
template <class Lanes>
__global__ void DecideKernel(Lanes lanes, DeferredBuffers buffers, DeferralRule rule, StepRows rows,
                             Workspace parts, DeviceStepCounts* __restrict__ counts) {
  for (int64_t r = ThreadOfGrid(); r < parts.max_due; r += ThreadsOfGrid()) {
    parts.keys[r] = kLastKey;
    parts.sources[r] = kNowhere;
  }
  if (counts->invalid_row != 0) {
    // The scan reads these numbers also if the rows are invalid, as the sort reads the keys.
    for (int64_t i = ThreadOfGrid(); i <= rows.n; i += ThreadsOfGrid()) parts.begins[i] = 0;
    return;
  }
  if (ThreadOfGrid() == 0) {
    parts.begins[rows.n] = 0;
    counts->offered = rows.n;
  }
  unsigned due_by_movement = 0, due_by_age = 0, stays = 0;
  for (int64_t i = lanes.first_row(); i < rows.n; i += lanes.rows_of_grid()) {
    // All lanes of a row read the same addresses, which is one read, and decide the same.
    const int64_t key = rows.keys[i], p = rows.indices[i];
    const bool is_deferred = p != kNotDeferred;
    const int64_t since = is_deferred ? buffers.since[p] : 0;
    const bool may_wait = key != DeferredBuffers::kFree &&
                          (rule.by_movement ? rows.may_wait[i] : rows.saturated.Contains(key));
    Decision decision = Decide(rule, is_deferred, since, may_wait);
    // Read the sum only if it would wait. A sum that is not finite never waits.
    if (!IsDue(decision)) {
      const auto* const sum = lanes.Row(rows.sums, i);
      bool is_finite = true;
      for (int64_t j = lanes.lane(); j < lanes.width; j += lanes.num_lanes()) {
        is_finite = is_finite && IsFinite(sum[j]);
      }
      if (__ballot_sync(lanes.mask(), !is_finite) != 0) {
        decision = Decide(rule, is_deferred, since, false);
      }
    }
    if (lanes.lane() != 0) continue;
    parts.decisions[i] = decision;
    parts.begins[i] = decision == Decision::kBegin ? 1 : 0;
    if (is_deferred && IsDue(decision)) buffers.keys[p] = DeferredBuffers::kFree;
    due_by_movement += decision == Decision::kDueByMovement;
    due_by_age += decision == Decision::kDueByAge;
    stays += decision == Decision::kStay;
  }
  AddOfBlock(due_by_movement, &counts->due_by_movement);
  AddOfBlock(due_by_age, &counts->due_by_age);
  AddOfBlock(stays, &counts->deferred);
}

// Lists and frees the entries that are due without a gradient, and counts the free entries.
__global__ void ListEntriesKernel(Tiles tiles, DeferredBuffers buffers, DeferralRule rule,
                                  int64_t n, Workspace parts,
                                  DeviceStepCounts* __restrict__ counts) {
  if (counts->invalid_row != 0) return;
  unsigned next_due = 0;
  for (int64_t tile = blockIdx.x; tile < tiles.number; tile += gridDim.x) {
    unsigned kept = 0;
    for (int64_t round = 0; round < tiles.rounds; ++round) {
      const int64_t p = tiles.Entry(tile, round);
      const int64_t key = p < tiles.capacity ? buffers.keys[p] : DeferredBuffers::kFree;
      bool is_deferred = key != DeferredBuffers::kFree;
      const int64_t since = is_deferred ? buffers.since[p] : 0;
      const bool is_due = is_deferred && IsDue(DecideWithoutGradient(rule, since));
      if (__syncthreads_count(is_due) > 0) {
        const int64_t r = AppendOfBlock(is_due, &parts.found->num_old);
        if (is_due && r < parts.max_due - n) {
          parts.keys[r] = key;
          parts.sources[r] = static_cast<int32_t>(n + p);
          buffers.keys[p] = DeferredBuffers::kFree;
          is_deferred = false;
        }
      }
      kept += is_deferred;
      next_due += is_deferred && rule.ExpiresNext(since);
    }
    const unsigned kept_in_tile = SumOfBlock(kept);
    if (threadIdx.x != 0) continue;
    parts.free_of_tile[tile] = static_cast<int32_t>(tiles.Size(tile) - kept_in_tile);
    if (kept_in_tile > 0) Add64(&parts.found->num_kept, kept_in_tile);
  }
  AddOfBlock(next_due, &counts->next_due);
}

// Lists the free entries that rows need.
__global__ void FreeEntriesKernel(Tiles tiles, DeferredBuffers buffers, DeferralRule rule,
                                  int64_t n, Workspace parts,
                                  const DeviceStepCounts* __restrict__ counts) {
  if (counts->invalid_row != 0) return;
  const int64_t begun = parts.NumBegun(rule, tiles.capacity, n);
  for (int64_t tile = blockIdx.x; tile < tiles.number; tile += gridDim.x) {
    unsigned free = 0;
    for (int64_t t = threadIdx.x; t < tile; t += blockDim.x) free += parts.free_of_tile[t];
    int64_t before = SumOfBlock(free);
    for (int64_t round = 0; round < tiles.rounds && before < begun; ++round) {
      const int64_t p = tiles.Entry(tile, round);
      const bool is_free = p < tiles.capacity && buffers.keys[p] == DeferredBuffers::kFree;
      const BlockRank rank = RankInBlock(is_free);
      if (is_free && before + rank.before < begun) {
        parts.free_entries[before + rank.before] = static_cast<int32_t>(p);
      }
      before += rank.total;
    }
  }
}

// Lists the rows that leave, and completes the counts except `sent`.
__global__ void ListRowsKernel(DeferredBuffers buffers, DeferralRule rule, StepRows rows,
                               Workspace parts, DeviceStepCounts* __restrict__ counts) {
  if (counts->invalid_row != 0) return;
  const int64_t begun = parts.NumBegun(rule, buffers.capacity, rows.n);
  const int64_t old = parts.NumOld(rows.n);
  if (ThreadOfGrid() == 0) {
    counts->deferred += begun;
    counts->over_budget = parts.begins[rows.n] - begun;
    counts->num_deferred = parts.found->num_kept + begun;
    counts->next_due += rule.ExpiresNext(rule.step) ? begun : 0;
    counts->without_gradient = old;
    (rule.flushes ? counts->flushed : counts->due_by_age) += old;
  }
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x;
  // All threads of a block make the same number of rounds, because they append together.
  for (int64_t begin = first; begin < rows.n; begin += ThreadsOfGrid()) {
    const int64_t i = begin + threadIdx.x;
    const Decision decision = i < rows.n ? parts.decisions[i] : Decision::kStay;
    const bool leaves =
        IsDue(decision) || (decision == Decision::kBegin && parts.begins[i] >= begun);
    const int64_t r = AppendOfBlock(leaves, &parts.found->num_rows);
    if (!leaves) continue;
    parts.keys[old + r] = rows.keys[i];
    parts.sources[old + r] = static_cast<int32_t>(i);
  }
}

template <class Lanes>
__global__ void WriteKernel(Lanes lanes, DeferredBuffers buffers, StepRows rows, Workspace parts,
                            int64_t* __restrict__ due_keys, float* __restrict__ due_sums,
                            DeviceStepCounts* __restrict__ counts) {
  if (counts->invalid_row != 0) return;
  const int64_t n = rows.n, sent = parts.NumOld(n) + parts.found->num_rows;
  if (ThreadOfGrid() == 0) counts->sent = sent;
  for (int64_t r = lanes.first_row(); r < sent; r += lanes.rows_of_grid()) {
    const int64_t source = parts.sorted_sources[r];
    const auto* const sum =
        source < n ? lanes.Row(rows.sums, source) : lanes.Row(buffers.sums, source - n);
    auto* const due = lanes.Row(due_sums, r);
    if (lanes.lane() == 0) due_keys[r] = parts.sorted_keys[r];
    for (int64_t j = lanes.lane(); j < lanes.width; j += lanes.num_lanes()) due[j] = sum[j];
  }
}

template <class Lanes>
__global__ void KeepKernel(Lanes lanes, DeferredBuffers buffers, DeferralRule rule, StepRows rows,
                           Workspace parts, const DeviceStepCounts* __restrict__ counts) {
  if (counts->invalid_row != 0) return;
  const int64_t begun = parts.NumBegun(rule, buffers.capacity, rows.n);
  for (int64_t i = lanes.first_row(); i < rows.n; i += lanes.rows_of_grid()) {
    const Decision decision = parts.decisions[i];
    if (IsDue(decision)) continue;
    int64_t p = rows.indices[i];
    if (decision == Decision::kBegin) {
      if (parts.begins[i] >= begun) continue;
      p = parts.free_entries[parts.begins[i]];
      if (lanes.lane() == 0) {
        buffers.keys[p] = rows.keys[i];
        buffers.since[p] = rule.step;
      }
    }
    const auto* const sum = lanes.Row(rows.sums, i);
    auto* const kept = lanes.Row(buffers.sums, p);
    for (int64_t j = lanes.lane(); j < lanes.width; j += lanes.num_lanes()) kept[j] = sum[j];
  }
}

int64_t NumBuckets(int64_t n) {
  int64_t number = 16;
  while (number < 2 * n) number *= 2;
  return number;
}

}  // namespace

cudaError_t AddDeferredWorkspaceBytes(int64_t n, size_t* bytes) {
  *bytes = static_cast<size_t>(NumBuckets(n)) * sizeof(int32_t);
  return n > kMaxDeferredRows ? cudaErrorInvalidValue : cudaSuccess;
}

cudaError_t TakeDueWorkspaceBytes(int64_t n, int64_t max_due, size_t* bytes) {
  Workspace workspace;
  const cudaError_t error = workspace.Layout(nullptr, n, max_due);
  *bytes = workspace.bytes;
  return error;
}

cudaError_t LaunchAddDeferred(cudaStream_t stream, const DeferredBuffers& buffers,
                              const int64_t* keys, const float* gradients, int64_t n,
                              const DeviceWorkspace& workspace, int64_t* indices, float* sums) {
  if (n > kMaxDeferredRows - buffers.capacity) return cudaErrorInvalidValue;
  const int64_t buckets = NumBuckets(n);
  const size_t bytes = static_cast<size_t>(buckets) * sizeof(int32_t);
  if (workspace.data == nullptr || bytes > workspace.bytes) return cudaErrorInvalidValue;
  if (n == 0) return cudaSuccess;
  const RowIndex index = {keys, static_cast<int32_t*>(workspace.data),
                          static_cast<uint64_t>(buckets) - 1, kHashSeed};
  // The byte 0xff makes kNowhere.
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(index.buckets, 0xff, bytes, stream));
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(Launch(stream, BlocksFor(n), IndexRowsKernel, index, n, indices));
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(
      Launch(stream, BlocksFor(buffers.capacity), FindEntriesKernel, buffers, index, indices));
  return WithRowLanes(buffers.dim, {buffers.sums, gradients, sums}, [&](const auto& lanes) {
    return Launch(stream, lanes.BlocksForRows(n), AddKernel<std::decay_t<decltype(lanes)>>, lanes,
                  buffers, indices, gradients, n, sums);
  });
}

cudaError_t LaunchTakeDue(cudaStream_t stream, const DeferredBuffers& buffers,
                          const DeferralRule& rule, const StepRows& rows, int64_t max_due,
                          const DeviceWorkspace& workspace, int64_t* due_keys, float* due_sums,
                          DeviceStepCounts* counts) {
  const int64_t n = rows.n, capacity = buffers.capacity;
  if (max_due > kMaxDeferredRows - capacity) return cudaErrorInvalidValue;
  Workspace parts;
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(parts.Layout(workspace.data, n, max_due));
  if (workspace.data == nullptr || parts.bytes > workspace.bytes) return cudaErrorInvalidValue;
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(counts, 0, sizeof(*counts), stream));
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(parts.found, 0, sizeof(Found), stream));
  const Tiles tiles(capacity);
  const auto blocks_of_tiles = static_cast<unsigned>(std::max<int64_t>(tiles.number, 1));
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(Launch(stream, BlocksFor(n), CheckKernel, buffers, rows, counts));
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(WithRowLanes(buffers.dim, {rows.sums}, [&](const auto& lanes) {
    return Launch(stream, lanes.BlocksForRows(n), DecideKernel<std::decay_t<decltype(lanes)>>,
                  lanes, buffers, rule, rows, parts, counts);
  }));
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(
      Launch(stream, blocks_of_tiles, ListEntriesKernel, tiles, buffers, rule, n, parts, counts));
  if (rule.MayDefer()) {
    SLIPSTREAM_RETURN_IF_CUDA_ERROR(
        LaunchScan(stream, parts.scratch, parts.scratch_bytes, n + 1, parts.begins));
    SLIPSTREAM_RETURN_IF_CUDA_ERROR(
        Launch(stream, blocks_of_tiles, FreeEntriesKernel, tiles, buffers, rule, n, parts, counts));
  }
  SLIPSTREAM_RETURN_IF_CUDA_ERROR(
      Launch(stream, BlocksFor(n), ListRowsKernel, buffers, rule, rows, parts, counts));
  if (max_due > 0) {
    SLIPSTREAM_RETURN_IF_CUDA_ERROR(LaunchSort(stream, parts.scratch, parts.scratch_bytes, max_due,
                                               parts.keys, parts.sources, parts.sorted_keys,
                                               parts.sorted_sources));
  }
  return WithRowLanes(buffers.dim, {buffers.sums, rows.sums, due_sums}, [&](const auto& lanes) {
    using Lanes = std::decay_t<decltype(lanes)>;
    SLIPSTREAM_RETURN_IF_CUDA_ERROR(Launch(stream, lanes.BlocksForRows(max_due), WriteKernel<Lanes>,
                                           lanes, buffers, rows, parts, due_keys, due_sums,
                                           counts));
    if (!rule.MayDefer()) return cudaSuccess;
    return Launch(stream, lanes.BlocksForRows(n), KeepKernel<Lanes>, lanes, buffers, rule, rows,
                  parts, counts);
  });
}

}  // namespace slipstream
