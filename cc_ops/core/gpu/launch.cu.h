// Launches, grid sizes, workspaces and 64-bit atomics of the CUDA launchers. Include it in .cu.cc
// files only.
#ifndef SLIPSTREAM_CC_OPS_CORE_GPU_LAUNCH_CU_H_
#define SLIPSTREAM_CC_OPS_CORE_GPU_LAUNCH_CU_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace slipstream {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;  // The mask of a whole warp.
constexpr int kThreadsPerBlock = 256;
constexpr int64_t kMaxBlocks = 65535;

// Returns the number of blocks of kThreadsPerBlock for `threads` threads; never 0, which is an
// invalid launch. Kernels loop if there are more items than threads.
inline unsigned BlocksFor(int64_t threads) {
  return static_cast<unsigned>(
      std::clamp<int64_t>((threads + kThreadsPerBlock - 1) / kThreadsPerBlock, 1, kMaxBlocks));
}

// Returns from the calling function if `call` returns an error.
#define SLIPSTREAM_RETURN_IF_CUDA_ERROR(call) \
  if (const cudaError_t error = (call); error != cudaSuccess) return error

// Launches `kernel` on `stream` with `blocks` blocks of kThreadsPerBlock threads. The arguments are
// converted to the types of the kernel's parameters. Returns the launch error.
template <class... Parameters, class... Arguments>
[[nodiscard]] cudaError_t Launch(cudaStream_t stream, unsigned blocks,
                                 void (*kernel)(Parameters...), const Arguments&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreadsPerBlock);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Returns the number of this thread in the grid, and the number of threads in the grid.
__device__ inline int64_t ThreadOfGrid() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline int64_t ThreadsOfGrid() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// CUDA's 64-bit atomics are for unsigned long long, which is neither int64_t nor uint64_t.
template <class T>
__device__ unsigned long long* Unsigned(T* at) {
  static_assert(std::is_same_v<T, int64_t> || std::is_same_v<T, uint64_t>);
  return reinterpret_cast<unsigned long long*>(at);
}

// Adds a number atomically. Returns the value before.
__device__ inline int64_t Add64(int64_t* at, int64_t number) {
  return static_cast<int64_t>(atomicAdd(Unsigned(at), static_cast<unsigned long long>(number)));
}

// Replaces a value atomically by `value` if that is larger. Values must not be negative.
template <class T>
__device__ void Max64(T* at, T value) {
  atomicMax(Unsigned(at), static_cast<unsigned long long>(value));
}

// Divides a workspace into consecutive parts. Without a workspace it only adds up their sizes,
// which gives the size of the workspace to allocate.
class WorkspaceParts {
 public:
  // base: aligned to 256 bytes, or null.
  explicit WorkspaceParts(void* base) : base_(static_cast<char*>(base)) {}

  // Returns the next part, with room for `count` values and aligned to 256 bytes; null without a
  // workspace.
  template <class T>
  T* Take(int64_t count) {
    char* const part = base_ == nullptr ? nullptr : base_ + bytes_;
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(part);
  }

  // Bytes of all parts so far.
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kAlignment = 256;

  char* base_;
  size_t bytes_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_GPU_LAUNCH_CU_H_
