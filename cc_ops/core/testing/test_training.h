// For tests: a table that is trained on given keys and gradients.
#ifndef SLIPSTREAM_CC_OPS_CORE_TESTING_TEST_TRAINING_H_
#define SLIPSTREAM_CC_OPS_CORE_TESTING_TEST_TRAINING_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "cc_ops/core/lookup/batch_lookup.h"
#include "cc_ops/core/testing/test_threads.h"
#include "cc_ops/core/update/gradient_update.h"

namespace slipstream {

// Supports one or multiple features.
struct Training {
  explicit Training(const TableOptions& options, int threads = 2)
      : dim(options.dim),
        parallel(Threads(threads)),
        table(std::make_unique<EmbeddingTable>(options)) {}

  // Trains a batch with `features` features of one key per example. `keys` and `gradient` list
  // feature by feature. Value j of the gradient of key i is (j + 1) * gradient[i].
  void Step(const std::vector<int64_t>& keys, const std::vector<float>& gradient,
            int features = 1) {
    const int64_t batch = static_cast<int64_t>(keys.size()) / features;
    std::vector<FeatureView> views(features);
    std::vector<std::vector<float>> pooled(features), upstream(features);
    std::vector<PooledOutput> outputs;
    std::vector<PooledGradient> gradients;
    for (int f = 0; f < features; ++f) {
      views[f].batch = views[f].num_keys = batch;
      views[f].keys = keys.data() + f * batch;
      pooled[f].resize(batch * dim);
      for (int64_t i = 0; i < batch; ++i) {
        for (int64_t j = 0; j < dim; ++j) {
          upstream[f].push_back(gradient[f * batch + i] * static_cast<float>(j + 1));
        }
      }
      outputs.push_back({pooled[f].data(), dim});
      gradients.push_back({upstream[f].data(), dim});
    }
    const std::vector<Combiner> combiners(features, Combiner::kSum);
    ASSERT_TRUE(
        LookupForTraining({table.get()}, views, combiners, outputs, parallel, &workspace).ok());
    if (between) between();
    ASSERT_TRUE(ApplyGradients(workspace.plan, gradients, rate, parallel).ok());
  }

  // Returns the values of all rows, by ascending key, and then their slots.
  std::vector<float> State() const {
    TableContents contents = table->Export();
    contents.rows.insert(contents.rows.end(), contents.slots.begin(), contents.slots.end());
    return contents.rows;
  }

  // Returns the values and slots of a row, which must exist and be stored as floats.
  std::vector<float> Row(int64_t key) const {
    const float* row = RowLayout::Floats(table->rows().Find(key));
    return std::vector<float>(row, row + dim + table->slots_per_row());
  }

  void SetFlags(const std::vector<int64_t>& keys, uint8_t flag) {
    const std::vector<uint8_t> flags(keys.size(), flag);
    EXPECT_TRUE(
        table->SetFlags(keys.data(), flags.data(), static_cast<int64_t>(keys.size()), Parallel())
            .ok());
  }

  const int64_t dim;
  float rate = 0.1f;
  Parallel parallel;
  std::unique_ptr<EmbeddingTable> table;
  LookupWorkspace workspace;
  std::function<void()> between;  // Called between the lookup and the update of a step.
};

// Trains `steps` random batches. Equal arguments give the same batches.
inline void TrainAtRandom(Training* training, int steps, int features = 1, uint64_t seed = 5) {
  std::mt19937_64 random(seed);
  for (int step = 0; step < steps; ++step) {
    std::vector<int64_t> keys;
    std::vector<float> gradients;
    for (int i = 0; i < 64 * features; ++i) {
      const int64_t spread = 1 << (random() % 10);
      keys.push_back(static_cast<int64_t>(random() % spread));
      gradients.push_back(static_cast<float>(random() % 2001) / 1000.f - 1.f);
    }
    training->Step(keys, gradients, features);
  }
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TESTING_TEST_TRAINING_H_
