// For tests that run the same cases on the CPU and, if available, on a GPU.
#ifndef SLIPSTREAM_CC_OPS_CORE_TESTING_TEST_GPU_H_
#define SLIPSTREAM_CC_OPS_CORE_TESTING_TEST_GPU_H_

#include <string>

#include "gtest/gtest.h"

#ifdef SLIPSTREAM_WITH_CUDA
#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>
#endif

namespace slipstream {

// Returns the reason why tests cannot use a GPU; empty if they can.
inline std::string WhyNoGpu() {
#ifdef SLIPSTREAM_WITH_CUDA
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaSuccess && devices > 0) return "";
  return std::string("no GPU on this machine (") + cudaGetErrorString(error) + ")";
#else
  return "built without CUDA (--config=cuda)";
#endif
}

// Parameter of a test: the processor on which it runs.
enum class Processor { kCpu, kGpu };

inline std::string NameOfProcessor(const testing::TestParamInfo<Processor>& processor) {
  return processor.param == Processor::kGpu ? "Gpu" : "Cpu";
}

// Reports tests for a GPU as skipped if there is none.
class OnProcessors : public testing::TestWithParam<Processor> {
 protected:
  void SetUp() override {
    if (GetParam() == Processor::kGpu && !WhyNoGpu().empty()) GTEST_SKIP() << WhyNoGpu();
  }
};

#ifdef SLIPSTREAM_WITH_CUDA
// Device memory with automatic deallocation.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(size_t count) : count_(count) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), count_ * sizeof(T)), cudaSuccess);
  }
  explicit OnDevice(const std::vector<T>& values) : OnDevice(values.size()) {
    EXPECT_EQ(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { cudaFree(data_); }

  T* data() { return data_; }
  std::vector<T> ToHost() const { return ToHost(count_); }
  // Copies the first `count` values.
  std::vector<T> ToHost(size_t count) const {
    std::vector<T> values(count);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, count * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return values;
  }

 private:
  size_t count_;
  T* data_ = nullptr;
};

// A stream; its destructor waits for the work.
class TestStream {
 public:
  TestStream() { EXPECT_EQ(cudaStreamCreate(&stream_), cudaSuccess); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  ~TestStream() {
    Wait();
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
  }

  cudaStream_t get() const { return stream_; }
  void Wait() const { EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }

 private:
  cudaStream_t stream_ = nullptr;
};
#endif

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TESTING_TEST_GPU_H_
