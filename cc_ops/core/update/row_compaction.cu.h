// CUDA launcher of the row compaction (see row_compaction.h): raw device pointers and a stream.
#ifndef SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_COMPACTION_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_COMPACTION_CU_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cc_ops/core/containers/key_set.h"

namespace slipstream {

// Most rows of one launch.
constexpr int64_t kMaxCompactedRows = (int64_t{1} << 31) - 1;

struct CompactionCounts {
  int64_t kept;     // rows written
  int64_t offered;  // rows before masking: n, or the number of different keys
};

// Bytes of device memory that LaunchCompactRows needs beside its results. Key is int32_t or
// int64_t. Returns the error of cub's size query, which needs a device.
template <class Key>
cudaError_t CompactRowsWorkspaceBytes(int64_t n, bool deduplicate, size_t* bytes);

// Enqueues the compaction on `stream`; returns at once and never waits for the device.
//
//   keys, rows            [n] and [n, dim], row-major.
//   masked                the keys to leave out; its slots are in device memory too.
//   deduplicate           false: the order of the input is kept; true: rows of one key are summed
//                         in the order of the input, and keys ascend.
//   workspace             CompactRowsWorkspaceBytes<Key>(n, deduplicate) bytes, 256-byte aligned.
//   kept_keys, kept_rows  [n] and [n, dim]; the first counts->kept rows are written.
//   counts                one value in device memory.
//
// All pointers are to device memory that the caller owns and keeps until the stream has passed.
// Equals the CPU's result bit for bit. cudaErrorInvalidValue if n > kMaxCompactedRows or the
// workspace is too small; otherwise the launches' error. Errors while running appear when the
// caller synchronizes.
template <class Key>
cudaError_t LaunchCompactRows(cudaStream_t stream, const Key* keys, const float* rows, int64_t n,
                              int64_t dim, const KeySetView& masked, bool deduplicate,
                              void* workspace, size_t workspace_bytes, Key* kept_keys,
                              float* kept_rows, CompactionCounts* counts);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_UPDATE_ROW_COMPACTION_CU_H_
