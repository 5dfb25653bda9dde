// What the benchmark itself runs on the GPU.
#ifndef SLIPSTREAM_BENCHMARKS_GPU_KERNELS_H_
#define SLIPSTREAM_BENCHMARKS_GPU_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace slipstream {

// All enqueue on `stream`, return at once, and return the launch's error.

// Keeps the stream busy for so many clock cycles.
cudaError_t LaunchDelay(cudaStream_t stream, int64_t cycles);

// Fills values [n] with random bits.
cudaError_t LaunchFill(cudaStream_t stream, uint64_t* values, int64_t n);

// Reads values [n]; those of LaunchFill. Nothing is written: what the caches hold afterwards need
// not be written back.
cudaError_t LaunchRead(cudaStream_t stream, const uint64_t* values, int64_t n, uint64_t* never);

}  // namespace slipstream

#endif  // SLIPSTREAM_BENCHMARKS_GPU_KERNELS_H_
