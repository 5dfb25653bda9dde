// Marks small functions that CPU code and CUDA kernels share.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_HOST_DEVICE_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_HOST_DEVICE_H_

#ifdef __CUDACC__
#define SLIPSTREAM_HOST_DEVICE __host__ __device__
#else
#define SLIPSTREAM_HOST_DEVICE
#endif

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_HOST_DEVICE_H_
