// CUDA launcher of the row compaction (see row_compaction.h): raw device pointers and a stream.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_COMPACTION_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_COMPACTION_CU_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cc_ops/core/containers/key_set.h"
#include "cc_ops/core/gpu/device_workspace.h"

namespace slipstream {

// Most rows of one launch.
constexpr int64_t kMaxCompactedRows = (int64_t{1} << 31) - 1;

struct CompactionCounts {
  int64_t kept;     // rows written
  int64_t offered;  // rows before masking: n, or the number of different keys
};

// Views of device memory. Key is int32_t or int64_t.
template <class Key>
struct CompactionInput {
  const Key* keys;    // [n]
  const float* rows;  // [n, dim], row-major
  int64_t n;
  int64_t dim;
  KeySetView masked;  // the keys to leave out
  bool deduplicate;   // false: the order of the input is kept; true: rows of one key are summed in
                      // the order of the input, and keys ascend
};

// Bytes of device memory that LaunchCompactRows needs beside its results. Returns the error of
// cub's size query, which needs a device.
template <class Key>
cudaError_t CompactRowsWorkspaceBytes(int64_t n, bool deduplicate, size_t* bytes);

// Enqueues the compaction on `stream`; returns at once and never waits for the device.
//
//   workspace             CompactRowsWorkspaceBytes<Key>(n, deduplicate) bytes.
//   kept_keys, kept_rows  [n] and [n, dim]; the first counts->kept rows are written.
//   counts                one value in device memory.
//
// All pointers are to device memory that the caller owns and keeps until the stream has passed.
// Equals the CPU's result bit for bit. cudaErrorInvalidValue if n > kMaxCompactedRows or the
// workspace is too small; otherwise the launches' error. Errors while running appear when the
// caller synchronizes.
template <class Key>
cudaError_t LaunchCompactRows(cudaStream_t stream, const CompactionInput<Key>& input,
                              const DeviceWorkspace& workspace, Key* kept_keys, float* kept_rows,
                              CompactionCounts* counts);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_COMPACTION_CU_H_
