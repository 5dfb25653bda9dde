// The CUDA launcher against the CPU's result. Skipped, visibly, where there is nothing to run it.
#include "gtest/gtest.h"

#ifndef SLIPSTREAM_WITH_CUDA

TEST(LaunchRowDrift, EqualsTheCpu) { GTEST_SKIP() << "built without CUDA (--config=cuda)"; }

#else

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cc_ops/core/drift.cu.h"
#include "cc_ops/core/drift.h"

namespace slipstream {
namespace {

constexpr double kEpsilon = 1e-12;

// Device memory that frees itself.
class DeviceFloats {
 public:
  explicit DeviceFloats(const std::vector<float>& values) : count_(values.size()) {
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data_), Bytes() + 1), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, values.data(), Bytes(), cudaMemcpyHostToDevice), cudaSuccess);
  }
  DeviceFloats(const DeviceFloats&) = delete;
  DeviceFloats& operator=(const DeviceFloats&) = delete;
  ~DeviceFloats() { cudaFree(data_); }

  float* data() { return data_; }

  std::vector<float> ToHost() const {
    std::vector<float> values(count_);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, Bytes(), cudaMemcpyDeviceToHost), cudaSuccess);
    return values;
  }

 private:
  size_t Bytes() const { return count_ * sizeof(float); }

  size_t count_;
  float* data_ = nullptr;
};

std::vector<float> DriftOnGpu(const std::vector<float>& current, const std::vector<float>& snapshot,
                              int64_t rows, int64_t dim, DriftMetric metric) {
  DeviceFloats a(current), b(snapshot), drift(std::vector<float>(rows, -1.0f));
  cudaStream_t stream;
  EXPECT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  EXPECT_EQ(LaunchRowDrift(stream, a.data(), b.data(), rows, dim, metric, kEpsilon, drift.data()),
            cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  return drift.ToHost();
}

class LaunchRowDriftTest : public testing::TestWithParam<DriftMetric> {
 protected:
  void SetUp() override {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
      GTEST_SKIP() << "no GPU on this machine (" << cudaGetErrorString(error) << ")";
    }
  }
};

TEST_P(LaunchRowDriftTest, EqualsTheCpu) {
  for (int64_t dim : {0, 1, 16, 31, 32, 33, 200}) {
    for (int64_t rows : {0, 1, 7, 8, 9, 1000}) {
      std::vector<float> current(rows * dim), snapshot(rows * dim), expected(rows);
      for (int64_t i = 0; i < rows * dim; ++i) {
        current[i] = static_cast<float>((i * 7919) % 1009) / 7.0f - 50.0f;
        snapshot[i] = static_cast<float>((i * 104729) % 997) / 3.0f;
      }
      RowDrift(current.data(), snapshot.data(), 0, rows, dim, GetParam(), kEpsilon,
               expected.data());
      const std::vector<float> drift = DriftOnGpu(current, snapshot, rows, dim, GetParam());
      for (int64_t row = 0; row < rows; ++row) {
        if (GetParam() == DriftMetric::kLinf) {
          EXPECT_EQ(drift[row], expected[row]) << dim << " " << row;
        } else {
          EXPECT_FLOAT_EQ(drift[row], expected[row]) << dim << " " << row;
        }
      }
    }
  }
}

TEST_P(LaunchRowDriftTest, WhatIsNotFiniteIsKept) {
  constexpr int64_t kDim = 40;
  for (float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(),
        std::numeric_limits<float>::infinity()}) {
    for (int64_t column : {0, 31, 32, 39}) {
      std::vector<float> current(3 * kDim, 2.0f), snapshot(3 * kDim, 1.0f);
      current[kDim + column] = bad;
      const std::vector<float> drift = DriftOnGpu(current, snapshot, 3, kDim, GetParam());
      EXPECT_TRUE(std::isfinite(drift[0]));
      EXPECT_FALSE(std::isfinite(drift[1])) << column;
      EXPECT_TRUE(std::isfinite(drift[2]));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Metrics, LaunchRowDriftTest,
                         testing::Values(DriftMetric::kLinf, DriftMetric::kL2,
                                         DriftMetric::kRelative));

}  // namespace
}  // namespace slipstream

#endif  // SLIPSTREAM_WITH_CUDA
