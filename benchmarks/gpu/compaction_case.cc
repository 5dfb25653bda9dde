// Measures the removal of masked gradient rows, without ("mask") and with sums by key ("compact").
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/gpu/bench.h"
#include "benchmarks/gpu/device.h"
#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/containers/key_set.h"
#include "cc_ops/core/update/row_compaction.cu.h"
#include "cc_ops/core/update/row_compaction.h"

namespace slipstream {
namespace {

struct Gradients {
  std::vector<int64_t> keys;
  std::vector<float> rows;  // [keys, dim]
  int64_t dim;

  int64_t size() const { return static_cast<int64_t>(keys.size()); }
};

// Returns a set with half of the distinct keys.
KeySet MaskedOf(int64_t different_keys) {
  std::vector<int64_t> keys;
  for (int64_t key = 0; key < different_keys; ++key) {
    if (HashKey(key) % 2 == 0) keys.push_back(key);
  }
  KeySet masked;
  const Status status = masked.Build(keys.data(), static_cast<int64_t>(keys.size()));
  if (!status.ok()) throw std::runtime_error(status.message());
  return masked;
}

void MeasureOne(Bench* bench, const Gradients& gradients, const OnDevice<float>& rows,
                int64_t different_keys, bool deduplicate) {
  const int64_t n = gradients.size(), dim = gradients.dim;
  const KeySet masked = MaskedOf(different_keys);
  RowCompaction expected;
  expected.Plan(gradients.keys.data(), n, masked.view(), deduplicate, Parallel());
  std::vector<int64_t> expected_keys(static_cast<size_t>(expected.kept()));
  std::vector<float> expected_rows(static_cast<size_t>(expected.kept() * dim));
  expected.Write(gradients.keys.data(), gradients.rows.data(), dim, Parallel(),
                 expected_keys.data(), expected_rows.data());
  int64_t unmasked = 0;
  for (const int64_t key : gradients.keys) unmasked += masked.Contains(key) ? 0 : 1;

  KeySetView view = masked.view();
  const OnDevice<KeySetEntry> entries(
      std::vector<KeySetEntry>(view.entries, view.entries + view.capacity));
  view.entries = entries.data();
  const OnDevice<int64_t> keys(gradients.keys), kept_keys(n);
  const OnDevice<float> kept_rows(n * dim);
  const OnDevice<CompactionCounts> counts(1);
  size_t workspace_bytes = 0;
  Check(CompactRowsWorkspaceBytes<int64_t>(n, dim, deduplicate, &workspace_bytes),
        "CompactRowsWorkspaceBytes");
  const OnDevice<char> workspace(static_cast<int64_t>(workspace_bytes));
  const int64_t read = 8 * n + 4 * dim * unmasked, written = (8 + 4 * dim) * expected.kept();
  bench->Measure(
      {deduplicate ? "compact (sums by key)" : "mask", Shape(n, dim),
       "keys, rows of unmasked keys; kept keys and rows", read + written, !deduplicate, nullptr,
       [&](cudaStream_t stream) {
         Check(LaunchCompactRows<int64_t>(stream,
                                          {keys.data(), rows.data(), n, dim, view, deduplicate},
                                          {workspace.data(), workspace_bytes}, kept_keys.data(),
                                          kept_rows.data(), counts.data()),
               "LaunchCompactRows");
       },
       [&] {
         const CompactionCounts found = counts.ToHost()[0];
         const int64_t kept = expected.kept(), offered = expected.offered();
         ExpectEqual(&found.kept, &kept, 1, "kept");
         ExpectEqual(&found.offered, &offered, 1, "offered");
         ExpectEqual(kept_keys.ToHost(kept), expected_keys, "kept_keys");
         ExpectEqual(kept_rows.ToHost(kept * dim), expected_rows, "kept_rows");
       }});
}

}  // namespace

void MeasureCompaction(Bench* bench) {
  const int64_t values = bench->Size(int64_t{1} << 27, 1 << 16);
  Gradients gradients;
  gradients.rows.resize(static_cast<size_t>(values));
  for (int64_t i = 0; i < values; ++i) gradients.rows[i] = RandomFloat(3, i);
  const OnDevice<float> rows(gradients.rows);
  for (const int64_t dim : {16, 64}) {
    const int64_t n = values / dim;
    gradients.dim = dim;
    gradients.keys.resize(static_cast<size_t>(n));
    for (const bool deduplicate : {false, true}) {
      // Without sums, there are as many masked keys as in a hot set, so that the key set stays in
      // the cache. With sums, each key occurs twice in the batch on average.
      const int64_t different_keys =
          deduplicate ? n / 2 : std::min<int64_t>(n / 2, bench->Size(1 << 18, 1 << 8));
      for (int64_t i = 0; i < n; ++i) gradients.keys[i] = RandomBelow(4, i, different_keys);
      MeasureOne(bench, gradients, rows, different_keys, deduplicate);
    }
  }
}

}  // namespace slipstream
