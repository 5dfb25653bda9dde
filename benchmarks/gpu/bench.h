// Compares a launcher with a device-to-device copy that moves the same number of bytes.
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

// A launcher with one input.
struct LauncherCase {
  std::string name;
  std::string shape;    // Shape of the input, for the table.
  std::string counted;  // Description of the data that `bytes` counts.
  // Bytes read and written: every input and every output once. Scratch memory and repeated reads
  // are not counted.
  int64_t bytes;
  // Whether the launcher streams its data and shall reach 80% of the bandwidth of the copy.
  bool has_target;
  // Restores the data that the launcher changes, outside the measured time. May be empty.
  std::function<void(cudaStream_t)> prepare;
  std::function<void(cudaStream_t)> launch;
  // Runs after the first launch. Throws if a result differs from the result of the CPU.
  std::function<void()> check;
};

class Bench {
 public:
  // is_quick: Uses small inputs to check that the program runs. The times are not meaningful.
  Bench(int runs, bool is_quick) : runs_(runs), is_quick_(is_quick) {}

  int runs() const { return runs_; }
  Stopwatch& stopwatch() { return stopwatch_; }

  // Returns the input size of a measurement, or the small size if `is_quick`.
  int64_t Size(int64_t full, int64_t quick) const { return is_quick_ ? quick : full; }

  // Runs the case once, checks its result, measures it and prints a record. Prints a failure record
  // if the check or a call fails.
  void Measure(const LauncherCase& measured);

  // Calls `work`. If it throws, prints a failure record with this name.
  void Guard(const std::string& name, const std::function<void()>& work);
  bool has_failed() const { return has_failed_; }

 private:
  void MeasureChecked(const LauncherCase& measured);

  int runs_;
  bool is_quick_;
  bool has_failed_ = false;
  Stopwatch stopwatch_;
};

// Formats a number with all digits. Types of one byte are formatted as numbers, too.
template <class T>
std::string Digits(T value) {
  std::ostringstream text;
  text << std::setprecision(std::numeric_limits<T>::max_digits10) << +value;
  return text.str();
}

// Throws unless the n values are equal byte for byte. `what` names the values in the error.
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

// Returns random number i of a stream, uniform in [-1, 1).
inline float RandomFloat(uint64_t seed, int64_t i) {
  const uint64_t bits = CounterRandom(seed, static_cast<uint64_t>(i)) >> 40;
  return static_cast<float>(static_cast<int64_t>(bits) - (int64_t{1} << 23)) * 0x1.0p-23f;
}

// Returns random number i of a stream, an integer in [0, range).
inline int64_t RandomBelow(uint64_t seed, int64_t i, int64_t range) {
  return static_cast<int64_t>(CounterRandom(seed, static_cast<uint64_t>(i)) %
                              static_cast<uint64_t>(range));
}

// Formats a shape, for example "2,097,152 x 64".
std::string Shape(int64_t rows, int64_t dim);
std::string WithCommas(int64_t number);

// Each function measures the launchers of one topic.
void MeasureDrift(Bench* bench);
void MeasureCompaction(Bench* bench);
void MeasureClassification(Bench* bench);
void MeasureDeferredGradients(Bench* bench);
void MeasureAccessSketch(Bench* bench);

}  // namespace slipstream

#endif  // SLIPSTREAM_BENCHMARKS_GPU_BENCH_H_
