// Measures the classification of examples by the drift of their keys.
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/gpu/bench.h"
#include "benchmarks/gpu/device.h"
#include "cc_ops/core/saturation/drift_classification.cu.h"
#include "cc_ops/core/saturation/drift_classification.h"
#include "cc_ops/core/saturation/drift_index.h"

namespace slipstream {
namespace {

constexpr int kTables = 26;  // An example looks up one key of each table.

// Fills the index with a random drift in [0, 1] for each key in [0, keys_per_table).
void FillIndex(int64_t keys_per_table, DriftIndex* index) {
  std::vector<int32_t> tables;
  std::vector<int64_t> keys;
  std::vector<float> drifts;
  for (int32_t table = 0; table < kTables; ++table) {
    for (int64_t key = 0; key < keys_per_table; ++key) {
      tables.push_back(table);
      keys.push_back(key);
      drifts.push_back(0.5f + 0.5f * RandomFloat(5, key * kTables + table));
    }
  }
  const Status status = index->Build(kTables, tables.data(), keys.data(), drifts.data(),
                                     static_cast<int64_t>(keys.size()));
  if (!status.ok()) throw std::runtime_error(status.message());
}

void MeasureOne(Bench* bench, int64_t batch, int64_t keys_per_table, double alpha,
                bool has_target) {
  DriftIndex index;
  FillIndex(keys_per_table, &index);
  const int64_t n = batch * kTables;
  std::vector<int64_t> keys(static_cast<size_t>(n));
  std::vector<int32_t> tables(static_cast<size_t>(n));
  // About 1% of the looked-up keys are not tracked.
  const int64_t range = keys_per_table + keys_per_table / 100;
  for (int64_t i = 0; i < n; ++i) {
    keys[i] = RandomBelow(6, i, range);
    tables[i] = static_cast<int32_t>(i % kTables);
  }
  std::vector<int64_t> offsets(static_cast<size_t>(batch + 1));
  for (int64_t i = 0; i <= batch; ++i) offsets[i] = i * kTables;
  DriftClassifier classifier = {alpha, 17, ClassifierSettings()};
  classifier.settings.mode = SkipMode::kDrift;
  classifier.settings.threshold = 0.97f;

  DriftIndexView view = index.view();
  const OnDevice<DriftEntry> slots(
      std::vector<DriftEntry>(view.entries, view.entries + view.capacity));
  view.entries = slots.data();
  const OnDevice<int64_t> keys_on_device(keys), offsets_on_device(offsets);
  const OnDevice<int32_t> tables_on_device(tables);
  const LookupLists lookups = {keys.data(), tables.data(), n, offsets.data(), batch};
  const LookupLists lookups_on_device = {keys_on_device.data(), tables_on_device.data(), n,
                                         offsets_on_device.data(), batch};
  const OnDevice<uint32_t> scratch(n);
  const OnDevice<uint8_t> skippable(batch);
  const OnDevice<float> score(batch), weight(batch);
  const Classified result = {reinterpret_cast<bool*>(skippable.data()), score.data(),
                             weight.data()};
  const int64_t item = 8 + 4;  // Bytes of a key and its table.
  const int64_t mebibytes = static_cast<int64_t>(slots.bytes()) >> 20;
  const std::string name = alpha == 1.0 ? "classify, all keys" : "classify, 90% of the keys";
  bench->Measure({name, Shape(batch, kTables) + ", index of " + std::to_string(mebibytes) + " MiB",
                  "keys, tables, offsets; skippable, score, weight (not the index)",
                  item * n + 8 * (batch + 1) + 9 * batch, has_target, nullptr,
                  [&](cudaStream_t stream) {
                    Check(LaunchClassifyByDrift(stream, view, classifier, lookups_on_device, 0,
                                                scratch.data(), result),
                          "LaunchClassifyByDrift");
                  },
                  [&] {
                    const auto count = static_cast<size_t>(batch);
                    const std::unique_ptr<bool[]> expected_skippable(new bool[count]);
                    std::vector<float> expected_score(count), expected_weight(count);
                    ClassifyByDrift(
                        index, classifier, lookups, 0,
                        {expected_skippable.get(), expected_score.data(), expected_weight.data()});
                    const std::vector<uint8_t> bytes(expected_skippable.get(),
                                                     expected_skippable.get() + count);
                    ExpectEqual(skippable.ToHost(), bytes, "skippable");
                    ExpectEqual(score.ToHost(), expected_score, "score");
                    ExpectEqual(weight.ToHost(), expected_weight, "weight");
                  }});
}

}  // namespace

void MeasureClassification(Bench* bench) {
  const int64_t batch = bench->Size(1 << 20, 1 << 10);
  const int64_t few = bench->Size(4000, 100), many = bench->Size(128000, 1000);
  MeasureOne(bench, batch, few, 1.0, true);
  MeasureOne(bench, batch, few, 0.9, true);
  // No target: the index exceeds the cache, therefore lookups are random reads from memory.
  MeasureOne(bench, batch, many, 1.0, false);
}

}  // namespace slipstream
