// CUDA launcher of the row compaction (see row_compaction.h).
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_COMPACTION_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_COMPACTION_CU_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cc_ops/core/containers/key_set.h"
#include "cc_ops/core/gpu/device_workspace.h"

namespace slipstream {

// Maximum number of rows of a launch.
constexpr int64_t kMaxCompactedRows = (int64_t{1} << 31) - 2;

struct CompactionCounts {
  int64_t kept;     // Number of rows written.
  int64_t offered;  // Rows before masking: n, or the number of distinct keys.
};

// Views of device memory. Key is int32_t or int64_t.
template <class Key>
struct CompactionInput {
  const Key* keys;    // [n]
  const float* rows;  // [n, dim], row-major
  int64_t n;
  int64_t dim;
  KeySetView masked;  // Keys to drop.
  // If true, rows of one key are summed as on the CPU, and keys ascend. If false, the input order
  // is kept.
  bool deduplicate;
};

// Stores in `bytes` the size of the device memory that LaunchCompactRows needs in addition to its
// results. Returns cudaErrorInvalidValue if n > kMaxCompactedRows, otherwise the error of cub's
// size query, which needs a device.
template <class Key>
cudaError_t CompactRowsWorkspaceBytes(int64_t n, int64_t dim, bool deduplicate, size_t* bytes);

// Enqueues the compaction on `stream` and returns immediately, without waiting for the device.
//
//   workspace             CompactRowsWorkspaceBytes<Key>(n, dim, deduplicate) bytes.
//   kept_keys, kept_rows  [n] and [n, dim]; the first counts->kept rows are written.
//   counts                One value in device memory.
//
// All pointers are to device memory that the caller owns and keeps until the stream has passed. The
// result has the CPU's bits (see DESIGN.md). Rows that are aligned to 16 bytes are read faster.
// Returns cudaErrorInvalidValue if n > kMaxCompactedRows or if the workspace is too small,
// otherwise the launch error. Runtime errors appear when the caller synchronizes.
template <class Key>
cudaError_t LaunchCompactRows(cudaStream_t stream, const CompactionInput<Key>& input,
                              const DeviceWorkspace& workspace, Key* kept_keys, float* kept_rows,
                              CompactionCounts* counts);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_COMPACTION_CU_H_
