// Times one training step of the embedding tables on 1, 2, 4, ... threads, without TensorFlow.
//
//   core_threads MAX_THREADS RUNS TABLES ROWS BATCH
//
// A step looks up one key per table and example and applies one Adagrad update. The thread counts
// are measured in turns. The program prints one JSON object per thread count to standard output.
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "benchmarks/gpu/record.h"
#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/work_crew.h"
#include "cc_ops/core/lookup/batch_lookup.h"
#include "cc_ops/core/update/gradient_update.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 16;

// Worker threads that take scheduled functions from a queue.
class ThreadPool {
 public:
  explicit ThreadPool(int threads) {
    for (int t = 0; t < threads; ++t) threads_.emplace_back([this] { Work(); });
  }
  ~ThreadPool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void Schedule(std::function<void()> function) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(function));
    }
    changed_.notify_one();
  }

 private:
  void Work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return ends_ || !queue_.empty(); });
      if (ends_) return;
      const std::function<void()> function = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      function();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

Parallel OnPool(ThreadPool* pool, int threads) {
  Parallel parallel;
  parallel.threads = threads;
  if (threads == 1) return parallel;
  const auto schedule = [pool](std::function<void()> fn) { pool->Schedule(std::move(fn)); };
  parallel.run = [crew = std::make_shared<WorkCrew>(threads, schedule)](
                     int tasks, const std::function<void(int)>& fn) { crew->Run(tasks, fn); };
  return parallel;
}

void Check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

class Step {
 public:
  Step(int tables, int64_t rows, int64_t batch) : rows_(rows), batch_(batch) {
    TableOptions options;
    options.dim = kDim;
    options.initializer.kind = RowInitializer::Kind::kUniform;
    options.initializer.a = -0.05f;
    options.initializer.b = 0.05f;
    Check(UpdateRule::Make("adagrad", {0.1f, 1e-7f}, &options.rule));
    features_.resize(tables);
    keys_.resize(tables, std::vector<int64_t>(batch));
    for (int t = 0; t < tables; ++t) {
      tables_.push_back(std::make_unique<EmbeddingTable>(options));
      pointers_.push_back(tables_.back().get());
      features_[t].table = t;
      features_[t].batch = features_[t].num_keys = batch;
      features_[t].keys = keys_[t].data();
    }
    rows_out_.resize(tables * batch * kDim);
    gradients_in_.assign(tables * batch * kDim, 1e-3f);
    for (int t = 0; t < tables; ++t) {
      outputs_.push_back({rows_out_.data() + t * batch * kDim, kDim});
      gradients_.push_back({gradients_in_.data() + t * batch * kDim, kDim});
    }
  }

  // Draws the keys of a step. The product of two uniform numbers makes low keys more frequent.
  void DrawKeys(int64_t step) {
    for (size_t t = 0; t < keys_.size(); ++t) {
      for (int64_t i = 0; i < batch_; ++i) {
        const uint64_t bits = CounterRandom(t + 1, step * batch_ + i);
        const auto low = static_cast<int64_t>(bits & 0xffffffff);
        const auto high = static_cast<int64_t>(bits >> 32);
        keys_[t][i] = ((low * rows_) >> 32) * high >> 32;
      }
    }
  }

  // Runs the lookup and the update with separate work crews, as the two TensorFlow ops do.
  void Run(ThreadPool* pool, int threads) {
    const std::vector<Combiner> combiners(features_.size(), Combiner::kSum);
    Check(LookupForTraining(pointers_, features_, combiners, outputs_, OnPool(pool, threads),
                            &workspace_));
    Check(ApplyGradients(workspace_.plan, gradients_, 0.05f, OnPool(pool, threads)));
  }

 private:
  const int64_t rows_, batch_;
  std::vector<std::unique_ptr<EmbeddingTable>> tables_;
  std::vector<EmbeddingTable*> pointers_;
  std::vector<FeatureView> features_;
  std::vector<std::vector<int64_t>> keys_;
  std::vector<float> rows_out_, gradients_in_;
  std::vector<PooledOutput> outputs_;
  std::vector<PooledGradient> gradients_;
  LookupWorkspace workspace_;
};

int Main(int max_threads, int runs, int tables, int64_t rows, int64_t batch) {
  constexpr int kStepsOfARun = 20;
  Step step(tables, rows, batch);
  int64_t number = 0;
  const auto seconds_of_a_run = [&](int threads) {
    ThreadPool pool(threads - 1);
    double seconds = 0;
    for (int i = 0; i < kStepsOfARun; ++i) {
      step.DrawKeys(number++);
      const auto start = std::chrono::steady_clock::now();
      step.Run(&pool, threads);
      seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
    return seconds / kStepsOfARun;
  };
  std::vector<int> numbers;
  for (int threads = 1; threads <= max_threads; threads *= 2) numbers.push_back(threads);
  for (int i = 0; i < 3; ++i) seconds_of_a_run(max_threads);  // Allocates most rows.
  std::vector<std::vector<double>> seconds(numbers.size());
  for (int run = 0; run < runs; ++run) {
    for (size_t i = 0; i < numbers.size(); ++i) seconds[i].push_back(seconds_of_a_run(numbers[i]));
  }
  for (size_t i = 0; i < numbers.size(); ++i) {
    Record("core_threads")
        .Add("name", std::to_string(numbers[i]) + " threads")
        .Add("threads", static_cast<int64_t>(numbers[i]))
        .Add("tables", static_cast<int64_t>(tables))
        .Add("rows", rows)
        .Add("batch", batch)
        .Add("seconds", seconds[i])
        .Print();
  }
  return 0;
}

}  // namespace
}  // namespace slipstream

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: core_threads MAX_THREADS RUNS TABLES ROWS BATCH\n");
    return 2;
  }
  return slipstream::Main(std::atoi(argv[1]), std::atoi(argv[2]), std::atoi(argv[3]),
                          std::atoll(argv[4]), std::atoll(argv[5]));
}
