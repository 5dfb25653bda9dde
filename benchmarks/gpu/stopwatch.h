// Measures the time of calls on a GPU with CUDA events.
#ifndef SLIPSTREAM_BENCHMARKS_GPU_STOPWATCH_H_
#define SLIPSTREAM_BENCHMARKS_GPU_STOPWATCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "benchmarks/gpu/device.h"

namespace slipstream {

// A call to measure in turns with others.
struct Contender {
  std::string name;
  // Enqueues work before every call, outside the measured time. May be empty.
  std::function<void(cudaStream_t)> prepare;
  // Enqueues the call. Must not allocate memory or synchronize.
  std::function<void(cudaStream_t)> call;
};

// Measures calls on its own stream of the current device.
//
// Each call starts with a cold L2 cache without modified lines, because an array of twice the cache
// size is read before. A delay kernel keeps the stream busy until the host has enqueued the whole
// call. The result is therefore the time of the GPU, including gaps between kernels, and excludes
// the host. If the stream starts a call too early, the call is repeated with a longer delay.
class Stopwatch {
 public:
  Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch();

  cudaStream_t stream() const { return stream_; }

  // Waits for the stream. Throws if a kernel in it failed.
  void Wait() const;

  // Measures contenders in turns (A B A B ...), after some turns that are not counted.
  // Returns the seconds of each call, [contenders][runs].
  std::vector<std::vector<double>> TakeTurns(const std::vector<Contender>& contenders, int runs);

  // Returns the median seconds between two adjacent events. Every measured time includes this
  // overhead.
  double EmptySeconds(int runs);

 private:
  double Seconds(const Contender& contender);

  cudaStream_t stream_ = nullptr;
  cudaEvent_t start_ = nullptr, stop_ = nullptr;
  int64_t cycles_per_millisecond_ = 0;
  OnDevice<uint64_t> read_before_;
  OnDevice<uint64_t> never_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_BENCHMARKS_GPU_STOPWATCH_H_
