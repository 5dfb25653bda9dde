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
#define __forceinline__ inline
#define __launch_bounds__(...)
// Blocks run one after the other, therefore all of them can use the same memory.
#define __shared__ static

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
struct alignas(16) longlong2 {
  long long x, y;
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

// Each thread of the grid calls `thread`.
cudaError_t Launch(const cudaLaunchConfig_t& config, std::function<void()> thread);

// Waits until all lanes in `mask` have arrived. Returns their values by lane.
const uint64_t* MeetWarp(unsigned mask, uint64_t value, bool orders_memory, Line line);

// Waits until all threads of the block have arrived. Returns the sum of their values.
int MeetBlock(int value, Line line);

// Lets other threads of the block run, now and then.
void Interleave();

[[noreturn]] void FailRead(unsigned mask, unsigned lane, Line line);

// Returns the value of `lane`, or the own value if it is not between `first` and `last`.
template <class T>
T ReadLane(unsigned mask, T value, unsigned lane, unsigned first, unsigned last, Line line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  if (lane < first || lane > last) lane = threadIdx.x % 32;
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = MeetWarp(mask, bits, false, line)[lane];
  if ((mask >> lane & 1) == 0) FailRead(mask, lane, line);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class Combine>
unsigned ReduceLanes(unsigned mask, unsigned value, const Combine& combine, Line line) {
  const uint64_t* const values = MeetWarp(mask, value, false, line);
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

// Replaces a value by `function` of it. Returns the value before.
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

inline void __syncthreads(SLIPSTREAM_LINE) { slipstream::emulation::MeetBlock(0, line); }
inline int __syncthreads_count(int predicate, SLIPSTREAM_LINE) {
  return slipstream::emulation::MeetBlock(predicate != 0 ? 1 : 0, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, SLIPSTREAM_LINE) {
  slipstream::emulation::MeetWarp(mask, 0, true, line);
}

// width: a power of two; lanes exchange values within groups of this size.
template <class T>
T __shfl_sync(unsigned mask, T value, unsigned source, unsigned width = 32, SLIPSTREAM_LINE) {
  const unsigned first = threadIdx.x % 32 / width * width;
  return slipstream::emulation::ReadLane(mask, value, first + source % width, 0, 31, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, unsigned width = 32, SLIPSTREAM_LINE) {
  const unsigned lane = threadIdx.x % 32, first = lane / width * width;
  return slipstream::emulation::ReadLane(mask, value, lane + delta, first, first + width - 1, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned bits, unsigned width = 32, SLIPSTREAM_LINE) {
  const unsigned lane = threadIdx.x % 32, last = lane / width * width + width - 1;
  return slipstream::emulation::ReadLane(mask, value, lane ^ bits, 0, last, line);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, SLIPSTREAM_LINE) {
  return slipstream::emulation::ReduceLanes(mask, value, std::plus<unsigned>(), line);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, SLIPSTREAM_LINE) {
  const auto larger = [](unsigned a, unsigned b) { return a > b ? a : b; };
  return slipstream::emulation::ReduceLanes(mask, value, larger, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SLIPSTREAM_LINE) {
  const unsigned own = predicate != 0 ? 1u << threadIdx.x % 32 : 0;
  return slipstream::emulation::ReduceLanes(mask, own, std::bit_or<unsigned>(), line);
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
T atomicOr(T* at, std::common_type_t<T> value) {
  return slipstream::emulation::Modify(at, [=](T before) { return before | value; });
}
template <class T>
T atomicExch(T* at, std::common_type_t<T> value) {
  return slipstream::emulation::Modify(at, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* at, std::common_type_t<T> expected, std::common_type_t<T> desired) {
  return slipstream::emulation::Modify(
      at, [=](T before) { return before == expected ? desired : before; });
}

template <class T>
T __ldg(const T* at) {
  return *at;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline unsigned __float_as_uint(float f) { return slipstream::emulation::BitCast<unsigned>(f); }
inline float __uint_as_float(unsigned u) { return slipstream::emulation::BitCast<float>(u); }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline long max(long a, long b) { return a > b ? a : b; }
inline long min(long a, long b) { return a < b ? a : b; }
// In nanoseconds: cudaDevAttrClockRate is 1 GHz.
inline long long clock64() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

#endif  // SLIPSTREAM_CC_OPS_CORE_TESTING_CUDA_EMULATION_CUDA_RUNTIME_H_
