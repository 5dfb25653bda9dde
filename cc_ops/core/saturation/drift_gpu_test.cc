// Compares the CUDA launcher with the CPU. Reported as skipped without a GPU.
#include "cc_ops/core/testing/test_gpu.h"
#include "gtest/gtest.h"

#ifndef SLIPSTREAM_WITH_CUDA

TEST(LaunchRowDrift, EqualsTheCpu) { GTEST_SKIP() << slipstream::WhyNoGpu(); }

#else

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cc_ops/core/base/drift.h"
#include "cc_ops/core/saturation/drift.cu.h"

namespace slipstream {
namespace {

// Returns the values after `count` zeros.
std::vector<float> Shifted(const std::vector<float>& values, int64_t count) {
  std::vector<float> shifted(static_cast<size_t>(count));
  shifted.insert(shifted.end(), values.begin(), values.end());
  return shifted;
}

// shift: position of the first row in an aligned array of floats.
std::vector<float> DriftOnGpu(const std::vector<float>& current, const std::vector<float>& snapshot,
                              int64_t rows, int64_t dim, DriftMetric metric, int64_t shift = 0) {
  OnDevice<float> a(Shifted(current, shift)), b(Shifted(snapshot, shift));
  // The value after the last row must stay.
  OnDevice<float> drift(std::vector<float>(rows + 1, -1.0f));
  const TestStream stream;
  EXPECT_EQ(LaunchRowDrift(stream.get(), a.data() + shift, b.data() + shift, rows, dim, metric,
                           drift.data()),
            cudaSuccess);
  stream.Wait();
  std::vector<float> found = drift.ToHost();
  EXPECT_EQ(found.back(), -1.0f);
  found.pop_back();
  return found;
}

class LaunchRowDriftTest : public testing::TestWithParam<DriftMetric> {
 protected:
  void SetUp() override {
    if (!WhyNoGpu().empty()) GTEST_SKIP() << WhyNoGpu();
  }
};

TEST_P(LaunchRowDriftTest, EqualsTheCpu) {
  for (int64_t dim : {0, 1, 2, 4, 16, 33, 68, 132}) {
    for (int64_t rows : {0, 1, 9, 300}) {
      std::vector<float> current(rows * dim), snapshot(rows * dim), expected(rows);
      for (int64_t i = 0; i < rows * dim; ++i) {
        current[i] = static_cast<float>((i * 7919) % 1009) / 7.0f - 50.0f;
        snapshot[i] = static_cast<float>((i * 104729) % 997) / 3.0f;
      }
      RowDrift(current.data(), snapshot.data(), 0, rows, dim, GetParam(), expected.data());
      for (int64_t shift : {0, 1}) {
        const std::vector<float> drift =
            DriftOnGpu(current, snapshot, rows, dim, GetParam(), shift);
        for (int64_t row = 0; row < rows; ++row) {
          if (GetParam() == DriftMetric::kLinf) {
            EXPECT_EQ(drift[row], expected[row]) << dim << " " << row << " " << shift;
          } else {
            EXPECT_FLOAT_EQ(drift[row], expected[row]) << dim << " " << row << " " << shift;
          }
        }
      }
    }
  }
}

TEST_P(LaunchRowDriftTest, KeepsNonFiniteValues) {
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
                         testing::Values(DriftMetric::kLinf, DriftMetric::kL2));

}  // namespace
}  // namespace slipstream

#endif  // SLIPSTREAM_WITH_CUDA
