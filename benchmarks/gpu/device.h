// CUDA helpers of the benchmark: errors as exceptions, and device memory with RAII.
#ifndef SLIPSTREAM_BENCHMARKS_GPU_DEVICE_H_
#define SLIPSTREAM_BENCHMARKS_GPU_DEVICE_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace slipstream {

// Throws std::runtime_error if a CUDA call failed. `what` names the call.
inline void Check(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(what + ": " + cudaGetErrorString(error) + " (" +
                           cudaGetErrorName(error) + ")");
}

// An array in device memory.
template <class T>
class OnDevice {
 public:
  // Fills the array with a byte pattern that no result has, so that missing writes are detected.
  explicit OnDevice(int64_t count) : count_(count) {
    // The additional byte gives an empty array a valid address.
    Check(cudaMalloc(reinterpret_cast<void**>(&data_), bytes() + 1),
          "cudaMalloc of " + std::to_string(bytes()) + " bytes");
    Poison();
  }
  explicit OnDevice(const std::vector<T>& values) : OnDevice(static_cast<int64_t>(values.size())) {
    Upload(values);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  // Ignores the error, which would be the error of an earlier kernel that Wait() reports.
  ~OnDevice() { cudaFree(data_); }

  T* data() const { return data_; }
  int64_t count() const { return count_; }
  size_t bytes() const { return static_cast<size_t>(count_) * sizeof(T); }

  void Poison() { Check(cudaMemset(data_, 0xa5, bytes()), "cudaMemset"); }
  // Copies `values` to the device. Their number must equal count().
  void Upload(const std::vector<T>& values) {
    if (static_cast<int64_t>(values.size()) != count_) throw std::logic_error("Upload: size");
    Check(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  std::vector<T> ToHost() const { return ToHost(count_); }
  // Returns the first `count` values.
  std::vector<T> ToHost(int64_t count) const {
    if (count < 0 || count > count_) throw std::logic_error("ToHost: count");
    std::vector<T> values(static_cast<size_t>(count));
    Check(cudaMemcpy(values.data(), data_, values.size() * sizeof(T), cudaMemcpyDeviceToHost),
          "cudaMemcpy");
    return values;
  }

 private:
  int64_t count_;
  T* data_ = nullptr;
};

// Enqueues a copy of one array over another of the same size.
template <class T>
void CopyAsync(cudaStream_t stream, const OnDevice<T>& from, OnDevice<T>* to) {
  Check(cudaMemcpyAsync(to->data(), from.data(), from.bytes(), cudaMemcpyDeviceToDevice, stream),
        "cudaMemcpyAsync");
}

}  // namespace slipstream

#endif  // SLIPSTREAM_BENCHMARKS_GPU_DEVICE_H_
