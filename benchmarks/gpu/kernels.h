// Kernels of the benchmark itself.
#ifndef SLIPSTREAM_BENCHMARKS_GPU_KERNELS_H_
#define SLIPSTREAM_BENCHMARKS_GPU_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace slipstream {

// All functions enqueue a kernel on `stream`, return immediately, and return the launch error.

// Keeps the stream busy for this number of clock cycles.
cudaError_t LaunchDelay(cudaStream_t stream, int64_t cycles);

// Fills values [n] with random bits. No value is 0.
cudaError_t LaunchFill(cudaStream_t stream, uint64_t* values, int64_t n);

// Reads values [n] that LaunchFill wrote. Writes no memory, so that the caches contain no modified
// lines afterwards. `never` must point to one value and is not written.
cudaError_t LaunchRead(cudaStream_t stream, const uint64_t* values, int64_t n, uint64_t* never);

}  // namespace slipstream

#endif  // SLIPSTREAM_BENCHMARKS_GPU_KERNELS_H_
