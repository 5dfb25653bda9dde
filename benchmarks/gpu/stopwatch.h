// Time that a GPU takes for a call, by CUDA events.
#ifndef SLIPSTREAM_BENCHMARKS_GPU_STOPWATCH_H_
#define SLIPSTREAM_BENCHMARKS_GPU_STOPWATCH_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "benchmarks/gpu/device.h"

namespace slipstream {

// One of those that take turns.
struct Contender {
  std::string name;
  // Enqueued before every call, outside the time; may be empty.
  std::function<void(cudaStream_t)> prepare;
  // Enqueues a call; allocates nothing and waits for nothing.
  std::function<void(cudaStream_t)> call;
};

// Owns a stream on the current device.
//
// Every call starts with a second-level cache that holds nothing of its data and nothing to write
// back: as much as twice the cache is read before. The stream is kept busy until the host has
// enqueued the whole call, so that the time is the GPU's, gaps between kernels included, not the
// host's. A call that the stream has begun before is made again, after a longer delay.
class Stopwatch {
 public:
  Stopwatch();
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch();

  cudaStream_t stream() const { return stream_; }

  // Waits for the stream; throws what went wrong in it.
  void Wait() const;

  // Lets contenders take turns (A B A B ...), after turns that are not counted.
  // Returns the seconds of each run, [contenders][runs].
  std::vector<std::vector<double>> TakeTurns(const std::vector<Contender>& contenders, int runs);

  // Seconds between two events with nothing in between: what every call's time has too much.
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
