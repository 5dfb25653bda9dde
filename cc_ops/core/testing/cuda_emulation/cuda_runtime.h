// The part of CUDA C++ that this project's kernels use, emulated on the CPU. See cuda_emulation.cc.
#ifndef SLIPSTREAM_CC_OPS_CORE_TESTING_CUDA_EMULATION_CUDA_RUNTIME_H_
#define SLIPSTREAM_CC_OPS_CORE_TESTING_CUDA_EMULATION_CUDA_RUNTIME_H_

#include <math.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cc_ops/core/testing/cuda_emulation/cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
// Blocks run one after the other, therefore all of them can use the same memory. ThreadSanitizer
// would report that; there each block has a host thread. The TLS model avoids allocations by the
// loader in shared libraries.
#ifdef __SANITIZE_THREAD__
#define __shared__ [[gnu::tls_model("initial-exec")]] static thread_local
#else
#define __shared__ static
#endif

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

extern __thread uint3 threadIdx, blockIdx, blockDim, gridDim;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

namespace slipstream::emulation {

// A line of the source, for messages. As a default argument Here() is the caller's line.
struct Line {
  const char* file = "";
  int number = 0;
};
constexpr Line Here(const char* file = __builtin_FILE(), int number = __builtin_LINE()) {
  return {file, number};
}

// A call of a collective. Threads that wait for each other must wait in the same one.
struct Call {
  const char* function = "";
  Line line;
};

// Each thread of the grid calls `thread`.
cudaError_t Launch(const cudaLaunchConfig_t& config, std::function<void()> thread);

// Waits until all lanes in `mask` have arrived. Returns their values by lane.
const uint64_t* MeetWarp(const Call& call, unsigned mask, uint64_t value, bool orders_memory);

// Waits until all threads of the block have arrived. Returns the sum of their values.
int MeetBlock(const Call& call, int value);

// Lets other threads of the block run, now and then.
void Interleave();

[[noreturn]] void FailRead(const Call& call, unsigned mask, unsigned lane);

// Returns the value of `lane`.
template <class T>
T ReadLane(const Call& call, unsigned mask, T value, unsigned lane) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = MeetWarp(call, mask, bits, false)[lane];
  if ((mask >> lane & 1) == 0) FailRead(call, mask, lane);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class Combine>
unsigned ReduceLanes(const Call& call, unsigned mask, unsigned value, const Combine& combine) {
  const uint64_t* const values = MeetWarp(call, mask, value, false);
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1) != 0 && lane != threadIdx.x % 32) {
      value = combine(value, static_cast<unsigned>(values[lane]));
    }
  }
  return value;
}

// nvcc has atomics for these types only.
template <class T>
constexpr bool kIsAtomic =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> ||
    std::is_same_v<T, unsigned long long> || std::is_same_v<T, float> || std::is_same_v<T, double>;

// Replaces a value by function(value). Returns the former value.
template <class T, class Function>
T Modify(T* at, const Function& function) {
  static_assert(kIsAtomic<T>);
  Interleave();
  T before;
  __atomic_load(at, &before, __ATOMIC_RELAXED);
  for (;;) {
    T after = function(before);
    if (__atomic_compare_exchange(at, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      return before;
    }
  }
}

template <class To, class From>
To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

}  // namespace slipstream::emulation

// The arguments are converted to the types of the parameters, as CUDA does.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const std::tuple<Parameters...> values(std::forward<Arguments>(arguments)...);
  return slipstream::emulation::Launch(*config, [=] { std::apply(kernel, values); });
}

// The compiler evaluates the last argument of each call at the call.
#define SLIPSTREAM_LINE ::slipstream::emulation::Line line = ::slipstream::emulation::Here()

inline void __syncthreads(SLIPSTREAM_LINE) {
  slipstream::emulation::MeetBlock({__func__, line}, 0);
}
inline int __syncthreads_count(int predicate, SLIPSTREAM_LINE) {
  return slipstream::emulation::MeetBlock({__func__, line}, predicate != 0 ? 1 : 0);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, SLIPSTREAM_LINE) {
  slipstream::emulation::MeetWarp({__func__, line}, mask, 0, true);
}

// bits: less than the number of lanes.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned bits, SLIPSTREAM_LINE) {
  return slipstream::emulation::ReadLane({__func__, line}, mask, value, threadIdx.x % 32 ^ bits);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, SLIPSTREAM_LINE) {
  return slipstream::emulation::ReduceLanes({__func__, line}, mask, value, std::plus<unsigned>());
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, SLIPSTREAM_LINE) {
  const auto larger = [](unsigned a, unsigned b) { return a > b ? a : b; };
  return slipstream::emulation::ReduceLanes({__func__, line}, mask, value, larger);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SLIPSTREAM_LINE) {
  const unsigned own = predicate != 0 ? 1u << threadIdx.x % 32 : 0;
  return slipstream::emulation::ReduceLanes({__func__, line}, mask, own, std::bit_or<unsigned>());
}
#undef SLIPSTREAM_LINE

// The type of `value` is the type of the target, as in CUDA's overloads.
template <class T>
T atomicAdd(T* at, std::common_type_t<T> value) {
  return slipstream::emulation::Modify(at, [=](T before) { return before + value; });
}
template <class T>
T atomicMax(T* at, std::common_type_t<T> value) {
  return slipstream::emulation::Modify(at, [=](T before) { return std::max(before, value); });
}
template <class T>
T atomicCAS(T* at, std::common_type_t<T> expected, std::common_type_t<T> desired) {
  return slipstream::emulation::Modify(
      at, [=](T before) { return before == expected ? desired : before; });
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __float_as_uint(float f) { return slipstream::emulation::BitCast<unsigned>(f); }
inline float __uint_as_float(unsigned u) { return slipstream::emulation::BitCast<float>(u); }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long max(long a, long b) { return a > b ? a : b; }
inline long min(long a, long b) { return a < b ? a : b; }
// In nanoseconds: cudaDevAttrClockRate is 1 GHz.
inline long long clock64() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

#endif  // SLIPSTREAM_CC_OPS_CORE_TESTING_CUDA_EMULATION_CUDA_RUNTIME_H_
