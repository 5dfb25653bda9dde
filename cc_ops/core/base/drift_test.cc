#include "cc_ops/core/base/drift.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace slipstream {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr DriftMetric kMetrics[] = {DriftMetric::kLinf, DriftMetric::kL2};

std::vector<float> Drift(const std::vector<float>& current, const std::vector<float>& snapshot,
                         int64_t rows, DriftMetric metric) {
  std::vector<float> drift(rows, -1.0f);
  const int64_t dim = rows == 0 ? 0 : static_cast<int64_t>(current.size()) / rows;
  RowDrift(current.data(), snapshot.data(), 0, rows, dim, metric, drift.data());
  return drift;
}

TEST(RowDrift, LinfIsTheLargestAbsoluteDifference) {
  EXPECT_EQ(Drift({1, 2, 3, 4, 5, 6}, {1, 2, 3, 4, 9, 5}, 2, DriftMetric::kLinf),
            (std::vector<float>{0, 4}));
}

TEST(RowDrift, L2IsTheEuclideanDistance) {
  EXPECT_EQ(Drift({3, 0, 1, 1}, {0, 4, 1, 1}, 2, DriftMetric::kL2), (std::vector<float>{5, 0}));
}

TEST(RowDrift, NanAnywhereInARowIsNotFinite) {
  constexpr int64_t kDim = 11;  // Longer than a vector register, with a remainder.
  for (DriftMetric metric : kMetrics) {
    for (int64_t position = 0; position < kDim; ++position) {
      std::vector<float> clean(kDim, 1.0f), dirty(kDim, 2.0f);
      dirty[position] = kNan;
      EXPECT_FALSE(std::isfinite(Drift(dirty, clean, 1, metric)[0])) << position;
      EXPECT_FALSE(std::isfinite(Drift(clean, dirty, 1, metric)[0])) << position;
      dirty[position] = -kNan;
      EXPECT_FALSE(std::isfinite(Drift(dirty, clean, 1, metric)[0])) << position;
    }
  }
}

TEST(RowDrift, InfinityIsNotFinite) {
  for (DriftMetric metric : kMetrics) {
    EXPECT_FALSE(std::isfinite(Drift({kInf, 0}, {0, 0}, 1, metric)[0]));
    EXPECT_FALSE(std::isfinite(Drift({0, 0}, {-kInf, 0}, 1, metric)[0]));
    EXPECT_FALSE(std::isfinite(Drift({kInf, 0}, {kInf, 0}, 1, metric)[0]));
  }
}

TEST(RowDrift, LargeFiniteRowsDoNotOverflow) {
  EXPECT_FLOAT_EQ(Drift({3e30f, 4e30f}, {0, 0}, 1, DriftMetric::kL2)[0], 5e30f);
}

TEST(RowDrift, AcceptsEmptyInput) {
  for (DriftMetric metric : kMetrics) {
    EXPECT_TRUE(Drift({}, {}, 0, metric).empty());
    EXPECT_EQ(Drift({}, {}, 3, metric), (std::vector<float>{0, 0, 0}));
  }
}

TEST(RowDrift, ResultDoesNotDependOnRange) {
  constexpr int64_t kRows = 5, kDim = 7;
  std::vector<float> current(kRows * kDim), snapshot(kRows * kDim);
  for (int64_t i = 0; i < kRows * kDim; ++i) {
    current[i] = static_cast<float>((i * 7919) % 101) / 7.0f;
    snapshot[i] = static_cast<float>((i * 104729) % 97) / 3.0f;
  }
  for (DriftMetric metric : kMetrics) {
    const std::vector<float> whole = Drift(current, snapshot, kRows, metric);
    std::vector<float> part(kRows, -1.0f);
    RowDrift(current.data(), snapshot.data(), 1, 3, kDim, metric, part.data());
    EXPECT_EQ(part, (std::vector<float>{-1, whole[1], whole[2], -1, -1}));
  }
}

}  // namespace
}  // namespace slipstream
