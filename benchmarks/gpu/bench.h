// Measures a launcher beside a device-to-device copy that moves as many bytes.
#ifndef SLIPSTREAM_BENCHMARKS_GPU_BENCH_H_
#define SLIPSTREAM_BENCHMARKS_GPU_BENCH_H_

#include <cstdint>
#include <cstring>
#include <functional>
#include <iomanip>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/gpu/device.h"
#include "benchmarks/gpu/stopwatch.h"
#include "cc_ops/core/base/hash.h"

namespace slipstream {

// One launcher on one input.
struct LauncherCase {
  std::string name;
  std::string shape;    // of its input, for the table
  std::string counted;  // what `bytes` is made of
  // Read and written: every input that is needed once, every output once. Scratch memory and what
  // is read a second time are left out.
  int64_t bytes;
  // Whether it streams: it is to reach 80% of the copy.
  bool has_target;
  // Restores what the launcher changes; outside the time. May be empty.
  std::function<void(cudaStream_t)> prepare;
  std::function<void(cudaStream_t)> launch;
  // Called once the launcher has run; throws if a result is not the CPU's.
  std::function<void()> check;
};

class Bench {
 public:
  // is_quick: small inputs, to see that it runs; the numbers mean nothing.
  Bench(int runs, bool is_quick) : runs_(runs), is_quick_(is_quick) {}

  int runs() const { return runs_; }
  Stopwatch& stopwatch() { return stopwatch_; }

  // The number for a measurement, or the one for a quick look.
  int64_t Size(int64_t full, int64_t quick) const { return is_quick_ ? quick : full; }

  // Runs the case once and checks it, then measures it and prints a record. If the check or a call
  // fails, prints a failure instead.
  void Measure(const LauncherCase& measured);

  // Calls `work`. If it throws, prints a failure under this name.
  void Guard(const std::string& name, const std::function<void()>& work);
  bool has_failed() const { return has_failed_; }

 private:
  void MeasureChecked(const LauncherCase& measured);

  int runs_;
  bool is_quick_;
  bool has_failed_ = false;
  Stopwatch stopwatch_;
};

// A number with all its digits; of small types, too.
template <class T>
std::string Digits(T value) {
  std::ostringstream text;
  text << std::setprecision(std::numeric_limits<T>::max_digits10) << +value;
  return text.str();
}

// Throws unless n values are the same, byte for byte; `what` names them.
template <class T>
void ExpectEqual(const T* found, const T* expected, int64_t n, const std::string& what) {
  for (int64_t i = 0; i < n; ++i) {
    if (std::memcmp(found + i, expected + i, sizeof(T)) == 0) continue;
    throw std::runtime_error("wrong result: " + what + "[" + std::to_string(i) + "] is " +
                             Digits(found[i]) + ", on the CPU " + Digits(expected[i]));
  }
}
template <class T>
void ExpectEqual(const std::vector<T>& found, const std::vector<T>& expected,
                 const std::string& what) {
  if (found.size() != expected.size()) {
    throw std::runtime_error("wrong result: " + std::to_string(found.size()) + " " + what +
                             ", on the CPU " + std::to_string(expected.size()));
  }
  ExpectEqual(found.data(), expected.data(), static_cast<int64_t>(found.size()), what);
}

// Random number i of a stream, from -1 to 1.
inline float RandomFloat(uint64_t seed, int64_t i) {
  const uint64_t bits = CounterRandom(seed, static_cast<uint64_t>(i)) >> 40;
  return static_cast<float>(static_cast<int64_t>(bits) - (int64_t{1} << 23)) * 0x1.0p-23f;
}

// Random number i of a stream, from 0 to range - 1.
inline int64_t RandomBelow(uint64_t seed, int64_t i, int64_t range) {
  return static_cast<int64_t>(CounterRandom(seed, static_cast<uint64_t>(i)) %
                              static_cast<uint64_t>(range));
}

// "2,097,152 x 64".
std::string Shape(int64_t rows, int64_t dim);
std::string WithCommas(int64_t number);

// The cases.
void MeasureDrift(Bench* bench);
void MeasureCompaction(Bench* bench);
void MeasureClassification(Bench* bench);
void MeasureDeferredGradients(Bench* bench);
void MeasureAccessSketch(Bench* bench);

}  // namespace slipstream

#endif  // SLIPSTREAM_BENCHMARKS_GPU_BENCH_H_
