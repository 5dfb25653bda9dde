// C functions that call the CUDA launchers, for Python programs that own the device memory.
//
// Pointers refer to device memory, except for parameters with names that start with "host_".
// Functions with a `stream` enqueue work and return a cudaError_t immediately. Key sets are built
// on the host, and the caller copies their entries to the device.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "cc_ops/core/containers/key_set.h"
#include "cc_ops/core/deferral/deferred_buffers.cu.h"
#include "cc_ops/core/saturation/drift.cu.h"
#include "cc_ops/core/update/row_compaction.cu.h"

#define SLIPSTREAM_C_API extern "C" __attribute__((visibility("default")))

namespace slipstream {

// Fields of a KeySetView. `entries` is on the host or on the device.
struct KeyTable {
  const void* entries;
  int64_t bytes;
  int64_t capacity;
  uint64_t seed;
  int64_t has_free_key;
};

SLIPSTREAM_C_API KeySet* slipstream_new_key_set(const int64_t* host_keys, int64_t n) {
  auto set = std::make_unique<KeySet>();
  return set->Build(host_keys, n).ok() ? set.release() : nullptr;
}

SLIPSTREAM_C_API void slipstream_view_key_set(const KeySet* set, KeyTable* host_table) {
  const KeySetView view = set->view();
  *host_table = {view.entries, view.bytes(), view.capacity, view.seed, view.has_free_key};
}

SLIPSTREAM_C_API void slipstream_delete_key_set(KeySet* set) { delete set; }

// Writes the linf drift of each row to `drift` [rows].
SLIPSTREAM_C_API int slipstream_row_drift(cudaStream_t stream, const float* current,
                                          const float* snapshot, int64_t rows, int64_t dim,
                                          float* drift) {
  return LaunchRowDrift(stream, current, snapshot, rows, dim, DriftMetric::kLinf, drift);
}

// Returns the size of the workspace in bytes, or -1 after an error.
SLIPSTREAM_C_API int64_t slipstream_compaction_workspace(int64_t n, int64_t dim, int deduplicate) {
  size_t bytes = 0;
  const cudaError_t error = CompactRowsWorkspaceBytes<int64_t>(n, dim, deduplicate != 0, &bytes);
  return error == cudaSuccess ? static_cast<int64_t>(bytes) : -1;
}

// Writes the numbers of kept and of offered rows to `counts`, int64 [2].
SLIPSTREAM_C_API int slipstream_compact_rows(cudaStream_t stream, const int64_t* keys,
                                             const float* rows, int64_t n, int64_t dim,
                                             const KeyTable* host_masked, int deduplicate,
                                             void* workspace, int64_t bytes, int64_t* kept_keys,
                                             float* kept_rows, int64_t* counts) {
  KeySetView masked;
  masked.entries = static_cast<const KeySetEntry*>(host_masked->entries);
  masked.capacity = host_masked->capacity;
  masked.seed = host_masked->seed;
  masked.has_free_key = host_masked->has_free_key != 0;
  const CompactionInput<int64_t> input = {keys, rows, n, dim, masked, deduplicate != 0};
  return LaunchCompactRows(stream, input, {workspace, static_cast<size_t>(bytes)}, kept_keys,
                           kept_rows, reinterpret_cast<CompactionCounts*>(counts));
}

// Return the size of the workspace in bytes, or -1 after an error.
SLIPSTREAM_C_API int64_t slipstream_add_deferred_workspace(int64_t n) {
  size_t bytes = 0;
  const cudaError_t error = AddDeferredWorkspaceBytes(n, &bytes);
  return error == cudaSuccess ? static_cast<int64_t>(bytes) : -1;
}
SLIPSTREAM_C_API int64_t slipstream_take_due_workspace(int64_t n, int64_t max_due) {
  size_t bytes = 0;
  const cudaError_t error = TakeDueWorkspaceBytes(n, max_due, &bytes);
  return error == cudaSuccess ? static_cast<int64_t>(bytes) : -1;
}

// Returns the number of int64 values in a DeviceStepCounts.
SLIPSTREAM_C_API int64_t slipstream_deferral_counts() {
  return sizeof(DeviceStepCounts) / sizeof(int64_t);
}

SLIPSTREAM_C_API int slipstream_add_deferred(cudaStream_t stream,
                                             const DeferredBuffers* host_buffers,
                                             const int64_t* keys, const float* gradients, int64_t n,
                                             void* workspace, int64_t bytes, int64_t* indices,
                                             float* sums) {
  return LaunchAddDeferred(stream, *host_buffers, keys, gradients, n,
                           {workspace, static_cast<size_t>(bytes)}, indices, sums);
}

SLIPSTREAM_C_API int slipstream_take_due(cudaStream_t stream, const DeferredBuffers* host_buffers,
                                         int64_t step, int64_t max_age, const int64_t* keys,
                                         int64_t n, const int64_t* indices, const float* sums,
                                         const bool* may_wait, int64_t max_due, void* workspace,
                                         int64_t bytes, int64_t* due_keys, float* due_sums,
                                         int64_t* counts) {
  const DeferralRule rule = {step, max_age, host_buffers->capacity, true, false, true};
  return LaunchTakeDue(stream, *host_buffers, rule,
                       {keys, n, indices, sums, may_wait, KeySetView()}, max_due,
                       {workspace, static_cast<size_t>(bytes)}, due_keys, due_sums,
                       reinterpret_cast<DeviceStepCounts*>(counts));
}

}  // namespace slipstream
