// Measures the CUDA launchers on the current GPU; compiled and run by gpu_launchers.py.
//
//   gpu_launchers RUNS quick|full
//
// Prints one JSON object per line to standard output: the device, then every case. A failed case
// prints its error, and the next case runs. Each topic runs in a new process, because a crash or
// an error of the device also stops the following cases of its process. The exit code is 3 without
// a GPU and 1 if a case failed.
#include <cuda_runtime_api.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "benchmarks/gpu/bench.h"
#include "benchmarks/gpu/device.h"
#include "benchmarks/gpu/record.h"

namespace slipstream {
namespace {

constexpr int kNoGpu = 3, kFailure = 1;
constexpr unsigned kMaxSeconds = 100;  // Per topic.

struct Topic {
  const char* name;
  void (*measure)(Bench*);
};

// Formats a CUDA version number, for example 12080 as "12.8".
std::string VersionText(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void PrintDevice(Bench* bench) {
  int device = 0, runtime = 0, driver = 0;
  cudaDeviceProp properties;
  Check(cudaGetDevice(&device), "cudaGetDevice");
  Check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  Check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  Check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  Record("device")
      .Add("name", properties.name)
      .Add("compute_capability",
           std::to_string(properties.major) + "." + std::to_string(properties.minor))
      .Add("multiprocessors", static_cast<int64_t>(properties.multiProcessorCount))
      .Add("memory_bytes", static_cast<int64_t>(properties.totalGlobalMem))
      .Add("l2_bytes", static_cast<int64_t>(properties.l2CacheSize))
      .Add("cuda_runtime", VersionText(runtime))
      .Add("cuda_of_driver", VersionText(driver))
      .Add("empty_seconds", bench->stopwatch().EmptySeconds(bench->runs()))
      .Print();
}

// Returns the exit code.
int Measure(const Topic& topic, int runs, bool is_quick) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
    return kNoGpu;
  }
  Bench bench(runs, is_quick);
  bench.Guard(topic.name, [&] { topic.measure(&bench); });
  return bench.has_failed() ? kFailure : 0;
}

// Measures a topic in a new process. This process must not use CUDA, which does not work after a
// fork. Returns the exit code.
int MeasureApart(const Topic& topic, int runs, bool is_quick) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kMaxSeconds);
    const int code = Measure(topic, runs, is_quick);
    std::fflush(nullptr);
    _exit(code);
  }
  int status = 0;
  const bool has_ended = child > 0 && waitpid(child, &status, 0) == child;
  if (has_ended && WIFEXITED(status)) return WEXITSTATUS(status);
  std::string problem = "its process could not run";
  if (has_ended) problem = "its process was ended by signal " + std::to_string(WTERMSIG(status));
  Record("failure").Add("name", topic.name).Add("error", problem).Print();
  return kFailure;
}

int Main(int runs, bool is_quick) {
  int exit_code = 0;
  for (const Topic& topic : std::vector<Topic>{{"device", PrintDevice},
                                               {"drift", MeasureDrift},
                                               {"compaction", MeasureCompaction},
                                               {"classification", MeasureClassification},
                                               {"deferred gradients", MeasureDeferredGradients},
                                               {"access sketch", MeasureAccessSketch}}) {
    const int code = MeasureApart(topic, runs, is_quick);
    if (code == kNoGpu) return code;
    if (code != 0) exit_code = kFailure;
  }
  return exit_code;
}

}  // namespace
}  // namespace slipstream

int main(int argc, char** argv) {
  const std::string size = argc == 3 ? argv[2] : "";
  const int runs = argc == 3 ? std::atoi(argv[1]) : 0;
  if (runs < 1 || (size != "quick" && size != "full")) {
    std::fprintf(stderr, "usage: gpu_launchers RUNS quick|full\n");
    return 2;
  }
  return slipstream::Main(runs, size == "quick");
}
