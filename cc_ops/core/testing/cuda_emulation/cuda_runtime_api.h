// The part of CUDA's runtime API that this project uses, emulated on the CPU. See
// cuda_emulation.cc.
#ifndef SLIPSTREAM_CC_OPS_CORE_TESTING_CUDA_EMULATION_CUDA_RUNTIME_API_H_
#define SLIPSTREAM_CC_OPS_CORE_TESTING_CUDA_EMULATION_CUDA_RUNTIME_API_H_

#include <cstddef>
#include <functional>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorNotReady = 600,
  cudaErrorUnknown = 999,
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault,
};
enum { cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
enum cudaDeviceAttr { cudaDevAttrClockRate = 13, cudaDevAttrL2CacheSize = 38 };

struct CUstream_st;
struct CUevent_st;
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;

struct cudaDeviceProp {
  char name[256];
  size_t totalGlobalMem;
  int major, minor, multiProcessorCount, l2CacheSize;
};

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaDriverGetVersion(int* version);

cudaError_t cudaMalloc(void** data, size_t bytes);
cudaError_t cudaFree(void* data);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void* data, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream = nullptr);

cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);

cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop);

namespace slipstream::emulation {

// Sets the value of cudaGetLastError, unless it is cudaSuccess. Returns the error.
cudaError_t Report(cudaError_t error);

// Appends work to a stream. The default stream (null) waits for all others and runs it at once.
void Enqueue(cudaStream_t stream, std::function<void()> work);

// Enqueues work of CUB, which needs `needed` bytes of scratch memory. Without scratch memory it
// only returns their number in `bytes`.
cudaError_t EnqueueWithScratch(cudaStream_t stream, void* scratch, size_t needed, size_t* bytes,
                               std::function<void()> work);

}  // namespace slipstream::emulation

#endif  // SLIPSTREAM_CC_OPS_CORE_TESTING_CUDA_EMULATION_CUDA_RUNTIME_API_H_
