#include "benchmarks/gpu/bench.h"

#include <cstdio>
#include <exception>

#include "benchmarks/gpu/kernels.h"
#include "benchmarks/gpu/record.h"

namespace slipstream {

std::string WithCommas(int64_t number) {
  std::string text = std::to_string(number);
  for (int64_t at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<size_t>(at), ",");
  }
  return text;
}

std::string Shape(int64_t rows, int64_t dim) {
  return WithCommas(rows) + " x " + std::to_string(dim);
}

void Bench::Guard(const std::string& name, const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    has_failed_ = true;
    cudaGetLastError();  // The stopwatch checks the last error of the next case.
    Record("failure").Add("name", name).Add("error", std::string(error.what())).Print();
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what());
  }
}

void Bench::Measure(const LauncherCase& measured) {
  Guard(measured.name + ", " + measured.shape, [&] { MeasureChecked(measured); });
}

void Bench::MeasureChecked(const LauncherCase& measured) {
  const cudaStream_t stream = stopwatch_.stream();
  if (measured.prepare) measured.prepare(stream);
  measured.launch(stream);
  stopwatch_.Wait();
  measured.check();

  // A copy reads and writes each byte, therefore it moves `bytes` by copying half of them.
  const int64_t words = measured.bytes / 2 / static_cast<int64_t>(sizeof(uint64_t)) + 1;
  OnDevice<uint64_t> source(words), target(words);
  Check(LaunchFill(stream, source.data(), words), "LaunchFill");
  const auto copied = static_cast<size_t>(measured.bytes / 2);
  const Contender launcher = {measured.name, measured.prepare, measured.launch};
  const Contender copy = {
      "copy", nullptr, [&](cudaStream_t on) {
        Check(cudaMemcpyAsync(target.data(), source.data(), copied, cudaMemcpyDeviceToDevice, on),
              "cudaMemcpyAsync");
      }};
  const std::vector<std::vector<double>> seconds = stopwatch_.TakeTurns({launcher, copy}, runs_);
  Record("launcher")
      .Add("name", measured.name)
      .Add("shape", measured.shape)
      .Add("counted", measured.counted)
      .Add("bytes", measured.bytes)
      .Add("has_target", measured.has_target)
      .Add("seconds", seconds[0])
      .Add("copy_seconds", seconds[1])
      .Print();
}

}  // namespace slipstream
