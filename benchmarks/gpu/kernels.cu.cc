#include "benchmarks/gpu/kernels.h"

#include <cuda_runtime.h>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/gpu/launch.cu.h"

namespace slipstream {
namespace {

__global__ void DelayKernel(int64_t cycles) {
  if (threadIdx.x > 0) return;
  const int64_t begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

__global__ void FillKernel(uint64_t* __restrict__ values, int64_t n) {
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    values[i] = Mix64(static_cast<uint64_t>(i)) | 1;
  }
}

// Reads all values. The write to `never` keeps the compiler from removing the reads. It does not
// happen, because FillKernel writes no zeros.
__global__ void ReadKernel(const uint64_t* __restrict__ values, int64_t n, uint64_t* never) {
  bool is_zero = false;
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) is_zero |= values[i] == 0;
  if (is_zero) *never = 1;
}

}  // namespace

cudaError_t LaunchDelay(cudaStream_t stream, int64_t cycles) {
  return Launch(stream, 1, DelayKernel, cycles);
}

cudaError_t LaunchFill(cudaStream_t stream, uint64_t* values, int64_t n) {
  return Launch(stream, BlocksFor(n), FillKernel, values, n);
}

cudaError_t LaunchRead(cudaStream_t stream, const uint64_t* values, int64_t n, uint64_t* never) {
  return Launch(stream, BlocksFor(n), ReadKernel, values, n, never);
}

}  // namespace slipstream
