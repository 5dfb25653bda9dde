#include "benchmarks/gpu/stopwatch.h"

#include <algorithm>
#include <stdexcept>

#include "benchmarks/gpu/kernels.h"

namespace slipstream {
namespace {

constexpr int kTurnsBefore = 3;
constexpr double kShortestDelay = 0.25, kLongestDelay = 64;  // Milliseconds.
constexpr int64_t kMinReadBefore = int64_t{64} << 20;        // Bytes.

int Attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  Check(cudaGetDevice(&device), "cudaGetDevice");
  Check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// Returns the length of the array that is read before each call: twice the L2 cache or 64 MiB.
int64_t ValuesReadBefore() {
  const int64_t cache = Attribute(cudaDevAttrL2CacheSize);
  return std::max(kMinReadBefore, 2 * cache) / static_cast<int64_t>(sizeof(uint64_t));
}

}  // namespace

Stopwatch::Stopwatch() : read_before_(ValuesReadBefore()), never_(1) {
  cycles_per_millisecond_ = Attribute(cudaDevAttrClockRate);  // kHz equals cycles per millisecond.
  Check(cudaStreamCreate(&stream_), "cudaStreamCreate");
  Check(cudaEventCreate(&start_), "cudaEventCreate");
  Check(cudaEventCreate(&stop_), "cudaEventCreate");
  Check(LaunchFill(stream_, read_before_.data(), read_before_.count()), "LaunchFill");
  Wait();
}

// A destructor cannot report errors.
Stopwatch::~Stopwatch() {
  cudaEventDestroy(stop_);
  cudaEventDestroy(start_);
  cudaStreamDestroy(stream_);
}

void Stopwatch::Wait() const { Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

double Stopwatch::Seconds(const Contender& contender) {
  for (double delay = kShortestDelay; delay <= kLongestDelay; delay *= 2) {
    if (contender.prepare) contender.prepare(stream_);
    Check(LaunchRead(stream_, read_before_.data(), read_before_.count(), never_.data()),
          "LaunchRead");
    const auto cycles = static_cast<int64_t>(delay * static_cast<double>(cycles_per_millisecond_));
    Check(LaunchDelay(stream_, cycles), "LaunchDelay");
    Check(cudaEventRecord(start_, stream_), "cudaEventRecord");
    contender.call(stream_);
    Check(cudaGetLastError(), contender.name);
    Check(cudaEventRecord(stop_, stream_), "cudaEventRecord");
    const cudaError_t begun = cudaEventQuery(start_);
    const bool is_in_time = begun == cudaErrorNotReady;
    if (is_in_time) {
      cudaGetLastError();  // Clear cudaErrorNotReady.
    } else {
      Check(begun, contender.name);
    }
    Check(cudaEventSynchronize(stop_), contender.name);
    if (!is_in_time) continue;
    float milliseconds = 0;
    Check(cudaEventElapsedTime(&milliseconds, start_, stop_), "cudaEventElapsedTime");
    return 1e-3 * static_cast<double>(milliseconds);
  }
  throw std::runtime_error(contender.name + ": the host does not enqueue it within " +
                           std::to_string(kLongestDelay) + " ms, or waits for the GPU");
}

std::vector<std::vector<double>> Stopwatch::TakeTurns(const std::vector<Contender>& contenders,
                                                      int runs) {
  std::vector<std::vector<double>> seconds(contenders.size());
  for (int run = -kTurnsBefore; run < runs; ++run) {
    for (size_t c = 0; c < contenders.size(); ++c) {
      const double of_run = Seconds(contenders[c]);
      if (run >= 0) seconds[c].push_back(of_run);
    }
  }
  return seconds;
}

double Stopwatch::EmptySeconds(int runs) {
  const Contender nothing = {"nothing", nullptr, [](cudaStream_t) {}};
  std::vector<double> seconds = TakeTurns({nothing}, runs)[0];
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

}  // namespace slipstream
