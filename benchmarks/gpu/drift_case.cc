// Measures the drift of rows from their snapshot.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/gpu/bench.h"
#include "benchmarks/gpu/device.h"
#include "cc_ops/core/base/drift.h"
#include "cc_ops/core/saturation/drift.cu.h"

namespace slipstream {
namespace {

struct Variant {
  DriftMetric metric;
  const char* name;
  int64_t dim;
};

// Throws unless the drifts agree: bit for bit for linf, and within 1e-6 for l2, because the device
// adds the squares in a different order.
void ExpectDrifts(const std::vector<float>& found, const std::vector<float>& expected,
                  DriftMetric metric) {
  if (metric == DriftMetric::kLinf) return ExpectEqual(found, expected, "drift");
  for (size_t i = 0; i < expected.size(); ++i) {
    // The negation makes NaN a mismatch.
    if (!(std::fabs(found[i] - expected[i]) <= 1e-6f * std::fabs(expected[i]))) {
      ExpectEqual(&found[i], &expected[i], 1, "drift of row " + std::to_string(i) + ", ");
    }
  }
}

}  // namespace

void MeasureDrift(Bench* bench) {
  const int64_t values = bench->Size(int64_t{1} << 27, 1 << 16);
  std::vector<float> current(static_cast<size_t>(values)), snapshot(current.size());
  for (int64_t i = 0; i < values; ++i) {
    snapshot[i] = RandomFloat(1, i);
    current[i] = snapshot[i] + 0.01f * RandomFloat(2, i);
  }
  const OnDevice<float> current_on_device(current), snapshot_on_device(snapshot);
  for (const Variant& variant :
       {Variant{DriftMetric::kLinf, "drift, linf", 16},
        Variant{DriftMetric::kLinf, "drift, linf", 64},
        Variant{DriftMetric::kLinf, "drift, linf", 128}, Variant{DriftMetric::kL2, "drift, l2", 16},
        Variant{DriftMetric::kL2, "drift, l2", 64}}) {
    const int64_t dim = variant.dim, rows = values / dim;
    const OnDevice<float> drift(rows);
    bench->Measure(
        {variant.name, Shape(rows, dim), "both rows, drift", 8 * values + 4 * rows, true, nullptr,
         [&](cudaStream_t stream) {
           Check(LaunchRowDrift(stream, current_on_device.data(), snapshot_on_device.data(), rows,
                                dim, variant.metric, drift.data()),
                 "LaunchRowDrift");
         },
         [&] {
           std::vector<float> expected(static_cast<size_t>(rows));
           RowDrift(current.data(), snapshot.data(), 0, rows, dim, variant.metric, expected.data());
           ExpectDrifts(drift.ToHost(), expected, variant.metric);
         }});
  }
}

}  // namespace slipstream
